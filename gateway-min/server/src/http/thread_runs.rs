//! The runs of a thread, one after the other, for those who follow the thread.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use threadkeep::id::ThreadId;

use super::auth::check_thread;
use super::error::{ApiError, OrApiError as _};
use super::threads::existing;
use crate::app::App;
use crate::auth::Principal;
use crate::streams::bridge::HEARTBEAT;
use threadkeep_records::{RecordsError, RunBrief, RunRow};

pub(super) const FAILED: &str = "Failed to read thread";
/// How often the records are searched for new runs of other processes. This process announces its own.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How many runs are looked at: more do not start between two looks.
const LOOKED_AT: u32 = 100;

/// The runs of a thread in the order in which they are followed.
pub(super) struct RunsOf {
    app: Arc<App>,
    caller: Principal,
    thread: ThreadId,
    /// The runs of the last look.
    known: BTreeSet<String>,
    /// The runs to follow, and the event after which, if not from the beginning.
    waiting: VecDeque<(String, Option<String>)>,
}

/// What comes next on a thread.
pub(super) enum Upcoming {
    /// A run, and the event after which it is followed, if not from its beginning.
    Run(Box<RunRow>, Option<String>),
    /// No run for the time of a heartbeat.
    Nothing,
}

impl RunsOf {
    pub(super) fn new(app: Arc<App>, caller: Principal, thread: ThreadId) -> Self {
        let (known, waiting) = (BTreeSet::new(), VecDeque::new());
        Self { app, caller, thread, known, waiting }
    }

    pub(super) fn app(&self) -> &Arc<App> {
        &self.app
    }

    pub(super) fn thread(&self) -> &ThreadId {
        &self.thread
    }

    /// The runs that there were at the last look.
    pub(super) fn known(&self) -> &BTreeSet<String> {
        &self.known
    }

    /// `None` if the thread is gone or no longer the caller's: it may have been deleted and created again, by another
    /// user. Ask after a read of the thread: a check before it says nothing about what is read.
    pub(super) async fn check(&self) -> Option<()> {
        let row = existing(&self.app, &self.thread, FAILED).await.ok()?;
        row.visible_to(self.caller.sees()).then_some(())
    }

    /// Starts after this event, `<run>:<event>`, or with the active run.
    ///
    /// # Errors
    /// 500 if the records cannot be read.
    pub(super) async fn after(&mut self, last_event_id: Option<&str>) -> Result<(), ApiError> {
        let runs = self.look().await?;
        let last = last_event_id.and_then(|id| id.rsplit_once(':'));
        let seen = last.and_then(|(run, _)| runs.iter().position(|row| row.run_id == run));
        for (index, run) in runs.into_iter().enumerate() {
            let event = last.filter(|_| seen == Some(index)).map(|(_, event)| event.to_owned());
            if seen.map_or(run.status.is_active(), |seen| index >= seen) {
                self.waiting.push_back((run.run_id, event));
            }
        }
        Ok(())
    }

    /// Starts with the runs of which `wanted` is true, or if there is none with the newest run.
    ///
    /// # Errors
    /// 500 if the records cannot be read.
    pub(super) async fn with(&mut self, wanted: impl Fn(&RunBrief) -> bool) -> Result<(), ApiError> {
        let mut runs = self.look().await?;
        let newest = runs.len().saturating_sub(1);
        let first = runs.iter().position(wanted).unwrap_or(newest);
        self.waiting.extend(runs.drain(first..).map(|run| (run.run_id, None)));
        Ok(())
    }

    /// The runs that were admitted before this one and have ended: the newest of them.
    ///
    /// # Errors
    /// Those of the read.
    pub(super) async fn ended_before(&self, run_id: &str) -> Result<Vec<RunBrief>, RecordsError> {
        let page = self.app.records.runs().briefs(self.thread.as_str(), LOOKED_AT).await?;
        let earlier = page.into_iter().skip_while(|run| run.run_id != run_id).skip(1);
        Ok(earlier.filter(|run| !run.status.is_active()).collect())
    }

    /// The runs that appeared since the last look, oldest first: those that were admitted after the newest of its runs
    /// that is still there. Their times say nothing: the clock may have been set back.
    async fn look(&mut self) -> Result<Vec<RunBrief>, ApiError> {
        let page = self.app.records.runs().briefs(self.thread.as_str(), LOOKED_AT).await;
        let page = page.or_internal(FAILED)?;
        let known = page.iter().map(|run| run.run_id.clone()).collect();
        let known = std::mem::replace(&mut self.known, known);
        let mut new: Vec<RunBrief> =
            page.into_iter().take_while(|run| !known.contains(&run.run_id)).collect();
        new.reverse();
        Ok(new)
    }

    /// The next run, or that there is none for a while; `None` if the stream is over: the gateway stops, or the thread is
    /// gone or no longer the caller's.
    pub(super) async fn next(&mut self) -> Option<Upcoming> {
        loop {
            if self.waiting.is_empty() && !self.wait().await? {
                return Some(Upcoming::Nothing);
            }
            let (run_id, after) = self.waiting.pop_front()?;
            // The thread may have been deleted and created again, by another user.
            check_thread(&self.app, &self.caller, &self.thread).await.ok()?;
            // Otherwise the run was deleted meanwhile.
            if let Some(run) = self.app.records.runs().get(&run_id).await.ok()? {
                return Some(Upcoming::Run(Box::new(run), after));
            }
        }
    }

    /// Waits for a new run; `false` if there is none for the time of a heartbeat.
    async fn wait(&mut self) -> Option<bool> {
        let beat = tokio::time::sleep(HEARTBEAT);
        tokio::pin!(beat);
        loop {
            let streams = Arc::clone(&self.app.streams);
            let announced = streams.announced();
            tokio::pin!(announced);
            // From here on, so that a run that starts during the look is not missed.
            announced.as_mut().enable();
            let had_runs = !self.known.is_empty();
            match self.look().await {
                Ok(found) => self.waiting.extend(found.into_iter().map(|run| (run.run_id, None))),
                // It may be back at the next look.
                Err(error) => tracing::debug!(%error, thread = %self.thread, "cannot look for new runs"),
            }
            if !self.waiting.is_empty() {
                return Some(true);
            }
            if self.app.runs.is_stopping() {
                return None;
            }
            if had_runs && self.known.is_empty() {
                // Deleted, with its thread or one by one.
                existing(&self.app, &self.thread, FAILED).await.ok()?;
            }
            tokio::select! {
                () = announced => {}
                () = tokio::time::sleep(LOOK_EVERY) => {}
                () = &mut beat => return Some(false),
            }
        }
    }
}
