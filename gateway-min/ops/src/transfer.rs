//! `threadkeep export`: threads to files ([`super::archive`] is the format), which `super::import` reads.

use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use threadkeep::id::ThreadId;

use super::archive::{ArchiveError, Record, Source, Writer, Written};
use super::error::{OpsError, Result};
use super::flushing::Flushing;
use super::output::{Out, bytes, one_line, things};
use super::pages::Oldest;
use super::pass::Pass;
use super::progress::Progress;
use super::target::{StoreArgs, Target, Threads};
use threadkeep_files::{NewFile, create_private_dir, thread_name};
use threadkeep_records::CHILD_PREFIX;

/// The file name that means stdout or stdin.
pub(crate) const STANDARD: &str = "-";
/// The ending of exported files in a directory.
pub(crate) const ENDING: &str = "ndjson";
/// How often the export of a thread to a file begins again because the thread was pruned or converted meanwhile.
const ATTEMPTS: usize = 4;

/// Write a thread to a file that any store can import, or every thread to a directory.
///
/// A file is text, one JSON document per line, with a hash over the whole; gateway-min/ops/src/export.md
/// describes the format. It holds the complete thread as it was at one moment, in its current mode, and the gateway's
/// title, owner and metadata, but no runs or events. Runs can go on meanwhile.
///
/// With --all, a file that is there already is left alone, so an interrupted export can be repeated. Threads of subagents are left
/// out: what they reported is in the thread that asked them.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  threadkeep export --thread my-thread --out my-thread.ndjson
  threadkeep export --thread my-thread | zstd > my-thread.ndjson.zst
  threadkeep export --all --out exported/")]
pub(crate) struct ExportCommand {
    #[command(flatten)]
    threads: Threads,
    /// The file, which must not exist; - for stdout. With --all, a directory, which is created if necessary.
    #[arg(long, value_name = "PATH", default_value = STANDARD)]
    out: PathBuf,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
}

impl ExportCommand {
    pub(crate) async fn run(&self, target: &Target, out: &mut Out) -> Result<()> {
        let standard = self.out == Path::new(STANDARD);
        let (mut threads, unlisted) = target.threads(&self.threads).await?;
        let mut left_out = 0;
        if self.threads.are_all() {
            // An exported thread stands alone: what its subagents did is not part of it, only what they reported.
            let all = threads.len();
            threads.retain(|thread| !thread.as_str().starts_with(CHILD_PREFIX));
            left_out = all - threads.len();
        }
        match &threads[..] {
            [thread] if !self.threads.are_all() => {
                let record = record(target, thread).await?;
                if standard {
                    return match write(target, thread, record, &mut *out).await {
                        // A part of a thread is worth nothing.
                        Ok(_) => Ok(out.flush()?),
                        Err(OpsError::Archive { error: ArchiveError::Io { cause, .. }, .. }) => {
                            Err(OpsError::Output(cause))
                        }
                        Err(error) => Err(error),
                    };
                }
                let written = to_file(target, thread, record, &self.out).await?;
                let written = told(&written);
                out.line(format!("{}: thread {}, {written}.", shown(&self.out), one_line(thread.as_str())))?;
                Ok(())
            }
            _ if standard => {
                Err(OpsError::Unsupported("several threads need a directory: --out DIRECTORY".to_owned()))
            }
            threads => {
                let exported = self.many(target, out, threads, unlisted).await;
                if left_out > 0 {
                    let left_out = things(left_out, "thread");
                    out.line(format!(
                        "{left_out} of subagents were left out; what they reported is in the others."
                    ))?;
                }
                exported
            }
        }
    }

