//! The names of the tables, and the SQL that differs between the databases.

use std::borrow::Cow;
use std::error::Error as _;
use std::pin::pin;
use std::sync::Arc;

use futures::TryStreamExt as _;
use futures::future::join_all;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{IsNull, ToSql, Type, private::BytesMut, to_sql_checked};
use tokio_postgres::{Error, Row};

use super::connect::Session;
use crate::query::{Builder, Sql, Value};

/// The table names: prefixed, because others may use the schema.
#[derive(Clone, Debug)]
pub(crate) struct Tables {
    prefix: Arc<str>,
}

/// The table names used in statements.
const NAMES: [&str; 12] = [
    "threads_meta",
    "runs",
    "run_events",
    "run_frames",
    "executions",
    "store_settings",
    "subagents",
    "subagent_batches",
    "subagent_batch_items",
    "subagent_batch_remains",
    "token_budgets",
    MIGRATIONS,
];

/// The table that lists the applied migrations.
const MIGRATIONS: &str = "migrations";

impl Tables {
    pub(super) fn of(schema: &str) -> Self {
        Self { prefix: format!("\"{}\".threadkeep_gateway_", schema.replace('"', "\"\"")).into() }
    }

    /// The full name of the table that lists the applied migrations.
    pub(crate) fn migrations(&self) -> String {
        format!("{}{MIGRATIONS}", self.prefix)
    }

    /// The channel on which processes tell each other of changes to these tables.
    pub(super) fn channel(&self) -> String {
        format!("threadkeep_{:016x}", self.lock("channel"))
    }

    /// The lock number for a name, specific to these tables. A collision only makes two names wait for each other.
    pub(super) fn lock(&self, name: &str) -> i64 {
        let mut key = [0; 8];
        let hash = blake3::Hasher::new().update(self.prefix.as_bytes()).update(name.as_bytes()).finalize();
        key.copy_from_slice(&hash.as_bytes()[..8]);
        i64::from_le_bytes(key)
    }

    /// A statement with the tables' full names.
    pub(crate) fn qualify(&self, text: &str) -> String {
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let mut qualified = String::with_capacity(text.len() + 2 * self.prefix.len());
        let (mut rest, mut before, mut in_comment) = (text, ' ', false);
        // A released migration keeps its text, its comments too.
        let on_one_line = self.prefix.replace(['\n', '\r'], " ");
        while let Some(first) = rest.chars().next() {
            let end = rest.find(|c| !is_part(c)).unwrap_or(rest.len()).max(first.len_utf8());
            let (word, after) = rest.split_at(end);
            if NAMES.contains(&word) && !matches!(before, '.' | '"' | '\'') {
                qualified.push_str(if in_comment { &on_one_line } else { &self.prefix });
            }
            in_comment = word != "\n" && (in_comment || before == '-' && word == "-");
            qualified.push_str(word);
            before = word.chars().next_back().unwrap_or(' ');
            rest = after;
        }
        qualified
    }
}

/// What a statement returned, and how many rows it returned or changed.
#[derive(Default)]
pub(crate) struct Answer {
    pub(crate) rows: Vec<Row>,
    pub(crate) count: u64,
}

/// Prepares statements in a session that is this connection's alone: those that it has not seen yet, in one round trip.
/// Returns whether there were any.
pub(super) async fn prepare(session: &Session, statements: &[Sql], tables: &Tables) -> Result<bool, Error> {
    let text_of = |sql: &Sql| {
        (tables.qualify(&sql.text), sql.values.iter().map(Value::postgres_type).collect::<Vec<_>>())
    };
    let new: Vec<_> =
        statements.iter().map(text_of).filter(|(text, _)| session.prepared(text).is_none()).collect();
    // Of the errors within a transaction, the first is the cause of the others.
    let prepared = join_all(new.iter().map(|(text, types)| session.prepare_once(text.clone(), types))).await;
    prepared.into_iter().collect::<Result<Vec<_>, _>>()?;
    Ok(!new.is_empty())
}

/// Runs a statement: as it is prepared, or parsed with its values. It is sent whole when this is polled first.
pub(super) async fn ask(session: &Session, sql: &Sql, tables: &Tables) -> Result<Answer, Error> {
    let text = tables.qualify(&sql.text);
    let stream = if let Some(statement) = session.prepared(&text) {
        session.query_raw(&statement, &sql.values).await?
    } else {
        let values = sql.values.iter().map(|value| (value, value.postgres_type()));
        session.query_typed_raw(&text, values).await?
    };
    let mut stream = pin!(stream);
    let mut rows = Vec::new();
    while let Some(row) = stream.try_next().await? {
        rows.push(row);
    }
    Ok(Answer { rows, count: stream.rows_affected().unwrap_or(0) })
}

