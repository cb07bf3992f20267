//! The report as aligned tables, or in Markdown.

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

use super::{Grows, Report, Used};

/// How tables are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// In columns.
    Aligned,
    /// For a page.
    Markdown,
}

/// The tables of a report.
pub fn tables(report: &Report, form: Form) -> String {
    // Each figure has three cells: on the small store, on the one with more threads, on that with longer ones too.
    let figures = ["wall", "CPU", "peak memory", "read", "printed"];
    let header = ["store", "command or route", "grows with"].into_iter();
    let header: Vec<&str> = header.chain(figures.into_iter().flat_map(|figure| [figure, "", ""])).collect();
    let mut costs = table(form, &header);
    for row in &report.rows {
        let grows = match row.grows {
            Grows::No => "",
            Grows::Thread => "the thread",
            Grows::Store => "the store",
        };
        let name = if form == Form::Markdown { format!("`{}`", row.name) } else { row.name.clone() };
        let mut cells = vec![format!("{:?}", row.store), name, grows.to_owned()];
        let columns: [fn(&Used) -> String; 5] = [
            |used| time(used.wall_ms),
            |used| time(used.cpu_ms),
            |used| bytes(used.peak),
            |used| bytes(used.read),
            |used| bytes(used.printed),
        ];
        cells.extend(columns.iter().flat_map(|cell| [&row.small, &row.wide, &row.large].map(cell)));
        costs.add_row(cells);
    }
    let mut turns = table(form, &["store", "turns", "failed", "", "p50", "p99", "slowest", "p99 / alone"]);
    for (at, row) in report.turns.iter().enumerate() {
        // The row before it has the turns that were measured just before.
        let alone = report.turns[..at].iter().rfind(|alone| alone.beside.is_empty());
        let (beside, ratio) = match alone {
            Some(alone) if !row.beside.is_empty() => {
                let failed = if row.error.is_some() { " (failed)" } else { "" };
                (format!("beside {}{failed}", row.beside), format!("{:.2}", row.p99_ms / alone.p99_ms))
            }
            _ => ("alone".to_owned(), String::new()),
        };
        let store = format!("{:?}", row.store);
        let times = [row.p50_ms, row.p99_ms, row.max_ms].map(time);
        turns.add_row(
            [vec![store, row.turns.to_string(), row.failed.to_string(), beside], times.into(), vec![ratio]]
                .concat(),
        );
    }
    let shown = [(costs, report.rows.is_empty()), (turns, report.turns.is_empty())];
    let shown = shown.into_iter().filter(|(_, empty)| !empty).map(|(mut table, _)| {
        for (number, column) in table.column_iter_mut().enumerate() {
            if form == Form::Aligned {
                column.set_padding((0, 2));
            }
            if number > 2 {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        table.lines().map(|line| line.trim_end().to_owned() + "\n").collect::<String>()
    });
    shown.collect::<Vec<_>>().join("\n")
}

fn table(form: Form, header: &[&str]) -> Table {
    let mut table = Table::new();
    let preset = if form == Form::Markdown { presets::ASCII_MARKDOWN } else { presets::NOTHING };
    table.load_preset(preset).set_content_arrangement(ContentArrangement::Disabled).set_header(header);
    table
}

fn time(ms: f64) -> String {
    match ms {
        ms if ms < 10.0 => format!("{ms:.1} ms"),
        ms if ms < 1_000.0 => format!("{ms:.0} ms"),
        ms => format!("{:.1} s", ms / 1_000.0),
    }
}

#[allow(clippy::cast_precision_loss, reason = "shown with one digit")]
fn bytes(bytes: u64) -> String {
    match bytes as f64 {
        bytes if bytes < 10e3 => format!("{:.1} kB", bytes / 1e3),
        bytes if bytes < 1e6 => format!("{:.0} kB", bytes / 1e3),
        bytes if bytes < 1e9 => format!("{:.0} MB", bytes / 1e6),
        bytes => format!("{:.1} GB", bytes / 1e9),
    }
}
