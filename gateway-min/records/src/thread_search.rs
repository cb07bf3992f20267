//! Searches threads by exact metadata, status and id, for one user.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::{Number, Value};

use super::codec::{Cells, JsonObject, cut, page_offset};
use super::error::RecordsError;
use super::failure::DatabaseError;
use super::query::{Builder, FromRow, Row};
use super::threads::{DISPLAY_NAME_MAX_CHARS, ThreadRow, ThreadStatus, Threads};

/// The maximum number of keys of one [`MetadataFilter`]; the database refuses expressions of unbounded depth.
pub const FILTER_MAX_KEYS: usize = 100;

/// The key, `true`, in the place of metadata that is left out: of threads, see [`ThreadQuery::metadata_bytes`], and of
/// runs in lists.
pub const METADATA_OMITTED_KEY: &str = "svc_metadata_omitted";

/// The filter of a search.
#[derive(Clone, Debug, Default)]
pub struct ThreadQuery {
    /// Every key must have its value.
    pub metadata: MetadataFilter,
    /// Only threads with this stored status.
    pub status: Option<ThreadStatus>,
    /// Only these threads.
    pub ids: Option<Vec<String>>,
    /// Only threads with this title, of which rows have the first [`DISPLAY_NAME_MAX_CHARS`]; `Some(None)` for those
    /// without one.
    pub title: Option<Option<String>>,
    /// Only threads that this user may see: their own and those without an owner. `None` sees all.
    pub owner: Option<String>,
    /// The order; `None` for pinned threads first, then the last updated.
    pub order: Option<ThreadOrder>,
    /// The maximum number of rows.
    pub limit: u32,
    /// The number of rows to skip.
    pub offset: u64,
    /// The maximum bytes of the metadata of all rows, as JSON; `None` for no limit. Smaller metadata goes first. A row
    /// beyond it has only [`METADATA_OMITTED_KEY`].
    pub metadata_bytes: Option<usize>,
}

/// An order of threads. Threads that are equal in it are in that of their ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadOrder {
    /// What is compared.
    pub by: ThreadSort,
    /// Whether the greatest is last.
    pub ascending: bool,
}

/// What threads can be sorted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadSort {
    /// The id.
    ThreadId,
    /// The name of the stored status.
    Status,
    /// When it was created.
    CreatedAt,
    /// When its record last changed.
    UpdatedAt,
}

impl ThreadOrder {
    fn sql(self) -> String {
        let column = match self.by {
            ThreadSort::ThreadId => "thread_id",
            ThreadSort::Status => "status",
            ThreadSort::CreatedAt => "created_at",
            ThreadSort::UpdatedAt => "updated_at",
        };
        let direction = if self.ascending { "ASC" } else { "DESC" };
        format!("{column} {direction}, thread_id {direction}")
    }
}

/// Validated metadata keys with their required values.
#[derive(Clone, Debug, Default)]
pub struct MetadataFilter(Vec<Entry>);

/// A key with its required value.
#[derive(Clone, Debug)]
struct Entry {
    key: String,
    /// The JSON texts of the value.
    texts: Vec<String>,
    /// Whether metadata without the key matches, too.
    or_absent: bool,
}

impl MetadataFilter {
    /// Validates a filter from a client.
    ///
    /// * A key has at least one character, all from `[A-Za-z0-9_-]`.
    /// * A value is null, a boolean, an integer of 64 bits, a float or a string.
    /// * Types matter: `true`, `1` and `"1"` are three values, and null does not match an absent key. An integer
    ///   matches only stored integers; a float matches the stored number equal to it.
    ///
    /// # Errors
    /// [`FilterRejection`] with every entry that breaks these rules.
    pub fn parse(filter: &JsonObject) -> Result<Self, FilterRejection> {
        let mut accepted = Vec::new();
        let mut rejected = Vec::new();
        for (key, value) in filter {
            let texts = if accepted.len() == FILTER_MAX_KEYS {
                Err(FilterProblem::TooMany)
            } else if is_filter_key(key) {
                stored_texts(value).ok_or(FilterProblem::Value)
            } else {
                Err(FilterProblem::Key)
            };
            match texts {
                Ok(texts) => accepted.push(Entry { key: key.clone(), texts, or_absent: false }),
                Err(problem) => rejected.push((key.clone(), problem)),
            }
        }
        if rejected.is_empty() {
            Ok(Self(accepted))
        } else {
            Err(FilterRejection { rejected, accepted: accepted.len() })
        }
    }

