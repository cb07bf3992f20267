//! Rollbacks that were requested of a process that is gone: the one that takes the run over carries them out.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use chrono::DateTime;
use serde_json::{Map, Value as Json};
use threadkeep::id::{CheckpointId, TaskId, ThreadId};
use threadkeep::saver::Load;
use threadkeep::state::{HistoryQuery, StateAccessor, StateSnapshot};
use threadkeep_records::{RecordsError, RunEnd, RunRow};
use tokio::time::Instant;

use super::Runs;
use super::control::RunGuard;
use super::error::RunError;
use super::worker::{ROLLED_BACK, restoring};
use crate::threads::lineage::RESTORED;

/// Checkpoints read at once while looking for the state before a run.
const PAGE: usize = 20;
/// How long a store that is unavailable is waited for. Without it no other run could work on the thread either.
const PATIENCE: Duration = Duration::from_mins(10);
/// The pauses between the attempts.
const PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

impl Runs {
    /// Restores the state before each of these runs, which this process has taken over, and ends them.
    pub(crate) fn roll_back(self: &Arc<Self>, taken_over: Vec<RunRow>) {
        for row in taken_over {
            tracing::warn!(
                run_id = row.run_id,
                thread_id = row.thread_id,
                "rolling back a run whose process is gone"
            );
            let runs = Arc::clone(self);
            // Before anyone can ask for the run: who waits for its end finds it here, and its lease is renewed.
            let guard = self.local.enter(&row.run_id);
            tokio::spawn(async move { runs.roll_back_one(row, guard).await });
        }
    }

    /// Holds `guard` until the run has ended. One that cannot be rolled back ends, too: its thread is needed.
    async fn roll_back_one(self: &Arc<Self>, row: RunRow, guard: RunGuard) {
        let _lock = self.threads.lock(&row.thread_id).await;
        guard.control.begun();
        let error = match self.restore_when_possible(&row).await {
            Ok(()) => ROLLED_BACK.to_owned(),
            // It is another process's, or will be: that one rolls it back.
            Err(error @ RunError::TakenOver) => {
                return tracing::warn!(run_id = row.run_id, %error, "not rolled back");
            }
            Err(error) if self.is_stopping() => {
                return tracing::warn!(run_id = row.run_id, %error, "left to be rolled back by the next process");
            }
            Err(error) => {
                tracing::error!(run_id = row.run_id, %error, "cannot roll back a run whose process is gone");
                format!("Run {} could not be rolled back, and what it committed is kept: {error}", row.run_id)
            }
        };
        let end = RunEnd { totals: row.totals, ..RunEnd::failed(&error) };
        if let Err(error) = self.finish(&row.run_id, &end).await {
            tracing::error!(run_id = row.run_id, %error, "cannot end a run that was rolled back");
            self.bury(&row.run_id, Some(end)).await;
        }
    }

    /// Restores the state before the run, again while the store is unavailable or another writer is in the way.
    async fn restore_when_possible(&self, row: &RunRow) -> Result<(), RunError> {
        let (until, mut pause) = (Instant::now() + PATIENCE, PAUSE);
        loop {
            match self.restore_before(row).await {
                Err(error) if error.may_pass() && Instant::now() + pause < until => {
                    tracing::warn!(run_id = row.run_id, %error, "cannot roll back a run yet");
                    tokio::select! {
                        () = tokio::time::sleep(pause) => {}
                        () = self.delegator.stopping.cancelled() => return Err(error),
                    }
                }
                done => return done,
            }
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }

    async fn restore_before(&self, row: &RunRow) -> Result<(), RunError> {
        let accessor = self.threads.accessor_for_run().await?;
        let thread = ThreadId::from(row.thread_id.as_str());
        let mut head = accessor.known_head(&thread).await?;
        // Only its owner writes to the thread, so the head stays until this process is taken for dead too.
        if !self.still_has(row).await? {
            return Err(RunError::TakenOver);
        }
        let run = Written::by(row, self.records.runs().kwargs(std::slice::from_ref(&row.run_id)).await?);
        let Some(before) = Before::find(accessor, &thread, &run).await? else { return Ok(()) };
        let point = accessor.captured_at(&thread, before.head, &before.since).await?;
        let extra = point.snapshot().map(|state| restoring(state.key.id, &state.metadata.extra));
        accessor.restore(&mut head, &point, extra.unwrap_or_default()).await?;
        Ok(())
    }

    /// Whether the run is active, and this process's.
    async fn still_has(&self, row: &RunRow) -> Result<bool, RecordsError> {
        let runs = self.records.runs();
        let found = runs.get(&row.run_id).await?;
        Ok(found.is_some_and(|row| row.status.is_active() && row.owner_worker_id.as_deref() == runs.owner()))
    }
}

/// The state before a run that has written something.
struct Before {
    /// The head; none if the thread had no checkpoint.
    head: Option<CheckpointId>,
    /// The tasks that the run's first checkpoint has applied.
    since: Vec<TaskId>,
}

impl Before {
    /// None if the run has written nothing: while it held the thread, all newer checkpoints were its own.
    async fn find(
        accessor: &StateAccessor,
        thread: &ThreadId,
        run: &Written<'_>,
    ) -> threadkeep::Result<Option<Self>> {
        let (mut before, mut first) = (None, None::<StateSnapshot>);
        loop {
            let query = HistoryQuery { before, limit: Some(PAGE), filter: Map::new(), load: Load::None };
            let page = accessor.history(thread, query).await?;
            let ended = page.len() < PAGE;
            for state in page {
                before = Some(state.key.id);
                if run.is_of(&state) {
                    first = Some(state);
                    continue;
                }
                return Ok(first.map(|first| Self { head: before, since: first.applied }));
            }
            if ended {
                return Ok(first.map(|first| Self { head: None, since: first.applied }));
            }
        }
    }
}

/// What shows that a checkpoint was written by a run.
struct Written<'a> {
    row: &'a RunRow,
    /// The text of its request, which may name the checkpoint to start from.
    request: String,
}

impl<'a> Written<'a> {
    fn by(row: &'a RunRow, mut kwargs: BTreeMap<String, Json>) -> Self {
        Self { row, request: kwargs.remove(&row.run_id).unwrap_or_default().to_string() }
    }

    /// Whether the checkpoint names the run, or restores the one that the run was to start from.
    fn is_of(&self, state: &StateSnapshot) -> bool {
        let Self { row, request } = self;
        if state.metadata.extra.get("run_id").and_then(Json::as_str) == Some(row.run_id.as_str()) {
            return true;
        }
        let restored = state.metadata.extra.get(RESTORED).and_then(Json::as_str);
        let is_asked_for = restored.is_some_and(|id| request.contains(id));
        let created = DateTime::parse_from_rfc3339(&state.created_at());
        is_asked_for && created.is_ok_and(|created| created > row.created_at)
    }
}
