//! Which entry of the ledger, and so which execution, is a call's.
//!
//! A client may change an answer before a run goes on with its calls: it edits one, adds one, takes one away. So an entry
//! belongs to a call with its content, and not to a place. A call that is edited is another one; the others keep theirs,
//! wherever they are moved.

use std::collections::HashMap;

use serde_json::Value as Json;
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::state::StateSnapshot;
use threadkeep::value::{ChannelValue, ListValue};
use threadkeep_agent::model::message;
use threadkeep_agent::pending_answer;
use threadkeep_agent::receipts::sha256;

use super::{Entry, TASK, entries};

/// The digest of a call's arguments. The keys of a JSON object are sorted.
pub(super) fn args_digest(call: &Json) -> String {
    sha256(&call["args"].to_string())
}

/// The entry of a call of the answer. Of calls with the same content, the first one has the first entry.
pub(crate) fn entry_of<'e>(entries: &'e [Entry], answer: &Json, index: usize) -> Option<&'e Entry> {
    let call = message::tool_calls(answer).get(index)?;
    let id = &answer["id"];
    let of_answer = move || entries.iter().filter(move |entry| *id == *entry.message_id);
    let with_content = of_answer().filter(|entry| entry.is_of(call)).nth(same_before(answer, index));
    // An entry of an earlier version knows only the place.
    with_content
        .or_else(|| of_answer().rfind(|entry| entry.args_sha256.is_none() && entry.call_index == index))
}

/// The execution of a call that a client has put into the answer, which has no entry before it has ended: from its
/// content, so that whatever repeats the call finds it, wherever the head is by then.
pub(crate) fn added_execution(thread_id: &str, answer: &Json, index: usize) -> String {
    let call = message::tool_calls(answer).get(index).unwrap_or(&Json::Null);
    let (answered, asked, digest) = (&answer["id"], &call["id"], args_digest(call));
    let place = format!("{thread_id}\n{answered}\n{asked}\n{digest}\n{}", same_before(answer, index));
    sha256(&place)[..32].to_owned()
}

/// The executions of the answer's `task` calls.
pub(crate) fn executions_of(thread_id: &str, entries: &[Entry], answer: &Json) -> Vec<String> {
    let execution = |index| match entry_of(entries, answer, index) {
        Some(entry) => entry.id.clone(),
        None => added_execution(thread_id, answer, index),
    };
    tasks(answer).map(execution).collect()
}

/// The index of the call to which an entry belongs, among the calls of its answer.
pub(super) fn index_of(entries: &[Entry], answer: &Json, entry: &Entry) -> Option<usize> {
    tasks(answer).find(|index| entry_of(entries, answer, *index).is_some_and(|own| own.id == entry.id))
}

/// Whether the thread may have delegations without a result.
///
/// # Errors
/// If the state cannot be read.
pub fn has_unfinished(state: Option<&StateSnapshot>) -> threadkeep::Result<bool> {
    if entries(state)?.iter().any(Entry::is_in_progress) {
        return Ok(true);
    }
    // A call that a client has put into the answer has no entry yet.
    let mut answer = pending_answer(None, state)?;
    if answer.is_none() {
        // After a write to the state the thread waits for no call.
        answer = unanswered(state)?;
    }
    Ok(answer.is_some_and(|answer| tasks(&answer).next().is_some()))
}

/// The last answer, if calls of it have no result in the conversation.
fn unanswered(state: Option<&StateSnapshot>) -> threadkeep::Result<Option<Json>> {
    let messages = state.and_then(|state| state.value(MESSAGES_CHANNEL)).and_then(ChannelValue::as_list);
    messages.map_or(Ok(None), last_open)
}

/// The same of these messages. Results are counted by the id of their call: a client may have added others, and
/// providers repeat ids.
fn last_open(messages: &ListValue) -> threadkeep::Result<Option<Json>> {
    let mut results = HashMap::<&str, usize>::new();
    for stored in messages.iter().rev() {
        match stored.text("type") {
            Some("tool") => *results.entry(stored.text("tool_call_id").unwrap_or_default()).or_default() += 1,
            Some("ai") => {
                let answer = stored.to_json()?;
                let has_result = |call: &Json| {
                    let left = results.get_mut(call["id"].as_str().unwrap_or_default());
                    left.is_some_and(|left| {
                        let has_one = *left > 0;
                        *left -= usize::from(has_one);
                        has_one
                    })
                };
                let calls = message::tool_calls(&answer).iter();
                let is_answered = calls.chain(message::invalid_tool_calls(&answer)).all(has_result);
                return Ok((!is_answered).then_some(answer));
            }
            _ => {}
        }
    }
    Ok(None)
}

/// The executions without a result that no call of `answer` has, with which a run from this state goes on: those of calls
/// that were edited or taken away.
///
/// # Errors
/// If the state cannot be read.
pub fn withdrawn(
    thread_id: &str,
    state: Option<&StateSnapshot>,
    answer: &Json,
) -> threadkeep::Result<Vec<String>> {
    let entries = entries(state)?;
    let mut known: Vec<String> =
        entries.iter().filter(|entry| entry.is_in_progress()).map(|entry| entry.id.clone()).collect();
    if let Some(before) = pending_answer(None, state)? {
        known.extend(executions_of(thread_id, &entries, &before));
    }
    let kept = executions_of(thread_id, &entries, answer);
    known.retain(|execution| !kept.contains(execution));
    Ok(known)
}

