//! The life of an admitted run: start, progress, cancellation, end. Every change checks the current state in its own
//! transaction, so that of two racing changes one wins and the other gets to know.
//!
//! In SQLite a run is flushed once, when it is finished; its admission also, if that is acknowledged to someone who does
//! not wait for the end ([`NewRun::acknowledged`](super::NewRun)), and an accepted cancellation. After a power loss the
//! rest is as of some earlier step, from each of which a run is recovered the same way, or the run is not known at all.

use chrono::{DateTime, Utc};

use super::admission::mark_cancelled;
use super::{
    CancelAction, CancelOutcome, DecideOutcome, FinishOutcome, MESSAGE_PREVIEW_MAX_CHARS, RunEnd, RunRow,
    RunStatus, RunTotals, Runs, StartOutcome, restores, select_run,
};
use crate::codec::{cut, object_text, time_text};
use crate::error::RecordsError;
use crate::executions::mark_counted;
use crate::failure::DatabaseError;
use crate::query::{Sql, query};
use crate::threads::{AHEAD, DISPLAY_NAME_MAX_CHARS, ThreadStatus, later, touched};
use crate::transaction::WriteTx;

/// The columns of [`RunTotals`] as parameters, which [`bind_totals`] binds after two others.
macro_rules! set_totals {
    () => {
        "message_count = $3, first_human_message = COALESCE($4, first_human_message), \
         last_ai_message = COALESCE($5, last_ai_message), total_input_tokens = $6, total_output_tokens = $7, \
         total_tokens = $8, llm_call_count = $9, lead_agent_tokens = $10, subagent_tokens = $11, \
         middleware_tokens = $12, token_usage_by_model = $13"
    };
}

/// The run `$1` can start.
macro_rules! startable {
    () => {
        "run_id = $1 AND operation_kind = 'run' AND status = 'pending' AND NOT waiting AND cancel_action IS NULL"
    };
}

/// The process in this parameter has the row; null is the one that has no leases.
macro_rules! owned {
    ($owner:literal) => {
        concat!("owner_worker_id IS NOT DISTINCT FROM ", $owner)
    };
}

/// The run `$1` can end, or be decided to end, with the status in this parameter: unless that was decided before, a
/// cancelled run does not end as a success, and one that restores the state from before it has no other end before that
/// is settled, as the second parameter says. One that found acknowledged changes lost ends in that error. Only the process
/// in the third parameter ends it: another one may have taken it over.
macro_rules! endable {
    ($status:literal, $settled:literal, $owner:literal) => {
        concat!(
            "run_id = $1 AND operation_kind = 'run' AND status IN ('pending', 'running') AND ",
            owned!($owner),
            " AND (history_lost IS NULL OR ",
            $status,
            " = 'error') AND (decided_status IS NOT NULL OR CASE WHEN ",
            $status,
            " = 'success' THEN cancel_action IS NULL ELSE ",
            $settled,
            " OR NOT ",
            restores!(),
            " END)"
        )
    };
}

/// Gives a free thread to the run that has waited longest.
macro_rules! promotes {
    ($thread:literal) => {
        concat!(
            "UPDATE runs SET waiting = FALSE, updated_at = $2 WHERE run_id = \
             (SELECT run_id FROM runs WHERE thread_id = ",
            $thread,
            " AND waiting ORDER BY admission_seq LIMIT 1) \
             AND NOT EXISTS (SELECT 1 FROM runs WHERE thread_id = ",
            $thread,
            " AND status IN ('pending', 'running') AND NOT waiting) RETURNING run_id"
        )
    };
}

