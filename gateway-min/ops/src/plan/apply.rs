//! Removes what a policy names, thread by thread, after confirmation, and reports the outcome.

use serde_json::{Value as Json, json};
use threadkeep::deletion::{Stats, carry_out};
use threadkeep::id::{CheckpointId, ThreadId};
use threadkeep::saver::ThreadImage;

use super::{ApplyArgs, Planner, heads, planned};
use crate::error::{OpsError, Result};
use crate::interrupt::Watched;
use crate::output::{Columns, NONE, Out, bytes, count, number, one_line, things};
use crate::pass::Pass;
use crate::progress::Progress;
use crate::question::{self, can_be_asked};
use crate::target::{Target, retried_while_stale};

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
pub(super) async fn run(
    target: &Target,
    out: &mut Out,
    asked: &ApplyArgs,
    until_done: bool,
    plan: &Planner<'_>,
) -> Result<()> {
    let (threads, unlisted) = target.threads(&asked.threads).await?;
    // If there was nothing to ask about, nobody has confirmed what may be found from now on.
    let confirmed = asked.yes || ask(target, &threads, until_done, plan).await?;
    let mut outcomes: Vec<Outcome> = Vec::new();
    let progress = Progress::new("threads done", threads.len() as u64);
    // Also of a single thread: each pass over it is a change of its own.
    let watched = until_done.then(Watched::new);
    let mut pass = Pass::new(progress, "done", threads.len(), asked.threads.are_all()).giving_way(target);
    for thread in &threads {
        if !pass.goes_on().await {
            break;
        }
        let (outcome, done) = if confirmed {
            apply_to(target, thread, until_done, plan, &pass).await
        } else {
            looked_at(target, thread, plan).await
        };
        pass.note(thread, done);
        let Some(outcome) = outcome else { continue };
        if asked.json {
            // At once, so that nothing that ends the command later hides it.
            out.json(&as_json(&outcome))?;
        } else {
            outcomes.push(outcome);
        }
    }
    drop(watched);
    let done = pass.end(unlisted);
    // Report completed work even if a later thread or pass failed, but do not call what failed at once nothing to do.
    if !asked.json && (done.is_ok() || !outcomes.is_empty()) {
        tell(target, out, &outcomes).await?;
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

/// Applies the plan of a thread. An error of a later pass does not undo the earlier ones: what they did comes with it.
async fn apply_to(
    target: &Target,
    thread: &ThreadId,
    until_done: bool,
    plan: &Planner<'_>,
    pass: &Pass<'_>,
) -> (Option<Outcome>, Result<()>) {
    let stored_before = match target.stored_bytes(thread).await {
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
        if let Err(interrupted) = pass.interrupted() {
            break Err(interrupted);
        }
    };
    if let Some(outcome) = &mut outcome {
        let stored = if outcome.changed { target.stored_bytes(thread).await } else { Ok(stored_before) };
        match stored {
            Ok(stored_after) => outcome.stored = stored_before.zip(stored_after),
            Err(error) => done = done.and(Err(error)),
        }
    }
    (outcome, done)
}

fn as_json(outcome: &Outcome) -> Json {
    let removed: Vec<String> = outcome.removed.iter().map(ToString::to_string).collect();
    json!({
        "thread": outcome.thread.as_str(), "removed": removed, "protected_head_ids": outcome.heads,
        "stats_before": outcome.before.to_map(), "stats_after": outcome.after.to_map(),
        "stored_bytes_before": outcome.stored.map(|(before, _)| before),
        "stored_bytes_after": outcome.stored.map(|(_, after)| after),
    })
}

async fn tell(target: &Target, out: &mut Out, outcomes: &[Outcome]) -> Result<()> {
    let changed: Vec<&Outcome> = outcomes.iter().filter(|outcome| outcome.changed).collect();
    if changed.is_empty() {
        return Ok(out.line(format!("Nothing to remove from {}.", things(outcomes.len(), "thread")))?);
    }
    let mut table = Columns::new(&["THREAD", "REMOVED>", "LEFT>", "LOGICAL BYTES>", "STORED BYTES>"]);
    for outcome in &changed {
        table.row([
            outcome.thread.to_string(),
            count(outcome.removed.len()),
            number(outcome.after.checkpoint_rows),
            format!("{} -> {}", bytes(outcome.before.logical()), bytes(outcome.after.logical())),
            outcome.stored.map_or_else(
                || NONE.to_owned(),
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
