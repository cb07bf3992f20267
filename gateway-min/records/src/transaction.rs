//! Write transactions: statements one by one in SQLite, and with as few round trips as possible in Postgres.

use std::sync::Arc;

use rusqlite::Connection;

use super::commits::Commits;
use super::error::RecordsError;
use super::failure::DatabaseError;
use super::postgres;
use super::query::{FromRow, Row, Sql};
use super::sqlite;

pub(super) fn read_all<T: FromRow>(rows: Vec<tokio_postgres::Row>) -> Result<Vec<T>, DatabaseError> {
    rows.into_iter().map(|row| T::from_row(&Row::Postgres(row))).collect()
}

/// What one of several statements did: the rows that it returned, and how many it returned or changed.
pub(super) struct Ran<T> {
    pub(super) rows: Vec<T>,
    pub(super) count: u64,
}

/// A write transaction.
pub(super) struct WriteTx<'c> {
    pub(super) tx: Tx<'c>,
    pub(super) commits: Arc<Commits>,
    /// Whether everything so far was committed by [`Self::fetch_and_commit`].
    pub(super) committed: bool,
    #[cfg(any(test, feature = "testing"))]
    pub(super) fault: super::fault::Fault,
}

pub(super) enum Tx<'c> {
    Sqlite(&'c mut Connection),
    Postgres(Box<postgres::Transaction>),
}

