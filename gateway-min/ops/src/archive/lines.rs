//! The lines of an exported file, one at a time.

use std::io::{BufRead, Read as _};

use serde_json::Value as Json;

use super::ArchiveError;
use super::format::{FORMAT, Header, Line, VERSION};

/// The maximum length of a line in bytes. A line holds at most one large value.
const MAX_LINE: u64 = 512 << 20;

/// What is left of a file.
pub(super) struct Lines<R> {
    from: R,
    /// The hash of all lines read so far.
    hash: blake3::Hasher,
    /// How many were read.
    pub(super) number: u64,
    text: Vec<u8>,
}

impl<R: BufRead> Lines<R> {
    pub(super) fn new(from: R) -> Self {
        Self { from, hash: blake3::Hasher::new(), number: 0, text: Vec::new() }
    }

    /// The hash of all lines read so far.
    pub(super) fn hash(&self) -> blake3::Hash {
        self.hash.finalize()
    }

    /// Reads the next line; `false` at the end of the file.
    pub(super) fn next(&mut self) -> Result<bool, ArchiveError> {
        self.text.clear();
        let line = self.number + 1;
        let read = self.from.by_ref().take(MAX_LINE + 1).read_until(b'\n', &mut self.text);
        let read = read.map_err(|cause| ArchiveError::Io { line, cause })?;
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
        self.hash.update(&self.text);
        Ok(true)
    }

    pub(super) fn parse(&self) -> Result<Line, ArchiveError> {
        threadkeep::json::from_slice(&self.text)
            .map_err(|error| ArchiveError::Line { line: self.number, reason: error.to_string() })
    }
}

/// The first line.
pub(super) fn header(lines: &mut Lines<impl BufRead>) -> Result<Header, ArchiveError> {
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
