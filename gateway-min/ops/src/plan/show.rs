//! Shows what a policy would remove, and why.

use std::collections::BTreeMap;

use serde_json::{Value as Json, json};
use threadkeep::deletion::{DeletionPlan, Reason, Stats};
use threadkeep::saver::ThreadImage;

use super::{PlanArgs, Planner, heads, planned};
use crate::checkpoints::shown_source;
use crate::error::Result;
use crate::output::{Columns, Out, bytes, count, moment, one_line, things};
use crate::pass::Pass;
use crate::progress::Progress;
use crate::target::Target;
use crate::threads::namespace_name;

/// Prints what would happen. Changes nothing.
pub(super) async fn run(target: &Target, out: &mut Out, asked: &PlanArgs, plan: &Planner<'_>) -> Result<()> {
    let (threads, unlisted) = target.threads(&asked.threads).await?;
    let progress = Progress::reading("threads planned", threads.len() as u64);
    let mut pass = Pass::new(progress, "planned", threads.len(), asked.threads.are_all()).giving_way(target);
    let mut totals = Totals::default();
    for thread in &threads {
        if !pass.goes_on().await {
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
            shown_source(tuple),
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
