//! Shared by the deleting commands: showing a plan, asking for confirmation, applying the plan thread by thread, and
//! reporting the outcome.

use std::collections::{BTreeMap, BTreeSet};

use clap::Args;
use serde_json::{Value as Json, json};
use threadkeep::deletion::{DeletionPlan, Reason, Stats, carry_out};
use threadkeep::id::{CheckpointId, ThreadId};
use threadkeep::saver::{ListQuery, Load, ThreadImage};

use super::advice::option;
use super::error::{OpsError, Result};
use super::output::{Columns, Out, bytes, count, moment, one_line, things};
use super::pages::Newest;
use super::pass::Pass;
use super::progress::Progress;
use super::question::{self, can_be_asked};
use super::target::{StoreArgs, Target, Threads, retried_while_stale};
use super::threads::{namespace_name, stored};

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
            Self::Plan(asked) => show(target, out, asked, policy.plan).await,
            Self::Apply(asked) => apply(target, out, asked, policy.repeat, policy.plan).await,
        }
    }
}

/// Refuses protected ids that no thread has, because a typo would protect nothing.
async fn check_protected(target: &Target, threads: &Threads, protect: &BTreeSet<CheckpointId>) -> Result<()> {
    let mut missing = protect.clone();
    if missing.is_empty() {
        return Ok(());
    }
    for thread in target.threads(threads).await?.0 {
        let query = ListQuery { namespace: None, load: Load::None, ..ListQuery::new(&thread) };
        let mut newest = Newest::new(&**target.saver(), query);
        loop {
            let page = match newest.next().await.map_err(OpsError::from) {
                // What is in a damaged thread stays in any case.
                Err(error) if error.is_of_one_thread() => break,
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
    let Some(id) = missing.first() else { return Ok(()) };
    let thread = match &threads.named()[..] {
        [thread] => option("--thread", thread.as_str()),
        _ => "--thread ID".to_owned(),
    };
    let list = target.again.command(&format!("checkpoints list {thread}"));
    Err(OpsError::Unsupported(format!(
        "--protect {id}: no selected thread has this checkpoint; list their ids with {list}"
    )))
}

/// Prints what would happen. Changes nothing.
async fn show(target: &Target, out: &mut Out, asked: &PlanArgs, plan: &Planner<'_>) -> Result<()> {
    let (threads, unlisted) = target.threads(&asked.threads).await?;
    let progress = Progress::reading("threads planned", threads.len() as u64);
    let mut pass = Pass::new(progress, "planned", threads.len(), asked.threads.are_all());
    let mut totals = Totals::default();
    for thread in &threads {
        if !pass.goes_on() {
            break;
        }
        let planned = planned(target, thread, plan).await;
        let Some((image, planned)) = pass.note(thread, planned) else { continue };
        if asked.json {
            out.json(&as_json(image, &planned, asked.summary))?;
        } else {
            if !asked.summary {
                details(out, &image, &planned)?;
            }
            totals.add(image, &planned);
        }
    }
    let ended = pass.end(unlisted);
    // Report the plans of the other threads.
    if !asked.json && (ended.is_ok() || totals.threads > 0) {
        totals.print(out)?;
    }
    ended
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

/// Prints the verdict on each checkpoint.
fn details(out: &mut Out, image: &ThreadImage, plan: &DeletionPlan) -> Result<()> {
    out.line(format!(
        "thread {}: {} of {} would be removed",
        one_line(image.thread.as_str()),
        count(plan.removed().count()),
        things(plan.verdicts.len(), "checkpoint"),
    ))?;
    let mut table =
        Columns::new(&["CHECKPOINT", "TIME", "NAMESPACE", "STEP>", "SOURCE", "VERDICT", "BECAUSE"]);
    for (place, reason) in &plan.verdicts {
        let tuple = &image.checkpoints[place];
        table.row([
            place.1.to_string(),
            moment(place.1),
            namespace_name(&place.0),
            tuple.metadata.step.to_string(),
            super::checkpoints::shown_source(tuple),
            if reason.goes() { "remove" } else { "keep" }.to_owned(),
            reason.to_string(),
        ]);
    }
    out.table(&table)?;
    out.line("")?;
    Ok(())
}

/// What plans of several threads remove, by reason.
#[derive(Default)]
struct Totals {
    threads: usize,
    last: String,
    /// Of each reason: how many checkpoints, of how many threads.
    reasons: BTreeMap<(bool, Reason), (usize, usize)>,
    rewritten: usize,
    /// Logical bytes before and after.
    size: (u64, u64),
}

impl Totals {
    fn add(&mut self, image: ThreadImage, plan: &DeletionPlan) {
        self.threads += 1;
        self.last = one_line(image.thread.as_str());
        for (reason, checkpoints) in by_reason(plan) {
            let total = self.reasons.entry(reason).or_default();
            *total = (total.0 + checkpoints, total.1 + 1);
        }
        self.rewritten += plan.rewrite.put.len();
        let before = Stats::of(&image).logical();
        let after =
            if plan.rewrite.is_empty() { before } else { Stats::of(&image.after(&plan.rewrite)).logical() };
        self.size = (self.size.0 + before, self.size.1 + after);
    }

    fn print(&self, out: &mut Out) -> Result<()> {
        if self.threads == 0 {
            return Ok(out.line("No threads.")?);
        }
        let of = |goes: bool| -> usize {
            self.reasons
                .iter()
                .filter(|((go, _), _)| *go == goes)
                .map(|(_, (checkpoints, _))| checkpoints)
                .sum()
        };
        let (removed, all) = (of(true), of(true) + of(false));
        let whose =
            if self.threads == 1 { format!("thread {}", self.last) } else { things(self.threads, "thread") };
        out.line(if removed == 0 {
            format!("Nothing to remove: all {} of {whose} stay.", things(all, "checkpoint"))
        } else {
            format!("{} of {} of {whose} would be removed.", count(removed), things(all, "checkpoint"))
        })?;
        let mut table = Columns::new(&["", "CHECKPOINTS>", "THREADS>", "BECAUSE"]);
        for goes in [true, false] {
            for ((_, reason), (checkpoints, threads)) in
                self.reasons.iter().filter(|((go, _), _)| *go == goes)
            {
                let verb = if goes { "remove" } else { "keep" };
                table.row([verb.to_owned(), count(*checkpoints), count(*threads), reason.to_string()]);
            }
        }
        out.table(&table)?;
        if self.rewritten > 0 {
            let verb = if self.rewritten == 1 { "is" } else { "are" };
            out.line(format!("{} {verb} rewritten.", things(self.rewritten, "remaining checkpoint")))?;
        }
        if removed > 0 || self.rewritten > 0 {
            let (before, after) = self.size;
            out.line(format!("Logical size: {} before, {} after.", bytes(before), bytes(after)))?;
        }
        Ok(())
    }
}

fn as_json(image: ThreadImage, plan: &DeletionPlan, summary: bool) -> Json {
    let verdicts = plan.verdicts.iter().map(|(place, reason)| {
        json!({
            "checkpoint": place.1.to_string(), "namespace": place.0.as_str(), "verdict": verdict(*reason),
            "reason": code(*reason), "because": reason.to_string(),
        })
    });
    let reasons = by_reason(plan).into_iter().map(|((_, reason), count)| (code(reason), Json::from(count)));
    let before = Stats::of(&image).to_map();
    let mut document = json!({
        "thread": image.thread.as_str(), "removed": plan.removed().count(),
        "kept": plan.verdicts.len() - plan.removed().count(), "rewritten": plan.rewrite.put.len(),
        "reasons": Json::Object(reasons.collect()), "protected_head_ids": heads(plan), "stats_before": before,
        "stats_after": Stats::of(&image.after(&plan.rewrite)).to_map(),
    });
    if !summary && let Some(document) = document.as_object_mut() {
        document.insert("checkpoints".to_owned(), verdicts.collect());
    }
    document
}

/// The head of each namespace that is kept.
fn heads(plan: &DeletionPlan) -> Json {
    let heads = plan.verdicts.iter().filter(|(_, reason)| *reason == Reason::Head);
    heads.map(|(place, _)| (place.0.as_str().to_owned(), Json::from(place.1.to_string()))).collect()
}

fn by_reason(plan: &DeletionPlan) -> BTreeMap<(bool, Reason), usize> {
    let mut reasons = BTreeMap::new();
    for (_, reason) in &plan.verdicts {
        *reasons.entry((reason.goes(), *reason)).or_default() += 1;
    }
    reasons
}

fn verdict(reason: Reason) -> &'static str {
    if reason.goes() { "goes" } else { "stays" }
}

/// The reason in JSON: the variant's name in snake case.
fn code(reason: Reason) -> String {
    let mut code = String::new();
    for char in format!("{reason:?}").chars() {
        if char.is_uppercase() && !code.is_empty() {
            code.push('_');
        }
        code.extend(char.to_lowercase());
    }
    code
}

/// What happened to a thread.
struct Outcome {
    thread: ThreadId,
    removed: Vec<CheckpointId>,
    heads: Json,
    before: Stats,
    after: Stats,
    stored: Option<(u64, u64)>,
    changed: bool,
}

impl Outcome {
    /// A thread of which nothing has been removed yet.
    fn begin(thread: &ThreadId, image: &ThreadImage) -> Self {
        Self {
            thread: thread.clone(),
            removed: Vec::new(),
            heads: Json::Null,
            before: Stats::of(image),
            after: Stats::of(image),
            stored: None,
            changed: false,
        }
    }
}

/// Applies the plan of each thread, after confirmation. With `until_done`, repeats until a pass finds nothing.
async fn apply(
    target: &Target,
    out: &mut Out,
    asked: &ApplyArgs,
    until_done: bool,
    plan: &Planner<'_>,
) -> Result<()> {
    let (threads, unlisted) = target.threads(&asked.threads).await?;
    // If there was nothing to ask about, nobody has confirmed what may be found from now on.
    let confirmed = asked.yes || ask(target, &threads, until_done, plan).await?;
    let mut outcomes: Vec<Outcome> = Vec::with_capacity(threads.len());
    let progress = Progress::new("threads done", threads.len() as u64);
    let mut pass = Pass::new(progress, "done", threads.len(), asked.threads.are_all());
    for thread in &threads {
        if !pass.goes_on() {
            break;
        }
        let (outcome, done) = if confirmed {
            apply_to(target, thread, until_done, plan).await
        } else {
            looked_at(target, thread, plan).await
        };
        outcomes.extend(outcome);
        pass.note(thread, done);
    }
    let done = pass.end(unlisted);
    // Report completed work even if a later thread or pass failed, but do not call what failed at once nothing to do.
    if done.is_ok() || !outcomes.is_empty() {
        tell(target, out, &outcomes, asked.json).await?;
    }
    done
}

/// Asks whether to remove what all passes over these threads remove. Returns whether there is anything.
async fn ask(target: &Target, threads: &[ThreadId], until_done: bool, plan: &Planner<'_>) -> Result<bool> {
    let unasked = "pass --yes to apply without confirmation; `plan` shows what would be removed";
    if !can_be_asked() {
        return Err(OpsError::Refused(unasked));
    }
    let (mut removed, mut all, mut rewritten) = (0, 0, 0);
    for thread in threads {
        let found = async {
            let mut image = target.image(thread).await?;
            all += image.checkpoints.len();
            loop {
                let planned = plan(&image)?;
                let found = planned.removed().count();
                removed += found;
                rewritten += planned.rewrite.put.len();
                if found == 0 || !until_done {
                    return Ok::<(), OpsError>(());
                }
                image = image.after(&planned.rewrite);
            }
        };
        match found.await {
            // It was deleted since the threads were listed, or cannot be read, which the pass reports.
            Err(OpsError::NoThread { .. }) => {}
            Err(error) if error.is_of_one_thread() => {}
            found => found?,
        }
    }
    if removed == 0 && rewritten == 0 {
        return Ok(false);
    }
    let question = format!(
        "Remove {} of {} of {} from {}?",
        count(removed),
        things(all, "checkpoint"),
        things(threads.len(), "thread"),
        one_line(target.name())
    );
    question::ask(question, "the change was not confirmed", unasked).await?;
    Ok(true)
}

/// What there is of a thread of which nothing is removed.
async fn looked_at(target: &Target, thread: &ThreadId, plan: &Planner<'_>) -> (Option<Outcome>, Result<()>) {
    match planned(target, thread, plan).await {
        Ok((image, planned)) => {
            let mut outcome = Outcome::begin(thread, &image);
            outcome.heads = heads(&planned);
            (Some(outcome), Ok(()))
        }
        Err(error) => (None, Err(error)),
    }
}

/// Applies the plan of a thread. An error of a later pass does not undo the earlier ones, so what they did comes beside it.
async fn apply_to(
    target: &Target,
    thread: &ThreadId,
    until_done: bool,
    plan: &Planner<'_>,
) -> (Option<Outcome>, Result<()>) {
    let stored_before = match stored(target, thread).await {
        Ok(stored) => stored,
        Err(error) => return (None, Err(error)),
    };
    let mut outcome = None::<Outcome>;
    let mut done = loop {
        let passed = retried_while_stale(|| carry_out(&**target.saver(), thread, plan)).await;
        let (before, planned) = match passed {
            Ok(passed) => passed,
            Err(error) => break Err(error.into()),
        };
        let outcome = outcome.get_or_insert_with(|| Outcome::begin(thread, &before));
        outcome.after = Stats::of(&before.after(&planned.rewrite));
        outcome.heads = heads(&planned);
        outcome.changed |= !planned.rewrite.is_empty();
        let found = planned.removed().count();
        outcome.removed.extend(planned.removed().map(|place| place.1));
        if found == 0 || !until_done {
            break Ok(());
        }
    };
    if let Some(outcome) = &mut outcome {
        match stored(target, thread).await {
            Ok(stored_after) => outcome.stored = stored_before.zip(stored_after),
            Err(error) => done = done.and(Err(error)),
        }
    }
    (outcome, done)
}

async fn tell(target: &Target, out: &mut Out, outcomes: &[Outcome], json: bool) -> Result<()> {
    if json {
        for outcome in outcomes {
            let removed: Vec<String> = outcome.removed.iter().map(ToString::to_string).collect();
            out.json(&json!({
                "thread": outcome.thread.as_str(), "removed": removed, "protected_head_ids": outcome.heads,
                "stats_before": outcome.before.to_map(), "stats_after": outcome.after.to_map(),
                "stored_bytes_before": outcome.stored.map(|(before, _)| before),
                "stored_bytes_after": outcome.stored.map(|(_, after)| after),
            }))?;
        }
        return Ok(());
    }
    let changed: Vec<&Outcome> = outcomes.iter().filter(|outcome| outcome.changed).collect();
    if changed.is_empty() {
        return Ok(out.line(format!("Nothing to remove from {}.", things(outcomes.len(), "thread")))?);
    }
    let mut table = Columns::new(&["THREAD", "REMOVED>", "LEFT>", "LOGICAL BYTES>", "STORED BYTES>"]);
    for outcome in &changed {
        table.row([
            outcome.thread.to_string(),
            count(outcome.removed.len()),
            super::output::number(outcome.after.checkpoint_rows),
            format!("{} -> {}", bytes(outcome.before.logical()), bytes(outcome.after.logical())),
            outcome.stored.map_or_else(
                || super::output::NONE.to_owned(),
                |(before, after)| format!("{} -> {}", bytes(before), bytes(after)),
            ),
        ]);
    }
    out.table(&table)?;
    let removed: usize = changed.iter().map(|outcome| outcome.removed.len()).sum();
    let verb = if removed == 1 { "was" } else { "were" };
    out.line(format!(
        "{} of {} {verb} removed.",
        things(removed, "checkpoint"),
        things(changed.len(), "thread")
    ))?;
    if changed.len() < outcomes.len() {
        out.line(format!("{} had nothing to remove.", things(outcomes.len() - changed.len(), "thread")))?;
    }
    if let Some(sqlite) = target.sqlite() {
        let size = sqlite.file_size().await?;
        out.line(format!(
            "The database file has {}, of which {} are free; {} gives them back.",
            bytes(size.bytes),
            bytes(size.free),
            target.again.command("vacuum")
        ))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_have_names_that_programs_can_rely_on() {
        assert_eq!(code(Reason::Head), "head");
        assert_eq!(code(Reason::DurationLeaf), "duration_leaf");
        assert_eq!(code(Reason::PendingWrites), "pending_writes");
    }
}
