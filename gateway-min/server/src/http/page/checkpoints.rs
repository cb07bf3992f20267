//! The checkpoints of a thread: the tree, the state at one, the difference of two.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt::Write as _;
use std::ops::Range;
use std::sync::Arc;

use axum::extract::{Query, State};
use axum::response::Html;
use serde_json::{Map, Value};
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::checkpoint::CheckpointTuple;
use threadkeep::deletion::RUN_ID_KEY;
use threadkeep::id::{ChannelName, CheckpointId, TaskId, ThreadId};
use threadkeep::saver::{CheckpointSelector, ListQuery, Load};
use threadkeep_agent::model::message::{kind, text, tool_calls};
use threadkeep_agent::serialize;
use threadkeep_page::{
    Change, Channel, CheckpointLine, Checkpoints, Difference, Excerpt, Node, State as StateView, ThreadHead,
};

use super::super::error::{ApiError, OrApiError as _};
use super::super::extract::{ApiPath, ThreadPath};
use super::super::fields::{Fields, FromFields};
use super::super::state::checkpoint_absent;
use super::message::checkpoint;
use super::session::Viewer;
use super::threads::head;
use super::{Page, Parameters, offset};
use crate::app::App;

const FAILED: &str = "Failed to read checkpoints";
/// Checkpoints on a page.
const PAGE: usize = 250;
/// Checkpoints that are read at a time.
const READ: usize = 1_000;

/// The path of a checkpoint.
pub(super) struct CheckpointPath {
    thread_id: ThreadId,
    checkpoint_id: String,
}

impl FromFields for CheckpointPath {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let ThreadPath { thread_id } = ThreadPath::from_fields(fields);
        Self { thread_id, checkpoint_id: fields.field("checkpoint_id").required().text().unwrap_or_default() }
    }
}

/// `GET /threads/{thread_id}/checkpoints`
pub(super) async fn tree(
    State(app): State<Arc<App>>,
    Viewer(session): Viewer,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
    Query(parameters): Query<Parameters>,
) -> Page {
    let thread = head(&app, &thread_id).await?;
    let accessor = app.threads.accessor();
    accessor.check(&thread_id, None).await.or_engine(&thread_id, FAILED)?;
    let saver = accessor.saver();
    let summary = saver.summary(&thread_id).await.or_engine(&thread_id, FAILED)?;
    let nested = summary.iter().filter(|(namespace, _)| !namespace.as_str().is_empty());
    let nested: u64 = nested.map(|(_, chain)| chain.checkpoints).sum();
    let offset = usize::try_from(offset(&parameters)).unwrap_or(usize::MAX);
    let mut walk = Walk::showing(offset..offset.saturating_add(PAGE));
    let mut query = ListQuery { load: Load::None, limit: Some(READ), ..ListQuery::new(&thread_id) };
    loop {
        let page = saver.list(&query).await.or_engine(&thread_id, FAILED)?;
        query.before = page.last().map(|tuple| tuple.checkpoint.id);
        let more = page.len() == READ;
        for tuple in page {
            walk.add(tuple);
        }
        if !more {
            break;
        }
    }
    let view = Checkpoints {
        thread,
        nested: usize::try_from(nested).unwrap_or(usize::MAX),
        lines: walk.lines(),
        offset: offset.min(walk.nodes.len()),
        nodes: walk.nodes,
        page: PAGE,
    };
    Ok(Html(view.page(&session)))
}

/// The checkpoints of a thread, newest first. It holds of each who its parent is, and of those that are shown, and of their
/// parents, everything but values.
struct Walk {
    /// The places of those that are shown.
    shown: Range<usize>,
    nodes: Vec<Node>,
    /// Those that are shown.
    ids: Vec<CheckpointId>,
    /// Their parents that did not come yet.
    wanted: HashSet<CheckpointId>,
    family: Family,
}

impl Walk {
    fn showing(shown: Range<usize>) -> Self {
        let (nodes, ids, wanted) = (Vec::new(), Vec::new(), HashSet::new());
        Self { shown, nodes, ids, wanted, family: Family::default() }
    }

