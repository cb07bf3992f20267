//! A branch: a separate thread that starts as a copy of another one, up to the end of a turn.
//!
//! It has two checkpoints: the state before the turn, so that the turn can be repeated, and the state after it. Both
//! are written from values, never copied as rows, so the branch does not depend on its source.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::ops::Bound;

use serde_json::{Map, Value as Json};
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::id::{CheckpointId, NodeName, ThreadId};
use threadkeep::saver::Load;
use threadkeep::state::{HistoryQuery, KnownHead, StateAccessor, StateSnapshot, Update};
use threadkeep::value::{ChannelValue, Element};
use threadkeep_agent::binding;
use threadkeep_agent::model::message::{is_from_user, is_hidden, kind};

use super::lineage::messages_only;

/// The node recorded for the checkpoints of a branch.
const BRANCH_NODE: &str = "branch";
/// Checkpoints per page of the search for a turn.
const PAGE: usize = 500;
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
/// It searches from the newest checkpoint for the one whose task wrote the last answer, without loading states, and only
/// looks into the states after that one. So a turn is found however far back it is.
///
/// # Errors
/// The accessor's.
pub(crate) async fn turn_end(
    accessor: &StateAccessor,
    thread: &ThreadId,
    answers: &[String],
) -> threadkeep::Result<Option<TurnEnd>> {
    let Some(answer) = answers.last() else { return Ok(None) };
    let answers: HashSet<&str> = answers.iter().map(String::as_str).collect();
    let mut query = HistoryQuery { limit: Some(PAGE), load: Load::None, ..HistoryQuery::default() };
    let mut newer = Newer::default();
    loop {
        let page = accessor.history(thread, query.clone()).await?;
        let Some(oldest) = page.last().map(|state| state.key.id) else { return Ok(None) };
        query.before = Some(oldest);
        for state in page {
            // What a root contains was not written by a task.
            let (is_root, wrote) = (state.parent.is_none(), writes_message(&state, answer)?);
            let id = state.key.id;
            newer.add(state);
            if is_root || wrote {
                let found = newer.last_with(accessor, thread, &answers, id, (is_root, wrote)).await?;
                if found.is_some() {
                    return Ok(found);
                }
            }
        }
    }
}

