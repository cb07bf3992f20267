//! One file of the feed: reading it, appending to it, and removing the rest of an interrupted append.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use super::{Event, Line};
use crate::error::RecordsError;
use crate::events::PreparedEvent;
use crate::failure::DatabaseError;
use threadkeep_files as files;

/// How much is read from the end of a file to find its last line; doubled if the line is longer.
const TAIL: u64 = 16 * 1024;
/// Only its owner may access a file, because it holds conversations.
const MODE: u32 = 0o600;

/// A file locked against other writers, in this process and in others.
#[derive(Debug)]
pub(super) struct FeedFile {
    file: File,
    path: PathBuf,
    thread_id: String,
}

/// Where an append was written, and the numbers of its events.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Appended {
    pub(super) at: u64,
    pub(super) numbers: Vec<i64>,
}

/// The end of the complete appends in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct End {
    bytes: u64,
    seq: i64,
}

impl FeedFile {
    /// Locks the file of a thread, creating it if missing.
    pub(super) fn hold(path: PathBuf, thread_id: String) -> Result<Self, RecordsError> {
        loop {
            let file = open(&path).map_err(unavailable)?;
            if lock(&file, &path).map_err(unavailable)? {
                return Ok(Self { file, path, thread_id });
            }
        }
    }

    /// As [`Self::hold`], but creates nothing: a full disk does not keep a thread without events from being deleted.
    pub(super) fn hold_existing(path: PathBuf, thread_id: String) -> Result<Option<Self>, RecordsError> {
        loop {
            let file = match OpenOptions::new().read(true).write(true).open(&path) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(error) => return Err(unavailable(error)),
            };
            if lock(&file, &path).map_err(unavailable)? {
                return Ok(Some(Self { file, path, thread_id }));
            }
        }
    }

    /// Appends the events of runs, all or none.
    pub(super) fn append(
        mut self,
        runs: Vec<(String, Vec<PreparedEvent>)>,
        user_id: Option<String>,
    ) -> Result<Appended, RecordsError> {
        let end = self.end()?;
        let mut lines: Vec<Event> = Vec::new();
        for (run_id, events) in runs {
            lines.extend(events.into_iter().map(|event| Event {
                thread_id: self.thread_id.clone(),
                run_id: run_id.clone(),
                user_id: user_id.clone(),
                seq: 0,
                event_type: event.event_type,
                category: event.category,
                content: event.content,
                metadata: event.metadata,
                created_at: event.created_at,
                more: true,
            }));
        }
        let Some(last) = lines.last_mut() else {
            return Ok(Appended { at: end.bytes, numbers: Vec::new() });
        };
        last.more = false;
        let mut text = Vec::new();
        for (seq, line) in (end.seq + 1..).zip(&mut lines) {
            line.seq = seq;
            write_line(&mut text, &Line::Event(line.clone()))?;
        }
        self.write(end.bytes, &text)?;
        Ok(Appended { at: end.bytes, numbers: lines.iter().map(|line| line.seq).collect() })
    }

    /// Keeps the events for which `keep` returns true, and the last number.
    pub(super) fn retain(mut self, keep: impl Fn(&Event) -> bool) -> Result<(), RecordsError> {
        let last = self.end()?.seq;
        self.file.seek(SeekFrom::Start(0)).map_err(unavailable)?;
        let file = self.file.try_clone().map_err(unavailable)?;
        let kept = select(file, &self.path, &self.thread_id, usize::MAX, keep)?;
        let mut text = Vec::new();
        for event in &kept {
            write_line(&mut text, &Line::Event(Event { more: false, ..event.clone() }))?;
        }
        if last > kept.last().map_or(0, |event| event.seq) {
            write_line(&mut text, &Line::Given { given: last })?;
        }
        files::replace(&self.path, &text, MODE).map_err(unavailable)
    }

    /// Removes the file. A writer that waits for its lock creates a new one.
    pub(super) fn remove(self) -> Result<(), RecordsError> {
        fs::remove_file(&self.path).map_err(unavailable)?;
        files::sync_directory(&self.path).map_err(unavailable)
    }

    /// Removes the file if it is empty.
    pub(super) fn remove_if_empty(self) -> Result<(), RecordsError> {
        if self.file.metadata().map_err(unavailable)?.len() == 0 { self.remove() } else { Ok(()) }
    }

    /// Writes `text` after the complete appends, over the rest of an interrupted one.
    fn write(&mut self, at: u64, text: &[u8]) -> Result<(), RecordsError> {
        let written = self.file.set_len(at).and_then(|()| {
            self.file.seek(SeekFrom::Start(at))?;
            self.file.write_all(text)?;
            self.file.sync_data()?;
            // The first line is only as durable as the file's directory entry.
            if at == 0 { files::sync_directory(&self.path) } else { Ok(()) }
        });
        written.map_err(|error| {
            // A partial write must not become visible.
            match self.file.set_len(at).and_then(|()| self.file.sync_data()) {
                Ok(()) => unavailable(error),
                Err(_) => RecordsError::InDoubt { cause: DatabaseError::Io(error) },
            }
        })
    }

    /// The end of the complete appends, found by reading backwards, so that the file's length does not matter.
    fn end(&mut self) -> Result<End, RecordsError> {
        let len = self.file.metadata().map_err(unavailable)?.len();
        let mut size = TAIL.min(len);
        loop {
            let mut tail = Vec::new();
            self.file.seek(SeekFrom::Start(len - size)).map_err(unavailable)?;
            (&self.file).take(size).read_to_end(&mut tail).map_err(unavailable)?;
            match end_of(&tail, size == len).map_err(|detail| self.damaged(detail))? {
                Some((bytes, seq)) => {
                    let bytes = len - size + u64::try_from(bytes).unwrap_or(0);
                    if bytes < len {
                        tracing::warn!(
                            thread_id = self.thread_id,
                            bytes = len - bytes,
                            "removing the rest of an interrupted append to the event feed"
                        );
                    }
                    return Ok(End { bytes, seq });
                }
                None => size = (size * 4).min(len),
            }
        }
    }

    fn damaged(&self, detail: String) -> RecordsError {
        RecordsError::Corrupt { place: self.path.display().to_string(), detail }
    }
}

