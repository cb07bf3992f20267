//! Write transactions and their locks.

use std::task::Poll;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::{FutureExt as _, TryFutureExt as _, poll};
use tokio::sync::OwnedMutexGuard;
use tokio::time::timeout;
use tokio_postgres::{Error, Row};

use super::connect::{Session, silent};
use super::pool::{ANSWER, Held, Pool, spoils};
use super::sql::{Answer, Tables, ask};
use crate::error::RecordsError;
use crate::failure::DatabaseError;
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
/// for long; they wait longer than that. It sends warnings, whatever the role is set to: one says that a commit did not
/// wait for the standby, and ends the connection.
fn begin(tables: &Tables, scope: Scope<'_>) -> String {
    begin_with("SET LOCAL lock_timeout = '10s'", tables, scope)
}

/// The same with these settings.
fn begin_with(settings: &str, tables: &Tables, scope: Scope<'_>) -> String {
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
    format!(
        "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL client_min_messages = warning; \
         SET LOCAL idle_in_transaction_session_timeout = '5s'; {settings}; {lock}"
    )
}

/// A write transaction. If it is dropped without [`Self::commit`], it is rolled back; if a statement is in progress then,
/// its connection is closed.
pub(crate) struct Transaction {
    held: Option<Held>,
    pool: Pool,
    /// After the connection, so that the next one finds it in the pool.
    turn: Option<OwnedMutexGuard<()>>,
    begin: String,
    begun: bool,
    /// How long the server may take to answer; `None` for a migration.
    limit: Option<Duration>,
    /// Statements that are sent with the next one, or with the commit.
    queued: Vec<Sql>,
    in_progress: bool,
    failed: bool,
}

impl Pool {
    /// A write transaction, after those requested earlier for the same thread. It begins with its first statement.
    pub(crate) async fn begin(&self, scope: Scope<'_>) -> Result<Transaction, DatabaseError> {
        let turn = match scope {
            Scope::Thread(thread_id) => Some(self.turn(thread_id).await?),
            Scope::EveryThread | Scope::Rows => None,
        };
        self.transaction(begin(self.tables(), scope), Some(self.answer()), turn).await
    }

    /// A write transaction for all threads that may take any time, as a migration of many rows does. It waits for another
    /// process's, whatever limits the role or the database has. Its literals are read as those of standard SQL.
    pub(crate) async fn begin_migration(&self) -> Result<Transaction, DatabaseError> {
        let settings = "SET LOCAL lock_timeout = 0; SET LOCAL statement_timeout = 0; \
            SET LOCAL standard_conforming_strings = on";
        let begin = begin_with(settings, self.tables(), Scope::EveryThread);
        self.transaction(begin, None, None).await
    }

    async fn transaction(
        &self,
        begin: String,
        limit: Option<Duration>,
        turn: Option<OwnedMutexGuard<()>>,
    ) -> Result<Transaction, DatabaseError> {
        Ok(Transaction {
            held: Some(self.acquire().await?),
            pool: self.clone(),
            turn,
            begin,
            begun: false,
            limit,
            queued: Vec::new(),
            in_progress: false,
            failed: false,
        })
    }
}

impl Transaction {
    /// Returns the number of changed rows.
    pub(crate) async fn execute(&mut self, sql: Sql) -> Result<u64, DatabaseError> {
        Ok(self.ask(sql).await?.count)
    }

    pub(crate) async fn fetch_all(&mut self, sql: Sql) -> Result<Vec<Row>, DatabaseError> {
        Ok(self.ask(sql).await?.rows)
    }

    /// Sends the statement with the next one, or with the commit.
    pub(crate) fn queue(&mut self, sql: Sql) {
        self.queued.push(sql);
    }

    /// Tells the other processes that something happened to a run, once this is committed.
    pub(crate) fn announce(&mut self, run_id: &str) {
        let sql = query("SELECT pg_catalog.pg_notify($1, $2)");
        self.queue(sql.bind(self.pool.tables().channel()).bind(run_id));
    }

