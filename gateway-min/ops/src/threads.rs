//! `threadkeep threads`: lists threads, and shows what they hold and how much space they take.

use std::io::{self, Write as _};

use clap::{Args, Subcommand};
use serde_json::{Value as Json, json};
use threadkeep::checkpoint::CheckpointTuple;
use threadkeep::id::{ChannelName, Namespace, ThreadId};
use threadkeep::saver::{ChainSummary, CheckpointSelector, Load, Summary};

use super::advice::option;
use super::error::Result;
use super::output::{Columns, Out, bytes, moment, number, one_line, or_dash, short, things, time};
use super::pass::Pass;
use super::progress::Progress;
use super::target::{StoreArgs, Target};
use threadkeep_records::ThreadRow;

/// The longest title in a table.
const TITLE_CHARS: usize = 40;
/// The characters of a full bar.
const BAR: u64 = 20;

/// Inspect threads: list, show, du.
#[derive(Debug, Subcommand)]
pub(crate) enum ThreadsCommand {
    /// List the threads of the store, by id.
    #[command(after_help = "\
Examples:
  threadkeep threads list
  threadkeep threads list --sqlite .svc/data/checkpoints.db --limit 20 --json

--json prints one document per line, one for each thread.")]
    List {
        #[command(flatten)]
        store: StoreArgs,
        /// Only threads after this id.
        #[arg(long, value_name = "ID")]
        after: Option<String>,
        /// Maximum threads to list.
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = at_least_one)]
        limit: usize,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show what one thread holds: namespaces, branches, rows and bytes.
    #[command(after_help = "Example:\n  threadkeep threads show my-thread")]
    Show {
        /// The thread.
        #[arg(value_name = "ID")]
        thread: String,
        #[command(flatten)]
        store: StoreArgs,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show how much space threads take, largest first.
    ///
    /// STORED: the bytes of the rows of its checkpoints and elements, compressed as they are. No value is read for that.
    #[command(after_help = "\
Examples:
  threadkeep threads du
  threadkeep threads du --thread my-thread --json

--json prints one document per line, one for each thread.")]
    Du(Du),
}

/// The arguments of `threads du`.
#[derive(Debug, Args)]
pub(crate) struct Du {
    #[command(flatten)]
    store: StoreArgs,
    /// Only these threads.
    #[arg(long, value_name = "ID", num_args = 1..)]
    thread: Vec<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The value of `--limit`.
pub(crate) fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("use a number of at least 1".to_owned()),
        Ok(limit) => Ok(limit),
    }
}

impl ThreadsCommand {
    pub(crate) fn store(&self) -> &StoreArgs {
        match self {
            Self::List { store, .. } | Self::Show { store, .. } | Self::Du(Du { store, .. }) => store,
        }
    }

    pub(crate) async fn run(&self, target: &Target, out: &mut Out) -> Result<()> {
        match self {
            Self::List { after, limit, json, .. } => list(target, out, after.as_deref(), *limit, *json).await,
            Self::Show { thread, json, .. } => show(target, out, &thread.as_str().into(), *json).await,
            Self::Du(asked) => du(target, out, asked).await,
        }
    }
}

async fn list(target: &Target, out: &mut Out, after: Option<&str>, limit: usize, json: bool) -> Result<()> {
    let after = after.map(ThreadId::from);
    let (mut threads, unlisted) = target.page_of_threads(after.as_ref(), limit.saturating_add(1)).await?;
    let more = threads.len() > limit;
    threads.truncate(limit);
    let mut pass = Pass::new(Progress::reading("threads read", 1), "read", threads.len(), true);
    let mut table = Columns::new(&["THREAD", "TITLE", "OWNER", "STATUS", "MODE", "STEP>", "LAST CHECKPOINT"]);
    for thread in &threads {
        if !pass.goes_on().await || out.is_unread() {
            break;
        }
        // Of a damaged thread its name is shown, and its record or its head if one of them can be read.
        let (record, damage) = match target.record(thread).await {
            Ok(record) => (record, None),
            Err(error) if error.is_of_one_thread() => (None, Some(error)),
            Err(error) => return Err(error),
        };
        let (head, damage) = match head(target, thread).await {
            Ok(head) => (head, damage),
            Err(error) => (None, damage.or(Some(error))),
        };
        pass.note(thread, damage.map_or(Ok(()), Err));
        let title = title(record.as_ref(), head.as_ref());
        let owner = record.as_ref().and_then(|record| record.user_id.clone());
        let status = record.as_ref().map(|record| record.status.as_str());
        let mode = head.as_ref().map(mode);
        let step = head.as_ref().map(|head| head.metadata.step);
        if json {
            let at = head.as_ref().map(|head| head.checkpoint.id);
            out.json(&json!({
                "thread": thread.as_str(), "title": title, "owner": owner, "status": status, "mode": mode, "step": step,
                "head": at.map(|id| id.to_string()), "last_checkpoint_at": at.map(|id| id.created_at()),
            }))?;
        } else {
            table.row([
                thread.to_string(),
                title.map_or_else(|| or_dash(None::<&str>), |title| short(&title, TITLE_CHARS)),
                or_dash(owner),
                or_dash(status),
                or_dash(mode),
                or_dash(step),
                or_dash(head.map(|head| moment(head.checkpoint.id))),
            ]);
        }
    }
    let ended = pass.end(unlisted);
    let next = threads.last().filter(|_| more).map(|last| {
        let after = option("--after", last.as_str());
        format!("There are more; continue with {}", one_line(&after))
    });
    if json {
        if let Some(next) = next {
            // stdout is for documents, and nobody may be reading stderr.
            let _ = writeln!(io::stderr(), "{next}");
        }
    } else {
        out.table_or(&table, "No threads.")?;
        if let Some(next) = next {
            out.line(next)?;
        }
    }
    ended
}