    /// The filter that metadata without `key` matches, too.
    #[must_use]
    pub fn or_without(mut self, key: &str) -> Self {
        for entry in self.0.iter_mut().filter(|entry| entry.key == key) {
            entry.or_absent = true;
        }
        self
    }
}

fn is_filter_key(key: &str) -> bool {
    !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'))
}

/// The JSON texts as which a value equal to `value` can be stored.
fn stored_texts(value: &Value) -> Option<Vec<String>> {
    match value {
        Value::Null | Value::Bool(_) | Value::String(_) => Some(vec![value.to_string()]),
        Value::Number(number) if number.is_i64() => Some(vec![number.to_string()]),
        Value::Number(number) if number.is_u64() => None,
        Value::Number(number) => number.as_f64().map(float_texts),
        Value::Array(_) | Value::Object(_) => None,
    }
}

/// The float itself, and the integer equal to it.
fn float_texts(float: f64) -> Vec<String> {
    // Zero has two float representations.
    let floats = if float == 0.0 { vec![0.0, -0.0] } else { vec![float] };
    let mut texts: Vec<String> =
        floats.into_iter().filter_map(Number::from_f64).map(|number| number.to_string()).collect();
    // Every integer that JSON metadata can hold is between these two; both are exact floats.
    if float.fract() == 0.0 && (-(2f64.powi(63))..2f64.powi(64)).contains(&float) {
        texts.push(format!("{:.0}", float + 0.0));
    }
    texts
}

/// Why one entry of a metadata filter was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FilterProblem {
    /// The key is empty, or has characters other than letters, digits, `_` and `-`.
    Key,
    /// The value is not null, a boolean, a 64-bit integer, a float or a string.
    Value,
    /// There are more than [`FILTER_MAX_KEYS`] entries.
    TooMany,
}

impl fmt::Display for FilterProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key => f.write_str("a key has only letters, digits, '_' and '-'"),
            Self::Value => {
                f.write_str("a value is null, a boolean, an integer of 64 bits, a float or a string")
            }
            Self::TooMany => write!(f, "there are at most {FILTER_MAX_KEYS} keys"),
        }
    }
}

/// An invalid metadata filter.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct FilterRejection {
    /// The rejected keys, each with the reason.
    pub rejected: Vec<(String, FilterProblem)>,
    /// How many entries were valid.
    pub accepted: usize,
}

impl fmt::Display for FilterRejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Invalid metadata filter entries: ")?;
        for (index, (key, problem)) in self.rejected.iter().enumerate() {
            let separator = if index == 0 { "" } else { "; " };
            write!(f, "{separator}'{key}': {problem}")?;
        }
        Ok(())
    }
}

/// A found thread, perhaps without its metadata, and the bytes of that.
struct Measured {
    row: ThreadRow,
    bytes: i64,
}

impl FromRow for Measured {
    fn from_row(row: &Row<'_>) -> Result<Self, DatabaseError> {
        let bytes = Cells::new(row, "threads_meta", &["thread_id"]).int("metadata_bytes")?;
        Ok(Self { row: ThreadRow::from_row(row)?, bytes })
    }
}

impl Threads {
    /// The threads that match `query`, in its order; without one pinned ones first, then the last updated, then the
    /// greatest id.
    pub async fn search(&self, query: &ThreadQuery) -> Result<Vec<ThreadRow>, RecordsError> {
        match query.metadata_bytes {
            None => self.found(self.db.builder("SELECT *"), query).await,
            Some(max_bytes) => self.within(max_bytes, query).await,
        }
    }

    /// [`Self::search`] with bounded metadata. What fits whatever the others have is read with the rows, in one statement;
    /// only larger metadata needs another one.
    async fn within(&self, max_bytes: usize, query: &ThreadQuery) -> Result<Vec<ThreadRow>, RecordsError> {
        let max_bytes = i64::try_from(max_bytes).unwrap_or(i64::MAX);
        let share = max_bytes / i64::from(query.limit.max(1));
        let mut sql = self.db.builder(
            "SELECT thread_id, assistant_id, user_id, display_name, status, created_at, updated_at, \
             CAST(OCTET_LENGTH(metadata_json) AS BIGINT) AS metadata_bytes, ",
        );
        push_metadata_within(&mut sql, share);
        let found: Vec<Measured> = self.found(sql, query).await?;
        let is_large = |thread: &Measured| thread.bytes > share;
        let shown: i64 = found.iter().filter(|thread| !is_large(thread)).map(|thread| thread.bytes).sum();
        let mut left = max_bytes.saturating_sub(shown);
        let mut fitting = Vec::new();
        for thread in found.iter().filter(|thread| is_large(thread)) {
            if thread.bytes <= left {
                left -= thread.bytes;
                fitting.push(thread.row.thread_id.clone());
            }
        }
        let mut whole = self.whole(fitting, query).await?;
        // One that was deleted meanwhile, or does not match any more, stays as it was found: to a client, a short page
        // is the last one.
        let rows = found.into_iter().map(|Measured { row, .. }| whole.remove(&row.thread_id).unwrap_or(row));
        Ok(rows.collect())
    }

