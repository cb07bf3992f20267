//! Every write of a run carries the run's known head. A run that stalled while another writer took over its thread gets
//! a conflict from each of its writes, including deletions, and changes nothing.

use std::sync::Arc;

use serde_json::{Map, json};
use threadkeep::channel::Schema;
use threadkeep::id::{IdSource, Namespace, ThreadId};
use threadkeep::metadata::Source;
use threadkeep::mode::ChannelMode;
use threadkeep::saver::{Saver, ThreadImage};
use threadkeep::state::{KnownHead, StateAccessor, StateSnapshot, Update};
use threadkeep::step::{Durability, StepWriter};
use threadkeep::{Error, Result};
use threadkeep_memory::MemorySaver;
use threadkeep_sqlite::{Options, SqliteSaver};

struct Store {
    saver: Arc<dyn Saver>,
    mode: ChannelMode,
    thread: ThreadId,
    _dir: tempfile::TempDir,
}

/// A thread of each saver in each mode.
fn stores() -> impl Iterator<Item = Store> {
    [ChannelMode::Full, ChannelMode::Delta].into_iter().flat_map(|mode| {
        ["memory", "sqlite"].map(|kind| {
            let dir = tempfile::tempdir().unwrap();
            let saver: Arc<dyn Saver> = match kind {
                "memory" => Arc::new(MemorySaver::new()),
                _ => Arc::new(SqliteSaver::open(dir.path().join("t.db"), &Options::default()).unwrap()),
            };
            Store { saver, mode, thread: "t".into(), _dir: dir }
        })
    })
}

impl Store {
    /// An accessor of another process.
    fn process(&self) -> StateAccessor {
        let table = Schema::thread_state().compile(self.mode, 3).unwrap();
        StateAccessor::new(Arc::clone(&self.saver), Arc::new(table), Arc::new(IdSource::default()))
    }

    async fn known(&self) -> KnownHead {
        self.process().known_head(&self.thread).await.unwrap()
    }

    async fn image(&self) -> ThreadImage {
        self.saver.read_thread(&self.thread).await.unwrap()
    }
}

fn saying(accessor: &StateAccessor, text: &str) -> Update {
    let message = json!([{"type": "human", "content": text, "id": text}]);
    let writes = vec![accessor.write("messages", message, false).unwrap()];
    Update { at: None, node: "n".into(), writes, extra: Map::new() }
}

async fn say(store: &Store, text: &str) -> StateSnapshot {
    let accessor = store.process();
    let update = saying(&accessor, text);
    accessor.update(&store.thread, update).await.unwrap()
}

async fn turn(writer: &mut StepWriter, text: &str) -> Result<StateSnapshot> {
    let task = writer.start_task(&"n".into(), 0);
    let write = writer.write("messages", json!([{"type": "ai", "content": text, "id": text}]), false)?;
    writer.finish_task(task, vec![write], Durability::WithCommit).await?;
    writer.commit(Source::Loop, Vec::new(), Map::new()).await.cloned()
}

fn conflict<T: std::fmt::Debug>(result: Result<T>) {
    assert!(matches!(&result, Err(Error::Conflict { .. })), "{result:?}");
}

#[tokio::test]
async fn a_rollback_beside_a_turn_of_somebody_else_is_a_conflict_and_changes_nothing() {
    for store in stores() {
        for first in [true, false] {
            store.saver.delete_thread(&store.thread).await.unwrap();
            if !first {
                say(&store, "before").await;
            }
            let run = store.process();
            let mut head = store.known().await;
            let point = run.capture(&mut head).await.unwrap();
            let mut writer = StepWriter::open_known(&run, head, None).await.unwrap();
            turn(&mut writer, "of the run").await.unwrap();
            // The run stalls; another process considers it lost and answers a turn.
            say(&store, "acknowledged").await;
            let before = store.image().await;

            let mut head = writer.head().clone();
            conflict(run.restore(&mut head, &point, Map::new()).await);
            conflict(turn(&mut writer, "too late").await);
            assert_eq!(store.image().await, before, "{:?}", store.mode);
        }
    }
}

/// Its run was taken over and has nothing to restore. The process that had it stood still before its first write.
#[tokio::test]
async fn a_rollback_for_another_process_fences_out_a_write_that_is_still_to_come() {
    for store in stores() {
        say(&store, "before").await;
        let before = store.process().get(&store.thread, None).await.unwrap().unwrap();
        let run = store.process();
        let mut late = StepWriter::open_known(&run, store.known().await, None).await.unwrap();
        let (there, mut head) = (store.process(), store.known().await);
        let point = there.captured_at(&store.thread, head.id(), |_| true).await.unwrap();
        let restored = there.restore(&mut head, &point, Map::new()).await.unwrap().unwrap();
        assert!(restored.key.id > before.key.id, "{:?}", store.mode);
        let image = store.image().await;
        conflict(turn(&mut late, "too late").await);
        assert_eq!(store.image().await, image);
        let read = store.process().get(&store.thread, None).await.unwrap().unwrap();
        assert_eq!((&read.key, read.values().unwrap()), (&restored.key, before.values().unwrap()));
        assert_eq!(read.next, before.next);
    }
}

