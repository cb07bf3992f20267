//! Shared by the deleting commands: showing a plan, asking for confirmation, applying the plan thread by thread, and
//! reporting the outcome.

use std::collections::{BTreeMap, BTreeSet};

use clap::Args;
use serde_json::{Value as Json, json};
use threadkeep::deletion::{DeletionPlan, Reason, Stats, carry_out};
use threadkeep::id::{CheckpointId, ThreadId};
use threadkeep::saver::{ListQuery, Load, ThreadImage};

use super::error::{OpsError, Result};
use super::output::{Columns, Out, bytes, confirmed, count, moment, one_line};
use super::progress::Progress;
use super::target::{StoreArgs, Target, Threads, persistently};
use super::threads::{namespace_name, stored};

/// How to show a plan.
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) threads: Threads,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Only count checkpoints by reason.
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

/// Refuses protected ids that no thread has, because a typo would protect nothing.
pub(crate) async fn check_protected(
    target: &Target,
    threads: &Threads,
    protect: &BTreeSet<CheckpointId>,
) -> Result<()> {
    let mut missing = protect.clone();
    for thread in target.threads(threads).await? {
        if missing.is_empty() {
            break;
        }
        let query = ListQuery { namespace: None, load: Load::None, ..ListQuery::new(&thread) };
        for tuple in target.saver().list(&query).await? {
            missing.remove(&tuple.checkpoint.id);
        }
    }
    match missing.first() {
        Some(id) => Err(OpsError::Unsupported(format!(
            "--protect {id}: no selected thread has this checkpoint; list their ids with `threadkeep checkpoints list`"
        ))),
        None => Ok(()),
    }
}

/// Prints what would happen to each thread. Changes nothing.
pub(crate) async fn show(target: &Target, out: &mut Out, asked: &PlanArgs, plan: &Planner<'_>) -> Result<()> {
    let threads = target.threads(&asked.threads).await?;
    let mut progress = Progress::new("threads planned", threads.len() as u64);
    let (mut removed, mut all) = (0, 0);
    for thread in &threads {
        let image = target.image(thread).await?;
        let planned = plan(&image)?;
        removed += planned.removed().count();
        all += planned.verdicts.len();
        if asked.json {
            out.json(&as_json(image, &planned, asked.summary))?;
        } else {
            print(out, image, &planned, asked.summary)?;
        }
        progress.next();
    }
    if threads.len() > 1 && !asked.json {
        out.line(format!(
            "{} of {} checkpoints of {} threads would be removed.",
            count(removed),
            count(all),
            count(threads.len())
        ))?;
    }
    Ok(())
}

fn print(out: &mut Out, image: ThreadImage, plan: &DeletionPlan, summary: bool) -> Result<()> {
    out.line(format!(
        "thread {}: {} of {} checkpoints would be removed",
        one_line(image.thread.as_str()),
        count(plan.removed().count()),
        count(plan.verdicts.len()),
    ))?;
    if !summary {
        let mut table =
            Columns::new(&["CHECKPOINT", "TIME", "NAMESPACE", "STEP>", "SOURCE", "VERDICT", "BECAUSE"]);
        for (place, reason) in &plan.verdicts {
            let tuple = &image.checkpoints[place];
            table.row([
                place.1.to_string(),
                moment(place.1),
                namespace_name(&place.0),
                tuple.metadata.step.to_string(),
                super::checkpoints::source(tuple),
                verdict(*reason).to_owned(),
                reason.to_string(),
            ]);
        }
        out.table(&table)?;
        out.line("")?;
    }
    let mut table = Columns::new(&["", "CHECKPOINTS>", "BECAUSE"]);
    for ((goes, reason), checkpoints) in by_reason(plan) {
        table.row([if goes { "go" } else { "stay" }.to_owned(), count(checkpoints), reason.to_string()]);
    }
    out.table(&table)?;
    let before = Stats::of(&image);
    let after = Stats::of(&image.after(&plan.rewrite));
    out.line(format!(
        "{} of those that stay are rewritten. Logical bytes {} -> {}.",
        count(plan.rewrite.put.len()),
        bytes(logical(&before)),
        bytes(logical(&after)),
    ))?;
    out.line("")?;
    Ok(())
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
        "kept": plan.verdicts.len() - plan.removed().count(), "stored_anew": plan.rewrite.put.len(),
        "reasons": Json::Object(reasons.collect()), "stats_before": before,
        "stats_after": Stats::of(&image.after(&plan.rewrite)).to_map(),
    });
    if !summary && let Some(document) = document.as_object_mut() {
        document.insert("checkpoints".to_owned(), verdicts.collect());
    }
    document
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

fn logical(stats: &Stats) -> u64 {
    stats.checkpoint_bytes + stats.blob_bytes + stats.write_bytes
}

