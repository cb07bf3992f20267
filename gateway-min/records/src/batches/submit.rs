//! Submitting a batch.

use serde_json::Value as Json;

use super::read::counted;
use super::{BatchRow, BatchStatus, Batches, ItemCounts, not_found};
use crate::codec::{JsonObject, object_text};
use crate::error::{Entity, RecordsError};
use crate::query::{Builder, query};
use crate::runs::push_active_run;
use crate::transaction::WriteTx;

/// How many items one statement inserts.
const ITEMS_PER_STATEMENT: usize = 500;
/// How much text one statement inserts at most, in bytes, except for a single longer item.
const BYTES_PER_STATEMENT: usize = 4 << 20;

/// A batch to submit.
#[derive(Clone, Debug)]
pub struct NewBatch {
    /// Its id: `subagent-batch-` and hexadecimal digits.
    pub id: String,
    /// The thread that delegates.
    pub thread_id: String,
    /// The run that delegates.
    pub run_id: String,
    /// The model's id of the call.
    pub tool_call_id: String,
    /// A text that is the same if the same submission is repeated.
    pub submission_key: String,
    /// What people call it.
    pub title: String,
    /// The subagent.
    pub subagent_type: String,
    /// How many items may be queued or at work.
    pub max_live_items: u32,
    /// How many items may be at work.
    pub max_running_items: u32,
    /// How often an item is tried.
    pub max_attempts: u32,
    /// What a worker needs to know.
    pub execution_spec: JsonObject,
    /// The limit of tokens that binds it with all other batches that have the same; `None` if it has none or its own.
    pub budget_id: Option<String>,
    /// The items, in their order; their keys differ.
    pub items: Vec<NewBatchItem>,
}

/// An item to submit.
#[derive(Clone, Debug, PartialEq)]
pub struct NewBatchItem {
    /// What the submission calls it.
    pub key: String,
    /// The task.
    pub prompt: String,
    /// What its result is checked against.
    pub acceptance_criteria: Option<Vec<String>>,
}

/// A submitted batch.
#[derive(Clone, Debug, PartialEq)]
pub struct SubmittedBatch {
    /// Its row.
    pub batch: BatchRow,
    /// Its items by status.
    pub counts: ItemCounts,
    /// Whether this call inserted it; otherwise an earlier one did.
    pub is_new: bool,
}

impl Batches {
    /// Stores a batch with its items, for a run that is active and this process's. If the thread's owner has a batch
    /// with this key, that one is returned and nothing is stored, whatever its items are.
    ///
    /// # Errors
    /// [`RecordsError::Invalid`] if there is no item. [`RecordsError::RunEnded`]: the thread may be deleted by then,
    /// and its id another user's.
    pub async fn submit(&self, new: NewBatch) -> Result<SubmittedBatch, RecordsError> {
        if new.items.is_empty() {
            let problem = "a batch has at least one item".to_owned();
            return Err(RecordsError::Invalid { field: "items", problem });
        }
        let (thread_id, this) = (new.thread_id.clone(), self.clone());
        let submitted =
            self.db.write(&thread_id, move |tx| Box::pin(async move { this.insert(tx, new).await }));
        submitted.await
    }

