//! `threadkeep checkpoints`: lists, shows and compares the checkpoints of a thread.

mod show;

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::mem::discriminant;

use clap::{Args, Subcommand};
use serde_json::{Value as Json, json};
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::checkpoint::{ChannelEntry, CheckpointTuple, Stored, TaskWrites, Write};
use threadkeep::deletion::{Lineage, RUN_ID_KEY};
use threadkeep::foreign;
use threadkeep::id::{ChannelName, CheckpointId, Namespace, TaskId, ThreadId};
use threadkeep::metadata::Metadata;
use threadkeep::saver::{CheckpointSelector, ListQuery, Load, LocalKey};
use threadkeep::value::{ChannelValue, ListValue};

use super::diff;
use super::error::{OpsError, Result};
use super::lineage::draw;
use super::output::{Columns, NONE, Out, bytes, count, moment, one_line, short, tail};
use super::pages::Newest;
use super::target::{StoreArgs, Target};
use super::threads::{mode, namespace_name};

/// Inspect the checkpoints of a thread: list, show, diff.
#[derive(Debug, Subcommand)]
pub(crate) enum CheckpointsCommand {
    /// List the checkpoints of a thread, newest first, or draw its lineage as a tree.
    ///
    /// BY: the nodes whose writes created the checkpoint. NEXT: the nodes to run from it. MESSAGES: the messages in the
    /// state; `?` if the state cannot be read, see `verify`. SIZE: the bytes of its metadata, without the maps that notes
    /// carry along, of values that its parent does not have, and of its task rows.
    #[command(after_help = "\
Examples:
  threadkeep checkpoints list --thread my-thread --limit 20
  threadkeep checkpoints list --thread my-thread --limit 20 --before 01a1fcab-c4a2-7779-938b-69cfe3835bcf
  threadkeep checkpoints list --thread my-thread --graph
  threadkeep checkpoints list --thread my-thread --json | jq 'select(.pending_rows > 0)'

--json prints one document per line, one for each checkpoint.")]
    List(List),
    /// Show everything about one checkpoint except its values, which `state get` shows.
    #[command(
        after_help = "Example:\n  threadkeep checkpoints show 01a1fcab-c4a2-7779-938b-69cfe3835bcf --thread my-thread"
    )]
    Show {
        /// The checkpoint [default: the head].
        #[arg(value_name = "CHECKPOINT")]
        id: Option<CheckpointId>,
        #[command(flatten)]
        at: At,
    },
    /// Show which channels differ between two checkpoints, and which messages were added, removed or changed.
    #[command(after_help = "\
Example:
  threadkeep checkpoints diff 01a1fcab-c4a2-7779-938b-69cfe3835bcf 01a1fcab-ca8c-737d-9790-b2b0e86e067f \\
    --thread my-thread")]
    Diff {
        /// The older checkpoint.
        #[arg(value_name = "A")]
        a: CheckpointId,
        /// The newer checkpoint.
        #[arg(value_name = "B")]
        b: CheckpointId,
        #[command(flatten)]
        at: At,
    },
}

/// Which thread and namespace.
#[derive(Debug, Args)]
pub(crate) struct At {
    /// The thread.
    #[arg(long, value_name = "ID")]
    pub(crate) thread: String,
    /// The namespace [default: the thread's own graph].
    #[arg(long, value_name = "NS", default_value = "")]
    pub(crate) namespace: String,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

impl At {
    pub(crate) fn place(&self) -> (ThreadId, Namespace) {
        (self.thread.as_str().into(), self.namespace.as_str().into())
    }
}

/// The arguments of `checkpoints list`.
#[derive(Debug, Args)]
pub(crate) struct List {
    /// The thread.
    #[arg(long, value_name = "ID")]
    thread: String,
    /// Only this namespace; '' is the thread's own graph.
    #[arg(long, value_name = "NS")]
    namespace: Option<String>,
    /// Maximum checkpoints to list, newest first; checkpoints of several namespaces with one id are not separated.
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Only checkpoints older than this one.
    #[arg(long, value_name = "CHECKPOINT")]
    before: Option<CheckpointId>,
    /// Draw the lineage as a tree, oldest first. Reads the whole thread.
    #[arg(long, conflicts_with_all = ["limit", "before", "json"])]
    graph: bool,
    #[command(flatten)]
    store: StoreArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

impl CheckpointsCommand {
    pub(crate) fn store(&self) -> &StoreArgs {
        match self {
            Self::List(List { store, .. }) => store,
            Self::Show { at, .. } | Self::Diff { at, .. } => &at.store,
        }
    }

