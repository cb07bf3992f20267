//! `threadkeep checkpoints`: lists, shows and compares the checkpoints of a thread.

use std::collections::{BTreeSet, HashMap};

use clap::{Args, Subcommand};
use serde_json::{Value as Json, json};
use threadkeep::channel::{ChannelTable, MESSAGES_CHANNEL};
use threadkeep::checkpoint::{CheckpointTuple, Stored, Write};
use threadkeep::deletion::{Lineage, RUN_ID_KEY};
use threadkeep::id::{ChannelName, CheckpointId, Namespace, ThreadId};
use threadkeep::saver::{CheckpointSelector, Load, LocalKey};
use threadkeep::value::ChannelValue;

use super::diff;
use super::error::{OpsError, Result};
use super::lineage::draw;
use super::output::{Columns, NONE, Out, bytes, count, moment, one_line, or_dash, short, tail};
use super::target::{StoreArgs, Target};
use super::threads::{mode, namespace_name};

/// Inspect the checkpoints of a thread: list, show, diff.
#[derive(Debug, Subcommand)]
pub(crate) enum CheckpointsCommand {
    /// List the checkpoints of a thread, newest first, or draw its lineage as a tree.
    ///
    /// BY: the nodes whose writes created the checkpoint. NEXT: the nodes to run from it. MESSAGES: the messages in the
    /// state; `?` if the state cannot be read, see `verify`. SIZE: what the checkpoint adds: metadata, values that its
    /// parent does not have, and its task rows.
    #[command(after_help = "\
Examples:
  threadkeep checkpoints list --thread my-thread --limit 20
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
    /// Maximum checkpoints to list, newest first.
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Draw the lineage as a tree, oldest first.
    #[arg(long, conflicts_with_all = ["limit", "json"])]
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
            Self::Show { id, at } => show(target, out, *id, at).await,
            Self::Diff { a, b, at } => diff::run(target, out, (*a, *b), at).await,
        }
    }
}

/// A line of the listing.
struct Line {
    by: Vec<String>,
    run: Option<String>,
    messages: Option<usize>,
    pending: usize,
    size: u64,
}

impl Line {
    fn of(lineage: &Lineage<'_>, tuple: &CheckpointTuple, counts: &HashMap<LocalKey, Option<usize>>) -> Self {
        let place = (tuple.namespace.clone(), tuple.checkpoint.id);
        let parent = lineage.parent(tuple);
        let rows = parent.map_or(&[][..], |parent| &parent.writes);
        let by = tuple.checkpoint.applied.iter().filter_map(|task| rows.iter().find(|row| row.task == *task));
        Self {
            by: by.map(|row| row.node.to_string()).collect(),
            run: tuple.metadata.extra.get(RUN_ID_KEY).and_then(Json::as_str).map(str::to_owned),
            messages: counts.get(&place).copied().flatten(),
            pending: lineage.get(&place).map_or(0, |tuple| lineage.pending(tuple).count()),
            size: size(tuple, parent),
        }
    }
}

