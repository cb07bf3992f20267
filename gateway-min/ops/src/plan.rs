//! Shared by the deleting commands: their arguments, and what they do with a policy.

mod apply;
mod show;

use std::collections::BTreeSet;

use clap::Args;
use serde_json::Value as Json;
use threadkeep::deletion::{DeletionPlan, Reason};
use threadkeep::id::{CheckpointId, ThreadId};
use threadkeep::saver::{ListQuery, Load, ThreadImage};

use super::advice::option;
use super::error::{OpsError, Result};
use super::output::{Out, count, one_line, things};
use super::pages::{Newest, through};
use super::target::{StoreArgs, Target, Threads};

/// The maximum number of threads that an error names.
const NAMED: usize = 10;

/// How to show a plan.
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) threads: Threads,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Only count checkpoints by reason, over all threads.
    #[arg(long)]
    summary: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// How to apply a plan.
#[derive(Debug, Args)]
pub(crate) struct ApplyArgs {
    #[command(flatten)]
    pub(crate) threads: Threads,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Do not ask for confirmation.
    #[arg(long)]
    yes: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Plans a pass over a thread.
pub(crate) type Planner<'a> = dyn Fn(&ThreadImage) -> threadkeep::Result<DeletionPlan> + 'a;

/// What a policy removes.
pub(crate) struct Policy<'a> {
    pub(crate) plan: &'a Planner<'a>,
    /// The checkpoints that were named to be kept.
    pub(crate) protect: &'a BTreeSet<CheckpointId>,
    /// Whether to apply it again until a pass finds nothing.
    pub(crate) repeat: bool,
}

/// What a command does with a policy: show what it would remove, or remove it.
pub(crate) enum Asked<'a> {
    Plan(&'a PlanArgs),
    Apply(&'a ApplyArgs),
}

impl<'a> Asked<'a> {
    pub(crate) fn store(&self) -> &'a StoreArgs {
        match self {
            Self::Plan(plan) => &plan.store,
            Self::Apply(apply) => &apply.store,
        }
    }

    pub(crate) async fn run(self, target: &Target, out: &mut Out, policy: Policy<'_>) -> Result<()> {
        let (Self::Plan(PlanArgs { threads, .. }) | Self::Apply(ApplyArgs { threads, .. })) = &self;
        check_protected(target, threads, policy.protect).await?;
        match self {
            Self::Plan(asked) => show::run(target, out, asked, policy.plan).await,
            Self::Apply(asked) => apply::run(target, out, asked, policy.repeat, policy.plan).await,
        }
    }
}

/// Refuses protected ids that are found in no thread, because a typo would protect nothing. A thread that cannot be
/// read may have them, but loses nothing without them, and a typo may mean a checkpoint of another one.
async fn check_protected(target: &Target, threads: &Threads, protect: &BTreeSet<CheckpointId>) -> Result<()> {
    let mut missing = protect.clone();
    if missing.is_empty() {
        return Ok(());
    }
    let (selected, unlisted) = target.threads(threads).await?;
    let mut unread = Vec::new();
    for thread in &selected {
        match find(target, thread, &mut missing).await {
            Err(error) if error.is_of_one_thread() => unread.push(one_line(thread.as_str())),
            found => found?,
        }
        if missing.is_empty() {
            return Ok(());
        }
    }
    let these = if missing.len() == 1 { "this checkpoint" } else { "these checkpoints" };
    let ids: Vec<String> = missing.iter().map(ToString::to_string).collect();
    let ids = ids.join(" ");
    if unread.is_empty() && unlisted.is_none() {
        let thread = match &threads.named()[..] {
            [thread] => option("--thread", thread.as_str()),
            _ => "--thread ID".to_owned(),
        };
        let list = target.again.command(&format!("checkpoints list {thread}"));
        return Err(OpsError::Unsupported(format!(
            "--protect {ids}: no selected thread has {these}; list their ids with {list}"
        )));
    }
    let mut damage = Vec::new();
    if !unread.is_empty() {
        let (those, more) = unread.split_at(unread.len().min(NAMED));
        let more = if more.is_empty() { String::new() } else { format!(" and {} more", count(more.len())) };
        let unread = things(unread.len(), "selected thread");
        damage.push(format!("{unread} cannot be read: {}{more}", those.join(", ")));
    }
    damage.extend(unlisted.map(|unlisted| format!("not every thread can be listed: {unlisted}")));
    Err(OpsError::Unsupported(format!(
        "--protect {ids}: no selected thread that can be read has {these}; {}; nothing goes of a thread that cannot be read, \
         so leave out its ids, and correct the others",
        damage.join("; ")
    )))
}

/// Removes from the missing ids those that the thread has, also if it cannot be read as a whole.
async fn find(target: &Target, thread: &ThreadId, missing: &mut BTreeSet<CheckpointId>) -> Result<()> {
    let read = find_in_pages(target, thread, missing).await;
    if read.as_ref().is_err_and(OpsError::is_of_one_thread) {
        for id in missing.clone() {
            if matches!(has(target, thread, id).await, Ok(true)) {
                missing.remove(&id);
            }
        }
    }
    read
}

async fn find_in_pages(
    target: &Target,
    thread: &ThreadId,
    missing: &mut BTreeSet<CheckpointId>,
) -> Result<()> {
    let query = ListQuery { namespace: None, load: Load::None, ..ListQuery::new(thread) };
    let mut newest = Newest::new(&**target.saver(), query);
    while !missing.is_empty() {
        let page = newest.next().await?;
        if page.is_empty() {
            break;
        }
        for tuple in &page {
            missing.remove(&tuple.checkpoint.id);
        }
    }
    Ok(())
}

/// Whether the thread has this checkpoint, of which only that one is read.
async fn has(target: &Target, thread: &ThreadId, id: CheckpointId) -> Result<bool> {
    let query = ListQuery {
        namespace: None,
        before: through(id),
        limit: Some(1),
        load: Load::None,
        ..ListQuery::new(thread)
    };
    Ok(target.saver().list(&query).await?.first().is_some_and(|tuple| tuple.checkpoint.id == id))
}

async fn planned(
    target: &Target,
    thread: &ThreadId,
    plan: &Planner<'_>,
) -> Result<(ThreadImage, DeletionPlan)> {
    let image = target.image(thread).await?;
    let planned = plan(&image)?;
    Ok((image, planned))
}

/// The head of each namespace that is kept.
fn heads(plan: &DeletionPlan) -> Json {
    let heads = plan.verdicts.iter().filter(|(_, reason)| *reason == Reason::Head);
    heads.map(|(place, _)| (place.0.as_str().to_owned(), Json::from(place.1.to_string()))).collect()
}