    /// Runs statements that have no parameters, as a migration has.
    pub(crate) async fn batch(&mut self, statements: &str) -> Result<(), DatabaseError> {
        if !self.begun {
            self.send(None).await.map_err(Refusal::into_error)?;
        }
        self.in_progress = true;
        self.pool.add_trip();
        let client = self.held.as_mut().ok_or(DatabaseError::Closed)?.dirty()?;
        let done = within(self.limit, client.batch_execute(statements)).await;
        let done = done.map_or(Err(Refusal::Silent), |done| done.map_err(Refusal::Statement));
        self.answered(done).map_err(Refusal::into_error)
    }

    async fn ask(&mut self, sql: Sql) -> Result<Answer, DatabaseError> {
        let first = !self.begun;
        self.queue(sql);
        let mut answers = match self.send(None).await.map_err(Refusal::into_error) {
            // Nothing is committed: the same on another connection.
            Err(error) if self.pool.lost(&error) && first => {
                self.reconnect().await?;
                self.send(None).await.map_err(Refusal::into_error)?
            }
            answers => answers?,
        };
        self.queued.clear();
        Ok(answers.pop().unwrap_or_default())
    }

    /// Sends what begins the transaction, if nothing was sent yet, the queued statements, and what ends it: all in one
    /// round trip. Returns the answers to the queued statements.
    async fn send(&mut self, end: Option<&str>) -> Result<Vec<Answer>, Refusal> {
        let begin = (!self.begun).then_some(self.begin.as_str());
        (self.begun, self.in_progress) = (true, true);
        let session = self.held.as_mut().and_then(|held| held.dirty().ok()).ok_or(Refusal::Closed)?;
        let preparing = within(self.limit, self.pool.prepare(session, &self.queued)).await;
        let done = match preparing.ok_or(Refusal::Unprepared)?.map_err(Refusal::Statement) {
            Ok(()) => {
                self.pool.add_trip();
                let done = pipelined(session, begin, &self.queued, end, self.pool.tables());
                within(self.limit, done).await.unwrap_or(Err(Refusal::Silent))
            }
            refused => refused.map(|()| Vec::new()),
        };
        self.answered(done)
    }

    fn answered<T>(&mut self, done: Result<T, Refusal>) -> Result<T, Refusal> {
        self.in_progress = done.as_ref().is_err_and(|refusal| !refusal.leaves_session());
        self.failed |= done.is_err();
        done
    }

    /// Makes the changes durable. If the future is dropped, the commit may or may not have happened.
    ///
    /// # Errors
    /// [`RecordsError::InDoubt`] if the commit may have happened.
    pub(crate) async fn commit(mut self) -> Result<(), RecordsError> {
        if self.failed {
            // The server would answer a commit with a rollback, and no error.
            return Err(
                DatabaseError::Internal("a statement of the transaction has failed".to_owned()).into()
            );
        }
        // Else nothing was asked: there is nothing to commit.
        if self.begun || !self.queued.is_empty() {
            self.end().await?;
        }
        if let Some(mut held) = self.held.take() {
            held.clean();
        }
        Ok(())
    }

    /// Runs what is queued and commits, in one round trip. Returns the rows of each statement. What follows is another
    /// transaction, for which nobody else in this process gets the thread.
    ///
    /// # Errors
    /// As for [`Self::commit`].
    pub(crate) async fn fetch_and_commit(&mut self) -> Result<Vec<Answer>, RecordsError> {
        self.end().await
    }

    /// Commits, with what is queued.
    async fn end(&mut self) -> Result<Vec<Answer>, RecordsError> {
        let first = !self.begun;
        let ended = match self.send(Some("COMMIT")).await {
            Err(refusal) if first && !refusal.leaves_doubt() => {
                let error = refusal.into_error();
                if !self.pool.lost(&error) {
                    return Err(error.into());
                }
                self.reconnect().await?;
                self.send(Some("COMMIT")).await
            }
            ended => ended,
        };
        let answers = ended.map_err(|refusal| {
            let in_doubt = refusal.leaves_doubt();
            let cause = refusal.into_error();
            self.pool.lost(&cause);
            if in_doubt { RecordsError::InDoubt { cause } } else { cause.into() }
        })?;
        self.begun = false;
        self.queued.clear();
        Ok(answers)
    }

    /// Goes on with another connection, on which nothing was sent yet.
    async fn reconnect(&mut self) -> Result<(), DatabaseError> {
        self.held = Some(self.pool.acquire().await?);
        (self.begun, self.failed, self.in_progress) = (false, false, false);
        Ok(())
    }
}