    /// Adds a checkpoint, older than those before it.
    fn add(&mut self, tuple: CheckpointTuple) {
        let (is_shown, id) = (self.shown.contains(&self.nodes.len()), tuple.checkpoint.id);
        self.nodes.push(node(&tuple));
        if is_shown {
            self.ids.push(id);
            self.wanted.extend(tuple.parent);
        } else {
            // All its children came before it, and nobody asks what they applied.
            self.family.applied.remove(&id);
        }
        if self.wanted.remove(&id) || is_shown {
            self.family.add(tuple);
        } else {
            self.family.note(&tuple);
        }
    }

    fn lines(&self) -> Vec<CheckpointLine> {
        let shown = self.ids.iter().filter_map(|id| self.family.by_id.get(id));
        shown.map(|tuple| self.family.line(tuple)).collect()
    }
}

fn node(tuple: &CheckpointTuple) -> Node {
    Node { id: tuple.checkpoint.id.to_string(), parent: tuple.parent.map(|id| id.to_string()) }
}

/// What checkpoints say about each other: the rows that a child applied are those of its parent.
#[derive(Default)]
struct Family {
    by_id: HashMap<CheckpointId, CheckpointTuple>,
    applied: HashMap<CheckpointId, HashSet<TaskId>>,
}

impl Family {
    /// Adds a checkpoint.
    fn add(&mut self, tuple: CheckpointTuple) {
        self.note(&tuple);
        self.by_id.insert(tuple.checkpoint.id, tuple);
    }

    /// Notes what a checkpoint applied.
    fn note(&mut self, tuple: &CheckpointTuple) {
        if let Some(parent) = tuple.parent {
            self.applied.entry(parent).or_default().extend(&tuple.checkpoint.applied);
        }
    }

    fn line(&self, tuple: &CheckpointTuple) -> CheckpointLine {
        let (checkpoint, metadata) = (&tuple.checkpoint, &tuple.metadata);
        let rows =
            tuple.parent.and_then(|parent| self.by_id.get(&parent)).map_or(&[][..], |parent| &parent.writes);
        let by = checkpoint.applied.iter().filter_map(|task| rows.iter().find(|row| row.task == *task));
        let applied = self.applied.get(&checkpoint.id);
        let is_pending = |task: &TaskId| applied.is_none_or(|applied| !applied.contains(task));
        let messages = ChannelName::from(MESSAGES_CHANNEL);
        let form = if metadata.is_duration_only() {
            "note"
        } else if !metadata.is_delta() || !checkpoint.channels.contains_key(&messages) {
            "full"
        } else if metadata.counters.contains_key(&messages) {
            "sentinel"
        } else {
            // The counters of a channel are absent where it has a snapshot.
            "snapshot"
        };
        CheckpointLine {
            id: checkpoint.id.to_string(),
            parent: tuple.parent.map(|id| id.to_string()),
            created_at: checkpoint.id.created_at(),
            by: by.map(|row| row.node.to_string()).collect(),
            source: format!("{:?}", metadata.source).to_lowercase(),
            step: metadata.step,
            run: metadata.extra.get(RUN_ID_KEY).and_then(Value::as_str).map(str::to_owned),
            form,
            pending: tuple.writes.iter().filter(|row| is_pending(&row.task)).count(),
            next: checkpoint.next.iter().map(ToString::to_string).collect(),
        }
    }
}

/// A checkpoint as a line, and its state.
async fn read(
    app: &App,
    thread: &ThreadId,
    id: CheckpointId,
) -> Result<(CheckpointLine, Map<String, Value>, Map<String, Value>), ApiError> {
    let accessor = app.threads.accessor();
    let state = accessor.get(thread, Some(id)).await.or_engine(thread, FAILED)?;
    let state = state.ok_or_else(|| checkpoint_absent(id))?;
    let mut family = Family::default();
    for id in [Some(id), state.parent].into_iter().flatten() {
        let at = CheckpointSelector { id: Some(id), load: Load::None, ..CheckpointSelector::head(thread) };
        if let Some(tuple) = accessor.saver().get(&at).await.or_engine(thread, FAILED)? {
            family.add(tuple);
        }
    }
    let tuple = family.by_id.get(&id).ok_or_else(|| checkpoint_absent(id))?;
    let mut line = family.line(tuple);
    // Its children were not read, so nothing is known of what they applied.
    line.pending = 0;
    let values = serialize::values(&state).or_engine(thread, FAILED)?;
    Ok((line, values, serialize::metadata(&state.metadata)))
}

/// The id of a checkpoint, as an address has it.
fn named(id: &str) -> Result<CheckpointId, ApiError> {
    id.parse().map_err(|_| ApiError::bad_request(format!("'{id}' is not the id of a checkpoint")))
}

