//! Which receipts of a subagent count.

use serde_json::Value;
use threadkeep_agent::model::message;
use threadkeep_agent::receipts::{Receipt, ledger, shown_to};

/// The receipts that the author of a report saw: those recorded on `answer`, the assistant message whose text is the
/// report. `None` if there is no valid record; then the report has no receipts and no verdict. A message after the
/// answer does not matter, and neither does what a compaction removed before it.
pub fn of_completed(answer: &Value) -> Option<Vec<Receipt>> {
    shown_to(answer)
}

/// The receipts so far of a subagent that did not complete: those of its conversation, or the ones recorded on its last
/// message if the model was about to end.
pub fn of_unfinished(messages: &[Value]) -> Vec<Receipt> {
    let last = messages.last().filter(|last| message::kind(last) == "ai");
    last.and_then(shown_to).unwrap_or_else(|| ledger(messages))
}

#[cfg(test)]
mod tests {
    use chrono::DateTime;
    use serde_json::json;
    use threadkeep_agent::receipts::{Shown, stamp, stamp_shown};
    use threadkeep_agent::tools::ToolStatus;

    use super::super::CitationVerdict;
    use super::*;

    fn result(tool: &str) -> Value {
        let call = json!({"id": "c", "name": tool, "args": {}});
        let mut result = json!({"type": "tool", "content": "a", "tool_call_id": "c"});
        stamp(&mut result, &call, ToolStatus::Success, DateTime::UNIX_EPOCH);
        result
    }

    /// The answer of a model that sees the ledger of `messages`.
    fn answer(messages: &[Value], text: &str) -> Value {
        let shown = Shown::of(&ledger(messages)).map(|shown| shown.receipts).unwrap_or_default();
        let mut answer = json!({"type": "ai", "content": text});
        stamp_shown(&mut answer, &shown);
        answer
    }

    /// Scenario 33 and bug 24.
    #[test]
    fn ids_still_mean_what_was_shown_after_a_compaction() {
        let conversation = [result("ls"), result("bash"), result("grep")];
        let report = answer(&conversation, "Ran it [r2 bash]");
        // The compaction removes the first result: a new scan would number `bash` r1 and `grep` r2.
        let compacted = [conversation[1..].to_vec(), vec![report.clone(), result("late")]].concat();
        assert_eq!(ledger(&compacted)[1].stamp.tool_name, "grep");
        let receipts = of_completed(&report).unwrap();
        assert_eq!(CitationVerdict::of("Ran it [r2 bash]", &receipts).resolved, ["r2"]);
    }

    /// Scenario 33.
    #[test]
    fn without_a_valid_record_a_completed_task_has_no_receipts() {
        assert_eq!(of_completed(&json!({"type": "ai", "content": "Ran it [r1]"})), None);
        let mut forged = answer(&[result("ls"), result("ls")], "");
        forged["additional_kwargs"]["svc_tool_receipt_ledger"][1]["id"] = json!("r7");
        assert_eq!(of_completed(&forged), None);
        assert_eq!(of_completed(&answer(&[], "")), Some(Vec::new()), "an empty record is one");
    }

    /// Scenario 32.
    #[test]
    fn a_receipt_that_was_not_shown_is_unknown() {
        let conversation = vec![result("bash"); 60];
        let receipts = of_completed(&answer(&conversation, "")).unwrap();
        let verdict = CitationVerdict::of("did it [r1], and [r60]", &receipts);
        assert_eq!((verdict.unknown, verdict.resolved), (vec!["r1".to_owned()], vec!["r60".to_owned()]));
    }

    #[test]
    fn an_unfinished_task_has_the_receipts_so_far() {
        let so_far = vec![result("ls"), result("bash")];
        assert_eq!(of_unfinished(&so_far).len(), 2);
        let ending = [so_far.clone(), vec![answer(&so_far[..1], "")]].concat();
        assert_eq!(of_unfinished(&ending).len(), 1, "what the last answer records");
        let unrecorded = [so_far, vec![json!({"type": "ai", "content": ""})]].concat();
        assert_eq!(of_unfinished(&unrecorded).len(), 2);
        assert!(of_unfinished(&[]).is_empty());
    }
}
