//! Converts values to database cells and back: times, JSON, names.

use std::error::Error;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use chrono::{DateTime, SecondsFormat, SubsecRound, Utc};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::query::{Cell, Row};
use crate::failure::DatabaseError;

/// A JSON object, as metadata fields hold it.
pub type JsonObject = serde_json::Map<String, Value>;

/// The store's source of time.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> DateTime<Utc> + Send + Sync>);

impl Clock {
    /// The system's clock.
    pub fn system() -> Self {
        Self::from_fn(Utc::now)
    }

    /// A clock that calls `now`, for tests and replays.
    pub fn from_fn(now: impl Fn() -> DateTime<Utc> + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    /// The current time in whole microseconds, the database's precision.
    pub fn now(&self) -> DateTime<Utc> {
        (self.0)().trunc_subsecs(6)
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clock")
    }
}

/// The last second whose year has four digits. A later time has no text that can be read or compared.
const LAST_SECOND: i64 = 253_402_300_799;

/// `2026-01-02T03:04:05.000006+00:00`: fixed width, so that text order is time order. A time after the last one that has
/// such a text, as a deadline of thousands of years, is that one.
pub(super) fn time_text(time: DateTime<Utc>) -> String {
    let last = DateTime::from_timestamp(LAST_SECOND, 999_999_000).unwrap_or(time);
    time.min(last).to_rfc3339_opts(SecondsFormat::Micros, false)
}

pub(super) fn object_text(object: &JsonObject) -> String {
    // Avoids serde_json::to_string, whose error cannot occur for a value.
    Value::Object(object.clone()).to_string()
}

/// The first `max` characters of `text`.
pub(super) fn cut(text: &str, max: usize) -> &str {
    text.char_indices().nth(max).map_or(text, |(end, _)| &text[..end])
}

/// An offset in the database's type; one out of its range skips everything anyway.
pub(super) fn page_offset(offset: u64) -> i64 {
    i64::try_from(offset).unwrap_or(i64::MAX)
}

/// A cell with invalid content.
#[derive(Debug, thiserror::Error)]
#[error("{table}.{column} of row {row}: {detail}")]
pub(super) struct BadCell {
    pub(super) table: &'static str,
    pub(super) column: &'static str,
    pub(super) row: String,
    pub(super) detail: String,
}

/// Reads the cells of one row by column name; errors name table, row and column, but never show the content.
pub(super) struct Cells<'r> {
    row: &'r Row<'r>,
    table: &'static str,
    id_columns: &'static [&'static str],
}

impl<'r> Cells<'r> {
    /// `id_columns` are the columns that identify the row in errors.
    pub(super) fn new(row: &'r Row<'r>, table: &'static str, id_columns: &'static [&'static str]) -> Self {
        Self { row, table, id_columns }
    }

    fn bad(&self, column: &'static str, detail: impl Into<String>) -> DatabaseError {
        let cell = BadCell { table: self.table, column, row: self.id(), detail: detail.into() };
        DatabaseError::Cell(Box::<dyn Error + Send + Sync>::from(cell))
    }

    fn id(&self) -> String {
        let ids = self.id_columns.iter().map(|column| match self.row.get::<String, _>(*column) {
            Ok(text) => text,
            Err(_) => self.row.get::<i64, _>(*column).map_or_else(|_| "?".to_owned(), |n| n.to_string()),
        });
        ids.collect::<Vec<_>>().join("/")
    }

    fn get<T: Cell>(&self, column: &'static str) -> Result<T, DatabaseError> {
        self.row.get(column).map_err(|error| self.bad(column, error.to_string()))
    }

    pub(super) fn text(&self, column: &'static str) -> Result<String, DatabaseError> {
        self.get(column)
    }

    pub(super) fn opt_text(&self, column: &'static str) -> Result<Option<String>, DatabaseError> {
        self.get(column)
    }

    pub(super) fn int(&self, column: &'static str) -> Result<i64, DatabaseError> {
        self.get(column)
    }

    pub(super) fn opt_int(&self, column: &'static str) -> Result<Option<i64>, DatabaseError> {
        self.get(column)
    }

    pub(super) fn flag(&self, column: &'static str) -> Result<bool, DatabaseError> {
        self.get(column)
    }

    pub(super) fn json<T: DeserializeOwned>(&self, column: &'static str) -> Result<T, DatabaseError> {
        serde_json::from_str(&self.text(column)?).map_err(|error| {
            self.bad(
                column,
                format!("not the expected JSON (line {}, column {})", error.line(), error.column()),
            )
        })
    }

    pub(super) fn opt_json<T: DeserializeOwned>(
        &self,
        column: &'static str,
    ) -> Result<Option<T>, DatabaseError> {
        self.opt_text(column)?.map(|_| self.json(column)).transpose()
    }

    /// A name from a fixed list.
    pub(super) fn name<T: FromStr>(&self, column: &'static str) -> Result<T, DatabaseError> {
        self.text(column)?.parse().map_err(|_| self.bad(column, "an unknown name"))
    }

    pub(super) fn opt_name<T: FromStr>(&self, column: &'static str) -> Result<Option<T>, DatabaseError> {
        let name = self.opt_text(column)?;
        name.map(|text| text.parse().map_err(|_| self.bad(column, "an unknown name"))).transpose()
    }

    pub(super) fn time(&self, column: &'static str) -> Result<DateTime<Utc>, DatabaseError> {
        self.parse_time(column, &self.text(column)?)
    }

    pub(super) fn opt_time(&self, column: &'static str) -> Result<Option<DateTime<Utc>>, DatabaseError> {
        self.opt_text(column)?.map(|text| self.parse_time(column, &text)).transpose()
    }

    fn parse_time(&self, column: &'static str, text: &str) -> Result<DateTime<Utc>, DatabaseError> {
        let time =
            DateTime::parse_from_rfc3339(text).map_err(|_| self.bad(column, "not an ISO-8601 time"))?;
        Ok(time.with_timezone(&Utc))
    }
}

/// The text is not a name of this list.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown {list} '{text}'")]
pub struct UnknownName {
    /// The list of names.
    pub list: &'static str,
    /// The unknown text.
    pub text: String,
}

/// An enum whose variants are stored and sent as fixed names.
macro_rules! name_enum {
    (
        $(#[$meta:meta])*
        $name:ident ($list:literal) { $( $(#[$variant_meta:meta])* $variant:ident = $text:literal, )+ }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name { $( $(#[$variant_meta])* $variant, )+ }

        impl $name {
            /// The stored and sent name.
            pub const fn as_str(self) -> &'static str {
                match self { $( Self::$variant => $text, )+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl std::str::FromStr for $name {
            type Err = $crate::UnknownName;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                match text {
                    $( $text => Ok(Self::$variant), )+
                    _ => Err($crate::UnknownName { list: $list, text: text.to_owned() }),
                }
            }
        }
    };
}
pub(super) use name_enum;