    /// Those of these threads that match `query`, by id.
    async fn whole(
        &self,
        ids: Vec<String>,
        query: &ThreadQuery,
    ) -> Result<BTreeMap<String, ThreadRow>, RecordsError> {
        if ids.is_empty() {
            return Ok(BTreeMap::new());
        }
        let query = ThreadQuery { ids: Some(ids), offset: 0, order: None, ..query.clone() };
        let rows: Vec<ThreadRow> = self.found(self.db.builder("SELECT *"), &query).await?;
        Ok(rows.into_iter().map(|row| (row.thread_id.clone(), row)).collect())
    }

    /// The ids and titles of what [`Self::search`] finds.
    pub async fn titles(&self, query: &ThreadQuery) -> Result<Vec<(String, Option<String>)>, RecordsError> {
        self.found(self.db.builder("SELECT thread_id, display_name"), query).await
    }

    /// What `sql`, which names the columns, selects of the threads that match.
    async fn found<T: FromRow>(&self, mut sql: Builder, query: &ThreadQuery) -> Result<Vec<T>, RecordsError> {
        sql.push(" FROM threads_meta WHERE TRUE");
        push_conditions(&mut sql, query);
        let order = query.order.map(ThreadOrder::sql);
        let order = order.as_deref().unwrap_or("pinned DESC, updated_at DESC, thread_id DESC");
        sql.push(" ORDER BY ").push(order).push(" LIMIT ").push_bind(i64::from(query.limit));
        sql.push(" OFFSET ").push_bind(page_offset(query.offset));
        self.db.fetch_all(sql.build()).await
    }

    /// How many threads match `query`, ignoring its limit and offset.
    pub async fn count(&self, query: &ThreadQuery) -> Result<u64, RecordsError> {
        let mut sql = self.db.builder("SELECT COUNT(*) FROM threads_meta WHERE TRUE");
        push_conditions(&mut sql, query);
        let count: Vec<(i64,)> = self.db.fetch_all(sql.build()).await?;
        Ok(count.first().map_or(0, |(count,)| count.unsigned_abs()))
    }
}

/// Appends the column `metadata_json`, with [`METADATA_OMITTED_KEY`] in the place of more than `max_bytes`.
pub(super) fn push_metadata_within(sql: &mut Builder, max_bytes: i64) {
    sql.push("CASE WHEN OCTET_LENGTH(metadata_json) <= ").push_bind(max_bytes);
    sql.push(" THEN metadata_json ELSE ").push_bind(format!("{{\"{METADATA_OMITTED_KEY}\":true}}"));
    sql.push(" END AS metadata_json");
}

fn push_conditions(sql: &mut Builder, query: &ThreadQuery) {
    if let Some(owner) = &query.owner {
        sql.push(" AND (user_id IS NULL OR user_id = ").push_bind(owner).push(")");
    }
    if let Some(status) = query.status {
        sql.push(" AND status = ").push_bind(status.as_str());
    }
    if let Some(ids) = &query.ids {
        sql.push(" AND ");
        sql.push_text_in("thread_id", ids);
    }
    match &query.title {
        None => {}
        Some(None) => _ = sql.push(" AND display_name IS NULL"),
        Some(Some(title)) => {
            sql.push(" AND display_name = ").push_bind(cut(title, DISPLAY_NAME_MAX_CHARS));
        }
    }
    for Entry { key, texts, or_absent } in &query.metadata.0 {
        sql.push(" AND (");
        sql.push_json_is("metadata_json", key, texts);
        // Of an absent key the comparison is null.
        sql.push(if *or_absent { ") IS NOT FALSE" } else { ")" });
    }
}