impl WriteTx<'_> {
    /// Returns the number of changed rows.
    pub(super) async fn execute(&mut self, sql: Sql) -> Result<u64, RecordsError> {
        self.commits.statement();
        self.committed = false;
        let changed = match &mut self.tx {
            Tx::Sqlite(connection) => sqlite::execute(connection, &sql)?,
            Tx::Postgres(tx) => Box::pin(tx.execute(sql)).await?,
        };
        self.statement_done()?;
        Ok(changed)
    }

    pub(super) async fn fetch_optional<T: FromRow>(&mut self, sql: Sql) -> Result<Option<T>, RecordsError> {
        self.commits.statement();
        self.committed = false;
        let row = match &mut self.tx {
            Tx::Sqlite(connection) => sqlite::fetch_optional(connection, &sql)?,
            Tx::Postgres(tx) => {
                let row = Box::pin(tx.fetch_all(sql)).await?.into_iter().next().map(Row::Postgres);
                row.as_ref().map(T::from_row).transpose()?
            }
        };
        self.statement_done()?;
        Ok(row)
    }

    /// Runs the transaction's last statement, and returns its first row. In Postgres the commit goes with it, so that a
    /// transaction of nothing else costs one round trip; what follows is another transaction.
    pub(super) async fn fetch_and_commit<T: FromRow>(&mut self, sql: Sql) -> Result<Option<T>, RecordsError> {
        Ok(self.fetch_all_and_commit(sql).await?.into_iter().next())
    }

    /// The same, with all rows.
    pub(super) async fn fetch_all_and_commit<T: FromRow>(
        &mut self,
        sql: Sql,
    ) -> Result<Vec<T>, RecordsError> {
        if let Tx::Sqlite(_) = &self.tx {
            return self.fetch_all(sql).await;
        }
        let rows = self.commit_with(vec![sql]).await?.pop().unwrap_or_default().rows;
        Ok(read_all(rows)?)
    }

    /// The same for the two last statements: the first row of each.
    pub(super) async fn fetch_two_and_commit<A: FromRow, B: FromRow>(
        &mut self,
        first: Sql,
        last: Sql,
    ) -> Result<(Option<A>, Option<B>), RecordsError> {
        if let Tx::Sqlite(_) = &self.tx {
            return Ok((self.fetch_optional(first).await?, self.fetch_optional(last).await?));
        }
        let mut answers = self.commit_with(vec![first, last]).await?;
        let (last, first) = (answers.pop().unwrap_or_default(), answers.pop().unwrap_or_default());
        Ok((read_all(first.rows)?.into_iter().next(), read_all(last.rows)?.into_iter().next()))
    }

    /// Runs the transaction's last statements, any number of them: the rows of each, and how many it changed. In Postgres
    /// the commit goes with them, so none may depend on what this process makes of the answer to another one.
    pub(super) async fn run_and_commit<T: FromRow>(
        &mut self,
        statements: Vec<Sql>,
    ) -> Result<Vec<Ran<T>>, RecordsError> {
        #[cfg(any(test, feature = "testing"))]
        statements.iter().try_for_each(|sql| self.fault.says(&sql.text))?;
        let Tx::Sqlite(connection) = &mut self.tx else {
            let answers = self.commit_with(statements).await?.into_iter();
            let read =
                |answer: postgres::Answer| Ok(Ran { count: answer.count, rows: read_all(answer.rows)? });
            return answers.map(read).collect();
        };
        self.committed = false;
        let mut ran = Vec::with_capacity(statements.len());
        for sql in statements {
            self.commits.statement();
            let (rows, count) = sqlite::run(connection, &sql)?;
            #[cfg(any(test, feature = "testing"))]
            self.fault.statement_done()?;
            ran.push(Ran { rows, count });
        }
        Ok(ran)
    }

    /// The answers to these statements, which go with what was queued and with the commit; only in Postgres.
    async fn commit_with(&mut self, statements: Vec<Sql>) -> Result<Vec<postgres::Answer>, RecordsError> {
        let number = statements.len();
        for sql in statements {
            self.queue(sql)?;
        }
        if let Tx::Postgres(_) = &self.tx {
            self.before_commit()?;
        }
        let Tx::Postgres(tx) = &mut self.tx else { return Ok(Vec::new()) };
        let mut answers = Box::pin(tx.fetch_and_commit()).await?;
        let answers = answers.split_off(answers.len().saturating_sub(number));
        // What neither returned nor changed a row did nothing.
        #[cfg(any(test, feature = "testing"))]
        if answers.iter().any(|answer| answer.count > 0) {
            self.fault.committed()?;
        }
        self.committed = true;
        Ok(answers)
    }

    pub(super) async fn fetch_all<T: FromRow>(&mut self, sql: Sql) -> Result<Vec<T>, RecordsError> {
        self.commits.statement();
        self.committed = false;
        let rows = match &mut self.tx {
            Tx::Sqlite(connection) => sqlite::fetch_all(connection, &sql)?,
            Tx::Postgres(tx) => read_all(Box::pin(tx.fetch_all(sql)).await?)?,
        };
        self.statement_done()?;
        Ok(rows)
    }

    /// Runs the statement before the transaction commits: in Postgres with the next one, or with the commit, so that it
    /// costs no round trip.
    pub(super) fn queue(&mut self, sql: Sql) -> Result<(), RecordsError> {
        self.commits.statement();
        self.committed = false;
        match &mut self.tx {
            Tx::Sqlite(connection) => drop(sqlite::execute(connection, &sql)?),
            Tx::Postgres(tx) => tx.queue(sql),
        }
        self.statement_done()
    }

    /// Wakes the processes that own or follow this run, when the transaction commits; see [`Changes`].
    pub(super) fn announce(&mut self, run_id: &str) {
        if let Tx::Postgres(tx) = &mut self.tx {
            tx.announce(run_id);
        }
    }

    /// Makes the changes durable. If the future is dropped, the commit may or may not have happened.
    pub(super) async fn commit(self) -> Result<(), RecordsError> {
        if self.committed {
            return Ok(());
        }
        self.before_commit()?;
        if let Tx::Postgres(tx) = self.tx {
            Box::pin(tx.commit()).await?;
        }
        #[cfg(any(test, feature = "testing"))]
        self.fault.committed()?;
        Ok(())
    }

    /// Tests make a commit fail here, as a statement, or be lost.
    pub(super) fn before_commit(&self) -> Result<(), RecordsError> {
        self.statement_done()?;
        #[cfg(any(test, feature = "testing"))]
        self.fault.commits()?;
        Ok(())
    }

    /// Tests make the k-th statement of an operation fail here, after it took effect.
    #[cfg_attr(
        not(any(test, feature = "testing")),
        expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "the hook is for tests")
    )]
    pub(super) fn statement_done(&self) -> Result<(), RecordsError> {
        #[cfg(any(test, feature = "testing"))]
        self.fault.statement_done()?;
        Ok(())
    }
}
