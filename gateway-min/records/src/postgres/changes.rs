//! Messages between processes through the database, so that they need not wait for the next poll. A message may be lost,
//! with its connection or behind a pooler, so a waiting process polls too.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::broadcast::{self, error::RecvError};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::connect::{PostgresTarget, silent};
use crate::failure::DatabaseError;

/// How many messages a slow receiver may be behind.
const KEPT: usize = 256;
/// The pause before listening again.
const PAUSE: Duration = Duration::from_secs(1);
/// A connection that has been silent for this long may be dead: another one is opened.
const SILENCE: Duration = Duration::from_mins(5);
/// How long the server may take to begin.
const CONNECT: Duration = Duration::from_secs(10);

/// Passes on what was heard: the id of a run, or nothing if something may have been missed.
#[derive(Clone, Debug)]
pub(crate) struct Announced {
    messages: broadcast::Sender<Option<Arc<str>>>,
    /// Whether nobody listens.
    missed: Arc<AtomicBool>,
}

impl Default for Announced {
    fn default() -> Self {
        Self { messages: broadcast::channel(KEPT).0, missed: Arc::default() }
    }
}

impl Announced {
    pub(crate) fn subscribe(&self) -> Changes {
        Changes(Some(Heard { messages: self.messages.subscribe(), missed: Arc::clone(&self.missed) }))
    }

    fn set_missed(&self, missed: bool) {
        self.missed.store(missed, Ordering::Relaxed);
    }

    fn pass_on(&self, run_id: Option<&str>) {
        // Nobody may be waiting.
        let _ = self.messages.send(run_id.map(Into::into));
    }
}

/// Wakes when another process has done something with a run that its owner or its followers should look at. Beside
/// waiting for it, poll: messages can be lost, and a database that does not pass them on never wakes anybody.
#[derive(Debug)]
pub struct Changes(Option<Heard>);

#[derive(Debug)]
struct Heard {
    messages: broadcast::Receiver<Option<Arc<str>>>,
    missed: Arc<AtomicBool>,
}

impl Changes {
    /// Of a database that passes nothing on.
    pub(crate) fn none() -> Self {
        Self(None)
    }

    /// Whether other processes are known to say things that do not arrive, as behind a pooler, or while the connection
    /// that listens is gone: then only polling finds what they did.
    pub fn are_missed(&self) -> bool {
        self.0.as_ref().is_some_and(|heard| heard.missed.load(Ordering::Relaxed))
    }

    /// Waits for the next message: the id of a run, or none if some may have been missed.
    pub async fn next(&mut self) -> Option<Arc<str>> {
        match &mut self.0 {
            Some(heard) => match heard.messages.recv().await {
                Ok(run_id) => run_id,
                Err(RecvError::Lagged(_)) => None,
                Err(RecvError::Closed) => std::future::pending().await,
            },
            None => std::future::pending().await,
        }
    }

    /// Waits for the next message that is, or may be, about this run.
    pub async fn of(&mut self, run_id: &str) {
        while self.next().await.is_some_and(|heard| *heard != *run_id) {}
    }
}

/// Listens until it is dropped.
pub(super) struct Listener(JoinHandle<()>);

impl Listener {
    pub(super) fn start(target: PostgresTarget, announced: Announced) -> Self {
        Self(tokio::spawn(async move {
            loop {
                if let Err(error) = hear(&target, &announced).await {
                    tracing::debug!(%error, "cannot listen to other processes; polling goes on");
                }
                announced.set_missed(true);
                tokio::time::sleep(PAUSE).await;
            }
        }))
    }

    pub(super) fn stop(&self) {
        self.0.abort();
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Listens on one connection until it ends. Behind a pooler it would hear nothing.
async fn hear(target: &PostgresTarget, announced: &Announced) -> Result<(), DatabaseError> {
    let (sender, mut heard) = mpsc::unbounded_channel();
    let session = target.open_heard_by(Some(sender)).await?;
    if !session.is_own() {
        tracing::debug!("the database is behind a pooler: runs of other processes are followed by polling");
        drop(session);
        announced.set_missed(true);
        // The address may lead elsewhere by then.
        tokio::time::sleep(SILENCE).await;
        return Ok(());
    }
    let listen = format!("LISTEN {}", target.tables().channel());
    timeout(CONNECT, session.batch_execute(&listen)).await.map_err(|_| silent())??;
    // What was said before is missed.
    announced.set_missed(false);
    announced.pass_on(None);
    // Ends with the connection, which holds the other end.
    while let Ok(Some(message)) = timeout(SILENCE, heard.recv()).await {
        announced.pass_on(Some(message.payload()));
    }
    Ok(())
}
