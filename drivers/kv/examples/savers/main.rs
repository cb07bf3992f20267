//! The same conversation on every saver, in one run: what it takes on disk, and what a durable commit takes.
//!
//! ```text
//! cargo run --release -p threadkeep-kv --example savers -- 500
//! ```
//!
//! The argument is the number of steps. Each step appends a message to a list and is one flushed commit with ten channels, nine
//! of which are held. The savers take turns at every step, so that what else the machine does is the same for all. Then sixteen
//! writers append to a thread each.

#[path = "../fjall/store.rs"]
mod store;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use store::FjallStore;
use threadkeep::checkpoint::{ChannelEntry, Checkpoint, Stored};
use threadkeep::id::{CheckpointId, IdSource, Namespace, ThreadId, Version};
use threadkeep::metadata::{Metadata, Source};
use threadkeep::saver::{Flush, Saver, StepCommit};
use threadkeep::value::{ChannelValue, Element, ListValue};
use threadkeep_kv::KvSaver;
use threadkeep_memory::MemorySaver;
use threadkeep_postgres::PostgresSaver;
use threadkeep_redb::RedbStore;
use threadkeep_sqlite::SqliteSaver;
use threadkeep_testing::Postgres;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const WRITERS: usize = 16;
const TABLES: &str = "SELECT sum(pg_total_relation_size(oid))::bigint FROM pg_class
    WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace";

/// A thread that grows.
struct Growing {
    ids: IdSource,
    thread: ThreadId,
    head: Option<CheckpointId>,
    messages: ListValue,
    version: Option<Version>,
    /// The version of the channels that the first step wrote.
    first: Option<Version>,
    random: u64,
}

impl Growing {
    fn new(thread: String) -> Self {
        let ids = IdSource::default();
        Self {
            ids,
            thread: thread.as_str().into(),
            head: None,
            messages: ListValue::default(),
            version: None,
            first: None,
            random: 1,
        }
    }

    /// Words, some of them frequent; about 700 bytes.
    fn text(&mut self) -> String {
        let words = (0..120).map(|_| {
            self.random =
                self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let word = (self.random >> 33) % 2_000 * ((self.random >> 48) % 100) / 100;
            format!("{:x}", word * 2_654_435_761 % 0xff_ffff)
        });
        words.collect::<Vec<_>>().join(" ")
    }

    fn next(&mut self) -> threadkeep::Result<StepCommit> {
        let text = self.text();
        self.messages
            .push(Element::from_json(&json!({"type": "ai", "id": self.ids.text(), "content": text}))?);
        let version = self.ids.version_after(self.version);
        let list: ChannelValue = self.messages.clone().into();
        let mut channels: BTreeMap<_, _> =
            [("messages".into(), ChannelEntry { version, stored: Stored::Value(list) })].into();
        for n in 0..9 {
            let name = format!("channel_{n}");
            let (version, stored) = match self.first {
                Some(first) => (first, Stored::Held),
                None => (version, Stored::Value(ChannelValue::from_json(&json!({"title": name}))?)),
            };
            channels.insert(name.into(), ChannelEntry { version, stored });
        }
        let id = self.ids.checkpoint_after(self.head);
        let mut metadata = Metadata::new(Source::Loop, 1);
        metadata.extra.insert("run_id".to_owned(), json!("9b2e6f0e-3a86-4c2c-9d8e-5a3f8a1f9b10"));
        let step = StepCommit {
            thread: self.thread.clone(),
            namespace: Namespace::root(),
            parent: self.head,
            expected_head: self.head,
            checkpoint: Checkpoint { id, channels, next: vec!["model".into()], applied: Vec::new() },
            metadata,
            writes: Vec::new(),
            pending: Vec::new(),
            flush: Flush::Now,
        };
        self.head = Some(id);
        self.version = Some(version);
        self.first.get_or_insert(version);
        self.messages.rebase(version);
        Ok(step)
    }
}

