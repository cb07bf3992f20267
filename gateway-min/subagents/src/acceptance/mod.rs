//! Acceptance criteria of a delegation: what the parent asks for, checked by code after the subagent completed.
//!
//! | Module | What it does |
//! |---|---|
//! | `criteria` | what a call gives, normalised, and how the child reads it |
//! | `form` | the four forms that can be checked |
//! | `files` | looks at files of the thread |
//! | `evidence` | the commands that the child ran |
//! | `tests_passed` | whether one of them was the one asked for, and passed |
//! | `verdict` | the result, and how it reads |
//!
//! Any doubt is UNVERIFIED. No model takes part, and a criterion never runs anything.

mod criteria;
mod evidence;
mod files;
mod form;
mod tests_passed;
mod verdict;

use std::path::Path;
use std::sync::LazyLock;
use std::time::Duration;

use tokio::sync::{Semaphore, oneshot};

use files::Workspace;
use form::Form;

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use tests_passed::fuzzing::command_line;

pub use criteria::{Criteria, MAX_CRITERIA, MAX_CRITERION_CHARS, POINTER_NOTE};
pub use evidence::{BashEvidence, BashExecution, ExecutionStatus, MAX_EXECUTIONS};
pub use verdict::{AcceptanceVerdict, Family, Finding, Leaf};

/// How long a check may take. Only a file system that does not answer takes that long.
const CHECK_TIME: Duration = Duration::from_secs(20);
/// The maximum number of checks at once.
const MAX_CHECKS: usize = 4;

/// Checks `criteria` of a completed delegation: files below `workspace`, the thread's own directory, and `executions`,
/// the commands that the child ran, oldest first.
///
/// Works on a thread of its own. `None` if the check itself fails: the delegation is then without a verdict, and
/// otherwise as it was.
pub async fn check(
    criteria: &Criteria,
    workspace: &Path,
    executions: &[BashExecution],
) -> Option<AcceptanceVerdict> {
    let (criteria, workspace) = (criteria.clone(), workspace.to_owned());
    let executions = executions.to_vec();
    isolated(move || checked(&criteria, &workspace, &executions)).await
}

/// Runs a check on a thread of its own; `None` if it panics, or takes too long.
async fn isolated(work: impl FnOnce() -> AcceptanceVerdict + Send + 'static) -> Option<AcceptanceVerdict> {
    static CHECKS: Semaphore = Semaphore::const_new(MAX_CHECKS);
    let checked = async {
        let permit = CHECKS.acquire().await.ok()?;
        let (sender, verdict) = oneshot::channel();
        // Not a thread of the runtime, whose shutdown would wait for it.
        let started = std::thread::Builder::new().name("threadkeep-acceptance".to_owned()).spawn(move || {
            let _permit = permit;
            // Fails if nobody waits any more.
            let _ = sender.send(work());
        });
        started.ok()?;
        verdict.await.ok()
    };
    let verdict = tokio::time::timeout(CHECK_TIME, checked).await.ok().flatten();
    if verdict.is_none() {
        tracing::warn!("the acceptance criteria of a delegation could not be checked: it has no verdict");
    }
    verdict
}

/// The finding on a criterion about commands, by what was recorded of them; `None` for one about something else.
pub(crate) fn recheck_commands(criteria: &Criteria, executions: &[BashExecution]) -> Option<Leaf> {
    let criterion = criteria.iter().next()?;
    match Form::of(criterion) {
        form @ Form::TestsPassed { command } => {
            Some(Leaf::new(criterion, form.family(), tests_passed::check(command, executions)))
        }
        Form::File { .. } | Form::Undecidable => None,
    }
}

/// As [`check`]; blocks.
fn checked(criteria: &Criteria, workspace: &Path, executions: &[BashExecution]) -> AcceptanceVerdict {
    // Opened only if a criterion is about a file.
    let workspace = LazyLock::new(|| Workspace::open(workspace));
    let leaf = |criterion: &str| {
        let form = Form::of(criterion);
        let finding = match form {
            Form::File { path, want } => files::check(workspace.as_ref(), path, want),
            Form::TestsPassed { command } => tests_passed::check(command, executions),
            Form::Undecidable => Finding::Unchecked("not deterministically checkable".to_owned()),
        };
        Leaf::new(criterion, form.family(), finding)
    };
    AcceptanceVerdict::new(criteria.iter().map(leaf).collect())
}

#[cfg(test)]
mod tests;