#[tokio::test]
async fn a_rollback_of_a_first_run_deletes_what_the_run_made_and_nothing_else() {
    for store in stores() {
        let run = store.process();
        let mut head = store.known().await;
        let point = run.capture(&mut head).await.unwrap();
        let mut writer = StepWriter::open_known(&run, head, None).await.unwrap();
        turn(&mut writer, "one").await.unwrap();
        turn(&mut writer, "two").await.unwrap();
        let mut head = writer.head().clone();

        let nested = run.clone().in_namespace(Namespace::from("nested"));
        nested.create(&store.thread, Map::new()).await.unwrap();
        let before = store.image().await;
        conflict(run.restore(&mut head, &point, Map::new()).await);
        assert_eq!(store.image().await, before, "the run made nothing in that namespace");

        store.saver.delete_thread(&store.thread).await.unwrap();
        let mut head = store.known().await;
        let mut writer = StepWriter::open_known(&run, head.clone(), None).await.unwrap();
        turn(&mut writer, "again").await.unwrap();
        conflict(run.restore(&mut head, &point, Map::new()).await);
        head = writer.head().clone();
        assert_eq!(run.restore(&mut head, &point, Map::new()).await.unwrap(), None);
        assert_eq!((head.id(), store.image().await), (None, ThreadImage::absent(&store.thread)));
        assert_eq!(run.restore(&mut head, &point, Map::new()).await.unwrap(), None, "again");
    }
}

#[tokio::test]
async fn no_write_of_a_run_reads_the_head_again_to_pass_its_own_check() {
    for store in stores() {
        let old = say(&store, "old").await;
        say(&store, "newer").await;
        let run = store.process();
        let known = store.known().await;
        say(&store, "acknowledged").await;
        let before = store.image().await;

        conflict(run.capture(&mut known.clone()).await);
        conflict(run.linearize(&mut known.clone(), old.key.id, Map::new()).await);
        conflict(StepWriter::open_known(&run, known.clone(), None).await.map(|_| ()));
        conflict(StepWriter::open_known(&run, known.clone(), Some(old.key.id)).await.map(|_| ()));
        conflict(run.update_known(&mut known.clone(), saying(&run, "lost")).await);
        let fork = Update { at: Some(old.key.id), ..saying(&run, "lost") };
        conflict(run.update_known(&mut known.clone(), fork).await);
        assert_eq!(store.image().await, before, "{:?}", store.mode);

        store.saver.delete_thread(&store.thread).await.unwrap();
        conflict(run.capture(&mut known.clone()).await);
        conflict(StepWriter::open_known(&run, known.clone(), None).await.map(|_| ()));
        assert_eq!(store.image().await, ThreadImage::absent(&store.thread), "{:?}", store.mode);
    }
}

#[tokio::test]
async fn a_deletion_deletes_what_was_seen_and_nothing_newer() {
    for store in stores() {
        let process = store.process();
        say(&store, "seen").await;
        let seen = process.look(&store.thread).await.unwrap();
        say(&store, "acknowledged").await;
        let before = store.image().await;
        let refused = process.delete_seen(seen).await;
        assert!(matches!(refused, Err(Error::Stale { .. })), "{refused:?}");
        assert_eq!(store.image().await, before, "{:?}", store.mode);

        // Deleted and created again: another thread of the same name.
        let seen = process.look(&store.thread).await.unwrap();
        store.saver.delete_thread(&store.thread).await.unwrap();
        say(&store, "again").await;
        let before = store.image().await;
        assert!(matches!(process.delete_seen(seen).await, Err(Error::Stale { .. })));
        assert_eq!(store.image().await, before, "{:?}", store.mode);

        let nested = process.clone().in_namespace(Namespace::from("nested"));
        nested.create(&store.thread, Map::new()).await.unwrap();
        let seen = process.look(&store.thread).await.unwrap();
        process.delete_seen(seen.clone()).await.unwrap();
        assert_eq!(store.image().await, ThreadImage::absent(&store.thread), "in every namespace");
        assert!(matches!(process.delete_seen(seen).await, Err(Error::Stale { .. })), "it is gone");
        let nothing = process.look(&store.thread).await.unwrap();
        process.delete_seen(nothing).await.unwrap();

        // Seen empty, and written to since.
        let nothing = process.look(&store.thread).await.unwrap();
        say(&store, "acknowledged").await;
        let before = store.image().await;
        let refused = process.delete_seen(nothing).await;
        assert!(matches!(refused, Err(Error::Stale { .. })), "{refused:?}");
        assert_eq!(store.image().await, before, "{:?}", store.mode);
    }
}
