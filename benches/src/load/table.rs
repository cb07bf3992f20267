//! The rows as an aligned table.

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

use super::Row;

/// A heading and the cell below it.
type Column = (&'static str, fn(&Row) -> String);

const COLUMNS: [Column; 27] = [
    ("turns", |row| row.turns_done.to_string()),
    ("turns/s", |row| format!("{:.0}", row.turns_per_s)),
    ("first frame p50", |row| ms(row.first_frame_p50_ms)),
    ("p99", |row| ms(row.first_frame_p99_ms)),
    ("turn p50", |row| ms(row.turn_p50_ms)),
    ("p99", |row| ms(row.turn_p99_ms)),
    ("later frames p50", |row| row.frame_delay_p50_ms.map(ms).unwrap_or_default()),
    ("p99", |row| row.frame_delay_p99_ms.map(ms).unwrap_or_default()),
    ("end p50", |row| row.end_delay_p50_ms.map(ms).unwrap_or_default()),
    ("p99", |row| row.end_delay_p99_ms.map(ms).unwrap_or_default()),
    ("first tenth", |row| ms(row.turn_first10pct_ms)),
    ("last tenth", |row| ms(row.turn_last10pct_ms)),
    ("CPU/turn", |row| ms(row.gateway_cpu_ms)),
    ("first tenth", |row| row.gateway_cpu_first10pct_ms.map(ms).unwrap_or_default()),
    ("last tenth", |row| row.gateway_cpu_last10pct_ms.map(ms).unwrap_or_default()),
    ("follower", |row| row.follower_cpu_ms.map(ms).unwrap_or_default()),
    ("server", |row| row.server_cpu_ms.map(ms).unwrap_or_default()),
    ("clients", |row| ms(row.client_cpu_ms)),
    ("calls/turn", |row| format!("{:.0}", row.gateway_calls)),
    ("waits", |row| format!("{:.0}", row.gateway_waits)),
    ("peak RSS", |row| megabytes(row.rss_peak)),
    ("RSS", |row| megabytes(row.rss_end)),
    ("checkpoint flushes/turn", |row| count(row.checkpoint_flushes)),
    ("record commits", |row| count(row.record_commits)),
    ("flushed", |row| count(row.record_flushes)),
    ("statements", |row| count(row.record_statements)),
    ("round trips", |row| count(row.record_round_trips.filter(|trips| *trips > 0.0))),
];

/// A table of the rows.
pub fn table(rows: &[Row]) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(["store", "mode", "threads"].into_iter().chain(COLUMNS.map(|(heading, _)| heading)));
    for row in rows {
        let followed = if row.followed { ", followed" } else { "" };
        let store = format!("{:?}{followed}", row.store).to_lowercase();
        let case = [store, row.mode.to_string(), row.threads.to_string()];
        table.add_row(case.into_iter().chain(COLUMNS.iter().map(|(_, cell)| cell(row))));
    }
    for (number, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if number > 1 {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}

fn ms(ms: f64) -> String {
    if ms < 10.0 { format!("{ms:.2} ms") } else { format!("{ms:.0} ms") }
}

#[allow(clippy::cast_precision_loss, reason = "shown without digits")]
fn megabytes(bytes: u64) -> String {
    format!("{:.0} MB", bytes as f64 / 1e6)
}

fn count(count: Option<f64>) -> String {
    count.map_or_else(String::new, |count| format!("{count:.2}"))
}
