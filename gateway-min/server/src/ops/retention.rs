//! `threadkeep retention`: the retention policy (service reference, "Retention policy"), when an operator asks for it.

use clap::{Args, Subcommand};
use threadkeep::deletion::{RetentionPolicy, plan_retention};
use threadkeep::id::CheckpointId;
use threadkeep::saver::ThreadImage;

use super::error::Result;
use super::output::Out;
use super::plan::{ApplyArgs, PlanArgs, apply, check_protected, show};
use super::target::{StoreArgs, Target, Threads};

/// Remove leaves that no run needs: duration notes, ends of side branches.
#[derive(Debug, Subcommand)]
pub(crate) enum RetentionCommand {
    /// Show what a pass would remove, and the reason for every checkpoint. Changes nothing.
    #[command(after_help = "\
Examples:
  threadkeep retention plan --thread my-thread
  threadkeep retention plan --all --leaf-sibling-branches --summary

--json prints one document a line, one for each thread.")]
    Plan {
        #[command(flatten)]
        plan: PlanArgs,
        #[command(flatten)]
        policy: Policy,
    },
    /// Carry out a pass over each thread, in one atomic change.
    ///
    /// A pass looks at leaves only; what becomes a leaf by it is for the next one.
    #[command(after_help = "\
Examples:
  threadkeep retention apply --thread my-thread
  threadkeep retention apply --all --leaf-sibling-branches --until-done --yes

Afterwards `threadkeep vacuum` gives the freed space back to the disk.")]
    Apply {
        #[command(flatten)]
        apply: ApplyArgs,
        #[command(flatten)]
        policy: Policy,
        /// Pass after pass until one finds nothing.
        #[arg(long)]
        until_done: bool,
    },
}

/// The fields of the policy.
#[derive(Debug, Args)]
pub(crate) struct Policy {
    /// Keep duration-only leaves, which go otherwise.
    #[arg(long)]
    keep_trailing_duration_leaves: bool,
    /// The ends of side branches go too.
    #[arg(long)]
    leaf_sibling_branches: bool,
    /// Checkpoints that stay in any case.
    #[arg(long, value_name = "ID", num_args = 1..)]
    protect: Vec<CheckpointId>,
    /// A checkpoint with pending writes may go too. They are lost with it.
    #[arg(long)]
    no_pending_write_guard: bool,
    /// At most so many go in one pass.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    max_delete_per_run: Option<i64>,
    /// Duration notes that something was made from go too; what was made from them moves to their parents.
    #[arg(long)]
    graft_duration_links: bool,
}

impl Policy {
    fn policy(&self) -> RetentionPolicy {
        RetentionPolicy {
            prune_trailing_duration_leaves: !self.keep_trailing_duration_leaves,
            prune_leaf_sibling_branches: self.leaf_sibling_branches,
            protect_checkpoint_ids: self.protect.iter().copied().collect(),
            strict_pending_write_guard: !self.no_pending_write_guard,
            max_delete_per_run: self.max_delete_per_run,
            graft_duration_links: self.graft_duration_links,
        }
    }
}

impl RetentionCommand {
    pub(crate) fn store(&self) -> &StoreArgs {
        match self {
            Self::Plan { plan, .. } => &plan.store,
            Self::Apply { apply, .. } => &apply.store,
        }
    }

    fn threads(&self) -> &Threads {
        match self {
            Self::Plan { plan, .. } => &plan.threads,
            Self::Apply { apply, .. } => &apply.threads,
        }
    }

    pub(crate) async fn run(&self, target: &Target, out: &mut Out) -> Result<()> {
        let (Self::Plan { policy, .. } | Self::Apply { policy, .. }) = self;
        let policy = policy.policy();
        check_protected(target, self.threads(), &policy.protect_checkpoint_ids).await?;
        let planner = |image: &ThreadImage| plan_retention(image, &policy, &target.table);
        match self {
            Self::Plan { plan, .. } => show(target, out, plan, &planner).await,
            Self::Apply { apply: asked, until_done, .. } => {
                apply(target, out, asked, *until_done, &planner).await
            }
        }
    }
}