/// The indices of the answer's `task` calls among all of its calls.
fn tasks(answer: &Json) -> impl Iterator<Item = usize> {
    let calls = message::tool_calls(answer).iter().enumerate();
    calls.filter(|(_, call)| call["name"] == TASK).map(|(index, _)| index)
}

/// How many calls before this one have its content.
fn same_before(answer: &Json, index: usize) -> usize {
    let calls = message::tool_calls(answer);
    let Some(call) = calls.get(index) else { return 0 };
    let is_same = |other: &&Json| ["name", "id", "args"].iter().all(|field| other[field] == call[field]);
    calls[..index].iter().filter(is_same).count()
}

#[cfg(test)]
mod tests {
    use chrono::DateTime;
    use serde_json::json;

    use super::*;

    fn call(id: &str, prompt: &str) -> Json {
        json!({"name": TASK, "id": id, "args": {"prompt": prompt, "subagent_type": "bash"}})
    }

    fn answer(calls: &[Json]) -> Json {
        json!({"type": "ai", "id": "m", "tool_calls": calls})
    }

    /// The entries of an answer, each with the number of its call as its id.
    fn begun(answer: &Json) -> Vec<Entry> {
        let calls = message::tool_calls(answer).iter().enumerate();
        let entry = |(index, call): (usize, &Json)| {
            Entry::begun(index.to_string(), "r", answer, index, call, DateTime::UNIX_EPOCH)
        };
        calls.map(entry).collect()
    }

    /// The ids of the entries of each call.
    fn found(entries: &[Entry], answer: &Json) -> Vec<Option<String>> {
        let calls = 0..message::tool_calls(answer).len();
        calls.map(|index| entry_of(entries, answer, index).map(|entry| entry.id.clone())).collect()
    }

    #[test]
    fn an_entry_belongs_to_a_call_with_its_content_wherever_that_is() {
        let (a, b, c) = (call("1", "a"), call("2", "b"), call("3", "c"));
        let entries = begun(&answer(&[a.clone(), b.clone(), c.clone()]));
        let of = |calls: &[Json]| found(&entries, &answer(calls));
        let own = |id: &str| Some(id.to_owned());
        assert_eq!(of(&[a.clone(), b.clone(), c.clone()]), [own("0"), own("1"), own("2")]);
        assert_eq!(of(&[call("1", "other"), b.clone(), c.clone()]), [None, own("1"), own("2")], "edited");
        assert_eq!(of(&[call("4", "a"), b.clone()]), [None, own("1")], "under another id");
        assert_eq!(of(&[c.clone(), b.clone()]), [own("2"), own("1")], "moved");
        let mut other = answer(&[a, b, c]);
        other["id"] = json!("n");
        assert_eq!(found(&entries, &other), vec![None::<String>; 3], "of another answer");
    }

    #[test]
    fn calls_with_the_same_content_have_an_entry_each() {
        let twice = answer(&[call("1", "a"), call("1", "a")]);
        let entries = begun(&twice);
        assert_eq!(found(&entries, &twice), [Some("0".to_owned()), Some("1".to_owned())]);
        assert_eq!(index_of(&entries, &twice, &entries[1]), Some(1));
        let [first, second] = &executions_of("t", &[], &twice)[..] else { panic!("two executions") };
        assert_ne!(first, second, "although no entry knows them");
    }

    #[test]
    fn a_call_without_a_result_is_hidden_by_no_result_of_another_call() {
        let is_open = |calls: &[&str], results: &[&str]| {
            let calls: Vec<Json> = calls.iter().map(|id| call(id, "a")).collect();
            let results = results.iter().map(|id| json!({"type": "tool", "tool_call_id": id}));
            let messages: Json = std::iter::once(answer(&calls)).chain(results).collect();
            let messages = ChannelValue::from_json(&messages).unwrap();
            last_open(messages.as_list().unwrap()).unwrap().is_some()
        };
        assert!(is_open(&["1"], &[]) && !is_open(&["1", "2"], &["2", "1"]));
        assert!(is_open(&["1"], &["2"]) && is_open(&["1", "2"], &["1", "3"]), "a client added one");
        assert!(is_open(&["1", "1"], &["1"]) && !is_open(&["1", "1"], &["1", "1"]), "the ids are the same");
        assert!(!is_open(&[], &["1"]));
    }

    #[test]
    fn an_entry_that_does_not_know_the_content_belongs_to_its_place() {
        let one = answer(&[call("1", "a")]);
        let mut stored = begun(&one)[0].to_json();
        stored.as_object_mut().unwrap().remove("args_sha256");
        let entries: [Entry; 1] = [serde_json::from_value(stored).unwrap()];
        assert_eq!(found(&entries, &one), [Some("0".to_owned())]);
    }
}
