//! The store that a command works on: the configured one, or a named one. Opening never creates anything.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use backon::{ExponentialBuilder, Retryable as _};
use clap::Args;
use threadkeep::Error;
use threadkeep::channel::{ChannelTable, Schema};
use threadkeep::checkpoint::CheckpointTuple;
use threadkeep::id::{CheckpointId, IdSource, Namespace, ThreadId};
use threadkeep::mode::ChannelMode;
use threadkeep::saver::{CheckpointSelector, ListQuery, Load, Saver, ThreadImage};
use threadkeep::state::StateAccessor;
use threadkeep_storage::{BackedUp, Existing, SqliteSaver, Stores};
use tokio::time::Instant;

use super::advice::{SameStore, option};
use super::error::{OpsError, Result};
use super::pages::Newest;
use threadkeep_config::{Config, LoadOptions};
use threadkeep_records::{Records, ThreadRow};

/// Threads fetched per page.
const PAGE: usize = 500;
/// The maximum number of ids that an error suggests.
const NEAR: usize = 3;
/// The maximum number of threads searched for suggestions.
const LOOKED_AT: usize = 20_000;

/// Which store.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct StoreArgs {
    /// The gateway's configuration, which names the store [default: SVC_CONFIG_PATH, then config.yaml in the project
    /// root].
    #[arg(long, value_name = "FILE", conflicts_with_all = ["sqlite", "postgres"])]
    config: Option<PathBuf>,
    /// A checkpoint database to use instead of the configured store.
    #[arg(long, value_name = "FILE", conflicts_with = "postgres")]
    sqlite: Option<PathBuf>,
    /// A Postgres database to use instead of the configured store.
    #[arg(long, value_name = "URL")]
    postgres: Option<String>,
}

impl StoreArgs {
    /// What another command on this store needs.
    fn again(&self) -> SameStore {
        SameStore::of(self.config.as_deref(), self.sqlite.as_deref(), self.postgres.as_deref())
    }
}

/// Which threads.
#[derive(Debug, Clone, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct Threads {
    /// These threads.
    #[arg(long, value_name = "ID", num_args = 1..)]
    thread: Vec<String>,
    /// Every thread of the store.
    #[arg(long)]
    all: bool,
}

impl Threads {
    /// Whether every thread was selected.
    pub(crate) fn are_all(&self) -> bool {
        self.all
    }

    /// The threads that were named.
    pub(crate) fn named(&self) -> Vec<ThreadId> {
        self.thread.iter().map(|id| ThreadId::from(id.as_str())).collect()
    }
}

/// An open store.
pub(crate) struct Target {
    store: Existing,
    /// For the commands that errors and results name.
    pub(crate) again: SameStore,
    /// The channels in delta mode, which read what either mode wrote.
    pub(crate) table: Arc<ChannelTable>,
}

impl Target {
    /// Opens the store that the arguments name, else the program's.
    pub(crate) async fn open(args: &StoreArgs, stores: &Stores) -> Result<Self> {
        let again = args.again();
        let store = match Self::existing(args, stores).await {
            Ok(store) => store,
            Err(OpsError::NoDatabase { path, .. }) => {
                return Err(OpsError::NoDatabase { path, setup: again.setup() });
            }
            Err(error) => return Err(error),
        };
        let table = Arc::new(table(ChannelMode::Delta, store.snapshot_frequency())?);
        Ok(Self { store, again, table })
    }

    async fn existing(args: &StoreArgs, stores: &Stores) -> Result<Existing> {
        Ok(if let Some(url) = &args.postgres {
            Existing::postgres(url).await?
        } else if let Some(path) = &args.sqlite {
            Existing::sqlite(path).await?
        } else {
            let options = LoadOptions::from_process(args.config.clone())?;
            let loading = tokio::task::spawn_blocking(move || Config::load(&options)).await;
            stores.existing(&loading.map_err(std::io::Error::from)??.config).await?
        })
    }

