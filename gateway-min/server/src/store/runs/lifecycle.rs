//! How an admitted run moves on: start, progress, cancellation, end. Every change looks at the state it
//! starts from in its own transaction, so that of two that race one wins and the other is told. What happens between
//! the admission and the decision how the run ends is not flushed by SQLite: after a loss of power a run is recovered from
//! each of these steps alike.

use super::admission::mark_cancelled;
use super::{CancelAction, MESSAGE_PREVIEW_MAX_CHARS, RunRow, RunStatus, RunTotals, Runs};
use crate::store::codec::{cut, object_text, time_text};
use crate::store::db::WriteTx;
use crate::store::error::StoreError;
use crate::store::query::{Sql, query};
use crate::store::threads::ThreadStatus;

/// What [`Runs::start`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartOutcome {
    /// The run is `running` now, by this call.
    Started,
    /// The run waits for its predecessor to end; nothing changed.
    Waiting,
    /// The run was cancelled before it started; nothing changed. Finish it.
    Cancelled(CancelAction),
    /// The run is not `pending` any more; nothing changed.
    NotPending(RunStatus),
}

/// What [`Runs::request_cancel`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelOutcome {
    /// The cancellation is marked; make the run stop.
    Accepted,
    /// The run was cancelled before, or is being cancelled; nothing changed.
    AlreadyInterrupted,
    /// The run had ended with this status before; nothing changed.
    AlreadyTerminal(RunStatus),
    /// There is no such run.
    NotFound,
}

/// How a run ends.
#[derive(Clone, Debug, PartialEq)]
pub struct RunEnd {
    /// The final status.
    pub status: RunStatus,
    /// Why it failed.
    pub error: Option<String>,
    /// Why it stopped early.
    pub stop_reason: Option<String>,
    /// What it used and said in all.
    pub totals: RunTotals,
}

/// What [`Runs::decide`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecideOutcome {
    /// It is stored how the run ends.
    Decided,
    /// The run was asked to cancel and cannot end as a `success`; nothing changed. Carry out the
    /// cancellation and decide for another end.
    CancelRequested(CancelAction),
    /// The run had ended with this status before, by whoever; nothing changed. It is not this process's any more:
    /// write nothing for it.
    AlreadyTerminal(RunStatus),
}

/// What [`Runs::finish`] did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishOutcome {
    /// The run has ended, by this call.
    Finished {
        /// The first of the runs that waited, which holds the thread now; start it.
        promoted: Option<String>,
    },
    /// The run was asked to cancel and cannot end as a `success`; nothing changed. Carry out the
    /// cancellation and finish the run with another status.
    CancelRequested(CancelAction),
    /// The run had ended with this status before; nothing changed.
    AlreadyTerminal(RunStatus),
}

/// The columns of [`RunTotals`] as the parameters that [`bind_totals`] adds after two others.
macro_rules! set_totals {
    () => {
        "message_count = $3, first_human_message = COALESCE($4, first_human_message), \
         last_ai_message = COALESCE($5, last_ai_message), total_input_tokens = $6, total_output_tokens = $7, \
         total_tokens = $8, llm_call_count = $9, lead_agent_tokens = $10, subagent_tokens = $11, \
         middleware_tokens = $12, token_usage_by_model = $13"
    };
}

impl Runs {
    /// Moves the run from `pending` to `running`.
    ///
    /// # Errors
    /// [`StoreError::NotFound`].
    pub async fn start(&self, run_id: &str) -> Result<StartOutcome, StoreError> {
        let mut tx = self.db.unflushed().write_of_run(run_id).await?;
        let run = run(&mut tx, run_id).await?.ok_or_else(|| StoreError::run_not_found(run_id))?;
        match (run.status, run.cancel_action) {
            (RunStatus::Pending, Some(action)) => return Ok(StartOutcome::Cancelled(action)),
            (RunStatus::Pending, None) if run.waiting => return Ok(StartOutcome::Waiting),
            (RunStatus::Pending, None) => {}
            (status, _) => return Ok(StartOutcome::NotPending(status)),
        }
        let sql = query("UPDATE runs SET status = 'running', updated_at = $2 WHERE run_id = $1");
        tx.execute(sql.bind(run_id).bind(time_text(self.db.clock.now()))).await?;
        tx.commit().await?;
        Ok(StartOutcome::Started)
    }

    /// Stores what the run has used so far; `false` if it is not `running`, and then nothing changes.
    pub async fn progress(&self, run_id: &str, totals: &RunTotals) -> Result<bool, StoreError> {
        let mut tx = self.db.unflushed().write_of_run(run_id).await?;
        let sql = bind_totals(
            query(concat!(
                "UPDATE runs SET updated_at = $2, ",
                set_totals!(),
                " WHERE run_id = $1 AND operation_kind = 'run' AND status = 'running'"
            ))
            .bind(run_id)
            .bind(time_text(self.db.clock.now())),
            totals,
        );
        let changed = tx.execute(sql).await? == 1;
        tx.commit().await?;
        Ok(changed)
    }