/// `GET /threads/{thread_id}/checkpoints/{checkpoint_id}`
pub(super) async fn state(
    State(app): State<Arc<App>>,
    Viewer(session): Viewer,
    ApiPath(CheckpointPath { thread_id, checkpoint_id }): ApiPath<CheckpointPath>,
) -> Page {
    let id = named(&checkpoint_id)?;
    let thread = head(&app, &thread_id).await?;
    let (line, values, metadata) = read(&app, &thread_id, id).await?;
    let channel = |(name, value): (&String, &Value)| Channel {
        name: name.clone(),
        bytes: value.to_string().len() as u64,
        value: Excerpt::of(&pretty(value)),
    };
    let view = StateView {
        channels: values.iter().map(channel).collect(),
        metadata: Excerpt::of(&pretty(&Value::Object(metadata))),
        commands: vec![
            ("state", format!("threadkeep state get {} --checkpoint {id}", option(&thread_id))),
            ("checkpoint", format!("threadkeep checkpoints show {id} {}", option(&thread_id))),
        ],
        line,
        thread,
    };
    Ok(Html(view.page(&session)))
}

/// The option of a command that names a thread, for a shell.
pub(crate) fn option(thread: &ThreadId) -> String {
    threadkeep_ops::option("--thread", thread.as_str())
}

/// `GET /threads/{thread_id}/diff?a=…&b=…`
pub(super) async fn difference(
    State(app): State<Arc<App>>,
    Viewer(session): Viewer,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
    Query(parameters): Query<Parameters>,
) -> Page {
    let (Some(a), Some(b)) = (checkpoint(&parameters, "a")?, checkpoint(&parameters, "b")?) else {
        return Err(ApiError::bad_request("Choose two checkpoints to compare, A and B."));
    };
    let thread = head(&app, &thread_id).await?;
    let (line_a, values_a, _) = read(&app, &thread_id, a).await?;
    let (line_b, values_b, _) = read(&app, &thread_id, b).await?;
    let command = format!("threadkeep checkpoints diff {a} {b} {}", option(&thread_id));
    Ok(Html(compared(thread, (line_a, &values_a), (line_b, &values_b), command).page(&session)))
}

/// The difference of two states.
fn compared(
    thread: ThreadHead,
    (a, before): (CheckpointLine, &Map<String, Value>),
    (b, after): (CheckpointLine, &Map<String, Value>),
    command: String,
) -> Difference {
    let (messages, same) = changed_messages(before.get(MESSAGES_CHANNEL), after.get(MESSAGES_CHANNEL));
    let names: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    let names =
        names.into_iter().filter(|name| *name != MESSAGES_CHANNEL && before.get(*name) != after.get(*name));
    let shown = |value: Option<&Value>| value.map(|value| Excerpt::of(&pretty(value)));
    let channels = names.map(|name| Change {
        name: name.clone(),
        before: shown(before.get(name)),
        after: shown(after.get(name)),
    });
    Difference { thread, a, b, messages, same, channels: channels.collect(), command }
}

/// The messages that differ, by their ids, and how many do not.
fn changed_messages(before: Option<&Value>, after: Option<&Value>) -> (Vec<Change>, usize) {
    let list = |value: Option<&Value>| value.and_then(Value::as_array).cloned().unwrap_or_default();
    let (before, after) = (list(before), list(after));
    let by_id = |messages: &[Value]| -> BTreeMap<String, Value> {
        messages.iter().map(|message| (identity(message), message.clone())).collect()
    };
    let (old, new) = (by_id(&before), by_id(&after));
    let (mut changes, mut same) = (Vec::new(), 0);
    for message in &before {
        match new.get(&identity(message)) {
            Some(kept) if kept == message => same += 1,
            kept => changes.push(Change {
                name: who(message),
                before: Some(said(message)),
                after: kept.map(said),
            }),
        }
    }
    let added = after.iter().filter(|message| !old.contains_key(&identity(message)));
    changes.extend(added.map(|message| Change {
        name: who(message),
        before: None,
        after: Some(said(message)),
    }));
    (changes, same)
}

/// What a message is known by: its id, or else its content.
fn identity(message: &Value) -> String {
    message["id"].as_str().map_or_else(|| message.to_string(), str::to_owned)
}