    /// Closes the store properly.
    pub(crate) async fn close(self) {
        self.store.close().await;
    }

    /// Its name, for people.
    pub(crate) fn name(&self) -> &str {
        self.store.name()
    }

    /// The checkpoints.
    pub(crate) fn saver(&self) -> &Arc<dyn Saver> {
        self.store.saver()
    }

    /// What only a database in one file can do.
    pub(crate) fn sqlite(&self) -> Option<&Arc<SqliteSaver>> {
        self.store.sqlite_saver()
    }

    /// The bytes of a thread's rows: see [`Existing::stored_bytes`].
    pub(crate) async fn stored_bytes(&self, thread: &ThreadId) -> Result<Option<u64>> {
        Ok(self.store.stored_bytes(thread).await?)
    }

    /// Whether others than commands work on its server: see [`Existing::is_serving`].
    pub(crate) async fn is_serving(&self) -> Result<bool> {
        Ok(self.store.is_serving().await?)
    }

    /// Copies the store into new files: see [`Existing::backup`].
    pub(crate) async fn backup(&self, to: &Path) -> Result<Option<BackedUp>> {
        Ok(self.store.backup(to).await?)
    }

    /// The gateway's records, if they are there and can be read.
    pub(crate) fn records(&self) -> Option<&Records> {
        self.store.records()
    }

    /// The gateway's records, if they are there: for a command that must not take records that cannot be read for none. A
    /// thread without a record is everybody's.
    pub(crate) fn needed_records(&self) -> Result<Option<&Records>> {
        match self.store.unreadable_records() {
            Some(reason) => Err(OpsError::UnreadableRecords(reason.to_owned())),
            None => Ok(self.records()),
        }
    }

    /// Reads the state of threads of either mode.
    pub(crate) fn accessor(&self, namespace: &Namespace) -> StateAccessor {
        StateAccessor::new(self.saver().clone(), self.table.clone(), Arc::new(IdSource::default()))
            .in_namespace(namespace.clone())
    }

    /// The selected threads, all of which exist, and why others are not listed if the list of threads is damaged.
    pub(crate) async fn threads(&self, wanted: &Threads) -> Result<(Vec<ThreadId>, Option<OpsError>)> {
        if wanted.all {
            return self.listed_threads().await;
        }
        let mut threads: Vec<ThreadId> = Vec::with_capacity(wanted.thread.len());
        for thread in wanted.named() {
            match self.newest(&thread).await {
                Ok(_) => {}
                // It is there, and what reads it says what is wrong.
                Err(error) if error.is_of_one_thread() => {}
                Err(error) => return Err(error),
            }
            if !threads.contains(&thread) {
                threads.push(thread);
            }
        }
        Ok((threads, None))
    }

    /// Every thread.
    async fn all_threads(&self) -> Result<Vec<ThreadId>> {
        let mut threads: Vec<ThreadId> = Vec::new();
        loop {
            let page = self.saver().threads(threads.last(), PAGE).await?;
            if page.is_empty() {
                return Ok(threads);
            }
            threads.extend(page);
        }
    }

    /// Every thread that can be listed, and why the others cannot if the list is damaged.
    pub(crate) async fn listed_threads(&self) -> Result<(Vec<ThreadId>, Option<OpsError>)> {
        match (self.all_threads().await, self.sqlite()) {
            (Err(damage @ OpsError::Checkpoints(Error::Corrupt { .. })), Some(sqlite)) => {
                Ok((sqlite.readable_threads().await?, Some(damage)))
            }
            (threads, _) => Ok((threads?, None)),
        }
    }

    /// At most `limit` threads after this one, and why others are not listed if the list is damaged.
    pub(crate) async fn page_of_threads(
        &self,
        after: Option<&ThreadId>,
        limit: usize,
    ) -> Result<(Vec<ThreadId>, Option<OpsError>)> {
        match (self.saver().threads(after, limit).await, self.sqlite()) {
            (Err(Error::Corrupt { .. }), Some(_)) => {
                let (mut threads, damage) = self.listed_threads().await?;
                threads.retain(|thread| after.is_none_or(|after| thread > after));
                threads.truncate(limit);
                Ok((threads, damage))
            }
            (threads, _) => Ok((threads?, None)),
        }
    }

