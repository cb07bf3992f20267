//! What commands print: tables, or one JSON document per line.

use std::io::{self, BufWriter, Write};

use chrono::{DateTime, Utc};
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use serde::Serialize;
use threadkeep::id::CheckpointId;

/// Where results go. Progress, questions and errors go to stderr.
///
/// A reader that leaves (`threadkeep threads list | head`) needs no more lines. The command goes on without it, because its
/// exit code says what it did or found.
pub(crate) struct Out {
    to: BufWriter<Box<dyn Write + Send>>,
    unread: bool,
}

impl Out {
    pub(crate) fn stdout() -> Self {
        Self::to(io::stdout())
    }

    /// Results that go somewhere else.
    pub(crate) fn to(sink: impl Write + Send + 'static) -> Self {
        Self { to: BufWriter::new(Box::new(sink)), unread: false }
    }

    /// Prints a line.
    pub(crate) fn line(&mut self, text: impl AsRef<str>) -> io::Result<()> {
        self.print(|to| {
            to.write_all(text.as_ref().as_bytes())?;
            to.write_all(b"\n")
        })
    }

    /// Prints one JSON document on one line.
    pub(crate) fn json(&mut self, document: &impl Serialize) -> io::Result<()> {
        self.print(|to| {
            serde_json::to_writer(&mut *to, document)?;
            to.write_all(b"\n")
        })
    }

    fn print(&mut self, print: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
        if self.unread {
            return Ok(());
        }
        match print(&mut self.to) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                self.unread = true;
                Ok(())
            }
            printed => printed,
        }
    }

    /// Shows what was printed.
    pub(crate) fn show(&mut self) -> io::Result<()> {
        self.print(|to| to.flush())
    }

    /// Whether the reader has left, so that a command which only lists may end.
    pub(crate) fn is_unread(&self) -> bool {
        self.unread
    }

    /// Shows what was printed, which is worth nothing unless all of it was read.
    ///
    /// # Errors
    /// That of the pipe, if the reader has left.
    pub(crate) fn show_all(&mut self) -> io::Result<()> {
        self.show()?;
        if self.unread { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(()) }
    }

    /// Prints a table, or what to say if it has no rows.
    pub(crate) fn table_or(&mut self, table: &Columns, none: &str) -> io::Result<()> {
        if table.0.row_count() == 0 { self.line(none) } else { self.table(table) }
    }

    /// Prints a table.
    pub(crate) fn table(&mut self, table: &Columns) -> io::Result<()> {
        for line in table.0.lines() {
            self.line(line.trim_end())?;
        }
        Ok(())
    }
}

/// For one document, of which a part is worth nothing: its writer learns that the reader has left.
impl Write for Out {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.to.write(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// A table of aligned columns without borders.
pub(crate) struct Columns(Table);

impl Columns {
    /// A table with these headings; a heading that ends with `>` right-aligns its column.
    pub(crate) fn new(headings: &[&str]) -> Self {
        let mut table = Table::new();
        table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        table.set_header(headings.iter().map(|heading| heading.trim_end_matches('>')));
        for (column, heading) in table.column_iter_mut().zip(headings) {
            column.set_padding((0, 2));
            if heading.ends_with('>') {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        Self(table)
    }

    /// Adds a row.
    pub(crate) fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.0.add_row(cells.map(|cell| one_line(&cell)));
    }
}

/// Text that cannot break a table or control a terminal: control characters are shown as `.`.
pub(crate) fn one_line(text: &str) -> String {
    text.chars().map(|char| if char.is_control() { '.' } else { char }).collect()
}

/// A text of at most `chars` characters; of a longer one the beginning, saying how much is missing and what shows it.
pub(crate) fn cut(text: &str, chars: usize, whole: &str) -> String {
    let text = one_line(text);
    let count = text.chars().count();
    if count <= chars {
        return text;
    }
    let start: String = text.chars().take(chars).collect();
    format!("{start}… ({}: {whole})", things(count - chars, "more character"))
}

/// The first `chars` characters of a text.
pub(crate) fn short(text: &str, chars: usize) -> String {
    let text = one_line(text);
    if text.chars().count() <= chars {
        return text;
    }
    let start: String = text.chars().take(chars.saturating_sub(1)).collect();
    format!("{start}…")
}

/// A human-readable number of bytes: `1.5 MB`.
#[allow(clippy::cast_precision_loss)] // Only three digits are shown.
pub(crate) fn bytes(count: u64) -> String {
    let units = ["kB", "MB", "GB", "TB"];
    let mut value = count as f64 / 1_000.0;
    if count < 1_000 {
        return format!("{count} B");
    }
    for unit in units {
        if value < 999.95 || unit == "TB" {
            return format!("{value:.1} {unit}");
        }
        value /= 1_000.0;
    }
    format!("{count} B")
}

/// A number with digit groups: `12,345`.
pub(crate) fn number(count: u64) -> String {
    let digits = count.to_string();
    let mut grouped = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// A number of things: `1 thread`, `12 threads`.
pub(crate) fn things(count: usize, one: &str) -> String {
    let number = number(count as u64);
    if count == 1 { format!("{number} {one}") } else { format!("{number} {one}s") }
}

/// A count, formatted as by [`number`].
pub(crate) fn count(things: usize) -> String {
    number(things as u64)
}

/// A checkpoint's time for a table: UTC, to the millisecond.
pub(crate) fn moment(id: CheckpointId) -> String {
    let moment = id.created_at();
    format!(
        "{}Z",
        moment.chars().take(23).map(|char| if char == 'T' { ' ' } else { char }).collect::<String>()
    )
}

/// A record's time for people: UTC, to the second.
pub(crate) fn time(time: DateTime<Utc>) -> String {
    time.format("%Y-%m-%d %H:%M:%SZ").to_string()
}

/// The last digits of a checkpoint's id, which distinguish it from its neighbours.
pub(crate) fn tail(id: CheckpointId) -> String {
    let text = id.to_string();
    format!("…{}", &text[text.len() - 12..])
}

/// Shown for a missing value.
pub(crate) const NONE: &str = "-";

/// The text, or a dash.
pub(crate) fn or_dash(text: Option<impl ToString>) -> String {
    text.map_or_else(|| NONE.to_owned(), |text| text.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_shown_for_people() {
        for (value, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1_000, "1.0 kB"),
            (999_949, "999.9 kB"),
            (999_950, "1.0 MB"),
            (8_960_000, "9.0 MB"),
            (1 << 40, "1.1 TB"),
        ] {
            assert_eq!(bytes(value), text, "{value}");
        }
        assert_eq!(
            [number(0), number(999), number(1_000), number(1_234_567)],
            ["0", "999", "1,000", "1,234,567"]
        );
        assert_eq!(time(DateTime::<Utc>::UNIX_EPOCH), "1970-01-01 00:00:00Z");
    }

    #[test]
    fn text_from_a_store_cannot_drive_the_terminal() {
        assert_eq!(one_line("a\u{1b}[2Jb\nc"), "a.[2Jb.c");
        assert_eq!(short("abcdef", 4), "abc…");
        assert_eq!(short("abcd", 4), "abcd");
        assert_eq!(cut("ab\ncd", 4, "--json"), "ab.c… (1 more character: --json)");
        assert_eq!(
            (cut("abcd", 4, ""), things(1, "thread"), things(1_000, "thread")),
            ("abcd".to_owned(), "1 thread".to_owned(), "1,000 threads".to_owned())
        );
    }
}