    pub(crate) async fn run(&self, target: &Target, out: &mut Out) -> Result<()> {
        match self {
            Self::List(asked) => list(target, out, asked).await,
            Self::Show { id, at } => show::run(target, out, *id, at).await,
            Self::Diff { a, b, at } => diff::run(target, out, (*a, *b), at).await,
        }
    }
}

/// The longest text of a line for people.
const TEXT_CHARS: usize = 1_000;

/// A line of the listing.
struct Line {
    by: Vec<String>,
    run: Option<String>,
    messages: Option<usize>,
    pending: usize,
    size: u64,
}

/// What newer checkpoints say about older ones, for a reader that goes from the newest to the oldest: the children of
/// each checkpoint, and the tasks that they applied.
#[derive(Default)]
struct Newer(HashMap<LocalKey, Children>);

#[derive(Default)]
struct Children {
    ids: Vec<CheckpointId>,
    applied: HashSet<TaskId>,
}

impl Newer {
    /// Reads the checkpoints from the newest one down to this one.
    async fn than(
        target: &Target,
        thread: &ThreadId,
        namespace: Option<&Namespace>,
        id: CheckpointId,
    ) -> Result<Self> {
        let query = ListQuery { namespace: namespace.cloned(), load: Load::None, ..ListQuery::new(thread) };
        let (mut newest, mut newer) = (Newest::new(&**target.saver(), query), Self::default());
        loop {
            let page = newest.next().await?;
            page.iter().take_while(|tuple| tuple.checkpoint.id > id).for_each(|tuple| newer.add(tuple));
            if page.last().is_none_or(|last| last.checkpoint.id <= id) {
                return Ok(newer);
            }
        }
    }

    fn add(&mut self, tuple: &CheckpointTuple) {
        if let Some(parent) = tuple.parent {
            let children = self.0.entry((tuple.namespace.clone(), parent)).or_default();
            children.ids.push(tuple.checkpoint.id);
            children.applied.extend(&tuple.checkpoint.applied);
        }
    }

    fn children(&self, tuple: &CheckpointTuple) -> Option<&Children> {
        self.0.get(&(tuple.namespace.clone(), tuple.checkpoint.id))
    }

    /// The rows under a checkpoint that no child applied.
    fn pending<'t>(&self, tuple: &'t CheckpointTuple) -> impl Iterator<Item = &'t TaskWrites> {
        let children = self.children(tuple);
        let is_pending =
            move |row: &&TaskWrites| children.is_none_or(|children| !children.applied.contains(&row.task));
        tuple.writes.iter().filter(is_pending)
    }
}

/// The lines of checkpoints that come newest first, all with their values. `newer` knows of those that came before, and
/// learns of these.
async fn lines(target: &Target, page: &[CheckpointTuple], newer: &mut Newer) -> Result<Vec<Line>> {
    for tuple in page {
        newer.add(tuple);
    }
    let mut known: HashMap<LocalKey, CheckpointTuple> =
        page.iter().map(|tuple| ((tuple.namespace.clone(), tuple.checkpoint.id), tuple.clone())).collect();
    let mut messages = Messages { target, values: HashMap::new() };
    let mut lines = Vec::with_capacity(page.len());
    for tuple in page.iter().rev() {
        let parent = match tuple.parent {
            Some(id) => {
                let place = (tuple.namespace.clone(), id);
                if !known.contains_key(&place)
                    && let Some(parent) = stored_at(target, &tuple.thread, &place.0, id).await?
                {
                    known.insert(place.clone(), parent);
                }
                known.get(&place)
            }
            None => None,
        };
        let rows = parent.map_or(&[][..], |parent| &parent.writes);
        let by = tuple.checkpoint.applied.iter().filter_map(|task| rows.iter().find(|row| row.task == *task));
        lines.push(Line {
            by: by.map(|row| row.node.to_string()).collect(),
            run: tuple.metadata.extra.get(RUN_ID_KEY).and_then(Json::as_str).map(str::to_owned),
            messages: messages.count(tuple, parent).await,
            pending: newer.pending(tuple).count(),
            size: size(tuple, parent),
        });
    }
    lines.reverse();
    Ok(lines)
}

