//! Random programs of calls, run on a saver and on a naive model side by side; after each call everything that can be
//! read must be equal. A program that fails is made smaller until each call in it is needed.

mod naive;
mod play;
mod program;
mod resolve;

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};
use tokio::runtime::Handle;

use crate::case::{Case, Failure, Outcome, case};
use crate::factory::Store;

pub(crate) const CASES: &[Case] = &[case!(
    Delta,
    random_programs_agree_with_the_model,
    "calls that are right one by one would be wrong together"
)];

/// Programs a run tries, unless `PROPTEST_CASES` says otherwise.
const PROGRAMS: u32 = 150;

async fn random_programs_agree_with_the_model(store: Store) -> Outcome {
    let runtime = Handle::current();
    tokio::task::spawn_blocking(move || search(&store, &runtime)).await?
}

fn search(store: &Store, runtime: &Handle) -> Outcome {
    let mut config = Config { failure_persistence: None, ..Config::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = PROGRAMS;
    }
    // All programs share the store, each with threads of its own: that is quicker where a store is a database.
    let programs = Arc::new(AtomicU32::new(0));
    let outcome = TestRunner::new(config).run(&program::programs(), |program| {
        let name = programs.fetch_add(1, Ordering::Relaxed).to_string();
        runtime
            .block_on(play::play(store, &name, &program))
            .map_err(|what| TestCaseError::fail(what.to_string()))
    });
    match outcome {
        Ok(()) => Ok(()),
        Err(TestError::Abort(why)) => Err(Failure::new(format_args!("the search was given up: {why}"))),
        Err(TestError::Fail(what, program)) => {
            let mut text = format!("{what}\n    the smallest program that shows it:");
            for (n, op) in program.iter().enumerate() {
                let _ = write!(text, "\n    {n}: {op:?}");
            }
            Err(Failure::new(text))
        }
    }
}
