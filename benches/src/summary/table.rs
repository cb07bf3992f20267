//! Aligned tables.

use std::fmt::Write as _;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

use super::{Group, groups, mode};
use crate::case::Kind;
use crate::row::{Found, Row};

/// A table for each group of comparable rows.
pub fn tables(rows: &[Row]) -> String {
    let mut text = String::new();
    for (group, rows) in groups(rows) {
        // Writing into a String cannot fail.
        let _ = writeln!(text, "\n{}\n\n{}", group.title(), table(group, &rows));
    }
    text
}

/// A heading and the cell below it.
type Column = (&'static str, fn(&Row) -> String);

const ALONE: [Column; 16] = [
    ("turn p50", |row| ms(row.found.turn_p50_ms)),
    ("p99", |row| ms(row.found.turn_p99_ms)),
    ("last/first", |row| ratio(row.found.turn_last10pct_ms, row.found.turn_first10pct_ms)),
    ("CPU/turn", |row| ms(cpu_per_turn(&row.found))),
    ("CPU end/20", |row| ratio(row.found.cpu_turn_end_ms, row.found.cpu_turn_at20_ms)),
    ("step", |row| ms(row.found.step_p50_ms)),
    ("/floor", |row| ratio(row.found.step_p50_ms, row.found.floor_step_p50_ms)),
    ("flushes/turn", |row| quotient(row.found.flushes, row.found.turns_done)),
    ("bytes", |row| bytes(row.found.bytes_closed)),
    ("/raw", |row| quotient(row.found.bytes_closed, row.found.raw_bytes)),
    ("head", |row| ms(row.found.head_warm_ms)),
    ("kept", |row| ms(row.found.head_kept_ms)),
    ("cold", |row| ms(row.found.cold_head_ms)),
    ("list 100", |row| ms(row.found.list100_ms)),
    ("states", |row| ms(row.found.list100_state_ms)),
    ("peak", |row| bytes(row.found.rss_peak)),
];

const MANY: [Column; 7] = [
    ("writers", |row| row.case.writers.to_string()),
    ("turns/s", |row| number(row.found.turns_per_s)),
    ("turn p50", |row| ms(row.found.turn_p50_ms)),
    ("p99", |row| ms(row.found.turn_p99_ms)),
    ("CPU/turn", |row| ms(cpu_per_turn(&row.found))),
    ("flushes/turn", |row| quotient(row.found.flushes, row.found.turns_done)),
    ("peak", |row| bytes(row.found.rss_peak)),
];

fn table(group: Group, rows: &[&Row]) -> String {
    let columns: &[Column] = if group.threads > 1 { &MANY } else { &ALONE };
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(["store", "mode"].into_iter().chain(columns.iter().map(|(heading, _)| *heading)));
    for row in rows {
        let shown = if row.case.backend.kind() == Kind::Raw { String::new() } else { mode(row) };
        let outcome = match (&row.found.error, &row.found.capped) {
            (Some(_), _) => " (failed)".to_owned(),
            (None, Some(_)) => format!(" (capped at {})", row.found.turns_done.unwrap_or_default()),
            (None, None) => String::new(),
        };
        let cells = columns.iter().map(|(_, cell)| cell(row));
        table.add_row([row.case.backend.to_string(), shown + &outcome].into_iter().chain(cells));
    }
    for (number, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if number > 1 {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}

#[allow(clippy::cast_precision_loss, reason = "a count of turns")]
fn cpu_per_turn(found: &Found) -> Option<f64> {
    Some(found.cpu_s? * 1e3 / found.turns_done? as f64)
}

fn ms(value: Option<f64>) -> String {
    value.map_or_else(String::new, |ms| match ms {
        ..10.0 => format!("{ms:.2} ms"),
        ..1_000.0 => format!("{ms:.0} ms"),
        _ => format!("{:.1} s", ms / 1e3),
    })
}

fn number(value: Option<f64>) -> String {
    value.map_or_else(String::new, |value| format!("{value:.0}"))
}

fn ratio(over: Option<f64>, under: Option<f64>) -> String {
    over.zip(under)
        .filter(|(_, under)| *under > 0.0)
        .map_or_else(String::new, |(a, b)| format!("{:.2}", a / b))
}

#[allow(clippy::cast_precision_loss, reason = "shown with two digits")]
fn quotient(over: Option<u64>, under: Option<u64>) -> String {
    ratio(over.map(|n| n as f64), under.map(|n| n as f64))
}

#[allow(clippy::cast_precision_loss, reason = "shown with two digits")]
fn bytes(value: Option<u64>) -> String {
    value.map_or_else(String::new, |bytes| format!("{:.2} MB", bytes as f64 / 1e6))
}