impl Runs {
    /// Moves the run from `pending` to `running`, and its thread with it.
    ///
    /// # Errors
    /// [`RecordsError::NotFound`].
    pub async fn start(&self, run_id: &str) -> Result<StartOutcome, RecordsError> {
        let (id, now) = (run_id.to_owned(), self.db.clock.now());
        let db = self.db.unflushed();
        let started = db.write_of_run(run_id, move |tx| {
            Box::pin(async move {
                let sql = || {
                    let sql = concat!(
                        "UPDATE runs SET status = 'running', updated_at = $2 WHERE ",
                        startable!(),
                        " RETURNING (SELECT threads_meta.updated_at FROM threads_meta \
                         WHERE threads_meta.thread_id = runs.thread_id)"
                    );
                    query(sql).bind(&id).bind(time_text(now))
                };
                let thread =
                    || query(START_THREAD).bind(&id).bind(time_text(now)).bind(time_text(now + AHEAD));
                tx.queue(thread())?;
                if let Some((after,)) = tx.fetch_and_commit::<(Option<String>,)>(sql()).await? {
                    return Ok(begun(after, now));
                }
                let run = existing(tx, &id).await?;
                match (run.status, run.cancel_action) {
                    (RunStatus::Pending, Some(action)) => return Ok(StartOutcome::Cancelled(action)),
                    (RunStatus::Pending, None) if run.waiting => return Ok(StartOutcome::Waiting),
                    // Another process has passed the thread on meanwhile.
                    (RunStatus::Pending, None) => {}
                    (status, _) => return Ok(StartOutcome::NotPending(status)),
                }
                tx.queue(thread())?;
                let after = tx.fetch_optional::<(Option<String>,)>(sql()).await?;
                Ok(begun(after.and_then(|(after,)| after), now))
            })
        });
        started.await
    }

    /// Stores the run's usage so far; `false`, without a change, if it is not `running`, or another process's.
    pub async fn progress(&self, run_id: &str, totals: &RunTotals) -> Result<bool, RecordsError> {
        let sql = bind_totals(
            query(concat!(
                "UPDATE runs SET updated_at = $2, ",
                set_totals!(),
                " WHERE run_id = $1 AND operation_kind = 'run' AND status = 'running' AND ",
                owned!("$14"),
                " RETURNING run_id"
            ))
            .bind(run_id)
            .bind(time_text(self.db.clock.now())),
            totals,
        );
        let sql = sql.bind(self.owner());
        let db = self.db.unflushed();
        let counted = mark_counted(&self.db, run_id, &totals.executions);
        let changed = db.write_of_run(run_id, move |tx| {
            Box::pin(async move {
                let Some(counted) = counted else {
                    return Ok(tx.fetch_and_commit::<(String,)>(sql).await?.is_some());
                };
                let changed = tx.fetch_optional::<(String,)>(sql).await?.is_some();
                if changed {
                    tx.queue(counted)?;
                }
                Ok(changed)
            })
        });
        changed.await
    }

    /// Records the cancellation of an active run. It keeps its thread until it has stopped and finished; clients see it
    /// as `interrupted` at once ([`RunRow::reported_status`]). The first request determines the action.
    pub async fn request_cancel(
        &self,
        run_id: &str,
        action: CancelAction,
    ) -> Result<CancelOutcome, RecordsError> {
        let (id, now) = (run_id.to_owned(), self.db.clock.now());
        let cancelled = self.db.write_of_run(run_id, move |tx| {
            Box::pin(async move {
                let Some(run) = run(tx, &id).await? else { return Ok(CancelOutcome::NotFound) };
                // One that is being cancelled takes the request again until it has ended, as clients see it.
                let decided = run.decided_status.filter(|_| run.cancel_action.is_none());
                match decided.unwrap_or(run.reported_status()) {
                    RunStatus::Pending | RunStatus::Running => {}
                    RunStatus::Interrupted => return Ok(CancelOutcome::AlreadyInterrupted),
                    status => return Ok(CancelOutcome::AlreadyTerminal(status)),
                }
                mark_cancelled(tx, &run, action, now)?;
                Ok(CancelOutcome::Accepted)
            })
        });
        cancelled.await
    }