/// Whether a task that ran from this checkpoint wrote the message.
fn writes_message(state: &StateSnapshot, id: &str) -> threadkeep::Result<bool> {
    let writes = state.writes.iter().flat_map(|row| &row.writes);
    for write in writes.filter(|write| write.channel.as_str() == MESSAGES_CHANNEL) {
        let found = match &write.value {
            ChannelValue::List(list) => {
                list.iter().any(|message| message.id().is_some_and(|found| **found == *id))
            }
            value @ ChannelValue::Plain(_) => value.to_json()?["id"] == id,
        };
        if found {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The checkpoints of a thread that were read so far, newest first.
#[derive(Default)]
struct Newer {
    links: BTreeMap<CheckpointId, Link>,
    children: HashMap<CheckpointId, Vec<CheckpointId>>,
}

struct Link {
    /// Whether no node is left to run.
    settled: bool,
    /// Whether it only notes how long a run took, on its parent's state.
    is_note: bool,
}

impl Newer {
    fn add(&mut self, state: StateSnapshot) {
        let id = state.key.id;
        let link = Link { settled: state.next.is_empty(), is_note: state.repeats_its_parent() };
        self.links.insert(id, link);
        if let Some(parent) = state.parent {
            self.children.entry(parent).or_default().push(id);
        }
    }

    /// The newest checkpoint at which the turn has just ended, among `from` and its descendants: what is asked for says
    /// whether to look at the checkpoint, and at its descendants.
    async fn last_with(
        &self,
        accessor: &StateAccessor,
        thread: &ThreadId,
        answers: &HashSet<&str>,
        from: CheckpointId,
        (itself, descendants): (bool, bool),
    ) -> threadkeep::Result<Option<TurnEnd>> {
        let children = |id| self.children.get(&id).into_iter().flatten().copied();
        let mut open: Vec<CheckpointId> = if descendants { children(from).collect() } else { Vec::new() };
        open.extend(itself.then_some(from));
        let mut found: Option<(StateSnapshot, String)> = None;
        while let Some(id) = open.pop() {
            let Some(link) = self.links.get(&id) else { continue };
            if link.is_note {
                open.extend(children(id));
                continue;
            }
            let Some(state) = accessor.get_loading(thread, Some(id), messages_only()).await? else {
                continue;
            };
            match stage_of(&state, answers)? {
                Stage::Ended(question) => {
                    open.extend(children(id));
                    if link.settled && found.as_ref().is_none_or(|(best, _)| best.key.id < id) {
                        found = Some((state, question));
                    }
                }
                // Its own messages follow.
                Stage::Open => open.extend(children(id)),
                Stage::Elsewhere => {}
            }
        }
        Ok(found.map(|(state, question)| {
            let later = self.links.range((Bound::Excluded(state.key.id), Bound::Unbounded));
            let latest = later.into_iter().all(|(_, link)| link.is_note);
            TurnEnd { state, question, latest }
        }))
    }
}

/// Where a conversation stands in a turn.
enum Stage {
    /// It ends with the answers, to the user's message with this id.
    Ended(String),
    /// It has some of them, and ends in the turn.
    Open,
    /// The turn is over, or is another one.
    Elsewhere,
}

/// Decodes only the messages from the turn's question on.
fn stage_of(state: &StateSnapshot, answers: &HashSet<&str>) -> threadkeep::Result<Stage> {
    let Some(list) = state.value(MESSAGES_CHANNEL).and_then(ChannelValue::as_list) else {
        return Ok(Stage::Elsewhere);
    };
    let with_id = |element: &Element| element.id().is_some_and(|id| answers.contains(&**id));
    let Some(first) = list.iter().position(with_id) else { return Ok(Stage::Elsewhere) };
    let mut turn = VecDeque::new();
    for element in list.iter_from(first) {
        turn.push_back(element.to_json()?);
    }
    let mut at = first;
    while let Some(before) = at.checked_sub(1) {
        at = before;
        let Some(element) = list.get(at) else { break };
        let message = element.to_json()?;
        let is_question = is_from_user(&message);
        turn.push_front(message);
        if is_question {
            break;
        }
    }
    Ok(match question_of(turn.iter().rev(), answers) {
        Some(question) => Stage::Ended(question),
        None if turn
            .iter()
            .skip_while(|message| !answers.contains(message["id"].as_str().unwrap_or_default()))
            .any(|message| kind(message) == "human") =>
        {
            Stage::Elsewhere
        }
        None => Stage::Open,
    })
}

/// The id of the user's message before these answers, if the conversation ends with them. There may be any number of
/// messages and of answers, so the messages, which come from the end, can be gone through only once.
fn question_of<'m>(messages: impl Iterator<Item = &'m Json>, answers: &HashSet<&str>) -> Option<String> {
    let mut found = HashSet::new();
    let mut question = None;
    for message in messages {
        let is_answer = kind(message) == "ai" && !is_hidden(message);
        let id = message["id"].as_str().filter(|id| is_answer && answers.contains(id));
        if let Some(id) = id {
            found.insert(id);
        } else if found.is_empty() && matches!(kind(message), "human" | "ai") {
            return None;
        } else if !found.is_empty() && question.is_none() && is_from_user(message) {
            question = Some(message);
        }
        if found.len() == answers.len() && question.is_some() {
            break;
        }
    }
    let question = question.filter(|_| found.len() == answers.len())?;
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
    use std::sync::Arc;

    use serde_json::json;
    use threadkeep::channel::Schema;
    use threadkeep::id::IdSource;
    use threadkeep::mode::ChannelMode;
    use threadkeep_memory::MemorySaver;

    use super::*;

    async fn say(accessor: &StateAccessor, kind: &str, id: &str) -> CheckpointId {
        let message = json!([{"type": kind, "content": id, "id": id}]);
        let writes = vec![accessor.write("messages", message, false).unwrap()];
        let update = Update { at: None, node: "n".into(), writes, extra: Map::new() };
        accessor.update(&"t".into(), update).await.unwrap().key.id
    }

    #[tokio::test]
    async fn every_turn_of_a_long_thread_is_found_where_it_ended() {
        for mode in [ChannelMode::Full, ChannelMode::Delta] {
            let table = Schema::thread_state().compile(mode, 10).unwrap();
            let saver = Arc::new(MemorySaver::default());
            let accessor = StateAccessor::new(saver, Arc::new(table), Arc::new(IdSource::default()));
            let thread = ThreadId::from("t");
            accessor.create(&thread, Map::new()).await.unwrap();
            let mut ends = Vec::new();
            for turn in 0..260 {
                say(&accessor, "human", &format!("h{turn}")).await;
                let mut end = say(&accessor, "ai", &format!("a{turn}")).await;
                if turn % 7 == 0 {
                    // The title is written when the turn has ended.
                    let writes = vec![accessor.write("title", json!(turn.to_string()), false).unwrap()];
                    let update = Update { at: None, node: "title".into(), writes, extra: Map::new() };
                    end = accessor.update(&thread, update).await.unwrap().key.id;
                }
                ends.push(end);
            }
            for turn in [0, 1, 7, 100, 258, 259] {
                let answers = [format!("a{turn}")];
                let found = turn_end(&accessor, &thread, &answers).await.unwrap().unwrap();
                assert_eq!((found.state.key.id, found.question), (ends[turn], format!("h{turn}")), "{mode}");
                assert_eq!(found.latest, turn == 259);
            }
            for nothing in ["h3", "a999"] {
                let found = turn_end(&accessor, &thread, &[nothing.to_owned()]).await.unwrap();
                assert!(found.is_none(), "{nothing}");
            }
        }
    }

    fn message(kind: &str, id: &str) -> Json {
        json!({"type": kind, "id": id, "content": id, "additional_kwargs": {}})
    }

    fn hidden(kind: &str, id: &str) -> Json {
        json!({"type": kind, "id": id, "content": id, "additional_kwargs": {"hide_from_ui": true}})
    }

    fn question(messages: &[Json], answers: &[&str]) -> Option<String> {
        question_of(messages.iter().rev(), &answers.iter().copied().collect())
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

    /// The question as it is defined: each answer is looked for in the whole conversation.
    fn defined(messages: &[Json], answers: &[&str]) -> Option<String> {
        let place =
            |id: &&str| messages.iter().rposition(|m| m["id"] == **id && kind(m) == "ai" && !is_hidden(m));
        let last = answers.iter().map(place).collect::<Option<Vec<usize>>>()?.into_iter().max()?;
        if messages[last + 1..].iter().any(|message| matches!(kind(message), "human" | "ai")) {
            return None;
        }
        let question = messages[..last].iter().rfind(|message| is_from_user(message))?;
        question["id"].as_str().map(str::to_owned)
    }

    #[test]
    fn the_question_of_every_short_conversation_is_as_defined() {
        let mut without_id = message("human", "");
        without_id["id"] = Json::Null;
        let any = [
            message("human", "h1"),
            message("human", "a1"),
            hidden("human", "h2"),
            without_id,
            message("ai", "a1"),
            message("ai", "a2"),
            hidden("ai", "a1"),
            message("tool", "a2"),
        ];
        let mut conversations: Vec<Vec<Json>> = vec![Vec::new()];
        let mut asked = 0;
        for _ in 0..4 {
            let longer = |shorter: &Vec<Json>| {
                any.each_ref().map(|more| [&shorter[..], std::slice::from_ref(more)].concat())
            };
            conversations = conversations.iter().flat_map(longer).collect();
            for messages in &conversations {
                for answers in [&["a1"][..], &["a2"], &["a1", "a2", "a1"], &["h1"], &["a1", "absent"]] {
                    let found = question(messages, answers);
                    assert_eq!(found, defined(messages, answers), "{answers:?} in {messages:?}");
                    asked += usize::from(found.is_some());
                }
            }
        }
        assert!(asked > 100, "{asked}");
    }

    #[test]
    fn a_turn_is_gone_through_once_however_many_answers_are_named() {
        const LEN: usize = 1000;
        let mut turn = vec![message("human", "h1")];
        turn.extend((0..LEN).map(|number| message("ai", &format!("a{number}"))));
        let last = format!("a{}", LEN - 1);
        let all: Vec<String> = (0..LEN).map(|number| format!("a{number}")).collect();
        let twice = all.iter().chain(&all);
        let lists: [Vec<&str>; 3] = [
            ["a0"].into_iter().cycle().take(10 * LEN).chain([&*last]).collect(),
            twice.map(String::as_str).collect(),
            all.iter().map(String::as_str).chain(["absent"]).collect(),
        ];
        for (answers, question) in lists.into_iter().zip([Some("h1"), Some("h1"), None]) {
            let mut looked_at = 0;
            let messages = turn.iter().rev().inspect(|_| looked_at += 1);
            assert_eq!(question_of(messages, &answers.into_iter().collect()).as_deref(), question);
            assert_eq!(looked_at, LEN + 1);
        }
    }
}
