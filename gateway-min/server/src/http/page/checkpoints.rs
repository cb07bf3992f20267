//! The checkpoints of a thread: the tree, the state at one, the difference of two.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::Arc;

use axum::extract::{Query, State};
use axum::response::Html;
use serde_json::{Map, Value};
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::id::{CheckpointId, ThreadId};
use threadkeep::saver::{CheckpointSelector, Load};
use threadkeep_agent::model::message::{kind, text, tool_calls};
use threadkeep_agent::serialize;
use threadkeep_page::{
    Change, Channel, CheckpointLine, Checkpoints, Difference, Excerpt, State as StateView, ThreadHead,
};

use super::super::error::{ApiError, OrApiError as _};
use super::super::extract::{ApiPath, ThreadPath};
use super::super::fields::{Fields, FromFields};
use super::super::state::checkpoint_absent;
use super::family::{Family, READ, walked};
use super::message::checkpoint;
use super::session::Viewer;
use super::threads::head;
use super::{Page, Parameters, offset};
use crate::app::App;

const FAILED: &str = "Failed to read checkpoints";
/// Checkpoints on a page.
const PAGE: usize = 250;

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
    let offset = usize::try_from(offset(&parameters)).unwrap_or(usize::MAX);
    let shown = offset..offset.saturating_add(PAGE);
    let (walk, nested) =
        walked(&**accessor.saver(), &thread_id, shown, READ).await.or_engine(&thread_id, FAILED)?;
    let view = Checkpoints {
        thread,
        nested,
        lines: walk.lines(),
        offset: offset.min(walk.nodes.len()),
        nodes: walk.nodes,
        page: PAGE,
    };
    Ok(Html(view.page(&session)))
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

    use super::*;

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