    async fn insert(&self, tx: &mut WriteTx<'_>, new: NewBatch) -> Result<SubmittedBatch, RecordsError> {
        let mut owner = self.db.builder("SELECT thread_id, user_id FROM threads_meta WHERE thread_id = ");
        owner.push_bind(&new.thread_id).push(" AND ");
        push_active_run(&mut owner, &new.thread_id, &new.run_id, self.owner.as_deref());
        let owner: Option<(String, Option<String>)> = tx.fetch_optional(owner.build()).await?;
        let (_, user_id) = owner.ok_or_else(|| RecordsError::run_ended(&new.run_id))?;
        let mut sql = self.db.builder("SELECT ");
        self.now().push(&mut sql);
        let now: Option<(String,)> = tx.fetch_optional(sql.build()).await?;
        let (now,) = now.ok_or_else(|| not_found(Entity::Batch, &new.id))?;
        let insert = query(
            "INSERT INTO subagent_batches (id, user_id, thread_id, run_id, tool_call_id, submission_key, title, \
             subagent_type, status, total_items, max_live_items, max_running_items, max_attempts, execution_spec, \
             created_at, updated_at, budget_id) \
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17) \
             ON CONFLICT DO NOTHING",
        );
        let insert = insert
            .bind(&new.id)
            .bind(&user_id)
            .bind(&new.thread_id)
            .bind(&new.run_id)
            .bind(&new.tool_call_id)
            .bind(&new.submission_key)
            .bind(&new.title)
            .bind(&new.subagent_type)
            .bind(BatchStatus::Queued.as_str())
            .bind(i64::try_from(new.items.len()).unwrap_or(i64::MAX))
            .bind(i64::from(new.max_live_items))
            .bind(i64::from(new.max_running_items))
            .bind(i64::from(new.max_attempts))
            .bind(object_text(&new.execution_spec))
            .bind(&now)
            .bind(&now)
            .bind(new.budget_id.as_ref().unwrap_or(&new.id));
        let is_new = tx.execute(insert).await? > 0;
        if is_new {
            let mut items = new.items.iter().enumerate().peekable();
            while items.peek().is_some() {
                let mut insert = Inserting::of(self.db.builder(INSERT_ITEMS), &new.id, &now);
                while let Some((position, item)) = items.next_if(|_| !insert.is_full()) {
                    insert.add(position, item);
                }
                tx.execute(insert.sql.build()).await?;
            }
        }
        let stored = query(
            "SELECT * FROM subagent_batches WHERE COALESCE(user_id, '') = COALESCE($1, '') AND submission_key = $2",
        );
        let stored: Option<BatchRow> =
            tx.fetch_optional(stored.bind(&user_id).bind(&new.submission_key)).await?;
        let batch = stored.ok_or_else(|| not_found(Entity::Batch, &new.id))?;
        let counts =
            counted(tx.fetch_all(super::read::counts(&self.db, std::slice::from_ref(&batch.id))).await?);
        let counts = counts.get(&batch.id).cloned().unwrap_or_default();
        Ok(SubmittedBatch { batch, counts, is_new })
    }
}

const INSERT_ITEMS: &str = "INSERT INTO subagent_batch_items (id, batch_id, item_key, position, prompt, \
    acceptance_criteria, status, attempt, result_truncated, created_at, updated_at) VALUES ";

/// A statement that inserts several items.
struct Inserting<'n> {
    sql: Builder,
    batch_id: &'n str,
    now: &'n str,
    items: usize,
    bytes: usize,
}

impl<'n> Inserting<'n> {
    fn of(sql: Builder, batch_id: &'n str, now: &'n str) -> Self {
        Self { sql, batch_id, now, items: 0, bytes: 0 }
    }

    fn is_full(&self) -> bool {
        self.items == ITEMS_PER_STATEMENT || self.bytes >= BYTES_PER_STATEMENT
    }

    fn add(&mut self, position: usize, item: &NewBatchItem) {
        let criteria =
            item.acceptance_criteria.as_ref().map(|criteria| Json::from(criteria.clone()).to_string());
        self.bytes += item.key.len() + item.prompt.len() + criteria.as_ref().map_or(0, String::len);
        let sql = &mut self.sql;
        sql.push(if self.items == 0 { "(" } else { ", (" });
        sql.push_bind(item_id(self.batch_id, position)).push(", ");
        sql.push_bind(self.batch_id).push(", ").push_bind(&item.key).push(", ");
        sql.push_bind(i64::try_from(position).unwrap_or(i64::MAX)).push(", ");
        sql.push_bind(&item.prompt).push(", ").push_bind(criteria).push(", 'pending', 0, FALSE, ");
        sql.push_bind(self.now).push(", ").push_bind(self.now).push(")");
        self.items += 1;
    }
}

/// The id of an item, from its place: the same submission has the same items.
fn item_id(batch_id: &str, position: usize) -> String {
    let hash = blake3::hash(format!("{batch_id}\n{position}").as_bytes()).to_hex();
    format!("batch-item-{}", &hash[..32])
}