async fn list(target: &Target, out: &mut Out, asked: &List) -> Result<()> {
    let thread = ThreadId::from(asked.thread.as_str());
    let image = target.image(&thread).await?;
    let lineage = Lineage::new(&image);
    let counts = message_counts(&lineage, &target.table);
    let namespace = asked.namespace.as_deref().map(Namespace::from);
    if let Some(namespace) =
        namespace.as_ref().filter(|wanted| !image.checkpoints.keys().any(|(ns, _)| ns == *wanted))
    {
        target.checkpoint(&thread, namespace, None).await?;
    }
    let wanted = |(ns, _): &&LocalKey| namespace.as_ref().is_none_or(|wanted| ns == wanted);
    if asked.graph {
        let namespaces: BTreeSet<&Namespace> =
            image.checkpoints.keys().filter(wanted).map(|(ns, _)| ns).collect();
        let many = namespaces.len() > 1;
        for namespace in namespaces {
            if many {
                out.line(format!("namespace {}", one_line(&namespace_name(namespace))))?;
            }
            let label = |place: &LocalKey| match lineage.get(place) {
                Some(tuple) => graph_label(tuple, &Line::of(&lineage, tuple, &counts)),
                None => String::new(),
            };
            for line in draw(&lineage, namespace, label) {
                out.line(line)?;
            }
        }
        return Ok(());
    }
    let mut places: Vec<&LocalKey> = image.checkpoints.keys().filter(wanted).collect();
    places.sort_by(|(a_ns, a), (b_ns, b)| b.cmp(a).then_with(|| a_ns.cmp(b_ns)));
    places.truncate(asked.limit.unwrap_or(usize::MAX));
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
    for place in places {
        let tuple = &image.checkpoints[place];
        let line = Line::of(&lineage, tuple, &counts);
        if asked.json {
            out.json(&as_json(tuple, &line))?;
            continue;
        }
        table.row([
            place.1.to_string(),
            moment(place.1),
            tuple.parent.map_or_else(|| NONE.to_owned(), tail),
            namespace_name(&place.0),
            source(tuple),
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
    if !asked.json {
        out.table(&table)?;
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
    let mut parts = vec![format!("{} step {} {}", tuple.checkpoint.id, tuple.metadata.step, source(tuple))];
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
    if tuple.metadata.is_duration_only() {
        parts.push("duration note".to_owned());
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

/// The mode, and how it is known.
fn marked_mode(tuple: &CheckpointTuple) -> String {
    let note = if tuple.metadata.is_duration_only() { " note" } else { "" };
    let marker = if tuple.metadata.is_delta() && !tuple.metadata.delta_marker { " unmarked" } else { "" };
    format!("{}{marker}{note}", mode(tuple))
}

/// What a checkpoint adds, in bytes of encoded values.
fn size(tuple: &CheckpointTuple, parent: Option<&CheckpointTuple>) -> u64 {
    let metadata = Json::Object(tuple.metadata.to_json()).to_string().len();
    let held = |name: &ChannelName| parent.and_then(|parent| parent.checkpoint.channels.get(name));
    let own = tuple.checkpoint.channels.iter().filter(|(name, entry)| held(name) != Some(*entry));
    let own: usize = own.filter_map(|(_, entry)| entry.stored.value()).map(ChannelValue::encoded_len).sum();
    let rows: usize =
        tuple.writes.iter().flat_map(|row| &row.writes).map(|write| write.value.encoded_len()).sum();
    (metadata + own + rows) as u64
}

/// The number of messages at every checkpoint; `None` where the state cannot be read. Each state is derived from its
/// parent's.
fn message_counts(lineage: &Lineage<'_>, table: &ChannelTable) -> HashMap<LocalKey, Option<usize>> {
    let channel = ChannelName::from(MESSAGES_CHANNEL);
    let mut values: HashMap<LocalKey, Option<ChannelValue>> = HashMap::new();
    for (place, tuple) in &lineage.image().checkpoints {
        let entry = tuple.checkpoint.channels.get(&channel);
        let value = match entry.map(|entry| &entry.stored) {
            Some(Stored::Value(value) | Stored::Snapshot(value)) => Some(value.clone()),
            Some(Stored::Sentinel) => lineage.parent(tuple).and_then(|parent| {
                let at = (parent.namespace.clone(), parent.checkpoint.id);
                let current = match parent.checkpoint.channels.get(&channel) {
                    Some(_) => Some(values.get(&at)?.clone()?),
                    None => None,
                };
                let mut writes: Vec<&Write> = Vec::new();
                for task in &tuple.checkpoint.applied {
                    let row = parent.writes.iter().find(|row| row.task == *task)?;
                    writes.extend(row.writes.iter().filter(|write| write.channel == channel));
                }
                table.behaviour(&channel)?.apply(&channel, current, &writes).ok()?
            }),
            Some(Stored::Held) | None => None,
        };
        values.insert(place.clone(), value);
    }
    let counted = |(place, value): (LocalKey, Option<ChannelValue>)| {
        let written =
            lineage.get(&place).is_some_and(|tuple| tuple.checkpoint.channels.contains_key(&channel));
        let count = match value {
            Some(ChannelValue::List(list)) => Some(list.len()),
            Some(ChannelValue::Plain(_)) => None,
            None if written => None,
            None => Some(0),
        };
        (place, count)
    };
    values.into_iter().map(counted).collect()
}

async fn show(target: &Target, out: &mut Out, id: Option<CheckpointId>, at: &At) -> Result<()> {
    let (thread, namespace) = at.place();
    let id = target.checkpoint(&thread, &namespace, id).await?;
    let image = target.image(&thread).await?;
    let lineage = Lineage::new(&image);
    let place = (namespace.clone(), id);
    let Some(tuple) = lineage.get(&place) else {
        // It was deleted between the two reads.
        return Err(OpsError::NoCheckpoint { thread, checkpoint: id, near: String::new() });
    };
    let children: Vec<String> =
        lineage.children(&place).iter().map(|child| child.checkpoint.id.to_string()).collect();
    let applied: BTreeSet<_> =
        lineage.children(&place).iter().flat_map(|child| &child.checkpoint.applied).collect();
    let line = Line::of(&lineage, tuple, &message_counts(&lineage, &target.table));
    if at.json {
        let mut document = as_json(tuple, &line);
        let channels = tuple.checkpoint.channels.iter().map(|(name, entry)| {
            let value = entry.stored.value();
            let about = json!({
                "version": entry.version.to_string(), "stored": stored(&entry.stored),
                "bytes": value.map(ChannelValue::encoded_len), "elements": value.and_then(elements),
            });
            (name.to_string(), about)
        });
        let rows = tuple.writes.iter().map(|row| {
            let writes = row.writes.iter().map(|write| {
                json!({"channel": write.channel.as_str(), "overwrite": write.overwrite, "bytes": write.value.encoded_len()})
            });
            json!({
                "task": row.task.to_string(), "node": row.node.as_str(), "index": row.index,
                "pending": !applied.contains(&row.task), "writes": writes.collect::<Vec<_>>(),
            })
        });
        let more = json!({
            "children": children, "metadata": tuple.metadata.to_json(),
            "applied": tuple.checkpoint.applied.iter().map(ToString::to_string).collect::<Vec<_>>(),
            "channels": Json::Object(channels.collect()), "rows": rows.collect::<Vec<_>>(),
        });
        if let (Some(document), Json::Object(more)) = (document.as_object_mut(), more) {
            document.extend(more);
        }
        out.json(&document)?;
        return Ok(());
    }
    for (name, text) in [
        ("checkpoint", id.to_string()),
        ("time", moment(id)),
        ("namespace", namespace_name(&namespace)),
        ("parent", or_dash(tuple.parent)),
        ("children", list_or_dash(&children).replace('+', ", ")),
        ("source", source(tuple)),
        ("step", tuple.metadata.step.to_string()),
        ("made by", list_or_dash(&line.by)),
        ("next", list_or_dash(&tuple.checkpoint.next)),
        ("mode", marked_mode(tuple)),
        ("messages", line.messages.map_or_else(|| "?".to_owned(), count)),
        ("metadata", Json::Object(tuple.metadata.to_json()).to_string()),
    ] {
        out.line(format!("{name:<11} {}", one_line(&text)))?;
    }
    out.line("")?;
    let mut table = Columns::new(&["CHANNEL", "STORED", "ELEMENTS>", "BYTES>", "VERSION"]);
    for (name, entry) in &tuple.checkpoint.channels {
        let value = entry.stored.value();
        table.row([
            name.to_string(),
            stored(&entry.stored).to_owned(),
            or_dash(value.and_then(elements).map(count)),
            or_dash(value.map(|value| bytes(value.encoded_len() as u64))),
            format!("{:?}", entry.version),
        ]);
    }
    out.table(&table)?;
    if !tuple.writes.is_empty() {
        out.line("")?;
        let mut table = Columns::new(&["TASK RUN FROM IT", "NODE", "INDEX>", "WRITES", "BYTES>", "APPLIED"]);
        for row in &tuple.writes {
            let writes: Vec<&ChannelName> = row.writes.iter().map(|write| &write.channel).collect();
            let size: usize = row.writes.iter().map(|write| write.value.encoded_len()).sum();
            table.row([
                row.task.to_string(),
                row.node.to_string(),
                row.index.to_string(),
                list_or_dash(&writes),
                bytes(size as u64),
                if applied.contains(&row.task) { "yes" } else { "no, pending" }.to_owned(),
            ]);
        }
        out.table(&table)?;
    }
    Ok(())
}

fn stored(stored: &Stored) -> &'static str {
    match stored {
        Stored::Value(_) => "value",
        Stored::Snapshot(_) => "snapshot",
        Stored::Sentinel => "sentinel",
        Stored::Held => "held",
    }
}

fn elements(value: &ChannelValue) -> Option<usize> {
    value.as_list().map(threadkeep::value::ListValue::len)
}

/// The raw checkpoint, with every value.
pub(crate) async fn raw(
    target: &Target,
    thread: &ThreadId,
    namespace: &Namespace,
    id: CheckpointId,
) -> Result<CheckpointTuple> {
    let at = CheckpointSelector {
        namespace: namespace.clone(),
        id: Some(id),
        load: Load::All,
        ..CheckpointSelector::head(thread)
    };
    let found = target.saver().get(&at).await?;
    found.ok_or_else(|| OpsError::NoCheckpoint {
        thread: thread.clone(),
        checkpoint: id,
        near: String::new(),
    })
}