/// The end of the complete appends in the last bytes of a file, and their last number; `None` if more must be read.
/// `is_all` says that these are all bytes of the file.
fn end_of(tail: &[u8], is_all: bool) -> Result<Option<(usize, i64)>, String> {
    let mut end = tail.iter().rposition(|byte| *byte == b'\n').map_or(0, |newline| newline + 1);
    while end > 0 {
        let start = tail[..end - 1].iter().rposition(|byte| *byte == b'\n').map(|newline| newline + 1);
        let start = match start {
            Some(start) => start,
            None if is_all => 0,
            None => return Ok(None),
        };
        let line = &tail[start..end - 1];
        // A block that never reached the disk reads as zeros, which no document contains.
        if !line.contains(&0) {
            let line: Line = serde_json::from_slice(line).map_err(|error| format!("its end: {error}"))?;
            if !line.has_more() {
                return Ok(Some((end, line.seq())));
            }
        }
        end = start;
    }
    Ok(is_all.then_some((0, 0)))
}

/// The first `limit` events of complete appends for which `wanted` returns true.
pub(super) fn select(
    file: File,
    path: &Path,
    thread_id: &str,
    limit: usize,
    wanted: impl Fn(&Event) -> bool,
) -> Result<Vec<Event>, RecordsError> {
    let mut reader = BufReader::new(file);
    let (mut selected, mut call, mut last) = (Vec::new(), Vec::new(), 0);
    let mut line = Vec::new();
    for number in 1_u64.. {
        line.clear();
        reader.read_until(b'\n', &mut line).map_err(unavailable)?;
        // An interrupted append has no events.
        if line.pop() != Some(b'\n') || line.contains(&0) {
            break;
        }
        let damaged = |detail: String| RecordsError::Corrupt {
            place: format!("{}, line {number}", path.display()),
            detail,
        };
        let read: Line = serde_json::from_slice(&line).map_err(|error| damaged(error.to_string()))?;
        if read.seq() <= last {
            return Err(damaged(format!("number {} follows {last}", read.seq())));
        }
        last = read.seq();
        let has_more = read.has_more();
        if let Line::Event(event) = read {
            if event.thread_id != thread_id {
                return Err(damaged("it belongs to another thread".to_owned()));
            }
            call.push(event);
        }
        if !has_more {
            selected.extend(call.drain(..).filter(&wanted));
            if selected.len() >= limit {
                break;
            }
        }
    }
    selected.truncate(limit);
    Ok(selected)
}

fn write_line(text: &mut Vec<u8>, line: &Line) -> Result<(), RecordsError> {
    serde_json::to_writer(&mut *text, line).map_err(|error| unavailable(error.into()))?;
    text.push(b'\n');
    Ok(())
}

/// Opens a file to read and write, creating it and its directory if missing.
fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, MODE);
    match options.open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if let Some(directory) = path.parent() {
                files::create_private_dir(directory)?;
            }
            options.open(path)
        }
        opened => opened,
    }
}

/// Locks a file. Returns whether `path` still refers to it: the previous holder of the lock may have removed or
/// replaced it.
fn lock(file: &File, path: &Path) -> io::Result<bool> {
    file.lock()?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt as _;
        let there = match fs::metadata(path) {
            Ok(there) => there,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error),
        };
        let here = file.metadata()?;
        Ok((here.dev(), here.ino()) == (there.dev(), there.ino()))
    }
    #[cfg(not(unix))]
    {
        let _ = path;
        Ok(true)
    }
}

pub(super) fn unavailable(error: io::Error) -> RecordsError {
    RecordsError::Unavailable { cause: DatabaseError::Io(error) }
}

#[cfg(test)]
mod tests;
