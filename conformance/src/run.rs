//! Runs cases: for a report, or as a test binary with a line per case.

use std::io::Write as _;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use tokio::sync::oneshot;

use crate::case::{Case, Failure, Outcome};
use crate::cases::cases;
use crate::child::{child, stray};
use crate::command::requested;
use crate::factory::{BoxError, Factory, Store};
use crate::report::{CaseReport, Report, Verdict};
use crate::settings::Settings;
use crate::waits::Waits;

fn is_claimed(case: &Case, factory: &impl Factory) -> bool {
    case.needs.is_none_or(|claim| factory.claims().contains(&claim))
}

/// Runs a case on its own store, on a thread and in a runtime of its own: a saver that blocks those does not block the
/// report. A panic of the saver is a failure of the case.
async fn attempt<F: Factory>(case: &Case, factory: Arc<F>, settings: Settings) -> Outcome {
    let (run, waits) = (case.run, Waits::default());
    let noted = waits.clone();
    let (over, ended) = oneshot::channel();
    // Dropped when nobody waits for the outcome any more.
    let (_waiting, given_up) = oneshot::channel::<()>();
    let alone = move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build();
        let runtime = match runtime {
            Ok(runtime) => runtime,
            Err(error) => return drop(over.send(Err(error.into()))),
        };
        let case = runtime.spawn(async move { run(Store::create(factory, settings, noted).await?).await });
        let outcome = runtime.block_on(async {
            tokio::select! {
                outcome = case => Some(outcome.unwrap_or_else(|panic| Err(panic.into()))),
                _ = given_up => None,
            }
        });
        match outcome {
            Some(outcome) => drop(over.send(outcome)),
            // Waits for no thread that the saver blocks.
            None => runtime.shutdown_background(),
        }
    };
    std::thread::Builder::new().name(case.name.to_owned()).spawn(alone)?;
    match tokio::time::timeout(settings.limit, ended).await {
        Ok(outcome) => outcome?,
        Err(_) => Err(Failure::new(format_args!(
            "the case did not end within {:?}; {}",
            settings.limit,
            waits.report()
        ))),
    }
}

/// Runs the cases that `filter` selects, one after the other, each in a runtime of its own. Needs a tokio runtime with a timer.
pub async fn run<F: Factory>(factory: F, settings: Settings, filter: impl Fn(&Case) -> bool) -> Report {
    let factory = Arc::new(factory);
    let mut report = Report { saver: factory.name(), settings, cases: Vec::new() };
    for case in cases().into_iter().filter(filter) {
        let began = Instant::now();
        let verdict = if is_claimed(&case, &*factory) {
            match attempt(&case, factory.clone(), settings).await {
                Ok(()) => Verdict::Passed,
                Err(what) => Verdict::Failed(what.to_string()),
            }
        } else {
            Verdict::NotClaimed
        };
        let took = if verdict == Verdict::NotClaimed { Duration::ZERO } else { began.elapsed() };
        report.cases.push(CaseReport { case, verdict, took });
    }
    report
}

/// The `main` of a test with `harness = false`: each case is a test named `<saver>::<case>`, with the arguments and
/// output of a usual test binary. Cases that are not claimed are listed as ignored, with the reason. [`Settings`] come
/// from the environment. With `report` as the first argument it prints one report, as [`crate::ReportArguments`] says.
pub fn main<F: Factory>(factory: F) -> ExitCode {
    if let Some(code) = child(&factory).or_else(|| stray(&factory)) {
        return code;
    }
    let refused = |error: BoxError| {
        // If even this cannot be printed, the exit code says it.
        drop(writeln!(std::io::stderr(), "{error}"));
        ExitCode::FAILURE
    };
    if let Some(report) = requested() {
        return report.report(factory).unwrap_or_else(refused);
    }
    let factory = Arc::new(factory);
    let settings = match Settings::from_env() {
        Ok(settings) => settings,
        Err(error) => return refused(error),
    };
    let trial = |case: Case| {
        let factory = factory.clone();
        let claimed = is_claimed(&case, &*factory);
        let name = test_name(&*factory, &case);
        let kind = if claimed { "" } else { "not claimed" };
        let run = move || match case.needs {
            Some(claim) if !claimed => Ok(Completion::ignored_with(format!("not claimed: {claim}"))),
            _ => alone(&case, factory, settings),
        };
        Trial::ignorable_test(name, run).with_kind(kind).with_ignored_flag(!claimed)
    };
    let trials = cases().into_iter().map(trial).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// The name of a case's test.
fn test_name<F: Factory>(factory: &F, case: &Case) -> String {
    format!("{}::{}", factory.name(), case.name)
}

/// Runs a case as a test.
fn alone<F: Factory>(case: &Case, factory: Arc<F>, settings: Settings) -> Result<Completion, Failed> {
    let name = test_name(&*factory, case);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    match runtime.block_on(attempt(case, factory, settings)) {
        Ok(()) => Ok(Completion::Completed),
        Err(what) => Err(format!(
            "otherwise {}\n    {what}\n    again: add {name} --exact, with PROPTEST_RNG_SEED={}",
            case.why, settings.seed
        )
        .into()),
    }
}
