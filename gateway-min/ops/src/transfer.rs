//! `threadkeep export` and `threadkeep import`: a thread to a file and back ([`super::archive`] is the format).

use std::fs::File;
use std::io::{self, BufReader, BufWriter, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;
use threadkeep::id::ThreadId;
use threadkeep::saver::{Revision, Rewrite, ThreadImage};

use super::archive::{Archive, ArchiveError, MAX_PLACES, Record, Source, Written, read_within, write};
use super::error::{OpsError, Result};
use super::output::{Out, bytes, number, one_line};
use super::target::{StoreArgs, Target};
use threadkeep_files::NewFile;
use threadkeep_records::NewThread;

/// The file name that means stdout or stdin.
const STANDARD: &str = "-";

/// Write a thread to a file that any store can import.
///
/// The file is text, one JSON document per line, with a hash over the whole; gateway-min/ops/src/export.md
/// describes the format. It holds the complete thread, in its current mode, and the gateway's title, owner and
/// metadata, but no runs or events.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  threadkeep export --thread my-thread --out my-thread.ndjson
  threadkeep export --thread my-thread | zstd > my-thread.ndjson.zst")]
pub(crate) struct ExportCommand {
    /// The thread.
    #[arg(long, value_name = "ID")]
    thread: String,
    /// The file, which must not exist; - for stdout.
    #[arg(long, value_name = "FILE", default_value = STANDARD)]
    out: PathBuf,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
}

impl ExportCommand {
    pub(crate) async fn run(&self, target: &Target, out: &mut Out) -> Result<()> {
        let thread = ThreadId::from(self.thread.as_str());
        let image = target.image(&thread).await?;
        let record = target.record(&thread).await?.map(|row| Record {
            title: row.display_name,
            owner: row.user_id,
            assistant: row.assistant_id,
            metadata: row.metadata,
        });
        if self.out == Path::new(STANDARD) {
            return match write(&image, source(target), record, out) {
                Ok(_) => Ok(()),
                Err(ArchiveError::Io { cause, .. }) => Err(OpsError::Output(cause)),
                Err(error) => Err(OpsError::Archive { file: "stdout".to_owned(), error }),
            };
        }
        let written = to_file(&self.out, &image, source(target), record)?;
        out.line(format!(
            "{}: thread {}, {} checkpoints, {} elements, {}.",
            one_line(&self.out.display().to_string()),
            one_line(&self.thread),
            number(written.checkpoints),
            number(written.elements),
            bytes(written.bytes)
        ))?;
        Ok(())
    }
}

fn source(target: &Target) -> Source {
    Source {
        program: concat!("threadkeep ", env!("CARGO_PKG_VERSION")).to_owned(),
        saver: target.saver().capabilities().name.to_owned(),
    }
}

/// Writes a file completely or not at all.
fn to_file(path: &Path, image: &ThreadImage, source: Source, record: Option<Record>) -> Result<Written> {
    let failed = |cause: io::Error| {
        let cause = match cause.kind() {
            io::ErrorKind::AlreadyExists => {
                io::Error::new(cause.kind(), "it already exists; choose another name")
            }
            _ => cause,
        };
        OpsError::File { path: path.display().to_string(), cause }
    };
    let file = NewFile::create(path).map_err(failed)?;
    let written = write(image, source, record, BufWriter::new(file.file()));
    let written = written.map_err(|error| OpsError::Archive { file: path.display().to_string(), error })?;
    file.finish().map_err(failed)?;
    Ok(written)
}

/// Read a thread from a file.
///
/// The whole file is checked before anything is written. The thread is written in one atomic change, and must not exist
/// yet. If the store has gateway records, the thread gets one, so that the gateway serves it.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  threadkeep import my-thread.ndjson
  threadkeep import my-thread.ndjson --as a-copy
  zstd -dc my-thread.ndjson.zst | threadkeep import -")]
pub(crate) struct ImportCommand {
    /// The file; - for stdin.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The id of the imported thread [default: its id in the file].
    #[arg(long = "as", value_name = "ID")]
    thread: Option<String>,
    /// The user who owns the imported thread. The owner that the file names does not count: who may read a thread is
    /// for this store to decide.
    #[arg(long, value_name = "USER", conflicts_with = "no_owner")]
    owner: Option<String>,
    /// Import the thread without an owner, so that every user of the gateway sees it.
    #[arg(long)]
    no_owner: bool,
    /// The maximum number of elements in the lists and maps of the thread; each takes about 100 bytes of memory.
    #[arg(long, value_name = "N", default_value_t = MAX_PLACES)]
    max_elements: u64,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

impl ImportCommand {
    pub(crate) async fn run(&self, target: &Target, out: &mut Out) -> Result<()> {
        let Archive { thread, record, mut checkpoints, .. } = self.read()?;
        let named = record.as_ref().and_then(|record| record.owner.as_deref());
        if let Some(named) = named
            && target.records().is_some()
            && self.owner.is_none()
            && !self.no_owner
        {
            return Err(OpsError::Unsupported(format!(
                "nothing was imported: the thread belonged to user {}; say whose it is now with --owner USER, or \
                 --no-owner for everybody's",
                one_line(named)
            )));
        }
        let thread = self.thread.as_deref().map_or(thread, ThreadId::from);
        for tuple in &mut checkpoints {
            tuple.thread = thread.clone();
        }
        let count = checkpoints.len() as u64;
        let rewrite = Rewrite { put: checkpoints, ..Rewrite::default() };
        rewrite.check(&thread, std::collections::BTreeMap::new())?;
        if !target.saver().read_thread(&thread).await?.checkpoints.is_empty() {
            return Err(there(&thread));
        }
        // The record first: if writing the thread fails, the same import can be repeated.
        if let Some(records) = target.records() {
            let record = record.map(|record| NewThread {
                display_name: record.title,
                assistant_id: record.assistant,
                metadata: record.metadata,
                ..NewThread::default()
            });
            let thread_id = thread.to_string();
            let user_id = self.owner.clone();
            records.threads().create(NewThread { thread_id, user_id, ..record.unwrap_or_default() }).await?;
        }
        match target.saver().rewrite_thread(&thread, &Revision::absent(), rewrite).await {
            Err(threadkeep::Error::Stale { .. }) => return Err(there(&thread)),
            done => done?,
        }
        if self.json {
            out.json(&json!({"thread": thread.as_str(), "checkpoints": count}))?;
        } else {
            let thread = one_line(thread.as_str());
            out.line(format!("thread {thread}: {} checkpoints were imported.", number(count)))?;
        }
        Ok(())
    }

    fn read(&self) -> Result<Archive> {
        let file = self.file.display().to_string();
        let read = if self.file == Path::new(STANDARD) {
            if io::stdin().is_terminal() {
                // Explain why nothing seems to happen.
                let _ = writeln!(io::stderr(), "reading from the terminal; Ctrl-D ends the file");
            }
            read_within(io::stdin().lock(), self.max_elements)
        } else {
            let opened = File::open(&self.file);
            let opened = opened.map_err(|cause| OpsError::File { path: file.clone(), cause })?;
            read_within(BufReader::new(opened), self.max_elements)
        };
        read.map_err(|error| OpsError::Archive { file, error })
    }
}

fn there(thread: &ThreadId) -> OpsError {
    OpsError::Unsupported(format!(
        "nothing was imported: thread {thread} already exists; import it under another id with --as"
    ))
}
