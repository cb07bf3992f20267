//! Helpers of the tests.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    unreachable_pub,
    dead_code,
    reason = "tests; each uses its part"
)]

use std::path::PathBuf;

use threadkeep_torture::exercises::ALL;
use threadkeep_torture::storage::Kind;
use threadkeep_torture::{Tally, Turn};

/// Runs an exercise with these seeds; returns its counts.
pub async fn play(name: &str, saver: Kind, seeds: std::ops::Range<u64>) -> Tally {
    let exercise = ALL.iter().find(|one| one.name == name && one.saver == saver).unwrap();
    let tally = Tally::default();
    for seed in seeds {
        let program = PathBuf::from(env!("CARGO_BIN_EXE_threadkeep-torture"));
        let turn = Turn { seed, effort: 1, saver, program, tally: tally.clone() };
        if let Err(error) = (exercise.run)(turn).await {
            panic!("{} with seed {seed}: {error:#}", exercise.title());
        }
    }
    println!("{}: {:?}", exercise.title(), tally.counts());
    assert_eq!(exercise.untried(&tally), [""; 0], "{}", exercise.title());
    tally
}
