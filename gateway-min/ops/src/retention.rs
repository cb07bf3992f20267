//! `threadkeep retention`: applies the retention policy (service reference, "Retention policy") on request.

use clap::{Args, Subcommand};
use threadkeep::deletion::{RetentionPolicy, plan_retention};
use threadkeep::id::CheckpointId;
use threadkeep::saver::ThreadImage;

use super::error::Result;
use super::output::Out;
use super::plan::{ApplyArgs, Asked, PlanArgs, Policy};
use super::target::{StoreArgs, Target};

/// Remove leaf checkpoints that no run needs: duration notes, ends of side branches.
#[derive(Debug, Subcommand)]
pub(crate) enum RetentionCommand {
    /// Show what a pass would remove, with a reason per checkpoint. Changes nothing.
    #[command(after_help = "\
Examples:
  threadkeep retention plan --thread my-thread
  threadkeep retention plan --all --leaf-sibling-branches --summary

--json prints one document per line, one for each thread.")]
    Plan {
        #[command(flatten)]
        plan: PlanArgs,
        #[command(flatten)]
        rules: Rules,
    },
    /// Run a pass over each thread, in one atomic change.
    ///
    /// A pass considers leaves only; a checkpoint that becomes a leaf is left to the next pass.
    #[command(after_help = "\
Examples:
  threadkeep retention apply --thread my-thread
  threadkeep retention apply --all --leaf-sibling-branches --until-done --yes

Run `threadkeep vacuum` afterwards to return the freed space to the file system.")]
    Apply {
        #[command(flatten)]
        apply: ApplyArgs,
        #[command(flatten)]
        rules: Rules,
        /// Repeat until a pass finds nothing.
        #[arg(long)]
        until_done: bool,
    },
}

/// The fields of the policy.
#[derive(Debug, Args)]
pub(crate) struct Rules {
    /// Keep duration-only leaves, which are otherwise removed.
    #[arg(long)]
    keep_trailing_duration_leaves: bool,
    /// Also remove the ends of side branches.
    #[arg(long)]
    leaf_sibling_branches: bool,
    /// Checkpoints to keep in any case. Nothing is removed if one of them is not found.
    #[arg(long, value_name = "ID", num_args = 1..)]
    protect: Vec<CheckpointId>,
    /// Also remove checkpoints with pending writes, which are lost.
    #[arg(long)]
    no_pending_write_guard: bool,
    /// Maximum checkpoints deleted per pass, newest first; run again to continue.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    max_delete_per_run: Option<i64>,
    /// Also remove duration notes with children; the children move to the notes' parents.
    #[arg(long)]
    graft_duration_links: bool,
}

impl Rules {
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
        self.asked().store()
    }

    fn asked(&self) -> Asked<'_> {
        match self {
            Self::Plan { plan, .. } => Asked::Plan(plan),
            Self::Apply { apply, .. } => Asked::Apply(apply),
        }
    }

    pub(crate) async fn run(&self, target: &Target, out: &mut Out) -> Result<()> {
        let (rules, repeat) = match self {
            Self::Plan { rules, .. } => (rules.policy(), false),
            Self::Apply { rules, until_done, .. } => (rules.policy(), *until_done),
        };
        // Not an error of each thread.
        rules.cap()?;
        let plan = |image: &ThreadImage| plan_retention(image, &rules, &target.table);
        let policy = Policy { plan: &plan, protect: &rules.protect_checkpoint_ids, repeat };
        self.asked().run(target, out, policy).await
    }
}