async fn list(target: &Target, out: &mut Out, asked: &List) -> Result<()> {
    let thread = ThreadId::from(asked.thread.as_str());
    let namespace = asked.namespace.as_deref().map(Namespace::from);
    if let Some(namespace) = &namespace {
        target.checkpoint(&thread, namespace, None).await?;
    } else {
        target.newest(&thread).await?;
    }
    if asked.graph {
        return graph(target, out, &thread, namespace.as_ref()).await;
    }
    let mut newer = match asked.before {
        Some(before) => Newer::than(target, &thread, namespace.as_ref(), before).await?,
        None => Newer::default(),
    };
    let query = ListQuery { namespace, before: asked.before, limit: asked.limit, ..ListQuery::new(&thread) };
    let mut newest = Newest::new(&**target.saver(), query);
    let mut table = Columns::new(&[
        "CHECKPOINT",
        "TIME",
        "PARENT",
        "NAMESPACE",
        "SOURCE",
        "STEP>",
        "BY",
        "NEXT",
        "RUN",
        "MODE",
        "MESSAGES>",
        "PENDING>",
        "SIZE>",
    ]);
    let mut left = asked.limit.unwrap_or(usize::MAX);
    let (mut last, mut more) = (None, false);
    while left > 0 && !out.is_unread() {
        let mut page = newest.next().await?;
        let shown = shown(&page, left);
        more |= page.len() > shown;
        page.truncate(shown);
        left = left.saturating_sub(shown);
        let Some(oldest) = page.last() else { break };
        last = Some(oldest.checkpoint.id);
        for (tuple, line) in page.iter().zip(lines(target, &page, &mut newer).await?) {
            if asked.json {
                out.json(&as_json(tuple, &line))?;
                continue;
            }
            table.row([
                tuple.checkpoint.id.to_string(),
                moment(tuple.checkpoint.id),
                tuple.parent.map_or_else(|| NONE.to_owned(), tail),
                namespace_name(&tuple.namespace),
                shown_source(tuple),
                tuple.metadata.step.to_string(),
                list_or_dash(&line.by),
                list_or_dash(&tuple.checkpoint.next),
                line.run.map_or_else(|| NONE.to_owned(), |run| short(&run, 13)),
                marked_mode(tuple),
                line.messages.map_or_else(|| "?".to_owned(), count),
                count(line.pending),
                bytes(line.size),
            ]);
        }
    }
    if !asked.json {
        match last {
            None => out.line("No checkpoint is older than that one.")?,
            Some(last) => {
                out.table(&table)?;
                if more || (left == 0 && newest.has_more().await?) {
                    out.line(format!("There are more; continue with --before {last}"))?;
                }
            }
        }
    }
    Ok(())
}

/// How many checkpoints of a page are shown if `left` may be: also the others with the id of the last one, because
/// `--before` leaves out all that have it.
fn shown(page: &[CheckpointTuple], left: usize) -> usize {
    let (first, rest) = page.split_at(left.min(page.len()));
    let last = first.last().map(|last| last.checkpoint.id);
    first.len() + rest.iter().take_while(|tuple| Some(tuple.checkpoint.id) == last).count()
}

