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
use super::output::Out;
use super::pages::Newest;
use super::target::{StoreArgs, Target, Threads};

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

/// Refuses protected ids that no thread has, because a typo would protect nothing. If a thread cannot be read, it may have
/// them.
async fn check_protected(target: &Target, threads: &Threads, protect: &BTreeSet<CheckpointId>) -> Result<()> {
    let mut missing = protect.clone();
    if missing.is_empty() {
        return Ok(());
    }
    let (selected, unlisted) = target.threads(threads).await?;
    let mut all_read = unlisted.is_none();
    for thread in selected {
        let query = ListQuery { namespace: None, load: Load::None, ..ListQuery::new(&thread) };
        let mut newest = Newest::new(&**target.saver(), query);
        loop {
            let page = match newest.next().await.map_err(OpsError::from) {
                // What is in a damaged thread stays in any case, and may be what is missing.
                Err(error) if error.is_of_one_thread() => {
                    all_read = false;
                    break;
                }
                page => page?,
            };
            if page.is_empty() || missing.is_empty() {
                break;
            }
            for tuple in &page {
                missing.remove(&tuple.checkpoint.id);
            }
        }
    }
    let Some(id) = missing.first().filter(|_| all_read) else { return Ok(()) };
    let thread = match &threads.named()[..] {
        [thread] => option("--thread", thread.as_str()),
        _ => "--thread ID".to_owned(),
    };
    let list = target.again.command(&format!("checkpoints list {thread}"));
    Err(OpsError::Unsupported(format!(
        "--protect {id}: no selected thread has this checkpoint; list their ids with {list}"
    )))
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
