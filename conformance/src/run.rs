//! Running cases: as a report for people, or as a test binary with a line for each case.

use std::fmt;
use std::process::ExitCode;
use std::sync::Arc;

use libtest_mimic::{Arguments, Completion, Failed, Trial};

use crate::case::{Case, Level, Outcome};
use crate::cases::cases;
use crate::factory::{Factory, Store};

/// How a case ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The saver does what the case asks.
    Passed,
    /// It does not; what was seen, and where.
    Failed(String),
    /// The case was not run: the saver or its factory does not offer what it needs.
    NotClaimed,
}

/// A case, and how it ended.
#[derive(Debug, Clone)]
pub struct CaseReport {
    /// The case.
    pub case: Case,
    /// How it ended.
    pub verdict: Verdict,
}

/// What a run of the suite found. Displayed as a table.
#[derive(Debug, Clone)]
pub struct Report {
    /// The name of the factory.
    pub saver: &'static str,
    /// Each case that was asked for, in the order of [`cases`].
    pub cases: Vec<CaseReport>,
}

impl Report {
    /// The names of the cases that failed.
    pub fn failed(&self) -> Vec<&'static str> {
        let failed = self.cases.iter().filter(|report| matches!(report.verdict, Verdict::Failed(_)));
        failed.map(|report| report.case.name).collect()
    }

    fn count(&self, which: impl Fn(&Verdict) -> bool) -> usize {
        self.cases.iter().filter(|report| which(&report.verdict)).count()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.cases.iter().map(|report| report.case.name.len()).max().unwrap_or(0);
        let level = Level::Concurrency.to_string().len();
        for CaseReport { case, verdict } in &self.cases {
            write!(f, "{:level$}  {:width$}  ", case.level, case.name)?;
            match (verdict, case.needs) {
                (Verdict::Passed, _) => writeln!(f, "passed")?,
                (Verdict::Failed(what), _) => {
                    writeln!(f, "FAILED\n    otherwise {}\n    {what}", case.why)?;
                }
                (Verdict::NotClaimed, None) => writeln!(f, "not claimed")?,
                (Verdict::NotClaimed, Some(claim)) => writeln!(f, "not claimed: {claim}")?,
            }
        }
        write!(
            f,
            "{}: {} passed, {} failed, {} not claimed",
            self.saver,
            self.count(|verdict| *verdict == Verdict::Passed),
            self.failed().len(),
            self.count(|verdict| *verdict == Verdict::NotClaimed)
        )
    }
}

fn is_claimed(case: &Case, factory: &impl Factory) -> bool {
    case.needs.is_none_or(|claim| factory.claims().contains(&claim))
}

/// Runs a case on a store of its own. A panic of the saver is a failure of the case.
async fn attempt<F: Factory>(case: &Case, factory: Arc<F>) -> Outcome {
    let run = case.run;
    tokio::spawn(async move { run(Store::create(factory).await?).await }).await?
}

/// Runs the cases that `filter` chooses, one after the other. Needs a multi-threaded tokio runtime.
pub async fn run<F: Factory>(factory: F, filter: impl Fn(&Case) -> bool) -> Report {
    let factory = Arc::new(factory);
    let mut report = Report { saver: factory.name(), cases: Vec::new() };
    for case in cases().into_iter().filter(filter) {
        let verdict = if is_claimed(&case, &*factory) {
            match attempt(&case, factory.clone()).await {
                Ok(()) => Verdict::Passed,
                Err(what) => Verdict::Failed(what.to_string()),
            }
        } else {
            Verdict::NotClaimed
        };
        report.cases.push(CaseReport { case, verdict });
    }
    report
}

/// The `main` of a test with `harness = false`: each case is a test named `<saver>::<case>`, with the arguments and the
/// output of a usual test binary. Cases that are not claimed are listed as ignored, and say why.
pub fn main<F: Factory>(factory: F) -> ExitCode {
    let factory = Arc::new(factory);
    let trial = |case: Case| {
        let factory = factory.clone();
        let claimed = is_claimed(&case, &*factory);
        let name = format!("{}::{}", factory.name(), case.name);
        let kind = if claimed { "" } else { "not claimed" };
        let run = move || match case.needs {
            Some(claim) if !claimed => Ok(Completion::ignored_with(format!("not claimed: {claim}"))),
            _ => alone(&case, factory),
        };
        Trial::ignorable_test(name, run).with_kind(kind).with_ignored_flag(!claimed)
    };
    let trials = cases().into_iter().map(trial).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// Runs a case in a runtime of its own.
fn alone<F: Factory>(case: &Case, factory: Arc<F>) -> Result<Completion, Failed> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build()?;
    match runtime.block_on(attempt(case, factory)) {
        Ok(()) => Ok(Completion::Completed),
        Err(what) => Err(format!("otherwise {}\n    {what}", case.why).into()),
    }
}