/// What happened to a thread.
struct Outcome {
    thread: ThreadId,
    removed: Vec<CheckpointId>,
    before: Stats,
    after: Stats,
    stored: Option<(u64, u64)>,
}

/// Applies the plan of each thread, after confirmation. With `until_done`, repeats until a pass finds nothing.
pub(crate) async fn apply(
    target: &Target,
    out: &mut Out,
    asked: &ApplyArgs,
    until_done: bool,
    plan: &Planner<'_>,
) -> Result<()> {
    let threads = target.threads(&asked.threads).await?;
    if !asked.yes {
        ask(target, &threads, plan).await?;
    }
    let mut outcomes: Vec<Outcome> = Vec::with_capacity(threads.len());
    let mut progress = Progress::new("threads done", threads.len() as u64);
    let mut failed = None;
    for thread in &threads {
        match apply_to(target, thread, until_done, plan).await {
            Ok(outcome) => outcomes.extend(outcome),
            Err(error) => {
                failed = Some(error);
                break;
            }
        }
        progress.next();
    }
    drop(progress);
    // Report completed work even if a later thread failed.
    tell(target, out, &outcomes, asked.json).await?;
    failed.map_or(Ok(()), Err)
}

async fn ask(target: &Target, threads: &[ThreadId], plan: &Planner<'_>) -> Result<()> {
    let unasked =
        OpsError::Refused("pass --yes to apply without confirmation; `plan` shows what would be removed");
    if !std::io::IsTerminal::is_terminal(&std::io::stdin()) {
        return Err(unasked);
    }
    let (mut removed, mut all) = (0, 0);
    for thread in threads {
        let planned = plan(&target.image(thread).await?)?;
        removed += planned.removed().count();
        all += planned.verdicts.len();
    }
    if removed == 0 {
        return Ok(());
    }
    let question = format!(
        "Remove {} of {} checkpoints of {} threads from {}?",
        count(removed),
        count(all),
        count(threads.len()),
        one_line(target.name())
    );
    match confirmed(&question)? {
        Some(true) => Ok(()),
        Some(false) => Err(OpsError::Refused("the change was not confirmed")),
        None => Err(unasked),
    }
}

async fn apply_to(
    target: &Target,
    thread: &ThreadId,
    until_done: bool,
    plan: &Planner<'_>,
) -> Result<Option<Outcome>> {
    let stored_before = stored(target, thread).await?;
    let (mut removed, mut first) = (Vec::new(), None);
    let after = loop {
        let (before, planned) = persistently(|| carry_out(&**target.saver(), thread, plan)).await?;
        first.get_or_insert_with(|| Stats::of(&before));
        let after = before.after(&planned.rewrite);
        let found = planned.removed().count();
        removed.extend(planned.removed().map(|place| place.1));
        if found == 0 || !until_done {
            break Stats::of(&after);
        }
    };
    let Some(before) = first else { return Ok(None) };
    let stored = match (stored_before, stored(target, thread).await?) {
        (Some(before), Some(after)) => Some((before, after)),
        _ => None,
    };
    Ok(Some(Outcome { thread: thread.clone(), removed, before, after, stored }))
}

async fn tell(target: &Target, out: &mut Out, outcomes: &[Outcome], json: bool) -> Result<()> {
    if json {
        for outcome in outcomes {
            let removed: Vec<String> = outcome.removed.iter().map(ToString::to_string).collect();
            out.json(&json!({
                "thread": outcome.thread.as_str(), "removed": removed,
                "stats_before": outcome.before.to_map(), "stats_after": outcome.after.to_map(),
                "stored_bytes_before": outcome.stored.map(|(before, _)| before),
                "stored_bytes_after": outcome.stored.map(|(_, after)| after),
            }))?;
        }
        return Ok(());
    }
    let mut table = Columns::new(&["THREAD", "REMOVED>", "LEFT>", "LOGICAL BYTES>", "STORED BYTES>"]);
    for outcome in outcomes {
        table.row([
            outcome.thread.to_string(),
            count(outcome.removed.len()),
            super::output::number(outcome.after.checkpoint_rows),
            format!("{} -> {}", bytes(logical(&outcome.before)), bytes(logical(&outcome.after))),
            outcome.stored.map_or_else(
                || super::output::NONE.to_owned(),
                |(before, after)| format!("{} -> {}", bytes(before), bytes(after)),
            ),
        ]);
    }
    out.table(&table)?;
    let removed: usize = outcomes.iter().map(|outcome| outcome.removed.len()).sum();
    out.line(format!("{} checkpoints of {} threads were removed.", count(removed), count(outcomes.len())))?;
    if let Some(sqlite) = target.sqlite() {
        let size = sqlite.file_size().await?;
        out.line(format!(
            "The database file has {}, of which {} are free; `threadkeep vacuum` gives them back.",
            bytes(size.bytes),
            bytes(size.free)
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
