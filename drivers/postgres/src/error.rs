//! Errors of the server and the connection as errors of the saver contract; the fixed texts with their remedies.

use std::error::Error as _;
use std::fmt;

use threadkeep::Error;
use threadkeep::id::ThreadId;
use tokio_postgres::error::{DbError, Severity, SqlState};

/// The saver's name in errors and reports.
pub(crate) const SAVER: &str = "postgres";

/// The tables or functions are missing, or of an older format.
pub(crate) const NOT_SET_UP: &str = "the tables are missing or of an older version; run `threadkeep setup` (or threadkeep_postgres::setup) as their owner, then retry";
/// The role lacks a right that the saver needs.
pub(crate) const NOT_ALLOWED: &str = "the role lacks a right; it needs USAGE on the schema, SELECT, INSERT, UPDATE, DELETE on its tables and EXECUTE on its functions";
/// The role that runs `setup` may not create or change the tables.
pub(crate) const NOT_ITS_OWNER: &str = "setup creates and changes the tables and functions: run it as the role that owns them and the schema, or give \
    this one CREATE on the schema (on the database, if the schema is missing) and the tables with ALTER TABLE and ALTER \
    FUNCTION ... OWNER TO";
/// The server's disk is full.
pub(crate) const FULL: &str = "the server's disk is full; free some space, then retry";
/// The server is a standby.
pub(crate) const READ_ONLY: &str = "the server accepts no writes; connect to the primary, for example with \
    target_session_attrs=read-write, or, if this is the primary, turn off its default_transaction_read_only, which managed \
    servers turn on while their disk is nearly full";
/// No attempt found the thread as it had been read.
pub(crate) const BUSY: &str = "the thread was deleted, created or rewritten during each of several attempts, or the \
    address leads to several servers of which some lag; retry";
/// The pool is closed.
pub(crate) const CLOSED: &str = "the store is closed; open it again";

/// The thread says nothing any more about an operation in doubt.
pub(crate) const OVERTAKEN: &str = "the server's answer was lost, and the thread was rewritten, deleted or written to many \
    times since";

/// What was to be copied is gone, and an earlier attempt may still be carried out.
pub(crate) const NOTHING_LEFT: &str =
    "the server's answer was lost, and the thread that was to be copied is gone since";

/// The address has no password, and the server wants one.
const NO_PASSWORD: &str =
    "; put it into the address: PGPASSWORD, password files and service files are not read";
/// The server's certificate is not accepted.
const NOT_TRUSTED: &str = "; name the file with the certificates to trust in sslrootcert (managed servers have one to \
    download), and the host as the server's certificate does";

/// The answer is that to another statement.
pub(crate) const STRAY: &str =
    "an answer came that belongs to another statement, as from a pooler that mixes up its clients";
/// The server does not answer.
pub(crate) const SILENT: &str = "the server does not answer";

/// Why an attempt did not succeed.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// A retry would not help.
    Final(Error),
    /// The connection or server went away, or the statement conflicted with another; a retry may succeed.
    Again {
        reason: String,
        /// Whether a statement that was sent may have been carried out.
        in_doubt: bool,
        /// Whether none of the open connections may be used any more: their server is about to stop, is no longer the
        /// primary, or answers other questions.
        renew: bool,
    },
    /// The thread lacks what this process knows to be flushed. The server may have been replaced: another attempt on
    /// new connections decides.
    Lost(Error),
}

impl Trouble {
    /// The same of something that comes before a statement is sent: nothing can have been carried out.
    pub(crate) fn before_it_was_sent(self) -> Self {
        match self {
            Self::Again { reason, renew, .. } => Self::Again { reason, in_doubt: false, renew },
            done => done,
        }
    }
}

/// How the client reports an answer that does not match the request.
const OUT_OF_STEP: [&str; 2] = ["unexpected message from server", "error parsing response from server"];

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        Self::Final(error)
    }
}

impl From<tokio_postgres::Error> for Trouble {
    fn from(error: tokio_postgres::Error) -> Self {
        if let Some(reported) = error.as_db_error() {
            return from_server(reported);
        }
        let reason = advised(&error);
        let of_the_network = error.source().is_some_and(<dyn std::error::Error>::is::<std::io::Error>);
        if error.is_closed() || of_the_network {
            return Self::Again { reason, in_doubt: true, renew: false };
        }
        if OUT_OF_STEP.iter().any(|what| reason.starts_with(what)) {
            return Self::Again { reason, in_doubt: true, renew: true };
        }
        Self::Final(unavailable(reason))
    }
}

