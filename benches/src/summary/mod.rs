//! Rows as aligned tables, and as plots on one page.

mod page;
mod plot;
mod table;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

use crate::case::Each;
use crate::row::Row;
use crate::workload::Workload;

pub use table::tables;

/// Writes each plot as an SVG file, and `index.html` with all of them and the tables.
///
/// # Errors
/// If a file cannot be written.
pub fn write_plots(rows: &[Row], directory: &Path) -> Result<()> {
    fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
    let plots = plot::plots(rows)?;
    for plot in &plots {
        fs::write(directory.join(format!("{}.svg", plot.name)), &plot.svg)?;
    }
    fs::write(directory.join("index.html"), page::page(&tables(rows), &plots))?;
    Ok(())
}

/// What makes rows comparable: the same workload and the same numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Group {
    workload: Workload,
    turns: usize,
    size: usize,
    threads: usize,
}

impl Group {
    fn title(self) -> String {
        let Self { workload, turns, size, threads } = self;
        let size = if size > 0 { format!(", {size} B a message") } else { String::new() };
        let threads = if threads > 1 { format!(", {threads} conversations") } else { String::new() };
        format!("{workload}, {turns} turns{size}{threads}")
    }

    /// The prefix of a file's name.
    fn slug(self) -> String {
        let Self { workload, turns, size, threads } = self;
        format!("{workload}-{turns}-{size}-{threads}")
    }
}

/// The rows by group, each group in input order.
fn groups(rows: &[Row]) -> BTreeMap<Group, Vec<&Row>> {
    let mut groups: BTreeMap<Group, Vec<&Row>> = BTreeMap::new();
    for row in rows {
        let crate::case::Case { workload, turns, size, threads, .. } = row.case;
        groups.entry(Group { workload, turns, size, threads }).or_default().push(row);
    }
    groups
}

/// A row's name within its group.
fn name(row: &Row) -> String {
    match row.case.backend.kind() {
        crate::case::Kind::Raw => row.case.backend.to_string(),
        _ => format!("{} {}", row.case.backend, mode(row)),
    }
}

/// A row's mode, and what it flushes if that is not every superstep.
fn mode(row: &Row) -> String {
    match row.case.flush {
        Each::Step => row.case.mode.to_string(),
        Each::Turn => format!("{}, flush a turn", row.case.mode),
    }
}
