//! `threadkeep import`: reads threads from the files that `threadkeep export` wrote ([`super::archive`] is the format).

mod file;

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;
use threadkeep::id::ThreadId;
use threadkeep::saver::{ListQuery, Load};

use self::file::{Checked, ImportFile};
use super::archive::{MAX_PLACES, Record};
use super::error::{OpsError, Result};
use super::output::{Out, number, one_line, things};
use super::pace::Pace;
use super::pages::Newest;
use super::progress::Progress;
use super::target::{StoreArgs, Target};
use super::transfer::{ENDING, failed, shown};
use threadkeep_records::{NewThread, Records, RecordsError, WriterKind};

/// Read a thread from a file, or every thread from a directory of exported files.
///
/// A whole file is checked before anything is written, also as `verify` checks a thread: one of a damaged thread is
/// refused. Each thread is written in one atomic change, and must not exist yet; from a directory, threads that exist are
/// left alone, so an interrupted import can be repeated. A file that is not on a disk, such as stdin, is copied to the
/// directory of temporary files first. If the store has gateway records, the thread gets one, so that
/// the gateway serves it.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  threadkeep import my-thread.ndjson
  threadkeep import my-thread.ndjson --as a-copy
  threadkeep import exported/ --owner ann
  zstd -dc my-thread.ndjson.zst | threadkeep import -")]
pub(crate) struct ImportCommand {
    /// The file; - for stdin; or a directory, of which all files named *.ndjson are read.
    #[arg(value_name = "PATH")]
    path: PathBuf,
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
    /// The maximum number of elements in the lists and maps of a thread; each takes about 100 bytes of memory.
    #[arg(long, value_name = "N", default_value_t = MAX_PLACES)]
    max_elements: u64,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Print JSON: one document per thread.
    #[arg(long)]
    json: bool,
}

/// What became of a file.
enum Imported {
    Now {
        thread: ThreadId,
        checkpoints: usize,
    },
    /// The thread, and the file.
    ThereAlready(ThreadId, ImportFile),
}

impl ImportCommand {
    pub(crate) async fn run(&self, target: &Target, out: &mut Out) -> Result<()> {
        if self.path.is_dir() {
            return self.directory(target, out).await;
        }
        match self.file(target, &self.path).await? {
            Imported::Now { thread, checkpoints } => self.tell(out, &thread, checkpoints),
            Imported::ThereAlready(thread, file) => {
                // As after an import that was in doubt, and is repeated.
                let is_it = matches!(there(target, &thread, &file).await, Ok(There::All));
                let what = if is_it { ", with every checkpoint of the file" } else { "" };
                Err(OpsError::Unsupported(format!(
                    "nothing was imported: thread {thread} already exists{what}; import it under another id with --as"
                )))
            }
        }
    }

    fn tell(&self, out: &mut Out, thread: &ThreadId, checkpoints: usize) -> Result<()> {
        if self.json {
            out.json(&json!({"thread": thread.as_str(), "checkpoints": checkpoints}))?;
        } else {
            let (thread, verb) = (one_line(thread.as_str()), if checkpoints == 1 { "was" } else { "were" });
            let checkpoints = things(checkpoints, "checkpoint");
            out.line(format!("thread {thread}: {checkpoints} {verb} imported."))?;
        }
        Ok(())
    }

    /// Imports each file of the directory. One that cannot be imported does not keep the others from it.
    async fn directory(&self, target: &Target, out: &mut Out) -> Result<()> {
        if self.thread.is_some() {
            return Err(OpsError::Unsupported(
                "--as names one thread; import a file of the directory instead of all".to_owned(),
            ));
        }
        let entries = fs::read_dir(&self.path).and_then(Iterator::collect::<io::Result<Vec<_>>>);
        let entries = entries.map_err(|cause| failed(&self.path, cause))?;
        let files = entries.into_iter().map(|entry| entry.path());
        let mut files: Vec<PathBuf> =
            files.filter(|file| file.extension().is_some_and(|ending| ending == ENDING)).collect();
        files.sort();
        if files.is_empty() {
            return Err(OpsError::Unsupported(format!(
                "{}: no file in it is named *.{ENDING}",
                shown(&self.path)
            )));
        }
        let mut progress = Progress::new("files done", files.len() as u64);
        let (mut threads, mut total, mut there, mut wrong, mut stopped) = (0_usize, 0, 0, 0, Ok(()));
        let mut pace = Pace::new();
        for file in &files {
            pace.rest(target).await;
            stopped = progress.interrupted();
            if stopped.is_err() {
                break;
            }
            match self.file(target, file).await {
                Ok(Imported::Now { thread, checkpoints }) => {
                    (threads, total) = (threads + 1, total + checkpoints);
                    if self.json {
                        self.tell(out, &thread, checkpoints)?;
                    }
                }
                Ok(Imported::ThereAlready(..)) => there += 1,
                Err(error)
                    if error.is_of_one_thread()
                        || matches!(error, OpsError::File { .. } | OpsError::Unsupported(_)) =>
                {
                    wrong += 1;
                    progress.say(&format!("error: {}", one_line(&error.to_string())));
                }
                Err(error) => {
                    stopped = Err(error);
                    break;
                }
            }
            progress.next();
        }
        drop(progress);
        if !self.json {
            let verb = if threads == 1 { "was" } else { "were" };
            let threads = things(threads, "thread");
            out.line(format!("{threads} {verb} imported, with {}.", things(total, "checkpoint")))?;
            if there > 0 {
                let (exist, were) = if there == 1 { ("exists", "was") } else { ("exist", "were") };
                let there = things(there, "thread");
                out.line(format!("{there} {exist} already and {were} left unchanged."))?;
            }
        }
        stopped?;
        if wrong > 0 {
            let all = files.len() as u64;
            return Err(OpsError::Unsupported(format!(
                "{} of {} files could not be imported: see above",
                number(wrong),
                number(all)
            )));
        }
        Ok(())
    }

