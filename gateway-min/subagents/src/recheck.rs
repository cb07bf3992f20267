//! Checks what is recorded of an execution against the checkpoints of its subagent.

use serde_json::Value as Json;
use threadkeep::state::StateSnapshot;
use threadkeep_agent::model::message;
use threadkeep_agent::receipts::sha256;
use threadkeep_records::{ExecutionKind, ExecutionRow, ExecutionStatus};

use crate::acceptance::{BashEvidence, Criteria, Family, Leaf, recheck_commands};
use crate::citations::CitationVerdict;
use crate::concluded::report;
use crate::evidence::harvest;
use crate::outcome::Recorded;
use crate::progress::Progress;

/// What differs between the records of an execution and the checkpoints of its subagent; empty if nothing does.
///
/// `child` is the head of the subagent's thread, `parent` the conversation that delegated. The report, its digest, the
/// receipts, the citations, the tokens and the criteria about commands are computed again. Criteria about files are not:
/// the files may have changed since.
///
/// # Errors
/// If the subagent's state cannot be read.
pub fn recheck(
    row: &ExecutionRow,
    child: Option<&StateSnapshot>,
    parent: &[Json],
) -> threadkeep::Result<Vec<String>> {
    let mut found = Vec::new();
    let Some(state) = child else {
        let worked = row.kind == ExecutionKind::Task
            && row.started_at.is_some()
            && row.status == ExecutionStatus::Completed;
        return Ok(if worked { vec!["its checkpoints are gone".to_owned()] } else { found });
    };
    let progress = Progress::of(Some(state))?;
    let said = state.json("messages")?.unwrap_or_default();
    let said = said.as_array().map_or(&[][..], Vec::as_slice);
    let tokens: u64 = progress.usage.values().map(|used| used.tokens.total_tokens).sum();
    let recorded: u64 = row.usage.values().map(|tokens| tokens.total_tokens).sum();
    // Those of an item that nobody ended are counted later.
    let is_counted = row.kind != ExecutionKind::BatchItem || row.counted;
    if row.status.is_terminal() && is_counted && tokens != recorded {
        found.push(format!("{recorded} tokens are recorded, its checkpoints show {tokens}"));
    }
    if row.status != ExecutionStatus::Completed {
        return Ok(found);
    }
    if row.kind == ExecutionKind::BatchItem {
        // Its report is in its batch, not in the conversation.
        return Ok(found);
    }
    let text = report(said);
    let digest = sha256(&text);
    let results = parent.iter().filter(|message| message::kind(message) == "tool");
    let metadata =
        |message: &Json| message["additional_kwargs"].as_object().and_then(Recorded::from_metadata);
    let of_call = results.filter(|message| message["tool_call_id"] == *row.tool_call_id);
    let delivered: Vec<Recorded> = of_call.filter_map(metadata).collect();
    // Providers repeat the ids of calls: the result is the one with the report.
    let same = |recorded: &&Recorded| recorded.result_sha256.as_deref().is_none_or(|found| found == digest);
    match delivered.iter().find(same) {
        Some(recorded) => found.extend(differences(recorded, &text, said, &progress)),
        // A summary of the conversation may have taken it away, or the conversation never got it, because it turned away
        // or a client has put another call in the place of this one.
        None if delivered.is_empty() || !row.delivered => {}
        None => found.push("the report in the conversation is not the one in its checkpoints".to_owned()),
    }
    Ok(found)
}

fn differences(recorded: &Recorded, text: &str, said: &[Json], progress: &Progress) -> Vec<String> {
    let mut found = Vec::new();
    if let Some(citations) = &recorded.citations {
        let receipts = harvest(true, said).unwrap_or_default();
        if receipts != recorded.receipts {
            found.push("its receipts are not those in its checkpoints".to_owned());
        }
        if CitationVerdict::of(text, &receipts) != *citations {
            found.push("the verdict on its citations is another one today".to_owned());
        }
    }
    let mut commands: BashEvidence = progress.commands.clone();
    commands.add(said);
    for leaf in recorded.acceptance.iter().flat_map(|verdict| &verdict.leaves) {
        if leaf.family != Family::TestsPassed {
            continue;
        }
        let today = Criteria::normalise(&[leaf.criterion.clone().into()])
            .and_then(|criteria| recheck_commands(&criteria, commands.executions()));
        if today.as_ref().map(Leaf::mark) != Some(leaf.mark()) {
            found.push(format!("the criterion `{}` comes out otherwise today", leaf.criterion));
        }
    }
    found
}