/// The head of the thread's own graph.
async fn head(target: &Target, thread: &ThreadId) -> Result<Option<CheckpointTuple>> {
    let title = Load::Only([ChannelName::from("title")].into());
    Ok(target.saver().get(&CheckpointSelector::head(thread).loading(title)).await?)
}

/// The title in the gateway's record, else the one in the state.
fn title(record: Option<&ThreadRow>, head: Option<&CheckpointTuple>) -> Option<String> {
    let noted = record.and_then(|record| record.display_name.clone());
    noted.or_else(|| {
        let title = head?.checkpoint.channels.get("title")?.stored.value()?.to_json().ok()?;
        title.as_str().map(str::to_owned)
    })
}

/// The mode in which a checkpoint was written.
pub(crate) fn mode(tuple: &CheckpointTuple) -> &'static str {
    if tuple.metadata.is_delta() { "delta" } else { "full" }
}

/// What a thread, which must exist, holds.
async fn contents(target: &Target, thread: &ThreadId) -> Result<Summary> {
    let summary = target.saver().summary(thread).await?;
    if summary.is_empty() {
        target.newest(thread).await?;
    }
    Ok(summary)
}

async fn show(target: &Target, out: &mut Out, thread: &ThreadId, json: bool) -> Result<()> {
    let summary = contents(target, thread).await?;
    let record = target.record(thread).await?;
    let title = title(record.as_ref(), head(target, thread).await?.as_ref());
    let stored = target.stored_bytes(thread).await?;
    if json {
        let namespaces: Vec<Json> = summary
            .iter()
            .map(|(namespace, chain)| {
                json!({
                    "namespace": namespace.as_str(), "checkpoints": chain.checkpoints, "delta": chain.delta,
                    "roots": chain.roots, "leaves": chain.leaves, "rows": chain.rows,
                    "pending_rows": chain.pending, "writes": chain.writes, "duration_only": chain.notes,
                    "head": chain.head.to_string(), "step": chain.step,
                    "first_at": chain.first.created_at(), "last_at": chain.head.created_at(),
                })
            })
            .collect();
        let record = record.map(|record| {
            json!({
                "owner": record.user_id, "assistant": record.assistant_id, "status": record.status.as_str(),
                "metadata": record.metadata,
                "created_at": record.created_at.to_rfc3339(), "updated_at": record.updated_at.to_rfc3339(),
            })
        });
        out.json(&json!({
            "thread": thread.as_str(), "title": title, "record": record, "namespaces": namespaces,
            "stored_bytes": stored,
        }))?;
        return Ok(());
    }
    out.line(format!("thread    {}", one_line(thread.as_str())))?;
    out.line(format!("title     {}", one_line(&or_dash(title))))?;
    if let Some(record) = record {
        out.line(format!("owner     {}", one_line(&or_dash(record.user_id))))?;
        out.line(format!("status    {}", record.status.as_str()))?;
        out.line(format!("created   {}", time(record.created_at)))?;
    }
    let total = |of: fn(&ChainSummary) -> u64, one: &str| {
        let count = summary.values().map(of).sum::<u64>();
        things(usize::try_from(count).unwrap_or(usize::MAX), one)
    };
    out.line(format!(
        "holds     {}, {}, {}{}",
        total(|chain| chain.checkpoints, "checkpoint"),
        total(|chain| chain.rows, "task row"),
        total(|chain| chain.writes, "write"),
        stored.map_or_else(String::new, |stored| format!(": {} stored", bytes(stored))),
    ))?;
    out.line("")?;
    let mut table = Columns::new(&[
        "NAMESPACE",
        "CHECKPOINTS>",
        "DELTA>",
        "ROOTS>",
        "LEAVES>",
        "PENDING ROWS>",
        "DURATION NOTES>",
        "STEP>",
        "HEAD",
        "LAST CHECKPOINT",
    ]);
    for (namespace, chain) in &summary {
        table.row([
            namespace_name(namespace),
            number(chain.checkpoints),
            number(chain.delta),
            number(chain.roots),
            number(chain.leaves),
            number(chain.pending),
            number(chain.notes),
            chain.step.to_string(),
            chain.head.to_string(),
            moment(chain.head),
        ]);
    }
    out.table(&table)?;
    Ok(())
}