    /// Exports each thread to a file of its own. Threads are read one after the other; meanwhile files that are written go to
    /// the disk.
    async fn many(
        &self,
        target: &Target,
        out: &mut Out,
        threads: &[ThreadId],
        unlisted: Option<OpsError>,
    ) -> Result<()> {
        create_private_dir(&self.out).map_err(|cause| failed(&self.out, cause))?;
        let progress = Progress::new("threads exported", threads.len() as u64);
        let mut pass =
            Pass::new(progress, "exported", threads.len(), self.threads.are_all()).giving_way(target);
        let (mut there, mut flushing) = (0, Flushing::default());
        for thread in threads {
            if !pass.goes_on().await {
                break;
            }
            let path = self.out.join(format!("{}.{ENDING}", thread_name(thread.as_str())));
            if path.symlink_metadata().is_ok() {
                there += 1;
                pass.note(thread, Ok(()));
                continue;
            }
            let exported = async {
                let (file, written) =
                    unfinished(target, thread, record(target, thread).await?, &path).await?;
                flushing.add(path, file, written.bytes).await
            };
            let exported = exported.await;
            pass.note(thread, exported);
        }
        let flushed = flushing.wait_until(0).await;
        let ended = pass.end(unlisted);
        let (files, size) = (things(flushing.files, "thread"), bytes(flushing.bytes));
        out.line(format!("{}: exported {files}, {size}.", shown(&self.out)))?;
        if there > 0 {
            let there = things(there, "thread");
            out.line(format!("Left as they are: the files of {there} that were there already."))?;
        }
        flushed.and(ended)
    }
}

/// What was written, for people.
fn told(written: &Written) -> String {
    let of = |count: u64, one: &str| things(usize::try_from(count).unwrap_or(usize::MAX), one);
    format!(
        "{}, {}, {}",
        of(written.checkpoints, "checkpoint"),
        of(written.elements, "element"),
        bytes(written.bytes)
    )
}

pub(crate) fn shown(path: &Path) -> String {
    one_line(&path.display().to_string())
}

async fn record(target: &Target, thread: &ThreadId) -> Result<Option<Record>> {
    let Some(records) = target.needed_records()? else { return Ok(None) };
    Ok(records.threads().get(thread.as_str(), None).await?.map(|row| Record {
        title: row.display_name,
        owner: row.user_id,
        assistant: row.assistant_id,
        metadata: row.metadata,
    }))
}

fn source(target: &Target) -> Source {
    Source {
        program: concat!("threadkeep ", env!("CARGO_PKG_VERSION")).to_owned(),
        saver: target.saver().capabilities().name.to_owned(),
    }
}

/// Writes a thread, which is read page by page.
async fn write(
    target: &Target,
    thread: &ThreadId,
    record: Option<Record>,
    to: impl Write,
) -> Result<Written> {
    let failed = |error| OpsError::Archive { file: format!("the export of thread {thread}"), error };
    let mut pages = Oldest::open(&**target.saver(), thread).await?;
    if pages.left() == 0 {
        target.newest(thread).await?;
    }
    let mut writer = Writer::begin(thread, source(target), record, to).map_err(failed)?;
    loop {
        let page = pages.next().await?;
        if page.is_empty() {
            return writer.end().map_err(failed);
        }
        for tuple in &page {
            writer.checkpoint(tuple).map_err(failed)?;
        }
    }
}

/// Writes a file completely or not at all.
async fn to_file(target: &Target, thread: &ThreadId, record: Option<Record>, path: &Path) -> Result<Written> {
    let (file, written) = unfinished(target, thread, record, path).await?;
    file.finish().map_err(|cause| failed(path, cause))?;
    Ok(written)
}

/// Writes a file that is not there until it is finished.
async fn unfinished(
    target: &Target,
    thread: &ThreadId,
    record: Option<Record>,
    path: &Path,
) -> Result<(NewFile, Written)> {
    let mut attempt = 1;
    loop {
        let file = NewFile::create(path).map_err(|cause| failed(path, cause))?;
        match write(target, thread, record.clone(), BufWriter::new(file.file())).await {
            Err(OpsError::Checkpoints(threadkeep::Error::Stale { .. })) if attempt < ATTEMPTS => {
                attempt += 1;
            }
            Err(OpsError::Archive { error: ArchiveError::Io { cause, .. }, .. }) => {
                return Err(failed(path, cause));
            }
            written => {
                let written = written?;
                return Ok((file, written));
            }
        }
    }
}

pub(crate) fn failed(path: &Path, cause: io::Error) -> OpsError {
    let cause = match cause.kind() {
        io::ErrorKind::AlreadyExists => {
            io::Error::new(cause.kind(), "it already exists; choose another name")
        }
        io::ErrorKind::StorageFull => io::Error::new(
            cause.kind(),
            "the disk is full, and nothing was left there; free some space or choose another disk",
        ),
        _ => cause,
    };
    OpsError::File { path: path.display().to_string(), cause }
}
