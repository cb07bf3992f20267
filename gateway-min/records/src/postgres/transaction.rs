//! Write transactions and their locks.

use sqlx::AssertSqlSafe;
use sqlx::postgres::{PgQueryResult, PgRow};
use tokio::sync::OwnedMutexGuard;
use tokio::time::timeout;

use super::connect::silent;
use super::pool::{ANSWER, Held, Pool};
use super::sql::{Tables, prepared};
use crate::query::{Sql, query};

/// Which other transactions a write transaction excludes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Scope<'a> {
    /// Those of this thread.
    Thread(&'a str),
    /// All.
    EveryThread,
    /// Those that exclude all; others as far as they lock the same rows.
    Rows,
}

/// The statements that begin a write transaction. The server ends it if its process stalls, so that others do not wait
/// for long; they wait longer than that.
pub(crate) fn begin(tables: &Tables, scope: Scope<'_>) -> AssertSqlSafe<String> {
    let every_thread = tables.lock("");
    let lock = match scope {
        Scope::Thread(thread_id) => format!(
            "SELECT pg_advisory_xact_lock_shared({every_thread}), pg_advisory_xact_lock({})",
            // A thread's id is never empty.
            tables.lock(thread_id)
        ),
        Scope::EveryThread => format!("SELECT pg_advisory_xact_lock({every_thread})"),
        Scope::Rows => format!("SELECT pg_advisory_xact_lock_shared({every_thread})"),
    };
    AssertSqlSafe(format!(
        "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL idle_in_transaction_session_timeout = '5s'; \
         SET LOCAL lock_timeout = '10s'; {lock}"
    ))
}

/// A write transaction. If it is dropped without [`Self::commit`], it is rolled back; if a statement is in progress then,
/// its connection is closed.
pub(crate) struct Transaction {
    held: Option<Held>,
    pool: Pool,
    /// After the connection, so that the next one finds it in the pool.
    turn: Option<OwnedMutexGuard<()>>,
    in_progress: bool,
    failed: bool,
}

impl Pool {
    /// Begins a write transaction, after those requested earlier for the same thread.
    pub(crate) async fn begin(&self, scope: Scope<'_>) -> Result<Transaction, sqlx::Error> {
        let turn = match scope {
            Scope::Thread(thread_id) => Some(self.turn(thread_id).await?),
            Scope::EveryThread | Scope::Rows => None,
        };
        let held = match self.begun(scope).await {
            // Nothing was written yet.
            Err(error) if self.lost(&error) => self.begun(scope).await?,
            begun => begun?,
        };
        Ok(Transaction { held: Some(held), pool: self.clone(), turn, in_progress: false, failed: false })
    }

    async fn begun(&self, scope: Scope<'_>) -> Result<Held, sqlx::Error> {
        let mut held = self.acquire().await?;
        let begin = sqlx::raw_sql(begin(self.tables(), scope)).execute(held.dirty());
        timeout(ANSWER, begin).await.map_err(|_| silent())??;
        Ok(held)
    }
}

impl Transaction {
    /// Returns the number of changed rows.
    pub(crate) async fn execute(&mut self, sql: Sql) -> Result<u64, sqlx::Error> {
        let query = prepared(sql, self.pool.tables()).persistent(self.pool.prepares());
        self.in_progress = true;
        let connection = self.held.as_mut().ok_or(sqlx::Error::PoolClosed)?.dirty();
        let done = timeout(ANSWER, query.execute(connection)).await;
        self.answered(done).map(|result: PgQueryResult| result.rows_affected())
    }

    pub(crate) async fn fetch_all(&mut self, sql: Sql) -> Result<Vec<PgRow>, sqlx::Error> {
        let query = prepared(sql, self.pool.tables()).persistent(self.pool.prepares());
        self.in_progress = true;
        let connection = self.held.as_mut().ok_or(sqlx::Error::PoolClosed)?.dirty();
        let done = timeout(ANSWER, query.fetch_all(connection)).await;
        self.answered(done)
    }

    /// Tells the other processes that something happened to a run, once this is committed. Behind a pooler nobody listens.
    pub(crate) async fn announce(&mut self, run_id: &str) -> Result<(), sqlx::Error> {
        if !self.pool.prepares() {
            return Ok(());
        }
        let sql = query("SELECT pg_catalog.pg_notify($1, $2)");
        self.execute(sql.bind(self.pool.tables().channel()).bind(run_id)).await.map(drop)
    }

    fn answered<T>(
        &mut self,
        done: Result<Result<T, sqlx::Error>, tokio::time::error::Elapsed>,
    ) -> Result<T, sqlx::Error> {
        let done = done.unwrap_or_else(|_| Err(silent()));
        // After an error of the server the connection is as good as before.
        self.in_progress = !matches!(done, Ok(_) | Err(sqlx::Error::Database(_)));
        if let Err(error) = &done {
            self.failed = true;
            self.pool.lost(error);
        }
        done
    }

    /// Makes the changes durable. If the future is dropped, or after an error, the commit may or may not have happened.
    pub(crate) async fn commit(mut self) -> Result<(), sqlx::Error> {
        if self.failed {
            // The server would answer a commit with a rollback, and no error.
            return Err(sqlx::Error::Protocol("a statement of the transaction has failed".to_owned()));
        }
        self.in_progress = true;
        let connection = self.held.as_mut().ok_or(sqlx::Error::PoolClosed)?.dirty();
        let done = timeout(ANSWER, sqlx::raw_sql("COMMIT").execute(connection)).await;
        self.answered(done)?;
        if let Some(mut held) = self.held.take() {
            held.clean();
        }
        Ok(())
    }
}

impl Drop for Transaction {
    fn drop(&mut self) {
        let Some(mut held) = self.held.take().filter(|_| !self.in_progress) else { return };
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let turn = self.turn.take();
        runtime.spawn(async move {
            let rolled_back = timeout(ANSWER, sqlx::raw_sql("ROLLBACK").execute(held.dirty())).await;
            if matches!(rolled_back, Ok(Ok(_))) {
                held.clean();
            }
            drop(held);
            drop(turn);
        });
    }
}