impl Value {
    fn postgres_type(&self) -> Type {
        match self {
            Self::Text(_) => Type::TEXT,
            Self::Int(_) => Type::INT8,
            Self::Flag(_) => Type::BOOL,
            Self::Texts(_) => Type::TEXT_ARRAY,
        }
    }
}

impl ToSql for Value {
    fn to_sql(
        &self,
        ty: &Type,
        out: &mut BytesMut,
    ) -> Result<IsNull, Box<dyn std::error::Error + Sync + Send>> {
        match self {
            Self::Text(text) => text.as_deref().map(without_nul).to_sql(ty, out),
            Self::Int(number) => number.to_sql(ty, out),
            Self::Flag(flag) => flag.to_sql(ty, out),
            Self::Texts(texts) => {
                texts.iter().map(|text| without_nul(text)).collect::<Vec<_>>().to_sql(ty, out)
            }
        }
    }

    /// It goes only where its own type was announced.
    fn accepts(_: &Type) -> bool {
        true
    }

    to_sql_checked!();
}

/// Postgres text cannot contain NUL; JSON documents have it escaped.
fn without_nul(text: &str) -> Cow<'_, str> {
    if text.contains('\0') { text.replace('\0', "\u{fffd}").into() } else { text.into() }
}

/// What the server or the connection reported, with its cause.
pub(crate) fn text_of(error: &Error) -> String {
    match (error.as_db_error(), error.source()) {
        (Some(refused), _) if *refused.code() == SqlState::DISK_FULL => {
            format!("the server's disk is full; free some space, then retry ({})", refused.message())
        }
        (Some(refused), _) => format!("error returned from database: {}", refused.message()),
        (None, Some(cause)) => format!("{error}: {cause}"),
        (None, None) => error.to_string(),
    }
}

/// The SQL around the list in "column is one of these texts".
pub(crate) const TEXT_IN: (&str, &str) = (" = ANY(", ")");

/// Appends the JSON document in `column`.
pub(crate) fn push_json(query: &mut Builder, column: &str) {
    // The server cannot look into a document with an escaped NUL. What a backslash in a literal without E is depends on
    // a setting of the database.
    query.push("replace(").push(column).push(", E'\\\\u0000', E'\\\\ufffd')::json");
}

/// Appends the text of the value at `key` of the JSON object in `column`.
pub(crate) fn push_json_at(query: &mut Builder, column: &str, key: &str) {
    query.push("(");
    push_json(query, column);
    query.push(" -> ").push_bind(key).push(")::text");
}

/// The text of a JSON value as [`push_json_at`] returns it.
pub(crate) fn json_without_nul(text: &str) -> String {
    text.replace("\\u0000", "\\ufffd")
}

/// Whether the server reports that its files are damaged, or an answer has another shape than expected.
pub(crate) fn is_corruption(error: &Error) -> bool {
    error.code().is_some_and(|code| matches!(code.code(), "XX001" | "XX002"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_named_in_full_and_nothing_else_is_changed() {
        let tables = Tables::of("a\"b");
        assert_eq!(
            tables.qualify(
                "SELECT runs.run_id, 'runs' FROM runs WHERE EXISTS (SELECT 1 FROM run_events) -- r\u{fc}ns"
            ),
            "SELECT \"a\"\"b\".threadkeep_gateway_runs.run_id, 'runs' FROM \"a\"\"b\".threadkeep_gateway_runs WHERE EXISTS \
             (SELECT 1 FROM \"a\"\"b\".threadkeep_gateway_run_events) -- r\u{fc}ns"
        );
        let qualified = Tables::of("a\nb").qualify("-- of runs\nFROM runs -- and runs - a\nruns");
        let (there, comment) = ("\"a\nb\".threadkeep_gateway_runs", "\"a b\".threadkeep_gateway_runs");
        assert_eq!(qualified, format!("-- of {comment}\nFROM {there} -- and {comment} - a\n{there}"));
        assert_eq!(tables.qualify("migrations"), tables.migrations());
        for same in ["runs_one_active_per_thread", "first_runs", "s.runs", "\"runs\"", ""] {
            assert_eq!(tables.qualify(same), same);
        }
        assert_eq!(tables.migrations(), "\"a\"\"b\".threadkeep_gateway_migrations");
    }
}