fn who(message: &Value) -> String {
    let who = match kind(message) {
        "human" => "person",
        "ai" => "agent",
        other => other,
    };
    who.to_owned()
}

/// What a message says, and which tools it calls.
fn said(message: &Value) -> Excerpt {
    let mut said = text(message);
    for call in tool_calls(message) {
        // Writing to a string does not fail.
        let _ = write!(said, "\n{} {}", call["name"].as_str().unwrap_or_default(), call["args"]);
    }
    Excerpt::of(said.trim_start_matches('\n'))
}

fn pretty(value: &Value) -> String {
    // A value always has a JSON form.
    serde_json::to_string_pretty(value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use threadkeep::checkpoint::{Checkpoint, TaskWrites};
    use threadkeep::id::Namespace;
    use threadkeep::metadata::{Metadata, Source};

    use super::*;

    /// Checkpoints newest first, each with two tasks; its parent is near or far, and it applied one or both of the parent's.
    fn tree_of(count: u8) -> Vec<CheckpointTuple> {
        let id = |n: u8| CheckpointId::from_bytes([n; 16]);
        let task = |n: u8, of: u8| TaskId::from_bytes([[n; 8], [of; 8]].concat().try_into().unwrap());
        let tuple = |n: u8| {
            let parent = (n > 0).then(|| if n.is_multiple_of(3) { n / 2 } else { n - 1 });
            let applied = parent.into_iter().flat_map(|parent| (0..=n % 2).map(move |of| task(parent, of)));
            let row = |of: u8| {
                let node = format!("node {n} {of}").as_str().into();
                TaskWrites { task: task(n, of), node, index: of.into(), writes: Vec::new() }
            };
            CheckpointTuple {
                thread: "t".into(),
                namespace: Namespace::root(),
                checkpoint: Checkpoint {
                    id: id(n),
                    channels: [].into(),
                    next: Vec::new(),
                    applied: applied.collect(),
                },
                parent: parent.map(id),
                metadata: Metadata::new(Source::Loop, n.into()),
                writes: (0..2).map(row).collect(),
            }
        };
        (0..count).rev().map(tuple).collect()
    }

    #[test]
    fn a_walk_shows_what_the_whole_thread_says() {
        let tuples = tree_of(60);
        let mut whole = Family::default();
        tuples.iter().cloned().for_each(|tuple| whole.add(tuple));
        for (offset, length) in (0..70).flat_map(|offset| [1, 7, 100].map(|length| (offset, length))) {
            let mut walk = Walk::showing(offset..offset + length);
            tuples.iter().cloned().for_each(|tuple| walk.add(tuple));
            let expected: Vec<_> =
                tuples.iter().skip(offset).take(length).map(|tuple| whole.line(tuple)).collect();
            assert_eq!(format!("{:?}", walk.lines()), format!("{expected:?}"), "{length} from {offset}");
            assert_eq!(walk.nodes.len(), tuples.len());
            assert!(walk.family.by_id.len() <= 2 * length, "{} are held", walk.family.by_id.len());
        }
    }

    #[test]
    fn messages_are_compared_by_their_ids() {
        let message = |id: &str, text: &str| json!({"type": "human", "id": id, "content": text});
        let a = json!([message("1", "one"), message("2", "two"), message("3", "three")]);
        let b = json!([message("1", "one"), message("3", "THREE"), message("4", "four")]);
        let (changes, same) = changed_messages(Some(&a), Some(&b));
        let shown = |side: &Option<Excerpt>| side.as_ref().map(|side| side.shown.clone());
        let changes: Vec<_> =
            changes.iter().map(|change| (shown(&change.before), shown(&change.after))).collect();
        let text = |text: &str| Some(text.to_owned());
        assert_eq!(same, 1);
        assert_eq!(changes, [(text("two"), None), (text("three"), text("THREE")), (None, text("four"))]);
        assert_eq!(changed_messages(None, None), (Vec::new(), 0));
    }

    #[test]
    fn an_id_is_one_argument_of_a_shell() {
        assert_eq!(option(&"t-1_a.b".into()), "--thread t-1_a.b");
        assert_eq!(option(&"a'; rm -rf /".into()), "--thread 'a'\\''; rm -rf /'");
        assert_eq!(option(&"--all".into()), "--thread=--all");
        assert_eq!(option(&"-a b".into()), "--thread='-a b'");
    }
}