    /// The newest checkpoint of a thread in any namespace, without values.
    pub(crate) async fn newest(&self, thread: &ThreadId) -> Result<CheckpointTuple> {
        let query = ListQuery { namespace: None, limit: Some(1), load: Load::None, ..ListQuery::new(thread) };
        match self.saver().list(&query).await?.pop() {
            Some(newest) => Ok(newest),
            None => Err(self.no_thread(thread).await),
        }
    }

    /// The complete thread, which must exist.
    pub(crate) async fn image(&self, thread: &ThreadId) -> Result<ThreadImage> {
        let image = self.saver().read_thread(thread).await?;
        if image.checkpoints.is_empty() {
            return Err(self.no_thread(thread).await);
        }
        Ok(image)
    }

    /// The gateway's record of a thread.
    pub(crate) async fn record(&self, thread: &ThreadId) -> Result<Option<ThreadRow>> {
        match self.records() {
            Some(records) => Ok(records.threads().get(thread.as_str(), None).await?),
            None => Ok(None),
        }
    }

    /// The requested checkpoint, or the head of the namespace.
    pub(crate) async fn checkpoint(
        &self,
        thread: &ThreadId,
        namespace: &Namespace,
        id: Option<CheckpointId>,
    ) -> Result<CheckpointId> {
        let at = CheckpointSelector {
            namespace: namespace.clone(),
            id,
            load: Load::None,
            ..CheckpointSelector::head(thread)
        };
        if let Some(found) = self.saver().get(&at).await? {
            return Ok(found.checkpoint.id);
        }
        let query = ListQuery {
            namespace: Some(namespace.clone()),
            limit: Some(LOOKED_AT),
            load: Load::None,
            ..ListQuery::new(thread)
        };
        let mut newest = Newest::new(&**self.saver(), query);
        let mut ids = Vec::new();
        while let page @ [_, ..] = &newest.next().await?[..] {
            ids.extend(page.iter().map(|tuple| tuple.checkpoint.id.to_string()));
            if ids.len() >= LOOKED_AT {
                break;
            }
        }
        match id {
            Some(checkpoint) if !ids.is_empty() => {
                let near = nearest(&checkpoint.to_string(), ids.into_iter());
                let near = near.unwrap_or_else(|| {
                    let list = format!("checkpoints list {}", option("--thread", thread.as_str()));
                    format!("; {} shows them", self.again.command(&list))
                });
                Err(OpsError::NoCheckpoint { thread: thread.clone(), checkpoint, near })
            }
            _ => {
                self.newest(thread).await?;
                let show = self.again.command_on("threads show", thread.as_str());
                Err(OpsError::Unsupported(format!(
                    "thread {thread} has no checkpoint in namespace '{namespace}'; {show} lists its namespaces"
                )))
            }
        }
    }

    /// The error for a missing thread, suggesting existing ids.
    async fn no_thread(&self, thread: &ThreadId) -> OpsError {
        let (mut ids, mut after): (Vec<String>, Option<ThreadId>) = Default::default();
        while let Ok(page) = self.saver().threads(after.as_ref(), PAGE).await {
            let Some(last) = page.last().cloned() else { break };
            ids.extend(page.iter().map(ToString::to_string));
            if ids.len() >= LOOKED_AT {
                break;
            }
            after = Some(last);
        }
        let near = match nearest(thread.as_str(), ids.iter().cloned()) {
            Some(near) => near,
            None if ids.is_empty() => "; the store is empty".to_owned(),
            None => format!("; {} shows its threads", self.again.command("threads list")),
        };
        OpsError::NoThread { thread: thread.clone(), store: self.name().to_owned(), near }
    }
}