    /// Stores how a running run will end. It keeps its thread until [`Runs::finish`], so that its remaining writes come
    /// before anyone else's; clients still see it as running. A cancelled run cannot be decided as a `success`, and one
    /// that is to be rolled back not at all before that is [settled](RunEnd::rollback_settled), so that no accepted
    /// cancellation is lost to a run that was just finishing or failing; a decided run accepts no cancellation. Nor is an
    /// [edit](super::NewRun::edits) decided otherwise than as a `success` before that. Only the run's owner decides.
    ///
    /// # Errors
    /// [`RecordsError::NotFound`]; [`RecordsError::Invalid`] if `end.status` is an active one.
    pub async fn decide(&self, run_id: &str, end: &RunEnd) -> Result<DecideOutcome, RecordsError> {
        self.decide_after(run_id, end, Vec::new()).await
    }

    /// The same, after these statements in the same transaction, whatever is decided.
    pub(crate) async fn decide_after(
        &self,
        run_id: &str,
        end: &RunEnd,
        statements: Vec<Sql>,
    ) -> Result<DecideOutcome, RecordsError> {
        match self.try_to_decide(run_id, end, statements).await? {
            Some(decided) => Ok(decided),
            None => self.try_to_decide(run_id, &lost(end), Vec::new()).await?.ok_or_else(|| changed(run_id)),
        }
    }

    /// `None` if the run found acknowledged changes lost, and ends in error.
    async fn try_to_decide(
        &self,
        run_id: &str,
        end: &RunEnd,
        statements: Vec<Sql>,
    ) -> Result<Option<DecideOutcome>, RecordsError> {
        check_end(end)?;
        let sql = bind_totals(
            query(concat!(
                "UPDATE runs SET updated_at = $2, ",
                set_totals!(),
                ", decided_status = $14, error = COALESCE(history_lost, $15), stop_reason = $16, \
                 left_checkpoint = COALESCE($17, left_checkpoint) WHERE ",
                endable!("$14", "$18", "$19"),
                " RETURNING run_id"
            ))
            .bind(run_id)
            .bind(time_text(self.db.clock.now())),
            &end.totals,
        );
        let sql = bind_end(sql, end).bind(self.owner());
        let counted = mark_counted(&self.db, run_id, &end.totals.executions);
        let (id, owner, status) = (run_id.to_owned(), self.owner().map(str::to_owned), end.status);
        let db = self.db.unflushed();
        let decided = db.write_of_run(run_id, move |tx| {
            Box::pin(async move {
                for statement in statements {
                    tx.queue(statement)?;
                }
                let decided: Option<(String,)> = match &counted {
                    None => tx.fetch_and_commit(sql).await?,
                    Some(_) => tx.fetch_optional(sql).await?,
                };
                if decided.is_none() {
                    return Ok(match refusal(tx, &id, owner.as_deref(), status).await? {
                        Refusal::Cancelled(action) => Some(DecideOutcome::CancelRequested(action)),
                        Refusal::Terminal(status) => Some(DecideOutcome::AlreadyTerminal(status)),
                        Refusal::TakenOver => Some(DecideOutcome::TakenOver),
                        Refusal::Lost => None,
                    });
                }
                if let Some(counted) = counted {
                    tx.queue(counted)?;
                }
                Ok(Some(DecideOutcome::Decided))
            })
        });
        decided.await
    }

    /// Ends an active run of this process, sets the resulting status of its thread if the run has worked on it, and
    /// passes the thread to the first waiting run. A cancelled run ends only as [`Runs::decide`] says, unless its end
    /// was decided before. One that found acknowledged changes lost ends in that error, whatever `end` says.
    ///
    /// # Errors
    /// [`RecordsError::NotFound`]; [`RecordsError::Invalid`] if `end.status` is an active one.
    pub async fn finish(&self, run_id: &str, end: &RunEnd) -> Result<FinishOutcome, RecordsError> {
        match self.try_to_finish(run_id, end).await? {
            Some(finished) => Ok(finished),
            None => self.try_to_finish(run_id, &lost(end)).await?.ok_or_else(|| changed(run_id)),
        }
    }

