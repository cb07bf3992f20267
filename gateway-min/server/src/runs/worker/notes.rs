//! What a run stores besides its state: its duration, its title, what it changed in the thread's files. A failure here
//! does not fail the run, unless it is that the store lost what it had acknowledged.

use std::io;

use chrono::{DateTime, Utc};
use serde_json::Value as Json;
use threadkeep::id::ChannelName;
use threadkeep::saver::Load;
use threadkeep::state::{RollbackPoint, StateAccessor};
use threadkeep_agent::duration::{self, RunNotes};
use threadkeep_agent::tools::Snapshot;

use super::Worker;
use super::conclude::End;
use crate::runs::interrupted_title;
use threadkeep_records::RunStatus;

impl Worker<'_> {
    /// The thread's current files. A failure only costs the summary of their changes.
    pub(super) async fn look_at_workspace(&self) -> Option<Snapshot> {
        let root = self.runs.delegator.agents.thread_dir(&self.spec.thread_id);
        // Most threads never have files. One look in place takes less than asking another thread to look.
        if root.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            return Some(Snapshot::default());
        }
        let taken = tokio::task::spawn_blocking(move || Snapshot::take(&root)).await;
        let taken = taken.unwrap_or_else(|error| Err(error.into()));
        let run_id = &self.spec.run_id;
        taken.inspect_err(|error| tracing::warn!(run_id, %error, "cannot read the thread's files")).ok()
    }

    /// Reports what the run changed in the thread's directory, if anything.
    pub(super) async fn note_workspace_changes(&mut self) {
        let Some(before) = self.workspace.take() else { return };
        let Some(after) = self.look_at_workspace().await else { return };
        if let Some(changes) = before.changes(&after) {
            self.reporter.journal.workspace_changes(&changes);
        }
    }

    /// Notes how long the run took. A failure only costs a later history read some work.
    pub(super) async fn note_duration(&mut self, accessor: &StateAccessor, started: DateTime<Utc>) {
        let (run_id, seconds) = (&self.spec.run_id, (self.runs.records.now() - started).num_seconds());
        let notes = RunNotes {
            durations: [(run_id.clone(), u64::try_from(seconds).unwrap_or(0))].into(),
            messages: self.reporter.journal.answers().map(|id| (id.to_owned(), run_id.clone())).collect(),
        };
        let Some(head) = &self.left else { return };
        let before = self.rollback.as_ref().and_then(RollbackPoint::snapshot);
        match duration::note_on(accessor, head, before, &notes).await {
            Ok(noted) => self.noted = noted.map(|noted| noted.key.id),
            Err(error) => {
                self.reporter.report_if_lost(&error).await;
                tracing::warn!(run_id, %error, "could not note the duration of the run");
            }
        }
    }

    /// Gives an interrupted or failed first turn its title. Returns the state's title, which becomes the thread's display
    /// name.
    pub(super) async fn settle_title(&mut self, accessor: &StateAccessor, end: &End) -> Option<String> {
        let load = Load::Only([ChannelName::from("title")].into());
        let settled = async {
            let title = if end.status == RunStatus::Success {
                self.left.as_ref().map(|state| state.json("title"))
            } else {
                // A restored state is unchanged, and a failed edit is not a first turn.
                if !self.restored && !self.spec.edits {
                    let config = self.runs.config.current_async().await;
                    if let Some(head) = self.head.clone() {
                        let run_id = &self.spec.run_id;
                        self.noted = interrupted_title::write(accessor, head, run_id, &config.title).await?;
                    }
                }
                accessor.get_loading(&self.thread, None, load).await?.map(|state| state.json("title"))
            };
            Ok::<_, threadkeep::Error>(title.transpose()?.flatten())
        };
        match settled.await {
            Ok(Some(Json::String(title))) => Some(title),
            Ok(_) => None,
            Err(error) => {
                self.reporter.report_if_lost(&error).await;
                tracing::warn!(thread_id = self.spec.thread_id, %error, "could not set the title");
                None
            }
        }
    }
}
