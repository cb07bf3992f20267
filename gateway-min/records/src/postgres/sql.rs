//! The names of the tables, and the SQL that differs between the databases.

use std::sync::Arc;

use sqlx::error::DatabaseError;
use sqlx::postgres::PgArguments;
use sqlx::{AssertSqlSafe, Postgres};

use crate::query::{Builder, Sql, Value};

/// The table names: prefixed, because others may use the schema.
#[derive(Clone, Debug)]
pub(crate) struct Tables {
    prefix: Arc<str>,
}

/// The table names used in statements.
const NAMES: [&str; 10] = [
    "threads_meta",
    "runs",
    "run_events",
    "run_frames",
    "executions",
    "store_settings",
    "subagents",
    "subagent_batches",
    "subagent_batch_items",
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

/// A statement in Postgres form.
pub(super) fn prepared(sql: Sql, tables: &Tables) -> sqlx::query::Query<'static, Postgres, PgArguments> {
    let mut query = sqlx::query(AssertSqlSafe(tables.qualify(&sql.text)));
    for value in sql.values {
        query = match value {
            Value::Text(text) => query.bind(text.map(without_nul)),
            Value::Int(number) => query.bind(number),
            Value::Flag(flag) => query.bind(flag),
            Value::Texts(texts) => query.bind(texts.into_iter().map(without_nul).collect::<Vec<_>>()),
        };
    }
    query
}

/// Postgres text cannot contain NUL; JSON documents have it escaped.
fn without_nul(text: String) -> String {
    if text.contains('\0') { text.replace('\0', "\u{fffd}") } else { text }
}

/// The SQL around the list in "column is one of these texts".
pub(crate) const TEXT_IN: (&str, &str) = (" = ANY(", ")");

/// Appends the text of the value at `key` of the JSON object in `column`.
pub(crate) fn push_json_at(query: &mut Builder, column: &str, key: &str) {
    // The server cannot look into a document with an escaped NUL.
    query
        .push("(replace(")
        .push(column)
        .push(", '\\u0000', '\\ufffd')::json -> ")
        .push_bind(key)
        .push(")::text");
}

/// The text of a JSON value as [`push_json_at`] returns it.
pub(crate) fn json_without_nul(text: &str) -> String {
    text.replace("\\u0000", "\\ufffd")
}

/// Whether the server reports that its files are damaged.
pub(crate) fn is_corruption(error: &dyn DatabaseError) -> bool {
    matches!(error.code().as_deref(), Some("XX001" | "XX002"))
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