async fn graph(
    target: &Target,
    out: &mut Out,
    thread: &ThreadId,
    namespace: Option<&Namespace>,
) -> Result<()> {
    let image = target.image(thread).await?;
    let mut tuples: Vec<CheckpointTuple> = image.checkpoints.values().cloned().collect();
    tuples.sort_by_key(|tuple| Reverse(tuple.checkpoint.id));
    let labels = lines(target, &tuples, &mut Newer::default()).await?;
    let labels: HashMap<LocalKey, String> = tuples
        .iter()
        .zip(&labels)
        .map(|(tuple, line)| ((tuple.namespace.clone(), tuple.checkpoint.id), graph_label(tuple, line)))
        .collect();
    let lineage = Lineage::new(&image);
    let namespaces = image.checkpoints.keys().map(|(ns, _)| ns);
    let namespaces: BTreeSet<&Namespace> =
        namespaces.filter(|ns| namespace.is_none_or(|wanted| *ns == wanted)).collect();
    let many = namespaces.len() > 1;
    for namespace in namespaces {
        if many {
            out.line(format!("namespace {}", one_line(&namespace_name(namespace))))?;
        }
        for line in draw(&lineage, namespace, |place| labels.get(place).cloned().unwrap_or_default()) {
            out.line(line)?;
        }
    }
    Ok(())
}

fn as_json(tuple: &CheckpointTuple, line: &Line) -> Json {
    let next: Vec<&str> = tuple.checkpoint.next.iter().map(threadkeep::id::NodeName::as_str).collect();
    json!({
        "thread": tuple.thread.as_str(), "checkpoint": tuple.checkpoint.id.to_string(),
        "created_at": tuple.checkpoint.id.created_at(), "parent": tuple.parent.map(|id| id.to_string()),
        "namespace": tuple.namespace.as_str(), "source": source(tuple), "step": tuple.metadata.step,
        "by": line.by, "next": next, "run_id": line.run, "mode": mode(tuple),
        "delta_marker": tuple.metadata.delta_marker, "duration_only": tuple.metadata.is_duration_only(),
        "messages": line.messages, "pending_rows": line.pending, "size": line.size,
    })
}

fn graph_label(tuple: &CheckpointTuple, line: &Line) -> String {
    let mut parts =
        vec![format!("{} step {} {}", tuple.checkpoint.id, tuple.metadata.step, shown_source(tuple))];
    if !line.by.is_empty() {
        parts.push(format!("by {}", line.by.join("+")));
    }
    parts.push(match line.messages {
        Some(1) => "1 message".to_owned(),
        Some(messages) => format!("{messages} messages"),
        None => "? messages".to_owned(),
    });
    if line.pending > 0 {
        parts.push(format!("pending rows: {}", line.pending));
    }
    one_line(&parts.join(", "))
}

fn list_or_dash(names: &[impl ToString]) -> String {
    let names: Vec<String> = names.iter().map(ToString::to_string).collect();
    if names.is_empty() { NONE.to_owned() } else { names.join("+") }
}

pub(crate) fn source(tuple: &CheckpointTuple) -> String {
    format!("{:?}", tuple.metadata.source).to_lowercase()
}

/// What wrote the checkpoint, for people: a note is an update that changes nothing.
pub(crate) fn shown_source(tuple: &CheckpointTuple) -> String {
    if tuple.metadata.is_duration_only() { "duration note".to_owned() } else { source(tuple) }
}

/// The mode, and whether only the counters show it.
fn marked_mode(tuple: &CheckpointTuple) -> String {
    let marker = if tuple.metadata.is_delta() && !tuple.metadata.delta_marker { " (no marker)" } else { "" };
    format!("{}{marker}", mode(tuple))
}

/// What a checkpoint adds, in bytes of encoded values.
fn size(tuple: &CheckpointTuple, parent: Option<&CheckpointTuple>) -> u64 {
    let metadata = Json::Object(own_metadata(tuple).to_json()).to_string().len();
    let held = |name: &ChannelName, entry: &ChannelEntry| {
        let held = parent.and_then(|parent| parent.checkpoint.channels.get(name));
        held.is_some_and(|held| {
            held.version == entry.version && discriminant(&held.stored) == discriminant(&entry.stored)
        })
    };
    let own = tuple.checkpoint.channels.iter().filter(|(name, entry)| !held(name, entry));
    let own: usize = own.filter_map(|(_, entry)| entry.stored.value()).map(ChannelValue::encoded_len).sum();
    let rows: usize =
        tuple.writes.iter().flat_map(|row| &row.writes).map(|write| write.value.encoded_len()).sum();
    (metadata + own + rows) as u64
}