    /// `None` if the run found acknowledged changes lost, and ends in error.
    async fn try_to_finish(&self, run_id: &str, end: &RunEnd) -> Result<Option<FinishOutcome>, RecordsError> {
        check_end(end)?;
        let now = self.db.clock.now();
        let now = end.not_before.map_or(now, |time| later(time, now));
        let (now, ahead) = (time_text(now), time_text(now + AHEAD));
        let sql = bind_totals(
            query(concat!(
                "UPDATE runs SET updated_at = $2, ",
                set_totals!(),
                ", status = $14, error = COALESCE(history_lost, $15), stop_reason = $16, waiting = FALSE, \
                 left_checkpoint = COALESCE($17, left_checkpoint) WHERE ",
                endable!("$14", "$18", "$19"),
                " RETURNING run_id"
            ))
            .bind(run_id)
            .bind(&now),
            &end.totals,
        );
        let sql = bind_end(sql, end).bind(self.owner());
        let counted = mark_counted(&self.db, run_id, &end.totals.executions);
        let display_name = end.display_name.as_deref().map(|name| cut(name, DISPLAY_NAME_MAX_CHARS));
        let thread = query(END_THREAD).bind(run_id).bind(ThreadStatus::after(end.status).as_str());
        let thread = thread.bind(display_name).bind(&now).bind(end.status.as_str());
        let thread = thread.bind(end.rollback_settled).bind(self.owner()).bind(ahead);
        let (id, owner, status) = (run_id.to_owned(), self.owner().map(str::to_owned), end.status);
        let finished = self.db.write_of_run(run_id, move |tx| {
            Box::pin(async move {
                tx.queue(thread)?;
                // A run that cannot end keeps its thread, or has passed it on: then this promotes none.
                let promotion = promotion_after(&id, &now);
                let (ended, promoted): (Option<(String,)>, Option<(String,)>) = match counted {
                    None => tx.fetch_two_and_commit(sql, promotion).await?,
                    Some(counted) => match tx.fetch_optional(sql).await? {
                        Some(ended) => {
                            tx.queue(counted)?;
                            (Some(ended), tx.fetch_and_commit(promotion).await?)
                        }
                        None => (None, None),
                    },
                };
                if ended.is_none() {
                    return Ok(match refusal(tx, &id, owner.as_deref(), status).await? {
                        Refusal::Cancelled(action) => Some(FinishOutcome::CancelRequested(action)),
                        Refusal::Terminal(status) => Some(FinishOutcome::AlreadyTerminal(status)),
                        Refusal::TakenOver => Some(FinishOutcome::TakenOver),
                        Refusal::Lost => None,
                    });
                }
                Ok(Some(FinishOutcome::Finished { promoted: promoted.map(|(run_id,)| run_id) }))
            })
        });
        let finished = finished.await;
        if finished.is_ok() {
            self.db.threads_of_runs.remove(run_id);
        }
        finished
    }
}

/// Why a run cannot end as it should.
enum Refusal {
    Cancelled(CancelAction),
    Terminal(RunStatus),
    TakenOver,
    /// It found acknowledged changes lost.
    Lost,
}

/// Why the row did not change to end with this status, although its `owner` may change it in [`endable`]'s states.
async fn refusal(
    tx: &mut WriteTx<'_>,
    run_id: &str,
    owner: Option<&str>,
    status: RunStatus,
) -> Result<Refusal, RecordsError> {
    let run = existing(tx, run_id).await?;
    match run.cancel_action {
        _ if !run.status.is_active() => Ok(Refusal::Terminal(run.status)),
        _ if run.owner_worker_id.as_deref() != owner => Ok(Refusal::TakenOver),
        _ if run.history_lost.is_some() && status != RunStatus::Error => Ok(Refusal::Lost),
        Some(action) => Ok(Refusal::Cancelled(action)),
        // An edit: as if that had been asked for.
        None if run.owes_restore() => Ok(Refusal::Cancelled(CancelAction::Rollback)),
        None => Err(changed(run_id)),
    }
}

fn changed(run_id: &str) -> RecordsError {
    DatabaseError::Internal(format!("run {run_id} changed meanwhile; try again")).into()
}

