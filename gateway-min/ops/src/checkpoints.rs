//! `threadkeep checkpoints`: lists, shows and compares the checkpoints of a thread.

mod line;
mod show;

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};

use clap::{Args, Subcommand};
use serde_json::{Value as Json, json};
use threadkeep::checkpoint::CheckpointTuple;
use threadkeep::deletion::Lineage;
use threadkeep::id::{CheckpointId, Namespace, ThreadId};
use threadkeep::saver::{ListQuery, LocalKey};

use self::line::{Line, Newer, lines, stored_at};
use super::diff;
use super::error::{OpsError, Result};
use super::lineage::draw;
use super::output::{Columns, NONE, Out, bytes, count, moment, one_line, short, tail};
use super::pages::Newest;
use super::target::{StoreArgs, Target};
use super::threads::{at_least_one, mode, namespace_name};

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
    #[arg(long, value_name = "N", value_parser = at_least_one)]
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
