//! Lists of runs.

use super::{RunRow, RunStatus, Runs, run_columns_but_metadata};
use crate::codec::page_offset;
use crate::error::RecordsError;
use crate::query::Builder;
use crate::thread_search::push_metadata_within;

/// The maximum bytes of the metadata of a run in a list, as JSON: a request may have as many as a body.
const LISTED_METADATA_BYTES: i64 = 64 << 10;

/// The filter of [`Runs::list_by_thread`] and [`Runs::of_all_threads`].
#[derive(Clone, Debug)]
pub struct RunQuery {
    /// Only runs with this [`RunRow::reported_status`].
    pub status: Option<RunStatus>,
    /// The maximum number of rows.
    pub limit: u32,
    /// The number of rows to skip.
    pub offset: u64,
}

impl Runs {
    /// How many of the newest runs [`Runs::of_all_threads`] looks at, if they have ended.
    pub const SEARCHED: i64 = 10_000;

    /// The thread's runs, last admitted first, without reservations. Metadata of more than 64 KiB is left out, with
    /// [`METADATA_OMITTED_KEY`](crate::METADATA_OMITTED_KEY) in its place.
    pub async fn list_by_thread(
        &self,
        thread_id: &str,
        query: &RunQuery,
    ) -> Result<Vec<RunRow>, RecordsError> {
        let mut sql = self.listing();
        sql.push(" AND thread_id = ").push_bind(thread_id);
        push_status(&mut sql, query.status);
        sql.push(" ORDER BY admission_seq DESC LIMIT ").push_bind(i64::from(query.limit));
        sql.push(" OFFSET ").push_bind(page_offset(query.offset));
        self.db.fetch_all(sql.build()).await
    }

    /// The runs of all threads that `owner` may see, `None` for all, last admitted first, without reservations. Runs of
    /// an owner, and those that have ended in some way, are looked for among the newest [`Runs::SEARCHED`] alone: there
    /// is no index of them. Their metadata is as in [`Self::list_by_thread`].
    pub async fn of_all_threads(
        &self,
        owner: Option<&str>,
        query: &RunQuery,
    ) -> Result<Vec<RunRow>, RecordsError> {
        let mut sql = self.listing();
        if query.status.is_some_and(RunStatus::is_active) {
            sql.push(" AND status IN ('pending', 'running')");
        } else if query.status.is_some() || owner.is_some() {
            // Not by their numbers, which have gaps: of refused requests, reservations and deleted runs.
            sql.push(
                " AND admission_seq >= COALESCE((SELECT admission_seq FROM runs WHERE operation_kind = 'run' \
                 ORDER BY admission_seq DESC LIMIT 1 OFFSET ",
            );
            sql.push_bind(Self::SEARCHED - 1).push("), 0)");
        }
        if let Some(owner) = owner {
            sql.push(
                " AND thread_id IN (SELECT thread_id FROM threads_meta WHERE user_id IS NULL OR user_id = ",
            );
            sql.push_bind(owner).push(")");
        }
        push_status(&mut sql, query.status);
        sql.push(" ORDER BY admission_seq DESC LIMIT ").push_bind(i64::from(query.limit));
        sql.push(" OFFSET ").push_bind(page_offset(query.offset));
        self.db.fetch_all(sql.build()).await
    }

    /// The runs that are pending or running and not cancelled, first admitted first; of one thread, or all. Their
    /// metadata is as in [`Self::list_by_thread`].
    pub async fn list_active(&self, thread_id: Option<&str>) -> Result<Vec<RunRow>, RecordsError> {
        let mut sql = self.listing();
        sql.push(" AND status IN ('pending', 'running') AND cancel_action IS NULL");
        if let Some(thread_id) = thread_id {
            sql.push(" AND thread_id = ").push_bind(thread_id);
        }
        sql.push(" ORDER BY admission_seq");
        self.db.fetch_all(sql.build()).await
    }

    /// The statement of a list of runs, which goes on with further conditions.
    fn listing(&self) -> Builder {
        let mut sql = self.db.builder(concat!("SELECT ", run_columns_but_metadata!(), ", "));
        push_metadata_within(&mut sql, LISTED_METADATA_BYTES);
        sql.with(" FROM runs WHERE operation_kind = 'run'")
    }
}

/// The condition of a [`RunRow::reported_status`].
fn push_status(sql: &mut Builder, status: Option<RunStatus>) {
    match status {
        None => {}
        Some(status) if status.is_active() => {
            sql.push(" AND cancel_action IS NULL AND status = ").push_bind(status.as_str());
        }
        Some(RunStatus::Interrupted) => {
            sql.push(
                " AND (status = 'interrupted' OR (status IN ('pending', 'running') AND cancel_action IS NOT NULL))",
            );
        }
        Some(status) => {
            sql.push(" AND status = ").push_bind(status.as_str());
        }
    }
}
