//! The state in which a run ended.

use serde_json::Map;
use threadkeep::Error;
use threadkeep::id::ThreadId;
use threadkeep::saver::Load;
use threadkeep::state::{HistoryQuery, StateSnapshot};
use threadkeep_records::RunRow;

use super::Threads;

impl Threads {
    /// The state in which a run ended; of an active run the head. `None` if there was no checkpoint, or it was removed
    /// since, with all before it.
    ///
    /// The row names the newest checkpoint of that moment, and no later one has a smaller id. The rows of earlier
    /// versions, of runs that never started, and of processes that died do not: then it is the newest checkpoint that
    /// names the run.
    ///
    /// # Errors
    /// The accessor's.
    pub(crate) async fn left_by(
        &self,
        run: &RunRow,
        load: &Load,
    ) -> threadkeep::Result<Option<StateSnapshot>> {
        let thread = ThreadId::from(run.thread_id.as_str());
        if run.status.is_active() {
            return self.accessor.get_loading(&thread, None, load.clone()).await;
        }
        let (before, filter) = match run.left_checkpoint.as_deref() {
            Some("") => return Ok(None),
            Some(left) => {
                let place = || format!("runs.left_checkpoint of row {}", run.run_id);
                let left = left.parse().map_err(|error: uuid::Error| Error::corrupt(place(), error))?;
                let found = self.accessor.get_loading(&thread, Some(left), load.clone()).await?;
                if found.is_some() {
                    return Ok(found);
                }
                // A pass has removed it: the newest that is left of those up to it.
                (Some(left), Map::new())
            }
            None => (None, Map::from_iter([("run_id".to_owned(), run.run_id.as_str().into())])),
        };
        let query = HistoryQuery { before, limit: Some(1), filter, load: load.clone() };
        Ok(self.accessor.history(&thread, query).await?.pop())
    }
}
