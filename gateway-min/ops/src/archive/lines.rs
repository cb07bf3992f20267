//! The lines of an exported file, one at a time.

use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};

use serde_json::Value as Json;

use super::ArchiveError;
use super::format::{FORMAT, Header, Line, VERSION};

/// The maximum length of a line in bytes. A line holds at most one large value.
const MAX_LINE: u64 = 512 << 20;

/// Where a line is, and a part of its hash: a line that is read again must be the same.
#[derive(Debug, Clone, Copy)]
pub(super) struct Spot {
    offset: u64,
    sum: u64,
}

impl Spot {
    /// Whether it is before another one.
    pub(super) fn is_before(self, other: Self) -> bool {
        self.offset < other.offset
    }
}

/// A file, of which each line is read in turn, and some again.
pub(super) struct Lines<R> {
    from: BufReader<R>,
    /// The hash of all lines before this one.
    hash: blake3::Hasher,
    /// How many were read.
    pub(super) number: u64,
    /// This line.
    text: Vec<u8>,
    offset: u64,
    /// A line that was read again.
    other: Vec<u8>,
    /// Whether the file is at another place than after this line.
    is_away: bool,
}

impl<R: Read + Seek> Lines<R> {
    /// The lines of a file that is at its beginning.
    pub(super) fn new(from: R) -> Self {
        Self {
            from: BufReader::new(from),
            hash: blake3::Hasher::new(),
            number: 0,
            text: Vec::new(),
            offset: 0,
            other: Vec::new(),
            is_away: false,
        }
    }

    /// The hash of all lines before this one.
    pub(super) fn hash(&self) -> blake3::Hash {
        self.hash.finalize()
    }

    /// How many bytes were read.
    pub(super) fn bytes(&self) -> u64 {
        self.offset + self.text.len() as u64
    }

    /// Where this line is.
    pub(super) fn spot(&self) -> Spot {
        Spot { offset: self.offset, sum: sum(&self.text) }
    }

    /// Reads the next line; `false` at the end of the file.
    pub(super) fn next(&mut self) -> Result<bool, ArchiveError> {
        let line = self.number + 1;
        self.hash.update(&self.text);
        self.offset = self.bytes();
        self.text.clear();
        let failed = |cause| ArchiveError::Io { line, cause };
        if std::mem::take(&mut self.is_away) {
            self.from.seek(SeekFrom::Start(self.offset)).map_err(failed)?;
        }
        let read = self.from.by_ref().take(MAX_LINE + 1).read_until(b'\n', &mut self.text);
        let read = read.map_err(failed)?;
        if read == 0 {
            return Ok(false);
        }
        if self.text.last() != Some(&b'\n') {
            return Err(if read as u64 > MAX_LINE {
                ArchiveError::Line { line, reason: format!("it is longer than {MAX_LINE} bytes") }
            } else {
                ArchiveError::Truncated { lines: self.number }
            });
        }
        self.number = line;
        Ok(true)
    }

    pub(super) fn parse(&self) -> Result<Line, ArchiveError> {
        threadkeep::json::from_slice(&self.text)
            .map_err(|error| ArchiveError::Line { line: self.number, reason: error.to_string() })
    }

    /// This line.
    pub(super) fn text(&self) -> &[u8] {
        &self.text
    }

    /// Reads a line again.
    pub(super) fn again(&mut self, spot: Spot) -> Result<Line, String> {
        self.is_away = true;
        self.other.clear();
        let read = self
            .from
            .seek(SeekFrom::Start(spot.offset))
            .and_then(|_| self.from.by_ref().take(MAX_LINE + 1).read_until(b'\n', &mut self.other));
        read.map_err(|error| format!("an earlier line cannot be read again: {error}"))?;
        if sum(&self.other) != spot.sum {
            return Err("an earlier line has changed since it was read".to_owned());
        }
        threadkeep::json::from_slice(&self.other).map_err(|error| error.to_string())
    }
}

fn sum(line: &[u8]) -> u64 {
    let mut start = [0; 8];
    start.copy_from_slice(&blake3::hash(line).as_bytes()[..8]);
    u64::from_le_bytes(start)
}

/// The first line.
pub(super) fn header(lines: &mut Lines<impl Read + Seek>) -> Result<Header, ArchiveError> {
    let not_ours = |reason: String| ArchiveError::NotOurs { reason };
    if !lines.next()? {
        return Err(not_ours("the file is empty".to_owned()));
    }
    // A newer header may have more keys, so check its version first.
    let text: Json =
        threadkeep::json::from_slice(&lines.text).map_err(|error| not_ours(error.to_string()))?;
    let found = &text["header"];
    if found["format"] != FORMAT {
        return Err(not_ours("it has another format or none".to_owned()));
    }
    match found["version"].as_u64() {
        Some(VERSION) => {}
        Some(found) if found > VERSION => return Err(ArchiveError::NewerVersion { found }),
        _ => return Err(not_ours("it has no version".to_owned())),
    }
    match lines.parse()? {
        Line::Header(header) => Ok(header),
        _ => Err(not_ours("it is not a header".to_owned())),
    }
}
