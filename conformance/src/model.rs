//! Random programs of calls, run on a saver and on a naive model side by side; after each call everything readable must
//! be equal. A failing program is reduced until each of its calls is needed.

pub(crate) mod naive;
mod play;
mod program;
mod resolve;

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU32, Ordering};

use proptest::test_runner::{TestCaseError, TestError, TestRunner};
use tokio::runtime::Handle;

use self::program::Op;
use crate::case::{Case, Failure, Outcome, case};
use crate::factory::Store;

pub(crate) const CASES: &[Case] = &[case!(
    Delta,
    random_programs_agree_with_the_model,
    "calls that are right one by one would be wrong together"
)];

async fn random_programs_agree_with_the_model(store: Store) -> Outcome {
    let runtime = Handle::current();
    tokio::task::spawn_blocking(move || search(&store, &runtime)).await?
}

/// Runs the program that some bytes encode: every four bytes are an operation, drawn with them as the seed. So a fuzzer
/// that moves, repeats or drops bytes does the same with operations.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) async fn play_bytes(store: &Store, name: &str, bytes: &[u8]) -> Outcome {
    use proptest::strategy::{Strategy as _, ValueTree as _};
    use proptest::test_runner::{Config, RngAlgorithm, TestRng};

    const LONGEST: usize = 48;
    let mut program = Vec::new();
    for four in bytes.chunks(4).take(LONGEST) {
        let mut seed = [0; 32];
        seed[..four.len()].copy_from_slice(four);
        let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
        let drawn = program::op().new_tree(&mut TestRunner::new_with_rng(Config::default(), rng));
        program.push(drawn.map_err(|why| Failure::new(why))?.current());
    }
    let shown = |failure: Failure| failure.retell(|what| format!("{what}\n{program:#?}"));
    play::play(store, name, &program).await.map_err(shown)
}

fn search(store: &Store, runtime: &Handle) -> Outcome {
    // All programs share the store, with separate threads: this is faster if a store is a database.
    let programs = AtomicU32::new(0);
    let play = |program: &[Op]| {
        let name = programs.fetch_add(1, Ordering::Relaxed).to_string();
        runtime.block_on(play::play(store, &name, program))
    };
    let outcome = TestRunner::new(store.settings.proptest()).run(&program::programs(), |program| {
        play(&program).map_err(|what| TestCaseError::fail(what.to_string()))
    });
    match outcome {
        Ok(()) => Ok(()),
        Err(TestError::Abort(why)) => Err(Failure::new(format_args!("the search was given up: {why}"))),
        Err(TestError::Fail(why, program)) => match play(&program) {
            Ok(()) => Err(Failure::new(format_args!("fails at times, as now: {why}\n    {program:?}"))),
            Err(failure) => Err(smallest(failure, program, play)),
        },
    }
}

/// Drops operations as long as the rest still fails. Shrinking simplifies operations first, but does not try again to
/// drop them afterwards.
fn smallest(mut failure: Failure, mut program: Vec<Op>, play: impl Fn(&[Op]) -> Outcome) -> Failure {
    let mut at = 0;
    while at < program.len() {
        let mut shorter = program.clone();
        shorter.remove(at);
        match play(&shorter) {
            Err(still) => (failure, program, at) = (still, shorter, 0),
            Ok(()) => at += 1,
        }
    }
    failure.retell(|mut text| {
        text.push_str("\n    the smallest program that shows it:");
        for (n, op) in program.iter().enumerate() {
            let _ = write!(text, "\n    {n}: {op:?}");
        }
        text
    })
}
