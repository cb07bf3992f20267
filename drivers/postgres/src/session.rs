//! A connection, and whether it has a session of the server to itself.
//!
//! A pooler may give each transaction of a client another session. What was prepared in one is missing in the next, or is
//! there under the same name with another client's text; so only a connection with a session of its own keeps statements
//! prepared. A server announces the number of its process when it accepts a connection, and its sessions answer the same
//! number. A pooler announces numbers that it draws itself.

use std::collections::HashMap;
use std::future::{Ready, ready};
use std::io;
use std::pin::Pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::tls::{ChannelBinding, TlsConnect, TlsStream};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Error, Row, Statement as Prepared};

use crate::connect::Driver;
use crate::error::Trouble;
use crate::pool::Param;
use crate::sql::Statement;

/// The process of the session that answers.
const PROCESS: &str = "SELECT pg_catalog.pg_backend_pid()";

/// A connection with the task that drives it. Dropped, it is closed at once, whatever is under way on it.
pub(crate) struct Session {
    client: Client,
    _driver: Driver,
    is_own: bool,
    /// By their texts.
    prepared: Mutex<HashMap<String, Prepared>>,
}

impl Session {
    /// Asks a connection that was just opened whether it has a session of its own.
    pub(crate) async fn of((client, driver): (Client, Driver)) -> Result<Self, Error> {
        let is_own = is_own(&client).await?;
        Ok(Self { client, _driver: driver, is_own, prepared: Mutex::default() })
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// Runs a statement: a call as it is prepared, if the session is this connection's own; else parsed each time.
    pub(crate) async fn query(
        &self,
        statement: &Statement,
        params: &[Param<'_>],
    ) -> Result<Vec<Row>, Trouble> {
        if !self.is_own || !statement.is_call() {
            return Ok(self.client.query_typed(statement, params).await?);
        }
        let prepared = match self.known(statement) {
            Some(prepared) => prepared,
            None => self.prepare(statement, params).await.map_err(Trouble::before_it_was_sent)?,
        };
        let values: Vec<&(dyn ToSql + Sync)> = params.iter().map(|(value, _)| *value).collect();
        Ok(self.client.query(&prepared, &values).await?)
    }

    fn known(&self, text: &str) -> Option<Prepared> {
        self.statements().get(text).cloned()
    }

    async fn prepare(&self, text: &str, params: &[Param<'_>]) -> Result<Prepared, Trouble> {
        let types: Vec<Type> = params.iter().map(|(_, of)| of.clone()).collect();
        let prepared = self.client.prepare_typed(text, &types).await?;
        self.statements().insert(text.to_owned(), prepared.clone());
        Ok(prepared)
    }

    fn statements(&self) -> MutexGuard<'_, HashMap<String, Prepared>> {
        self.prepared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the session that answers is that of this connection alone.
pub(crate) async fn is_own(client: &Client) -> Result<bool, Error> {
    let row = client.query_typed_one(PROCESS, &[]).await?;
    let answers: i32 = row.try_get(0)?;
    Ok(announced(client).await == Some(answers))
}

/// The process that was announced when the connection was accepted. The client says it in one place only: in the request
/// to cancel what is under way, which is written here and not sent.
async fn announced(client: &Client) -> Option<i32> {
    let mut written = Vec::new();
    client.cancel_token().cancel_query_raw(Overheard(&mut written), Plain).await.ok()?;
    // At the end, behind a request for TLS: the length, the code of the request, the process and its key.
    let request: [u8; 16] = written.last_chunk().copied()?;
    let [.., a, b, c, d, _, _, _, _] = request;
    Some(i32::from_be_bytes([a, b, c, d]))
}

/// Keeps what is written, and answers that TLS is welcome.
struct Overheard<'a>(&'a mut Vec<u8>);

impl AsyncRead for Overheard<'_> {
    fn poll_read(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        answer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        answer.put_slice(b"S");
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Overheard<'_> {
    fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.0.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl TlsStream for Overheard<'_> {
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

/// What a connection with TLS writes, as it is.
struct Plain;

impl<'a> TlsConnect<Overheard<'a>> for Plain {
    type Stream = Overheard<'a>;
    type Error = io::Error;
    type Future = Ready<io::Result<Overheard<'a>>>;

    fn connect(self, stream: Overheard<'a>) -> Self::Future {
        ready(Ok(stream))
    }
}

#[cfg(test)]
mod tests;
