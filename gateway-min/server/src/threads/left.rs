//! The state in which a run ended.

use chrono::DateTime;
use serde_json::{Map, Value as Json};
use threadkeep::id::ThreadId;
use threadkeep::saver::Load;
use threadkeep::state::{HistoryQuery, StateSnapshot};
use threadkeep_records::RunRow;

use super::Threads;

/// How many checkpoints are looked at together, at first and at most: few runs are asked for long after their end.
const PAGE: usize = 8;
const LARGEST_PAGE: usize = 1024;

impl Threads {
    /// The state in which a run ended, which the head is until the next writer; of an active run the head. `None` if there
    /// was no checkpoint, or it was removed since.
    ///
    /// The row of a run ends after its last write, and others write later. Where the clocks of processes differ, the
    /// newest checkpoint that names the run counts as its last one.
    ///
    /// # Errors
    /// The accessor's.
    pub(crate) async fn left_by(
        &self,
        run: &RunRow,
        load: &Load,
    ) -> threadkeep::Result<Option<StateSnapshot>> {
        let thread = ThreadId::from(run.thread_id.as_str());
        let Some(head) = self.accessor.get_loading(&thread, None, load.clone()).await? else {
            return Ok(None);
        };
        if run.status.is_active() || !is_later(run, &head) {
            return Ok(Some(head));
        }
        let mut own = names(run, &head).then_some(head.key.id);
        let (mut before, mut limit) = (Some(head.key.id), PAGE);
        loop {
            let query = HistoryQuery { before, limit: Some(limit), filter: Map::new(), load: Load::None };
            let page = self.accessor.history(&thread, query).await?;
            for state in &page {
                if is_later(run, state) {
                    own = own.or_else(|| names(run, state).then_some(state.key.id));
                    continue;
                }
                let last = own.filter(|_| !names(run, state)).unwrap_or(state.key.id);
                return self.accessor.get_loading(&thread, Some(last), load.clone()).await;
            }
            before = page.last().map(|state| state.key.id);
            if page.len() < limit {
                break;
            }
            limit = (2 * limit).min(LARGEST_PAGE);
        }
        match own {
            Some(last) => self.accessor.get_loading(&thread, Some(last), load.clone()).await,
            None => Ok(None),
        }
    }
}

/// Whether a checkpoint was written after the run had ended. An id has the time in milliseconds, and the next run may
/// begin within one.
fn is_later(run: &RunRow, state: &StateSnapshot) -> bool {
    let created = DateTime::parse_from_rfc3339(&state.created_at()).map(|at| at.timestamp_millis());
    let ended = run.updated_at.timestamp_millis();
    created.is_ok_and(|created| created > ended || created == ended && names_another(run, state))
}

fn run_of(state: &StateSnapshot) -> Option<&str> {
    state.metadata.extra.get("run_id").and_then(Json::as_str)
}

fn names(run: &RunRow, state: &StateSnapshot) -> bool {
    run_of(state) == Some(run.run_id.as_str())
}

fn names_another(run: &RunRow, state: &StateSnapshot) -> bool {
    run_of(state).is_some_and(|named| named != run.run_id)
}