    async fn file(&self, target: &Target, file: &Path) -> Result<Imported> {
        let records = target.needed_records()?;
        if self.owner.is_some() && records.is_none() {
            return Err(OpsError::Unsupported(format!(
                "nothing was imported: who owns a thread is in the gateway's records, which are not beside this store; create \
                 them with {}, or pass --no-owner in its place",
                target.again.setup()
            )));
        }
        let path = file;
        let file = ImportFile::open(path, self.max_elements)?;
        let checked = file.check(&target.table, self.thread.as_deref())?;
        let record = checked.record.clone();
        let named = record.as_ref().and_then(|record| record.owner.as_deref());
        if let Some(named) = named
            && self.owner.is_none()
            && !self.no_owner
        {
            let remedy = if records.is_some() {
                "say whose it is now with --owner USER, or --no-owner for everybody's".to_owned()
            } else {
                // Without records it would be everybody's once there is a gateway.
                let setup = target.again.setup();
                format!(
                    "the gateway's records, which would say whose it is now, are not beside this store; create them with \
                     {setup} and pass --owner USER, or pass --no-owner for everybody's"
                )
            };
            return Err(OpsError::Unsupported(format!(
                "{}: nothing was imported: the thread belonged to user {}; {remedy}",
                shown(path),
                one_line(named)
            )));
        }
        if let Some(why) = &checked.refused {
            return Err(OpsError::Unsupported(format!("{}: nothing was imported: {why}", shown(path))));
        }
        let thread = checked.thread.clone();
        if exists(target, &thread).await? {
            return Ok(Imported::ThereAlready(thread, file));
        }
        if let Some(found) = checked.damage() {
            return Err(OpsError::Unsupported(format!("{}: nothing was imported: {found}", shown(path))));
        }
        let Some(records) = records else { return written(target, file, &checked).await };
        // Until the thread and its record are both there or both are not, no other import counts on one of them.
        let reservation = match records.runs().reserve(thread.as_str(), WriterKind::Delete).await {
            Err(held @ RecordsError::Conflict { .. }) => {
                return Err(OpsError::Unsupported(format!(
                    "nothing was imported: {held}, perhaps another import; try again when it has ended"
                )));
            }
            reserved => reserved?,
        };
        // Programs that know no records may begin the thread at any time. The record first: a thread without one is
        // everybody's.
        let (imported, created) = match exists(target, &thread).await {
            Ok(true) => (Ok(Imported::ThereAlready(thread.clone(), file)), false),
            Ok(false) => match self.create_record(records, &thread, record).await {
                Ok(created) => (written(target, file, &checked).await, created),
                Err(error) => (Err(error), false),
            },
            Err(error) => (Err(error), false),
        };
        // Else there is no thread, or that of a program that knows no records, of which the record is not true.
        let may_be_there = matches!(imported, Ok(Imported::Now { .. }) | Err(OpsError::InDoubt(_)));
        if may_be_there || !created {
            // After an error it is tried again in the background, and the lease ends.
            let _ = reservation.release().await;
        } else if let Err(left) = records.delete_thread(reservation).await {
            let thread = one_line(thread.as_str());
            // Nobody may be reading stderr.
            let _ = writeln!(
                io::stderr(),
                "the gateway's record of thread {thread}, which the import created, is left: {left}"
            );
        }
        imported
    }

