//! A file to import, which is read three times: for its links, to check it, and to write it.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, IsTerminal as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;

use async_trait::async_trait;
use threadkeep::Error;
use threadkeep::channel::ChannelTable;
use threadkeep::checkpoint::CheckpointTuple;
use threadkeep::id::{TaskId, ThreadId};
use threadkeep::saver::{Coming, LocalKey, check_next};
use threadkeep::verify::{Check, Violation};

use crate::archive::{ArchiveError, Links, Reader, Record, places};
use crate::error::{OpsError, Result};
use crate::output::count;
use crate::transfer::STANDARD;

/// How many checkpoints are given to a store at once, and after how many bytes of the file no more of them.
const PART: usize = 128;
const BYTES: u64 = 1 << 20;

/// A file that can be read again.
pub(super) struct ImportFile {
    name: String,
    file: File,
    max_elements: u64,
}

/// What was found in a file that is whole.
pub(super) struct Checked {
    /// The id that the thread will have.
    pub(super) thread: ThreadId,
    pub(super) record: Option<Record>,
    pub(super) checkpoints: usize,
    /// Why no store would take it.
    pub(super) refused: Option<Error>,
    /// The first violation of `verify` that it could not repair, and how many there are.
    violations: Option<(Violation, usize)>,
    digest: Option<blake3::Hash>,
    #[cfg(test)]
    pub(super) most_held: usize,
}

impl Checked {
    /// What `verify` would find.
    pub(super) fn damage(&self) -> Option<String> {
        let (first, all) = self.violations.as_ref()?;
        let more = if *all == 1 { String::new() } else { format!(", and {} more", count(*all - 1)) };
        Some(format!(
            "the file was written of a thread that was damaged: {first}{more}; export the thread again from a backup \
             (`threadkeep backup --out FILE` makes one, see docs/backup.md)"
        ))
    }
}

impl ImportFile {
    /// Opens a file. What cannot be read twice, such as a pipe, is copied first.
    pub(super) fn open(path: &Path, max_elements: u64) -> Result<Self> {
        let name = path.display().to_string();
        let failed = |cause| OpsError::File { path: name.clone(), cause };
        let file = if path == Path::new(STANDARD) {
            if io::stdin().is_terminal() {
                // Explain why nothing seems to happen.
                let _ = writeln!(io::stderr(), "reading from the terminal; Ctrl-D ends the file");
            }
            copied(io::stdin().lock()).map_err(failed)?
        } else {
            let file = File::open(path).map_err(failed)?;
            if file.metadata().map_err(failed)?.is_file() { file } else { copied(file).map_err(failed)? }
        };
        Ok(Self { name, file, max_elements })
    }

    /// The error of what is wrong with it.
    pub(super) fn error(&self, error: ArchiveError) -> OpsError {
        OpsError::Archive { file: self.name.clone(), error }
    }

    fn begin(&self) -> Result<&File, ArchiveError> {
        let sought = (&self.file).seek(SeekFrom::Start(0));
        sought.map_err(|cause| ArchiveError::Io { line: 1, cause })?;
        Ok(&self.file)
    }

    fn reader(&self) -> Result<Reader<&File>, ArchiveError> {
        Reader::begin(self.begin()?, self.max_elements)
    }

    /// The places of its checkpoints.
    pub(super) fn places(&self) -> Result<BTreeSet<LocalKey>> {
        self.begin().and_then(places).map_err(|error| self.error(error))
    }

    /// Checks all of it, also as `verify` would. The thread will have the id `named`, or else the one of the file.
    pub(super) fn check(&self, table: &ChannelTable, named: Option<&str>) -> Result<Checked> {
        self.checked(table, named).map_err(|error| self.error(error))
    }

    fn checked(&self, table: &ChannelTable, named: Option<&str>) -> Result<Checked, ArchiveError> {
        let links = Links::of(self.begin()?)?;
        let mut reader = self.reader()?;
        let mut checked = Checked {
            thread: named.map_or_else(|| reader.thread().clone(), ThreadId::from),
            record: reader.record().cloned(),
            checkpoints: 0,
            refused: None,
            violations: None,
            digest: None,
            #[cfg(test)]
            most_held: 0,
        };
        let mut check = Check::new(table);
        let (mut last, mut next): (Option<LocalKey>, _) = (None, reader.next_checkpoint()?);
        while let Some(mut tuple) = next {
            tuple.thread = checked.thread.clone();
            next = reader.next_checkpoint()?;
            let tasks = check.parent(&tuple).map(|parent| parent.writes.iter().map(|row| row.task));
            let tasks = tasks.map(Iterator::collect::<Vec<TaskId>>);
            let may_come = check_next(&checked.thread, &tuple, last.as_ref(), tasks.as_deref());
            checked.refused = checked.refused.or(may_come.err());
            last = Some((tuple.namespace.clone(), tuple.checkpoint.id));
            let last_child = links.last_child(&tuple, next.as_ref());
            for violation in check.next(Cow::Owned(tuple), last_child) {
                if !violation.rule.is_repairable() {
                    checked.violations.get_or_insert((violation, 0)).1 += 1;
                }
            }
            checked.checkpoints += 1;
            #[cfg(test)]
            {
                checked.most_held = checked.most_held.max(check.held());
            }
        }
        checked.digest = reader.digest();
        Ok(checked)
    }

    /// Its checkpoints, as a store takes them.
    pub(super) fn coming(&self, checked: &Checked) -> ComingFile<'_> {
        let (thread, digest) = (checked.thread.clone(), checked.digest);
        ComingFile { file: self, thread, digest, reader: None, failed: None }
    }
}

/// A copy without a name, which is gone with the process.
fn copied(mut from: impl io::Read) -> io::Result<File> {
    let mut copy = tempfile::tempfile()?;
    io::copy(&mut from, &mut copy)?;
    Ok(copy)
}

/// The checkpoints of a file that was checked.
pub(super) struct ComingFile<'f> {
    file: &'f ImportFile,
    thread: ThreadId,
    digest: Option<blake3::Hash>,
    reader: Option<Reader<&'f File>>,
    /// What was wrong with the file.
    pub(super) failed: Option<ArchiveError>,
}

impl ComingFile<'_> {
    fn part(&mut self) -> Result<Vec<CheckpointTuple>, ArchiveError> {
        let reader = match &mut self.reader {
            Some(reader) => reader,
            none => none.insert(self.file.reader()?),
        };
        let (from, mut part) = (reader.bytes(), Vec::new());
        while part.len() < PART && reader.bytes().saturating_sub(from) < BYTES {
            let Some(mut tuple) = reader.next_checkpoint()? else {
                if reader.digest() != self.digest {
                    let reason = "the file was changed while it was imported; import it again".to_owned();
                    return Err(ArchiveError::Line { line: 1, reason });
                }
                break;
            };
            tuple.thread = self.thread.clone();
            part.push(tuple);
        }
        Ok(part)
    }
}

#[async_trait]
impl Coming for ComingFile<'_> {
    async fn rewind(&mut self) -> threadkeep::Result<()> {
        self.reader = None;
        Ok(())
    }

    async fn next(&mut self) -> threadkeep::Result<Vec<CheckpointTuple>> {
        self.part().map_err(|error| {
            let reason = error.to_string();
            self.failed = Some(error);
            Error::InvalidInput(reason)
        })
    }
}

#[cfg(test)]
mod tests;