/// A namespace's name for a table.
pub(crate) fn namespace_name(namespace: &Namespace) -> String {
    if namespace.as_str().is_empty() { "(root)".to_owned() } else { namespace.to_string() }
}

struct Usage {
    thread: ThreadId,
    checkpoints: u64,
    /// The bytes of its rows, if the driver knows them.
    stored: Option<u64>,
}

async fn usage(target: &Target, thread: &ThreadId) -> Result<Usage> {
    let checkpoints = contents(target, thread).await?.values().map(|chain| chain.checkpoints).sum();
    Ok(Usage { thread: thread.clone(), checkpoints, stored: target.stored_bytes(thread).await? })
}

async fn du(target: &Target, out: &mut Out, asked: &Du) -> Result<()> {
    let listed = asked.thread.is_empty();
    let (threads, unlisted) = if listed {
        target.listed_threads().await?
    } else {
        let mut named: Vec<ThreadId> = Vec::with_capacity(asked.thread.len());
        for thread in asked.thread.iter().map(|id| ThreadId::from(id.as_str())) {
            // One that is named twice takes its space once.
            if !named.contains(&thread) {
                named.push(thread);
            }
        }
        (named, None)
    };
    let mut usages = Vec::with_capacity(threads.len());
    let progress = Progress::reading("threads read", threads.len() as u64);
    let mut pass = Pass::new(progress, "read", threads.len(), listed).giving_way(target);
    for thread in threads {
        if !pass.goes_on().await {
            break;
        }
        let used = usage(target, &thread).await;
        usages.extend(pass.note(&thread, used));
    }
    let stopped = pass.end(unlisted);
    if usages.is_empty() && stopped.is_err() {
        return stopped;
    }
    let weight = |usage: &Usage| usage.stored.unwrap_or(usage.checkpoints);
    usages.sort_by(|a, b| weight(b).cmp(&weight(a)).then_with(|| a.thread.cmp(&b.thread)));
    if asked.json {
        for usage in &usages {
            out.json(&json!({
                "thread": usage.thread.as_str(), "checkpoints": usage.checkpoints, "stored_bytes": usage.stored,
            }))?;
        }
        return stopped;
    }
    let total: u64 = usages.iter().map(weight).sum();
    let mut table = Columns::new(&["THREAD", "CHECKPOINTS>", "STORED>", "%>", ""]);
    for usage in &usages {
        let share = (weight(usage) * 1_000).checked_div(total).unwrap_or_default();
        let bar = usize::try_from((weight(usage) * BAR).div_ceil(total.max(1))).unwrap_or_default();
        table.row([
            usage.thread.to_string(),
            number(usage.checkpoints),
            or_dash(usage.stored.map(bytes)),
            format!("{}.{}", share / 10, share % 10),
            "█".repeat(bar),
        ]);
    }
    table.row([
        format!("total of {}", things(usages.len(), "thread")),
        number(usages.iter().map(|usage| usage.checkpoints).sum()),
        or_dash(usages.iter().map(|usage| usage.stored).sum::<Option<u64>>().map(bytes)),
        String::new(),
        String::new(),
    ]);
    out.table(&table)?;
    if let Some(sqlite) = target.sqlite() {
        let size = sqlite.file_size().await?;
        out.line(format!(
            "The database file has {}, of which {} are free.",
            bytes(size.bytes),
            bytes(size.free)
        ))?;
    }
    stopped
}