    /// Creates the gateway's record of the thread, unless it is there; returns whether it did. One of another owner is not
    /// taken for the import's: it decides who may read the thread.
    async fn create_record(
        &self,
        records: &Records,
        thread: &ThreadId,
        record: Option<Record>,
    ) -> Result<bool> {
        let record = record.map(|record| NewThread {
            display_name: record.title,
            assistant_id: record.assistant,
            metadata: record.metadata,
            ..NewThread::default()
        });
        let (thread_id, user_id) = (thread.to_string(), self.owner.clone());
        let new = NewThread { thread_id, user_id, ..record.unwrap_or_default() };
        let made = records.threads().create(new).await?;
        if !made.created && made.row.user_id != self.owner {
            return Err(OpsError::Unsupported(format!(
                "nothing was imported: the gateway has a record of thread {thread} with another owner; delete the thread, or \
                 import it under another id with --as"
            )));
        }
        Ok(made.created)
    }
}

async fn exists(target: &Target, thread: &ThreadId) -> Result<bool> {
    let query = ListQuery { namespace: None, limit: Some(1), load: Load::None, ..ListQuery::new(thread) };
    Ok(!target.saver().list(&query).await?.is_empty())
}

/// Writes the thread, which must not exist.
async fn written(target: &Target, file: ImportFile, checked: &Checked) -> Result<Imported> {
    let thread = checked.thread.clone();
    let now = |thread| Imported::Now { thread, checkpoints: checked.checkpoints };
    let mut coming = file.coming(checked);
    let created = target.saver().create_thread(&thread, &mut coming).await;
    if let (Err(_), Some(error)) = (&created, coming.failed.take()) {
        return Err(file.error(error));
    }
    match created {
        Ok(()) => Ok(now(thread)),
        Err(threadkeep::Error::Stale { .. }) => Ok(Imported::ThereAlready(thread, file)),
        Err(doubt @ threadkeep::Error::InDoubt { .. }) => {
            let is_there = settled(&thread, doubt, there(target, &thread, &file).await)?;
            Ok(if is_there { now(thread) } else { Imported::ThereAlready(thread, file) })
        }
        Err(error) => Err(error.into()),
    }
}

/// What there is under the id of a thread whose import is in doubt.
enum There {
    /// Every checkpoint of the file.
    All,
    /// Some of them.
    Part,
    Nothing,
    /// Other checkpoints, and none of the file.
    Another,
}

async fn there(target: &Target, thread: &ThreadId, file: &ImportFile) -> Result<There> {
    let wanted = file.places()?;
    let query = ListQuery { namespace: None, load: Load::None, ..ListQuery::new(thread) };
    let (mut newest, mut nothing, mut found) = (Newest::new(&**target.saver(), query), true, 0);
    loop {
        let page = newest.next().await?;
        if page.is_empty() {
            break;
        }
        nothing = false;
        for tuple in page {
            found += usize::from(wanted.contains(&(tuple.namespace, tuple.checkpoint.id)));
        }
    }
    Ok(match found {
        _ if nothing => There::Nothing,
        found if found == wanted.len() => There::All,
        0 => There::Another,
        _ => There::Part,
    })
}

/// Settles an import in doubt by reading the thread; returns whether it is there. It was written as a whole or not at
/// all, but a thread that is missing may still appear: a server may be at work on it, and a disk may have it. It cannot
/// where another one is: it is written only if there is none.
fn settled(thread: &ThreadId, doubt: threadkeep::Error, there: Result<There>) -> Result<bool> {
    let seen = match &there {
        Ok(There::All) => return Ok(true),
        Ok(There::Another) => return Ok(false),
        Ok(There::Part) => format!("a part of thread {thread} is there"),
        Ok(There::Nothing) => format!("thread {thread} is not there yet, and may still appear"),
        Err(_) => return Err(doubt.into()),
    };
    match doubt {
        threadkeep::Error::InDoubt { saver, reason } => {
            let reason = format!("{seen}: {reason}");
            Err(threadkeep::Error::InDoubt { saver, reason }.into())
        }
        doubt => Err(doubt.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_import_in_doubt_that_is_not_seen_is_not_called_undone() {
        let doubt =
            || threadkeep::Error::InDoubt { saver: "x", reason: "the connection was lost".to_owned() };
        let thread = ThreadId::from("t");
        assert!(settled(&thread, doubt(), Ok(There::All)).unwrap());
        assert!(!settled(&thread, doubt(), Ok(There::Another)).unwrap(), "it is not the file's");
        for (there, says) in [
            (Ok(There::Nothing), "thread t is not there yet"),
            (Ok(There::Part), "a part of thread t is there"),
            (Err(OpsError::Refused("it does not answer")), ""),
        ] {
            let error = settled(&thread, doubt(), there).unwrap_err();
            assert!(matches!(error, OpsError::InDoubt(_)), "{error}");
            let error = error.to_string();
            assert!(error.contains(says) && error.contains("the connection was lost"), "{error}");
        }
    }
}
