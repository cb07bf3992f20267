//! The limit of tokens that a run shares with its batches: what they have used of it.
//!
//! Each batch has its sum in its row, and the run has a row of its own. What all have used is read from these: one row a
//! batch, however many items they have. Nothing locks the rows of two batches.

use super::Batches;
use crate::codec::Cells;
use crate::error::RecordsError;
use crate::executions::ExecutionTokens;
use crate::failure::DatabaseError;
use crate::query::{FromRow, Row, Sql};
use crate::runs::push_active_run;

/// What is used of a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BudgetTokens {
    /// By the runs of the turn themselves and their direct subagents, as far as they have stored it.
    pub run: ExecutionTokens,
    /// By the items of all batches.
    pub batches: ExecutionTokens,
}

impl FromRow for BudgetTokens {
    fn from_row(row: &Row<'_>) -> Result<Self, DatabaseError> {
        let cells = Cells::new(row, "token_budgets", &["budget_id"]);
        let tokens = |column| Ok::<_, DatabaseError>(u64::try_from(cells.int(column)?).unwrap_or_default());
        Ok(Self {
            run: ExecutionTokens {
                input_tokens: tokens("run_input_tokens")?,
                output_tokens: tokens("run_output_tokens")?,
                total_tokens: tokens("run_total_tokens")?,
            },
            batches: ExecutionTokens::from_row(row)?,
        })
    }
}

/// Adds up what is used, of the batches `o`.
const USED: &str = "SELECT MAX(o.budget_id) AS budget_id, \
    CAST(COALESCE(MAX(t.input_tokens), 0) AS BIGINT) AS run_input_tokens, \
    CAST(COALESCE(MAX(t.output_tokens), 0) AS BIGINT) AS run_output_tokens, \
    CAST(COALESCE(MAX(t.total_tokens), 0) AS BIGINT) AS run_total_tokens, \
    CAST(COALESCE(SUM(o.input_tokens), 0) AS BIGINT) AS input_tokens, \
    CAST(COALESCE(SUM(o.output_tokens), 0) AS BIGINT) AS output_tokens, \
    CAST(COALESCE(SUM(o.total_tokens), 0) AS BIGINT) AS total_tokens \
    FROM subagent_batches AS o LEFT JOIN token_budgets AS t ON t.id = o.budget_id WHERE ";

impl Batches {
    /// Stores what a turn has used of its limit without its batches, unless more is stored already, and returns what is used
    /// with them; `None` if no batch has that limit. If `used` is `None`, or the run is not an active one of this process,
    /// it only reads: the thread of another run may be deleted.
    ///
    /// # Errors
    /// [`RecordsError::Unavailable`], [`RecordsError::Corrupt`].
    pub async fn budget(
        &self,
        budget_id: &str,
        (thread_id, run_id): (&str, &str),
        used: Option<ExecutionTokens>,
    ) -> Result<Option<BudgetTokens>, RecordsError> {
        let mut read = self.db.builder(USED);
        read.push("o.budget_id = ").push_bind(budget_id).push(" GROUP BY o.budget_id");
        let read = read.build();
        let Some(used) = used else { return self.db.fetch_optional(read).await };
        let mut store = self.db.builder(
            "INSERT INTO token_budgets AS held (id, thread_id, input_tokens, output_tokens, total_tokens) SELECT ",
        );
        store.push_bind(budget_id).push(", ").push_bind(thread_id);
        for tokens in [used.input_tokens, used.output_tokens, used.total_tokens] {
            store.push(", ").push_bind(i64::try_from(tokens).unwrap_or(i64::MAX));
        }
        store.push(" WHERE ");
        push_active_run(&mut store, thread_id, run_id, self.owner.as_deref());
        store.push(" ON CONFLICT (id) DO UPDATE SET ");
        for (index, column) in ["input_tokens", "output_tokens", "total_tokens"].into_iter().enumerate() {
            store.push(if index == 0 { "" } else { ", " }).push(&format!(
                "{column} = CASE WHEN excluded.{column} > held.{column} THEN excluded.{column} ELSE held.{column} END"
            ));
        }
        let statements = vec![store.build(), read];
        // Before a deletion of the thread, or after it.
        let db = self.db.unflushed();
        let stored = db.write(thread_id, move |tx| {
            Box::pin(async move {
                let ran = tx.run_and_commit::<BudgetTokens>(statements).await?;
                Ok(ran.into_iter().next_back().and_then(|ran| ran.rows.into_iter().next()))
            })
        });
        stored.await
    }

    /// Reads what is used of the limit that binds a batch: its own, if an older build has stored it.
    pub(super) fn budget_of(&self, batch_id: &str) -> Sql {
        let mut sql = self.db.builder(USED);
        sql.push("o.id = ").push_bind(batch_id);
        sql.push(" OR o.budget_id = (SELECT budget_id FROM subagent_batches WHERE id = ").push_bind(batch_id);
        sql.push(")");
        sql.build()
    }
}