/// The metadata of a checkpoint without the large maps, which notes carry along.
fn own_metadata(tuple: &CheckpointTuple) -> Metadata {
    Metadata { extra: tuple.metadata.extra.split().0.into(), ..tuple.metadata.clone() }
}

/// Counts the messages of checkpoints, parents before their children: a state is derived from its parent's.
struct Messages<'a> {
    target: &'a Target,
    values: HashMap<LocalKey, Option<ChannelValue>>,
}

impl Messages<'_> {
    /// The number of messages; `None` if the state cannot be read.
    async fn count(&mut self, tuple: &CheckpointTuple, parent: Option<&CheckpointTuple>) -> Option<usize> {
        let channel = ChannelName::from(MESSAGES_CHANNEL);
        let value = match tuple.checkpoint.channels.get(&channel).map(|entry| &entry.stored) {
            None => return Some(0),
            Some(Stored::Value(value) | Stored::Snapshot(value)) => Some(value.clone()),
            // Only LangGraph knows its reducer.
            Some(Stored::Sentinel) if foreign::changed(tuple, parent, &channel) => None,
            Some(Stored::Sentinel) => self.replayed(tuple, parent, &channel).await,
            Some(Stored::Held) => None,
        };
        let count = value.as_ref().and_then(|value| value.as_list().map(ListValue::len));
        self.values.insert((tuple.namespace.clone(), tuple.checkpoint.id), value);
        count
    }

    async fn replayed(
        &self,
        tuple: &CheckpointTuple,
        parent: Option<&CheckpointTuple>,
        channel: &ChannelName,
    ) -> Option<ChannelValue> {
        let parent = parent?;
        let current = match parent.checkpoint.channels.get(channel).map(|entry| &entry.stored) {
            None => None,
            Some(Stored::Value(value) | Stored::Snapshot(value)) => Some(value.clone()),
            Some(_) => match self.values.get(&(parent.namespace.clone(), parent.checkpoint.id)) {
                Some(value) => Some(value.clone()?),
                None => Some(self.read(parent, channel).await?),
            },
        };
        let mut writes: Vec<&Write> = Vec::new();
        for task in &tuple.checkpoint.applied {
            let row = parent.writes.iter().find(|row| row.task == *task)?;
            writes.extend(row.writes.iter().filter(|write| write.channel == *channel));
        }
        self.target.table.behaviour(channel)?.apply(channel, current, &writes).ok()?
    }

    /// The value at a checkpoint, replayed from its nearest snapshot.
    async fn read(&self, tuple: &CheckpointTuple, channel: &ChannelName) -> Option<ChannelValue> {
        let accessor = self.target.accessor(&tuple.namespace);
        let load = Load::Only([channel.clone()].into());
        let state = accessor.get_loading(&tuple.thread, Some(tuple.checkpoint.id), load).await.ok()??;
        state.value(channel.as_str()).cloned()
    }
}

/// The checkpoint as it is stored, with every value, if it exists.
async fn stored_at(
    target: &Target,
    thread: &ThreadId,
    namespace: &Namespace,
    id: CheckpointId,
) -> Result<Option<CheckpointTuple>> {
    let at = CheckpointSelector {
        namespace: namespace.clone(),
        id: Some(id),
        load: Load::All,
        ..CheckpointSelector::head(thread)
    };
    Ok(target.saver().get(&at).await?)
}

/// The checkpoint as it is stored, which must exist.
pub(crate) async fn raw(
    target: &Target,
    thread: &ThreadId,
    namespace: &Namespace,
    id: CheckpointId,
) -> Result<CheckpointTuple> {
    let found = stored_at(target, thread, namespace, id).await?;
    found.ok_or_else(|| OpsError::NoCheckpoint {
        thread: thread.clone(),
        checkpoint: id,
        near: String::new(),
    })
}