    /// Marks an active run for cancellation. It keeps its thread until it has stopped and finished;
    /// clients see it as `interrupted` at once ([`RunRow::reported_status`]). The first request
    /// decides about the action.
    pub async fn request_cancel(
        &self,
        run_id: &str,
        action: CancelAction,
    ) -> Result<CancelOutcome, StoreError> {
        let mut tx = self.db.write_of_run(run_id).await?;
        let Some(run) = run(&mut tx, run_id).await? else { return Ok(CancelOutcome::NotFound) };
        match run.decided_status.unwrap_or(run.reported_status()) {
            RunStatus::Pending | RunStatus::Running => {}
            RunStatus::Interrupted => return Ok(CancelOutcome::AlreadyInterrupted),
            status => return Ok(CancelOutcome::AlreadyTerminal(status)),
        }
        mark_cancelled(&mut tx, &run, action, self.db.clock.now()).await?;
        tx.commit().await?;
        Ok(CancelOutcome::Accepted)
    }

    /// Stores how a run that works will end. It keeps its thread until [`Runs::finish`], so that what is still to be
    /// written of it is written before anybody else writes; clients see it at work until then. A run that was asked to
    /// cancel is not decided to be a `success`, so no accepted cancellation is lost to a run that was just done, and one
    /// that is decided accepts no cancellation.
    ///
    /// # Errors
    /// [`StoreError::NotFound`]; [`StoreError::Invalid`] if `end.status` is an active one.
    pub async fn decide(&self, run_id: &str, end: &RunEnd) -> Result<DecideOutcome, StoreError> {
        check_end(end)?;
        let mut tx = self.db.write_of_run(run_id).await?;
        let run = run(&mut tx, run_id).await?.ok_or_else(|| StoreError::run_not_found(run_id))?;
        match run.cancel_action {
            _ if !run.status.is_active() => return Ok(DecideOutcome::AlreadyTerminal(run.status)),
            Some(action) if end.status == RunStatus::Success && run.decided_status.is_none() => {
                return Ok(DecideOutcome::CancelRequested(action));
            }
            _ => {}
        }
        let sql = bind_totals(
            query(concat!(
                "UPDATE runs SET updated_at = $2, ",
                set_totals!(),
                ", decided_status = $14, error = $15, stop_reason = $16 WHERE run_id = $1"
            ))
            .bind(run_id)
            .bind(time_text(self.db.clock.now())),
            &end.totals,
        );
        tx.execute(sql.bind(end.status.as_str()).bind(&end.error).bind(&end.stop_reason)).await?;
        tx.commit().await?;
        Ok(DecideOutcome::Decided)
    }

    /// Ends an active run, gives its thread the status that follows from that if the run has worked on it, and passes
    /// the thread to the first run that waits for it, if there is one. A run that was asked to cancel does not end as a
    /// `success`, unless that was [decided](Runs::decide) before.
    ///
    /// # Errors
    /// [`StoreError::NotFound`]; [`StoreError::Invalid`] if `end.status` is an active one.
    pub async fn finish(&self, run_id: &str, end: &RunEnd) -> Result<FinishOutcome, StoreError> {
        check_end(end)?;
        let now = time_text(self.db.clock.now());
        let mut tx = self.db.write_of_run(run_id).await?;
        let run = run(&mut tx, run_id).await?.ok_or_else(|| StoreError::run_not_found(run_id))?;
        match run.cancel_action {
            _ if !run.status.is_active() => return Ok(FinishOutcome::AlreadyTerminal(run.status)),
            Some(action) if end.status == RunStatus::Success && run.decided_status.is_none() => {
                return Ok(FinishOutcome::CancelRequested(action));
            }
            _ => {}
        }
        let sql = bind_totals(
            query(concat!(
                "UPDATE runs SET updated_at = $2, ",
                set_totals!(),
                ", status = $14, error = $15, stop_reason = $16, waiting = FALSE WHERE run_id = $1"
            ))
            .bind(run_id)
            .bind(&now),
            &end.totals,
        );
        tx.execute(sql.bind(end.status.as_str()).bind(&end.error).bind(&end.stop_reason)).await?;
        if run.status == RunStatus::Running {
            let sql = query("UPDATE threads_meta SET status = $2, updated_at = $3 WHERE thread_id = $1");
            let left = ThreadStatus::after(end.status);
            tx.execute(sql.bind(&run.thread_id).bind(left.as_str()).bind(&now)).await?;
        }
        let promoted = promote_waiting(&mut tx, &run.thread_id, &now).await?;
        tx.commit().await?;
        Ok(FinishOutcome::Finished { promoted })
    }
}

fn check_end(end: &RunEnd) -> Result<(), StoreError> {
    if end.status.is_active() {
        let problem = format!("a run cannot end as '{}'", end.status);
        return Err(StoreError::Invalid { field: "status", problem });
    }
    Ok(())
}

async fn run(tx: &mut WriteTx, run_id: &str) -> Result<Option<RunRow>, StoreError> {
    tx.fetch_optional(query("SELECT * FROM runs WHERE run_id = $1 AND operation_kind = 'run'").bind(run_id))
        .await
}

/// Gives the thread, if nobody holds it, to the run that has waited longest for it.
pub(super) async fn promote_waiting(
    tx: &mut WriteTx,
    thread_id: &str,
    now: &str,
) -> Result<Option<String>, StoreError> {
    let sql = "UPDATE runs SET waiting = FALSE, updated_at = $2 WHERE run_id = \
               (SELECT run_id FROM runs WHERE thread_id = $1 AND waiting ORDER BY admission_seq LIMIT 1) \
               AND NOT EXISTS (SELECT 1 FROM runs WHERE thread_id = $1 AND status IN ('pending', 'running') \
               AND NOT waiting) RETURNING run_id";
    let promoted: Option<(String,)> = tx.fetch_optional(query(sql).bind(thread_id).bind(now)).await?;
    Ok(promoted.map(|(run_id,)| run_id))
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
