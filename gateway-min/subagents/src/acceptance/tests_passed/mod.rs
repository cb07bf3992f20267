//! Whether the child ran the command of a criterion, and its tests passed.
//!
//! The newest execution of the command decides. Nothing runs: a recorded command line is compared with the criterion as
//! text, so the comparison has to prove that the criterion's command ran, with its selection of tests, and that the
//! output is its own. What is not proven is UNVERIFIED.
//!
//! It does not detect a program that only has the name of a test runner, a Makefile that swallows failures, or a
//! configuration file of the runner that narrows the selection.

mod arguments;
#[cfg(any(test, feature = "fuzzing"))]
pub(super) mod fuzzing;
mod line;
mod matching;
mod runner;
mod shell;
mod summary;

use super::Finding;
use super::evidence::{BashExecution, ExecutionStatus, MAX_TAIL_CHARS};
use matching::Match;
use summary::Summary;

/// The service reference, "Acceptance criteria", has these texts.
const NO_CANDIDATE: &str = "no matching bash execution recorded";
const UNPROVEN: &str = "matching segment cannot be proven to have executed";
const TRUNCATED: &str = "recorded command is truncated; its end is unknown";
const SHARED_SHELL: &str = "the state of the shell cannot be proven clean";
const NOT_ITS_OUTPUT: &str = "output cannot be attributed to the matching command";
const NO_SUMMARY: &str = "matching run recorded no test-summary shape";

/// The result of `tests_passed:<command>`; `executions` are oldest first.
pub(super) fn check(command: &str, executions: &[BashExecution]) -> Finding {
    let unchecked = |why: &str| Finding::Unchecked(why.to_owned());
    let compared = executions.iter().rev().map(|execution| {
        let succeeded = execution.status == ExecutionStatus::Success;
        (execution, matching::compare(command, &execution.command, succeeded))
    });
    let newest = compared.into_iter().find(|(_, found)| *found != Match::No);
    let Some((execution, found)) = newest else { return unchecked(NO_CANDIDATE) };
    // What was cut off could be another selection, or another command after it.
    if execution.command_truncated {
        return unchecked(TRUNCATED);
    }
    let Match::Yes { attributable } = found else { return unchecked(UNPROVEN) };
    if execution.shell_persistent != Some(false) {
        return unchecked(SHARED_SHELL);
    }
    if execution.status != ExecutionStatus::Success {
        let marker = execution.status_marker.as_deref().unwrap_or("status error");
        return Finding::DoesNotHold(format!("the command failed: {marker}"));
    }
    if !attributable {
        return unchecked(NOT_ITS_OUTPUT);
    }
    match summary::of(&execution.output_tail, execution.output_tail.chars().count() >= MAX_TAIL_CHARS) {
        Summary::Failed(line) => Finding::DoesNotHold(format!("failing test summary: {line}")),
        Summary::Passed(line) => Finding::Holds(format!("passing test summary: {line}")),
        Summary::None => unchecked(NO_SUMMARY),
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod traced;
