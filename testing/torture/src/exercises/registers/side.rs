//! The savers that read registers and append to them: in this process, and each in a process of its own.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use threadkeep::checkpoint::{ChannelEntry, Checkpoint, Stored};
use threadkeep::id::{CheckpointId, IdSource, ThreadId};
use threadkeep::metadata::{Metadata, Source};
use threadkeep::saver::{CheckpointSelector, Flush, Saver as _, StepCommit};
use threadkeep::value::ChannelValue;
use threadkeep::{Error, Result};
use threadkeep_postgres::{Options, PostgresSaver};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tracing::instrument::WithSubscriber as _;

use super::{PAUSE, RETRIES};
use crate::child::{self, Child};
use crate::settled::Settled;
use crate::storage::HUNG;

pub(super) type Head = Option<CheckpointId>;

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    Read { thread: String },
    Append { thread: String, head: Head, values: Vec<u64> },
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    Read {
        head: Head,
        values: Vec<u64>,
    },
    /// What was appended is stored; this is the head.
    Stored(CheckpointId),
    /// Nothing is stored, or nothing was read.
    Refused,
    /// It knew what a cancelled wait left on the old primary alone. Nobody acknowledged that.
    HistoryLost,
}

/// An answer, and the doubts on the way to it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Answered {
    pub(super) answer: Answer,
    /// Whether the commit was in doubt for its caller, who repeated it.
    pub(super) was_in_doubt: bool,
    /// How many doubts the driver settled by itself.
    pub(super) settled: usize,
}

/// Opens a saver. Its retries may be over early on a busy machine.
pub(super) async fn connect(url: &str, patience: Duration) -> anyhow::Result<Arc<PostgresSaver>> {
    let connected = async {
        loop {
            let options = Options { patience, ..Options::default() };
            match PostgresSaver::connect(url, options).await {
                Err(Error::Unavailable { .. }) => tokio::time::sleep(PAUSE).await,
                connected => return connected,
            }
        }
    };
    Ok(Arc::new(tokio::time::timeout(HUNG, connected).await??))
}

/// Carries out what is asked line by line, on a saver of this process alone, until the process is killed.
///
/// # Errors
/// Any but those that are answers.
pub(crate) async fn serve(url: &str) -> anyhow::Result<()> {
    let saver = connect(url, RETRIES).await?;
    let local = Local::new(&saver, &saver);
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    while let Some(line) = lines.next_line().await? {
        let answered = local.carry_out(&serde_json::from_str(&line)?).await?;
        child::say(&serde_json::to_string(&answered)?);
    }
    Ok(())
}

/// A worker's way to the store.
pub(super) enum Side {
    Here(Box<Local>),
    Process(Box<Child>),
}

impl Side {
    /// Reads with one saver of this process, and appends with one.
    pub(super) fn here(reading: &Arc<PostgresSaver>, appending: &Arc<PostgresSaver>) -> Self {
        Self::Here(Box::new(Local::new(reading, appending)))
    }

    pub(super) async fn ask(&mut self, request: &Request) -> anyhow::Result<Answered> {
        match self {
            Self::Here(local) => Ok(local.carry_out(request).await?),
            Self::Process(child) => {
                let answered = child.ask(&serde_json::to_string(request)?).await?;
                Ok(serde_json::from_str(&answered)?)
            }
        }
    }

    /// Ends its process, if it has one.
    pub(super) async fn end(self) -> anyhow::Result<()> {
        match self {
            Self::Here(_) => Ok(()),
            Self::Process(child) => child.kill().await.map(drop),
        }
    }
}

/// Savers of this process.
pub(super) struct Local {
    reading: Arc<PostgresSaver>,
    appending: Arc<PostgresSaver>,
    ids: IdSource,
    settled: Settled,
}

impl Local {
    fn new(reading: &Arc<PostgresSaver>, appending: &Arc<PostgresSaver>) -> Self {
        let (reading, appending) = (reading.clone(), appending.clone());
        Self { reading, appending, ids: IdSource::default(), settled: Settled::default() }
    }

    async fn carry_out(&self, request: &Request) -> Result<Answered> {
        let before = self.settled.count();
        let mut was_in_doubt = false;
        let answering = async {
            match request {
                Request::Read { thread } => {
                    read(&self.reading, thread).await.map(|(head, values)| Answer::Read { head, values })
                }
                Request::Append { thread, head, values } => {
                    let step = append(&self.ids, thread, *head, values)?;
                    self.commit(step, &mut was_in_doubt).await
                }
            }
        };
        let answer = match answering.with_subscriber(self.settled.dispatch()).await {
            Ok(answer) => answer,
            Err(Error::Conflict { .. } | Error::Unavailable { .. }) => Answer::Refused,
            Err(Error::HistoryLost { .. }) => Answer::HistoryLost,
            Err(error) => return Err(error),
        };
        Ok(Answered { answer, was_in_doubt, settled: self.settled.count() - before })
    }

    /// Commits, and repeats the commit for as long as it is in doubt.
    async fn commit(&self, step: StepCommit, was_in_doubt: &mut bool) -> Result<Answer> {
        loop {
            match self.appending.commit(step.clone()).await {
                Err(Error::InDoubt { .. }) => *was_in_doubt = true,
                // Nothing was written this time; the doubt remains.
                Err(Error::Unavailable { .. }) if *was_in_doubt => {}
                done => return done.map(|key| Answer::Stored(key.id)),
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

pub(super) async fn read(saver: &PostgresSaver, thread: &str) -> Result<(Head, Vec<u64>)> {
    let Some(head) = saver.get(&CheckpointSelector::head(&ThreadId::from(thread))).await? else {
        return Ok((None, Vec::new()));
    };
    let value = head.checkpoint.channels.get("values").and_then(|entry| entry.stored.value());
    let json = value.map(ChannelValue::to_json).transpose()?.unwrap_or_default();
    let numbers = json.as_array().into_iter().flatten().filter_map(serde_json::Value::as_u64);
    Ok((Some(head.checkpoint.id), numbers.collect()))
}

fn append(ids: &IdSource, thread: &str, head: Head, values: &[u64]) -> Result<StepCommit> {
    let stored = Stored::Value(ChannelValue::from_json(&serde_json::json!(values))?);
    let entry = ChannelEntry { version: ids.version_after(None), stored };
    Ok(StepCommit {
        thread: thread.into(),
        namespace: "".into(),
        parent: head,
        expected_head: head,
        checkpoint: Checkpoint {
            id: ids.checkpoint_after(head),
            channels: [("values".into(), entry)].into(),
            next: Vec::new(),
            applied: Vec::new(),
        },
        metadata: Metadata::new(Source::Loop, 0),
        writes: Vec::new(),
        pending: Vec::new(),
        flush: Flush::Now,
    })
}