async fn commits_per_second(saver: &Arc<dyn Saver>, steps: usize) -> Result<f64> {
    let started = Instant::now();
    let mut writers = tokio::task::JoinSet::new();
    for n in 0..WRITERS {
        let saver = saver.clone();
        writers.spawn(async move {
            let mut thread = Growing::new(format!("writer {n}"));
            for _ in 0..steps {
                saver.commit(thread.next()?).await?;
            }
            Ok::<(), threadkeep::Error>(())
        });
    }
    while let Some(done) = writers.join_next().await {
        done??;
    }
    #[allow(clippy::cast_precision_loss, reason = "a rate with three digits")]
    Ok((WRITERS * steps) as f64 / started.elapsed().as_secs_f64())
}

fn files(path: &Path) -> std::io::Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(path)? {
        let entry = entry?;
        bytes += if entry.file_type()?.is_dir() { files(&entry.path())? } else { entry.metadata()?.len() };
    }
    Ok(bytes)
}

#[tokio::main]
async fn main() -> Result<()> {
    let steps: usize = std::env::args().nth(1).map_or(Ok(200), |steps| steps.parse())?;
    let dir = tempfile::tempdir()?;
    let place = |name: &str| -> Result<_> {
        let place = dir.path().join(name);
        std::fs::create_dir(&place)?;
        Ok(place)
    };
    let sqlite =
        SqliteSaver::open(place("SQLite")?.join("checkpoints.db"), &threadkeep_sqlite::Options::default())?;
    let sqlite = Arc::new(sqlite);
    let server = Postgres::start_flushing()?;
    let database = server.database().await?;
    threadkeep_postgres::setup(database.url(), &threadkeep_postgres::Options::default()).await?;
    let postgres = PostgresSaver::connect(database.url(), threadkeep_postgres::Options::default()).await?;
    let redb = Arc::new(RedbStore::open(place("redb")?.join("checkpoints.redb"))?);
    let fjall = Arc::new(FjallStore::open(&place("fjall")?)?);
    let savers: [(&str, Arc<dyn Saver>); 5] = [
        ("memory", Arc::new(MemorySaver::new())),
        ("SQLite", sqlite.clone()),
        ("Postgres", Arc::new(postgres)),
        ("redb", Arc::new(KvSaver::open(redb.clone())?)),
        ("fjall", Arc::new(KvSaver::open(fjall.clone())?)),
    ];

    let mut threads: Vec<_> =
        savers.iter().map(|(name, _)| (Growing::new((*name).to_owned()), Vec::new())).collect();
    for _ in 0..steps {
        for ((thread, times), (_, saver)) in threads.iter_mut().zip(&savers) {
            let step = thread.next()?;
            let started = Instant::now();
            saver.commit(step).await?;
            times.push(started.elapsed());
        }
    }
    let (client, connection) = tokio_postgres::connect(database.url(), tokio_postgres::NoTls).await?;
    drop(tokio::spawn(connection));
    let tables: i64 = client.query_one(TABLES, &[]).await?.get(0);
    let used = BTreeMap::from([
        ("SQLite", sqlite.file_size().await?.bytes),
        ("Postgres", u64::try_from(tables)?),
        ("redb", redb.used_bytes()?),
        ("fjall", fjall.live_bytes()?),
    ]);

    let mut out = std::io::stdout();
    writeln!(
        out,
        "| Saver | Bytes in use | Bytes of files | A durable commit, median | Commits a second, {WRITERS} writers |"
    )?;
    writeln!(out, "|---|---|---|---|---|")?;
    for ((_, times), (name, saver)) in threads.iter_mut().zip(&savers) {
        times.sort_unstable();
        let median: Duration = times[times.len() / 2];
        let on_disk =
            files(&dir.path().join(name)).map_or_else(|_| "-".to_owned(), |bytes| bytes.to_string());
        let used = used.get(name).map_or_else(|| "-".to_owned(), u64::to_string);
        let rate = commits_per_second(saver, steps / 4).await?;
        writeln!(
            out,
            "| {name} | {used} | {on_disk} | {:.2} ms | {rate:.0} |",
            median.as_secs_f64() * 1_000.0
        )?;
    }
    Ok(())
}
