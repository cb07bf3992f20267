//! What prompts say about delegation.

use crate::acceptance::POINTER_NOTE;
use crate::catalog::Available;
use crate::ledger::Limits;
use crate::snapshot;

/// What the tool `task` does, for the model that may call it.
pub const TASK_TOOL: &str = "Hands a task to a subagent that works on it alone, with a conversation of its own, \
    and returns its final report. Several calls in one answer run at the same time.";

/// What a subagent's prompt says about its report.
const REPORT: &str = "Your final answer is the only thing that the agent that gave you the task reads. Make it complete \
    without your conversation.";
/// The same, where tool calls have receipts.
const CITATIONS: &str = "Cite the receipt of the tool call that supports each claim about something you did, as [r3] or \
    [r3 read_file]. The receipts are listed before each of your turns.";

/// The sections that follow a subagent's own prompt: how to report, and notes on the criteria and on the copy of its
/// parent's conversation, if it gets them.
pub(crate) fn sections(receipts: bool, criteria: bool, snapshot: bool) -> Vec<String> {
    let report = if receipts { format!("{REPORT}\n{CITATIONS}") } else { REPORT.to_owned() };
    let criteria = criteria.then(|| POINTER_NOTE.to_owned());
    let snapshot = snapshot.then(|| snapshot::NOTE.to_owned());
    [Some(report), criteria, snapshot].into_iter().flatten().collect()
}

/// The section of the lead agent's prompt about delegation.
pub(crate) fn delegation(available: &Available, limits: Limits, receipts: bool) -> String {
    let Limits { concurrent, total } = limits;
    let mut text = format!(
        "You can delegate with the tool `task`. Delegate work that is long or that splits into independent parts, and do \
         short work yourself. Call it at most {concurrent} times in one answer, for tasks that do not depend on each \
         other; a run may make {total} delegations. A subagent sees only the prompt that you write for it, so put in all \
         that it needs. That it finished does not mean that its result is right: look at what it reports before you rely \
         on it.\nSubagents: {}",
        available.names()
    );
    if receipts {
        text.push_str(
            "\nReports cite receipts of tool calls, as [r3]. A receipt shows that a call was made, not that a claim is \
             correct.",
        );
    }
    text
}