/// An error that the server reported.
fn from_server(error: &DbError) -> Trouble {
    let code = error.code();
    let text = format!("{} ({})", error.message(), code.code());
    let with = |remedy: &str| Trouble::Final(unavailable(format!("{remedy} ({text})")));
    match *code {
        SqlState::T_R_SERIALIZATION_FAILURE
        | SqlState::T_R_DEADLOCK_DETECTED
        | SqlState::LOCK_NOT_AVAILABLE
        | SqlState::TOO_MANY_CONNECTIONS
        // The transaction was rolled back, because this process stood still in it.
        | SqlState::IDLE_IN_TRANSACTION_SESSION_TIMEOUT => Trouble::Again { reason: text, in_doubt: false, renew: false },
        // It starts, stops, or is a standby (55000: it has no timeline of its own).
        SqlState::CANNOT_CONNECT_NOW | SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE
        // What was prepared is gone, or another client's is there: the session is not what it was. Nothing was executed.
        | SqlState::INVALID_SQL_STATEMENT_NAME | SqlState::DUPLICATE_PSTATEMENT => {
            Trouble::Again { reason: text, in_doubt: false, renew: true }
        }
        SqlState::READ_ONLY_SQL_TRANSACTION => {
            Trouble::Again { reason: format!("{READ_ONLY} ({text})"), in_doubt: false, renew: true }
        }
        SqlState::UNDEFINED_TABLE
        | SqlState::UNDEFINED_COLUMN
        | SqlState::UNDEFINED_FUNCTION
        | SqlState::INVALID_SCHEMA_NAME => with(NOT_SET_UP),
        SqlState::INSUFFICIENT_PRIVILEGE => with(NOT_ALLOWED),
        SqlState::DISK_FULL => with(FULL),
        // A row where there must be none: the thread's own row is wrong.
        SqlState::UNIQUE_VIOLATION | SqlState::DATA_CORRUPTED | SqlState::INDEX_CORRUPTED => {
            Trouble::Final(Error::corrupt(error.table().unwrap_or("the database"), text))
        }
        // Our statements compute with stored values only.
        _ if code.code().starts_with("22") => Trouble::Final(Error::corrupt("a row of the database", text)),
        SqlState::PROGRAM_LIMIT_EXCEEDED => {
            Trouble::Final(Error::InvalidInput(format!("a value is too large for Postgres: {text}")))
        }
        // An administrator, a crash or a pooler may end the session after the commit.
        _ if !is_refusal(error) || code.code().starts_with("08") => match *code {
            SqlState::INVALID_PASSWORD
            | SqlState::INVALID_AUTHORIZATION_SPECIFICATION
            | SqlState::INVALID_CATALOG_NAME => Trouble::Final(unavailable(text)),
            _ => {
                let shutdown = [SqlState::ADMIN_SHUTDOWN, SqlState::CRASH_SHUTDOWN].contains(code);
                // The end of one session says nothing about the others, unless the server is shutting down.
                Trouble::Again { reason: text, in_doubt: true, renew: shutdown }
            }
        },
        _ => Trouble::Final(unavailable(text)),
    }
}

/// Whether the server refused a statement, and the session goes on. The word for it is in the language of the server; a
/// field of newer servers has it in English.
fn is_refusal(error: &DbError) -> bool {
    error.parsed_severity().map_or(error.severity() == "ERROR", |severity| severity == Severity::Error)
}

/// An error with its causes, neither of which contains a password.
pub(crate) fn told(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

/// The same, with what to do about errors of the client that do not say it.
fn advised(error: &dyn std::error::Error) -> String {
    let mut text = told(error);
    if text.ends_with("password missing") {
        text.push_str(NO_PASSWORD);
    } else if text.contains("invalid peer certificate") {
        text.push_str(NOT_TRUSTED);
    }
    text
}

/// An error after which the caller may retry: nothing was written.
pub(crate) fn unavailable(reason: impl Into<String>) -> Error {
    Error::Unavailable { saver: SAVER, reason: reason.into() }
}

/// An error that leaves open whether something was written.
pub(crate) fn in_doubt(reason: impl Into<String>) -> Error {
    Error::InDoubt { saver: SAVER, reason: reason.into() }
}

/// An invalid row of a thread.
pub(crate) fn corrupt(
    table: &str,
    thread: &ThreadId,
    row: impl fmt::Display,
    reason: impl fmt::Display,
) -> Error {
    Error::corrupt(format!("table threadkeep_{table}, thread {thread}, {row}"), reason)
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;
    use tokio_postgres::config::SslMode;
    use tokio_postgres::{Config, NoTls};

    use super::*;

    /// What the client makes of an error with these fields.
    async fn reported(fields: &[(u8, &str)]) -> Trouble {
        let body: Vec<u8> = fields
            .iter()
            .flat_map(|(of, text)| [&[*of], text.as_bytes(), &[0]].concat())
            .chain([0])
            .collect();
        let length = u32::try_from(body.len() + 4).unwrap().to_be_bytes();
        let (client, mut server) = tokio::io::duplex(1024);
        server.write_all(&[&b"E"[..], &length, &body].concat()).await.unwrap();
        let connected = Config::new().user("u").ssl_mode(SslMode::Disable).connect_raw(client, NoTls).await;
        connected.err().unwrap().into()
    }

    #[tokio::test]
    async fn a_refusal_is_one_in_any_language() {
        let text = (b'M', "etwas");
        for severity in [
            &[(b'S', "FEHLER"), (b'V', "ERROR")][..],
            &[(b'S', "ERROR"), (b'V', "ERROR")],
            &[(b'S', "ERROR")],
        ] {
            let trouble = reported(&[severity, &[(b'C', "42601"), text]].concat()).await;
            assert!(
                matches!(trouble, Trouble::Final(Error::Unavailable { .. })),
                "{severity:?}: {trouble:?}"
            );
        }
        for severity in
            [&[(b'S', "PANIK"), (b'V', "PANIC")][..], &[(b'S', "FATAL"), (b'V', "FATAL")], &[(b'S', "FATAL")]]
        {
            let trouble = reported(&[severity, &[(b'C', "XX000"), text]].concat()).await;
            assert!(matches!(trouble, Trouble::Again { in_doubt: true, .. }), "{severity:?}: {trouble:?}");
        }
    }
}