/// How often a change is tried on a thread that a run keeps writing to.
const TRIES: usize = 6;
/// The first pause between two tries; each is twice as long as the one before.
const PAUSE: Duration = Duration::from_millis(100);
/// No try begins later than this after the first one: each may read a long thread several times.
const PATIENCE: Duration = Duration::from_mins(1);

/// Retries a change, with pauses, while another process writes to the thread.
///
/// # Errors
/// The last one.
pub(crate) async fn retried_while_stale<T, F: Future<Output = threadkeep::Result<T>>>(
    change: impl Fn() -> F,
) -> threadkeep::Result<T> {
    let pauses = ExponentialBuilder::new().with_min_delay(PAUSE).with_factor(2.0).with_max_times(TRIES - 1);
    let began = Instant::now();
    let is_worth_it = |error: &threadkeep::Error| {
        matches!(error, threadkeep::Error::Stale { .. }) && began.elapsed() < PATIENCE
    };
    change.retry(pauses).when(is_worth_it).await
}

/// The channels of threads, compiled for a mode.
pub(crate) fn table(mode: ChannelMode, frequency: u64) -> threadkeep::Result<ChannelTable> {
    Schema::thread_state().compile(mode, frequency)
}

/// The existing ids so similar to a missing one that they may be meant; `None` if there is none.
fn nearest(wanted: &str, ids: impl Iterator<Item = String>) -> Option<String> {
    let far = wanted.chars().count().min(64) / 3 + 1;
    let near = |(distance, id): &(usize, String)| *distance <= far || id.starts_with(wanted);
    let mut ids: Vec<(usize, String)> = ids.map(|id| (distance(wanted, &id), id)).filter(near).collect();
    ids.sort();
    ids.truncate(NEAR);
    let ids: Vec<String> = ids.into_iter().map(|(_, id)| id).collect();
    match ids.len() {
        0 => None,
        1 => Some(format!("; the nearest id is {}", ids[0])),
        _ => Some(format!("; the nearest ids are {}", ids.join(", "))),
    }
}

/// The edits that turn one string into the other, over at most 64 characters of each.
fn distance(a: &str, b: &str) -> usize {
    let start = |text: &str| text.chars().take(64).collect::<String>();
    strsim::levenshtein(&start(a), &start(b))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn distances_are_counts_of_edits() {
        for (a, b, edits) in
            [("", "", 0), ("abc", "", 3), ("kitten", "sitting", 3), ("abc", "abc", 0), ("a", "ba", 1)]
        {
            assert_eq!((distance(a, b), distance(b, a)), (edits, edits), "{a} {b}");
        }
    }

    #[test]
    fn the_nearest_ids_come_first_and_are_few() {
        let near = |wanted, ids: &[&str]| nearest(wanted, ids.iter().map(|id| (*id).to_owned()));
        let ids = ["tour", "tower", "x", "other", "zzzzzz"];
        assert_eq!(near("tuor", &ids).unwrap(), "; the nearest id is tour");
        assert_eq!(near("towe", &ids).unwrap(), "; the nearest ids are tower, tour");
        assert_eq!(
            (near("nothing", &ids), near("t", &[])),
            (None, None),
            "what is not alike is not suggested"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_of_a_busy_thread_is_tried_a_few_times_and_not_for_longer_than_a_minute() {
        let tried = async |seconds| {
            let tries = Cell::new(0);
            let stale = retried_while_stale(|| async {
                tries.set(tries.get() + 1);
                tokio::time::sleep(Duration::from_secs(seconds)).await;
                Err::<(), _>(threadkeep::Error::Stale { thread: "busy".into() })
            });
            assert!(matches!(stale.await, Err(threadkeep::Error::Stale { .. })));
            tries.get()
        };
        assert_eq!((tried(0).await, tried(25).await, tried(600).await), (TRIES, 3, 1));
    }
}