/// This end of a run that found acknowledged changes lost: its row says what.
fn lost(end: &RunEnd) -> RunEnd {
    RunEnd { status: RunStatus::Error, ..end.clone() }
}

/// A run has started now, on a thread with this time.
fn begun(thread: Option<String>, now: DateTime<Utc>) -> StartOutcome {
    let thread = thread.and_then(|text| DateTime::parse_from_rfc3339(&text).ok());
    StartOutcome::Started { after: thread.map_or(now, |time| time.with_timezone(&Utc)) }
}

fn check_end(end: &RunEnd) -> Result<(), RecordsError> {
    if end.status.is_active() {
        let problem = format!("a run cannot end as '{}'", end.status);
        return Err(RecordsError::Invalid { field: "status", problem });
    }
    Ok(())
}

async fn run(tx: &mut WriteTx<'_>, run_id: &str) -> Result<Option<RunRow>, RecordsError> {
    tx.fetch_optional(query(select_run!("run_id = $1 AND operation_kind = 'run'")).bind(run_id)).await
}

async fn existing(tx: &mut WriteTx<'_>, run_id: &str) -> Result<RunRow, RecordsError> {
    run(tx, run_id).await?.ok_or_else(|| RecordsError::run_not_found(run_id))
}

/// Sets the status of the thread of the run `$1`, if that can start.
const START_THREAD: &str = concat!(
    "UPDATE threads_meta SET status = 'running', updated_at = ",
    touched!("$2", "$3"),
    " WHERE thread_id = (SELECT thread_id FROM runs WHERE ",
    startable!(),
    ")"
);
/// Sets the status of the thread of the run `$1` of the process `$7`, and its title, unless that stays, if that run has
/// worked on it and can end with the status `$5`, settled as `$6` says.
const END_THREAD: &str = concat!(
    "UPDATE threads_meta SET status = $2, display_name = COALESCE($3, display_name), updated_at = ",
    touched!("$4", "$8"),
    " WHERE thread_id = (SELECT thread_id FROM runs WHERE status = 'running' AND ",
    endable!("$5", "$6", "$7"),
    ")"
);

/// Gives the thread, if it is free, to the run that has waited longest.
pub(super) async fn promote_waiting(
    tx: &mut WriteTx<'_>,
    thread_id: &str,
    now: &str,
) -> Result<Option<String>, RecordsError> {
    let promoted: Option<(String,)> = tx.fetch_optional(promotion(thread_id, now)).await?;
    Ok(promoted.map(|(run_id,)| run_id))
}

/// The statement that does so, and returns the id of the run.
pub(super) fn promotion(thread_id: &str, now: &str) -> Sql {
    query(promotes!("$1")).bind(thread_id).bind(now)
}

/// The same for the thread of this run.
fn promotion_after(run_id: &str, now: &str) -> Sql {
    query(promotes!("(SELECT thread_id FROM runs WHERE run_id = $1)")).bind(run_id).bind(now)
}

fn bind_totals(sql: Sql, totals: &RunTotals) -> Sql {
    let preview =
        |text: &Option<String>| text.as_deref().map(|text| cut(text, MESSAGE_PREVIEW_MAX_CHARS).to_owned());
    sql.bind(totals.message_count)
        .bind(preview(&totals.first_human_message))
        .bind(preview(&totals.last_ai_message))
        .bind(totals.total_input_tokens)
        .bind(totals.total_output_tokens)
        .bind(totals.total_tokens)
        .bind(totals.llm_call_count)
        .bind(totals.lead_agent_tokens)
        .bind(totals.subagent_tokens)
        .bind(totals.middleware_tokens)
        .bind(object_text(&totals.token_usage_by_model))
}

/// Binds what follows the totals in a statement that stores how a run ends.
fn bind_end(sql: Sql, end: &RunEnd) -> Sql {
    let sql = sql.bind(end.status.as_str()).bind(&end.error).bind(&end.stop_reason);
    sql.bind(&end.left_checkpoint).bind(end.rollback_settled)
}
