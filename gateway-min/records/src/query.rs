//! Statements and rows for both databases. A statement has one text for both, with numbered parameters (`$1`); the
//! differences are in [`super::sqlite`] and [`super::postgres`].

use std::borrow::Cow;
use std::fmt::Write as _;

use rusqlite::RowIndex;
use rusqlite::types::FromSql;
use tokio_postgres::types::FromSqlOwned;

use super::failure::DatabaseError;
use super::{postgres, sqlite};

/// The databases that can hold the records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialect {
    Sqlite,
    Postgres,
}

/// A value for a parameter.
#[derive(Clone, Debug)]
pub(super) enum Value {
    Text(Option<String>),
    Int(i64),
    Flag(bool),
    /// For the list of [`Builder::push_text_in`].
    Texts(Vec<String>),
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(Some(text.to_owned()))
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Text(Some(text))
    }
}

impl From<&String> for Value {
    fn from(text: &String) -> Self {
        Self::Text(Some(text.clone()))
    }
}

impl From<Option<&str>> for Value {
    fn from(text: Option<&str>) -> Self {
        Self::Text(text.map(str::to_owned))
    }
}

impl From<Option<String>> for Value {
    fn from(text: Option<String>) -> Self {
        Self::Text(text)
    }
}

impl From<&Option<String>> for Value {
    fn from(text: &Option<String>) -> Self {
        Self::Text(text.clone())
    }
}

impl From<i64> for Value {
    fn from(number: i64) -> Self {
        Self::Int(number)
    }
}

impl From<bool> for Value {
    fn from(flag: bool) -> Self {
        Self::Flag(flag)
    }
}

/// A statement with the values of its parameters.
#[derive(Clone, Debug)]
pub(super) struct Sql {
    pub(super) text: Cow<'static, str>,
    pub(super) values: Vec<Value>,
}

/// A statement whose parameters are bound later, in order.
pub(super) fn query(text: &'static str) -> Sql {
    Sql { text: text.into(), values: Vec::new() }
}

impl Sql {
    /// Binds the next parameter.
    pub(super) fn bind(mut self, value: impl Into<Value>) -> Self {
        self.values.push(value.into());
        self
    }
}

/// A statement that is built piece by piece.
pub(super) struct Builder {
    dialect: Dialect,
    text: String,
    values: Vec<Value>,
}

impl Builder {
    pub(super) fn new(dialect: Dialect, text: &str) -> Self {
        Self { dialect, text: text.to_owned(), values: Vec::new() }
    }

    /// Appends text unchanged.
    pub(super) fn push(&mut self, text: &str) -> &mut Self {
        self.text.push_str(text);
        self
    }

    /// Appends more text.
    pub(super) fn with(mut self, text: &str) -> Self {
        self.push(text);
        self
    }

    /// Appends a parameter.
    pub(super) fn push_bind(&mut self, value: impl Into<Value>) -> &mut Self {
        self.values.push(value.into());
        // Writing to a string cannot fail.
        let _ = write!(self.text, "${}", self.values.len());
        self
    }

    /// Appends one more parameter.
    pub(super) fn with_bind(mut self, value: impl Into<Value>) -> Self {
        self.push_bind(value);
        self
    }

    /// Appends: the text in `column` is one of `texts`, any number of them.
    pub(super) fn push_text_in(&mut self, column: &str, texts: &[String]) -> &mut Self {
        let (before, after) = match self.dialect {
            Dialect::Sqlite => sqlite::TEXT_IN,
            Dialect::Postgres => postgres::TEXT_IN,
        };
        self.push(column).push(before).push_bind(Value::Texts(texts.to_vec())).push(after)
    }

    /// Appends: the value at the top-level `key` of the JSON object in `column` is one of `texts`. Values are compared
    /// as their stored JSON text, which distinguishes types (`1`, `"1"`, `true`) and is exact for every number and
    /// string. `key` consists of letters, digits, `_` and `-`.
    pub(super) fn push_json_is(&mut self, column: &str, key: &str, texts: &[String]) -> &mut Self {
        match self.dialect {
            Dialect::Sqlite => sqlite::push_json_at(self, column, key),
            Dialect::Postgres => postgres::push_json_at(self, column, key),
        }
        self.push(" IN (");
        for (index, text) in texts.iter().enumerate() {
            let text = match self.dialect {
                Dialect::Sqlite => text.clone(),
                Dialect::Postgres => postgres::json_without_nul(text),
            };
            self.push(if index == 0 { "" } else { ", " }).push_bind(text);
        }
        self.push(")")
    }

    pub(super) fn build(self) -> Sql {
        Sql { text: self.text.into(), values: self.values }
    }
}

/// A row of either database.
pub(super) enum Row<'r> {
    Sqlite(&'r rusqlite::Row<'r>),
    Postgres(tokio_postgres::Row),
}

impl Row<'_> {
    /// The value of a column, by name or index.
    pub(super) fn get<T: Cell, I>(&self, column: I) -> Result<T, DatabaseError>
    where
        I: RowIndex + tokio_postgres::row::RowIndex + std::fmt::Display,
    {
        match self {
            Self::Sqlite(row) => row.get(column).map_err(|error| DatabaseError::Cell(error.into())),
            Self::Postgres(row) => row.try_get(column).map_err(|error| DatabaseError::Cell(error.into())),
        }
    }
}

/// A type that a cell of either database can be read as.
pub(super) trait Cell: FromSql + FromSqlOwned {}

impl<T: FromSql + FromSqlOwned> Cell for T {}

/// A type that a row can be read as.
pub(super) trait FromRow: Sized + Send + 'static {
    fn from_row(row: &Row<'_>) -> Result<Self, DatabaseError>;
}

impl<T: Cell + Send + 'static, U: Cell + Send + 'static> FromRow for (T, U) {
    fn from_row(row: &Row<'_>) -> Result<Self, DatabaseError> {
        Ok((row.get(0)?, row.get(1)?))
    }
}

impl<T: Cell + Send + 'static> FromRow for (T,) {
    fn from_row(row: &Row<'_>) -> Result<Self, DatabaseError> {
        Ok((row.get(0)?,))
    }
}