/// What `work` returns, unless it takes longer than the limit, if there is one.
async fn within<T>(limit: Option<Duration>, work: impl Future<Output = T>) -> Option<T> {
    match limit {
        Some(limit) => timeout(limit, work).await.ok(),
        None => Some(work.await),
    }
}

/// Why not everything that was sent together was done.
enum Refusal {
    /// The connection is closed; nothing was sent.
    Closed,
    /// A statement was refused, or could not be sent: what ends the transaction was not sent, or had to roll it back.
    Statement(Error),
    /// The connection failed, or the end was refused.
    End(Error),
    /// There is no answer.
    Silent,
    /// The server does not answer, and nothing but preparations was sent.
    Unprepared,
}

impl Refusal {
    /// Whether the connection is as good as before, as after most errors of the server.
    fn leaves_session(&self) -> bool {
        let (Self::Statement(error) | Self::End(error)) = self else { return false };
        error.code().is_some_and(|code| !spoils(code))
    }

    /// Of a commit: whether it may have happened.
    fn leaves_doubt(&self) -> bool {
        matches!(self, Self::End(_) | Self::Silent)
    }

    fn into_error(self) -> DatabaseError {
        match self {
            Self::Closed => DatabaseError::Closed,
            Self::Statement(error) | Self::End(error) => error.into(),
            Self::Silent | Self::Unprepared => silent(),
        }
    }
}

/// Sends everything, then reads the answers. In a transaction a pooler allows that, too: it closes a connection whose
/// client left a transaction.
async fn pipelined(
    session: &Session,
    begin: Option<&str>,
    statements: &[Sql],
    end: Option<&str>,
    tables: &Tables,
) -> Result<Vec<Answer>, Refusal> {
    let batch = |text| session.batch_execute(text).map_ok(|()| Answer::default()).boxed();
    let statements = statements.iter().map(|sql| ask(session, sql, tables).boxed());
    let mut sent: Vec<Sent<'_>> = begin.map(batch).into_iter().chain(statements).map(Sent::new).collect();
    // The first poll of each sends it. One that fails at once was not sent: the end must not be sent either, because the
    // server, which has refused nothing, would commit without that statement.
    for statement in &mut sent {
        statement.poll_once().await;
        if let Some(Err(_)) = &statement.answer {
            break;
        }
    }
    let unsent = sent.iter().any(|statement| matches!(statement.answer, Some(Err(_))));
    let mut ending = end.filter(|_| !unsent).map(batch).map(Sent::new);
    if let Some(ending) = &mut ending {
        ending.poll_once().await;
    }
    let mut answers = Vec::with_capacity(sent.len());
    for statement in sent {
        answers.push(statement.answer().await.map_err(|error| match &ending {
            Some(_) if error.as_db_error().is_none() => Refusal::End(error),
            _ => Refusal::Statement(error),
        })?);
    }
    if let Some(ending) = ending {
        ending.answer().await.map_err(Refusal::End)?;
    }
    if begin.is_some() {
        answers.remove(0);
    }
    Ok(answers)
}

/// A statement that is sent when it is polled first.
struct Sent<'a> {
    future: BoxFuture<'a, Result<Answer, Error>>,
    answer: Option<Result<Answer, Error>>,
}

impl<'a> Sent<'a> {
    fn new(future: BoxFuture<'a, Result<Answer, Error>>) -> Self {
        Self { future, answer: None }
    }

    async fn poll_once(&mut self) {
        if let Poll::Ready(answer) = poll!(&mut self.future) {
            self.answer = Some(answer);
        }
    }

    async fn answer(self) -> Result<Answer, Error> {
        match self.answer {
            Some(answer) => answer,
            None => self.future.await,
        }
    }
}

impl Drop for Transaction {
    fn drop(&mut self) {
        let Some(mut held) = self.held.take().filter(|_| !self.in_progress) else { return };
        if !self.begun {
            return held.clean();
        }
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let turn = self.turn.take();
        runtime.spawn(async move {
            let rolled_back = match held.dirty() {
                Ok(client) => timeout(ANSWER, client.batch_execute("ROLLBACK")).await,
                Err(_) => return,
            };
            if matches!(rolled_back, Ok(Ok(()))) {
                held.clean();
            }
            drop(held);
            drop(turn);
        });
    }
}
