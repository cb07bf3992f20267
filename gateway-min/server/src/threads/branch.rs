//! A branch: a separate thread that starts as a copy of another one, up to the end of a turn.
//!
//! It has two checkpoints: the state before the turn, so that the turn can be repeated, and the state after it. Both
//! are written from values, never copied as rows, so the branch does not depend on its source.

use serde_json::{Map, Value as Json};
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::id::{NodeName, ThreadId};
use threadkeep::state::{HistoryQuery, KnownHead, StateAccessor, StateSnapshot, Update};
use threadkeep_agent::binding;
use threadkeep_agent::model::message::{is_from_user, is_hidden, kind};

use super::lineage::{PAGE, SCAN_ROWS, messages_only};

/// The node recorded for the checkpoints of a branch.
const BRANCH_NODE: &str = "branch";
/// Channels that refer to the source's own directory.
const LEFT_OUT: [&str; 2] = ["sandbox", "thread_data"];

/// A checkpoint at which a turn has just ended.
pub(crate) struct TurnEnd {
    /// The checkpoint, with only its messages loaded.
    pub(crate) state: StateSnapshot,
    /// The id of the user's message that began the turn.
    pub(crate) question: String,
    /// Whether only notes follow it.
    pub(crate) latest: bool,
}

/// The newest checkpoint at which the turn with these answers has just ended; `None` if there is none, or the ids are
/// not such answers.
///
/// # Errors
/// The accessor's.
pub(crate) async fn turn_end(
    accessor: &StateAccessor,
    thread: &ThreadId,
    answers: &[String],
) -> threadkeep::Result<Option<TurnEnd>> {
    let mut query = HistoryQuery { limit: Some(PAGE), load: messages_only(), ..HistoryQuery::default() };
    let mut latest = true;
    for _ in 0..SCAN_ROWS / PAGE {
        let page = accessor.history(thread, query.clone()).await?;
        let Some(oldest) = page.last().map(|state| state.key.id) else { break };
        query.before = Some(oldest);
        for state in page {
            if state.metadata.is_duration_only() {
                continue;
            }
            let messages = state.json(MESSAGES_CHANNEL)?.unwrap_or_default();
            let messages = messages.as_array().map_or(&[][..], Vec::as_slice);
            if state.next.is_empty()
                && let Some(question) = question_of(messages, answers)
            {
                return Ok(Some(TurnEnd { state, question, latest }));
            }
            latest = false;
        }
    }
    Ok(None)
}

/// The id of the user's message before these answers, if the conversation ends with them.
fn question_of(messages: &[Json], answers: &[String]) -> Option<String> {
    let place = |id: &String| {
        messages
            .iter()
            .rposition(|message| message["id"] == **id && kind(message) == "ai" && !is_hidden(message))
    };
    let places = answers.iter().map(place).collect::<Option<Vec<usize>>>()?;
    let last = places.into_iter().max()?;
    if messages[last + 1..].iter().any(|message| matches!(kind(message), "human" | "ai")) {
        return None;
    }
    let question = messages[..last].iter().rfind(|message| is_from_user(message))?;
    question["id"].as_str().map(str::to_owned)
}

/// Writes the checkpoints of a branch to an empty thread, and returns the last one. The states contain all their
/// values; `title` replaces the title in the last one.
///
/// A failed or dropped call may leave checkpoints, which must be deleted with the thread.
///
/// # Errors
/// The accessor's.
pub(crate) async fn write(
    accessor: &StateAccessor,
    branch: &ThreadId,
    base: Option<&StateSnapshot>,
    end: &StateSnapshot,
    title: Option<&str>,
    extra: &Map<String, Json>,
) -> threadkeep::Result<StateSnapshot> {
    let mut head = accessor.known_head(branch).await?;
    if let Some(base) = base {
        copy(accessor, &mut head, base, None, extra).await?;
    }
    copy(accessor, &mut head, end, title, extra).await
}

async fn copy(
    accessor: &StateAccessor,
    branch: &mut KnownHead,
    state: &StateSnapshot,
    title: Option<&str>,
    extra: &Map<String, Json>,
) -> threadkeep::Result<StateSnapshot> {
    let mut values = state.values()?;
    values.retain(|channel, _| !LEFT_OUT.contains(&channel.as_str()));
    values.extend(title.map(|title| ("title".to_owned(), title.into())));
    let table = accessor.table();
    let writes = values.into_iter().map(|(channel, value)| {
        let reduced = table.behaviour(&channel.as_str().into()).is_some_and(|b| b.reducer().is_some());
        accessor.write(&channel, value, reduced)
    });
    let writes = writes.collect::<threadkeep::Result<Vec<_>>>()?;
    let mut extra = extra.clone();
    extra.extend(binding(&state.metadata.extra));
    let update = Update { at: None, node: NodeName::from(BRANCH_NODE), writes, extra };
    accessor.update_known(branch, update).await
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn message(kind: &str, id: &str) -> Json {
        json!({"type": kind, "id": id, "content": id, "additional_kwargs": {}})
    }

    fn hidden(kind: &str, id: &str) -> Json {
        json!({"type": kind, "id": id, "content": id, "additional_kwargs": {"hide_from_ui": true}})
    }

    fn question(messages: &[Json], answers: &[&str]) -> Option<String> {
        let answers: Vec<String> = answers.iter().map(|&id| id.to_owned()).collect();
        question_of(messages, &answers)
    }

    #[test]
    fn a_turn_has_ended_if_its_answers_are_all_there_and_nothing_follows() {
        let first = [message("human", "h1"), message("ai", "a1"), message("tool", "t1"), message("ai", "a2")];
        assert_eq!(question(&first, &["a2"]).as_deref(), Some("h1"));
        assert_eq!(question(&first, &["a1", "a2"]).as_deref(), Some("h1"));
        assert_eq!(question(&first, &["a1"]), None, "not the last part of the turn");
        assert_eq!(question(&first, &["h1"]), None, "not an answer");
        assert_eq!(question(&first, &["t1", "a2"]), None, "not all are answers");
        assert_eq!(question(&first, &["a2", "x"]), None, "not all exist");
        assert_eq!(question(&first[1..], &["a2"]), None, "no question");
        let and = |more: Json| [&first[..], &[more]].concat();
        assert_eq!(question(&and(message("tool", "t2")), &["a2"]).as_deref(), Some("h1"));
        for more in [message("human", "h2"), message("ai", "a3"), hidden("human", "h2")] {
            assert_eq!(question(&and(more), &["a2"]), None);
        }
        assert_eq!(question(&and(hidden("ai", "a3")), &["a3"]), None, "a hidden answer");
        let prompted = [hidden("human", "h1"), message("ai", "a1")];
        assert_eq!(question(&prompted, &["a1"]), None, "the user did not ask");
    }
}
