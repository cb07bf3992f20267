//! What a caller may conclude from an error, through the engine on a store that fails at random and refuses to write from
//! then on: [`Error::Unavailable`] is said only of what is absent after the store is opened again.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use async_trait::async_trait;
use proptest::prelude::*;
use serde_json::{Map, json};
use threadkeep::channel::Schema;
use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple, TaskWrites};
use threadkeep::convert::{Conversion, convert};
use threadkeep::deletion::{Boundary, Keep, Prune, prune};
use threadkeep::id::{ChannelName, CheckpointId, IdSource, ThreadId};
use threadkeep::metadata::Source;
use threadkeep::mode::ChannelMode;
use threadkeep::saver::{
    Capabilities, CheckpointSelector, DeltaHistory, Flush, ListQuery, Revision, Rewrite, Saver, StepCommit,
    ThreadImage,
};
use threadkeep::state::{StateAccessor, Update};
use threadkeep::step::{Durability, StepWriter};
use threadkeep::verify::repair;
use threadkeep::{Error, Result};
use threadkeep_memory::MemorySaver;

/// What happens to the write that fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loss {
    /// It is refused, and nothing is stored.
    Refused,
    /// Nobody knows, and it is stored.
    DoubtStored,
    /// Nobody knows, and it is not stored.
    DoubtLost,
    /// Nobody knows, and the next write finds that the store lost earlier ones.
    HistoryLost,
    /// None: it is stored and acknowledged, and the store is gone after it.
    Nothing,
}

/// Lets the `nth` write fail. After a doubt it refuses every write, as a writer does after a failed flush.
struct Failing {
    inner: MemorySaver,
    left: AtomicUsize,
    loss: Loss,
    poisoned: AtomicBool,
    /// Whether reads fail, too, once it is poisoned.
    blind: bool,
    /// What somebody else puts after the write in doubt.
    meanwhile: Option<(CheckpointKey, TaskWrites)>,
}

impl Failing {
    fn refused<T>() -> Result<T> {
        Err(Error::Unavailable { saver: "failing", reason: "it refuses".to_owned() })
    }

    async fn write<T>(&self, write: impl Future<Output = Result<T>> + Send) -> Result<T> {
        if self.poisoned.load(Ordering::SeqCst) {
            return match self.loss {
                Loss::HistoryLost => {
                    Err(Error::HistoryLost { thread: "t".into(), seen: "it knew more".to_owned() })
                }
                _ => Self::refused(),
            };
        }
        if self.left.fetch_sub(1, Ordering::SeqCst) != 0 {
            return write.await;
        }
        if self.loss == Loss::Refused {
            return Self::refused();
        }
        self.poisoned.store(true, Ordering::SeqCst);
        if self.loss == Loss::Nothing {
            return write.await;
        }
        if self.loss == Loss::DoubtStored {
            write.await?;
        }
        if let Some((at, row)) = &self.meanwhile {
            self.inner.put_writes(at, row).await?;
        }
        Err(Error::InDoubt { saver: "failing", reason: "the flush failed".to_owned() })
    }

    fn readable(&self) -> Result<()> {
        if self.blind && self.poisoned.load(Ordering::SeqCst) { Self::refused() } else { Ok(()) }
    }
}

#[async_trait]
impl Saver for Failing {
    async fn get(&self, at: &CheckpointSelector) -> Result<Option<CheckpointTuple>> {
        self.readable()?;
        self.inner.get(at).await
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<CheckpointTuple>> {
        self.readable()?;
        self.inner.list(query).await
    }

    async fn put_writes(&self, at: &CheckpointKey, task: &TaskWrites) -> Result<()> {
        self.write(self.inner.put_writes(at, task)).await
    }

    async fn commit(&self, step: StepCommit) -> Result<CheckpointKey> {
        self.write(self.inner.commit(step)).await
    }

    async fn flush(&self, thread: &ThreadId) -> Result<()> {
        self.write(self.inner.flush(thread)).await
    }

    async fn delta_history(
        &self,
        at: &CheckpointKey,
        channels: &BTreeSet<ChannelName>,
        reach: Option<CheckpointId>,
    ) -> Result<DeltaHistory> {
        self.readable()?;
        self.inner.delta_history(at, channels, reach).await
    }

    async fn delete_thread(&self, thread: &ThreadId) -> Result<()> {
        self.write(self.inner.delete_thread(thread)).await
    }

    async fn threads(&self, after: Option<&ThreadId>, limit: usize) -> Result<Vec<ThreadId>> {
        self.inner.threads(after, limit).await
    }

    async fn read_thread(&self, thread: &ThreadId) -> Result<ThreadImage> {
        self.readable()?;
        self.inner.read_thread(thread).await
    }

    async fn rewrite_thread(&self, thread: &ThreadId, expected: &Revision, rewrite: Rewrite) -> Result<()> {
        self.write(self.inner.rewrite_thread(thread, expected, rewrite)).await
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
}

/// What is done to the thread, through every door of the engine that writes.
#[derive(Debug, Clone, Copy)]
enum Op {
    Create,
    Update,
    Fork,
    Annotate,
    Linearize,
    Restore,
    /// A first run that is rolled back.
    RestoreNothing,
    Turn,
    /// A turn of two supersteps and one flush.
    TurnWithOneFlush,
    Prune,
    /// To the other mode.
    Convert,
    Repair,
}

const OPS: [Op; 12] = [
    Op::Create,
    Op::Update,
    Op::Fork,
    Op::Annotate,
    Op::Linearize,
    Op::Restore,
    Op::RestoreNothing,
    Op::Turn,
    Op::TurnWithOneFlush,
    Op::Prune,
    Op::Convert,
    Op::Repair,
];

fn saying(accessor: &StateAccessor, text: &str) -> Update {
    let message = json!([{"type": "human", "content": text, "id": text}]);
    let writes = vec![accessor.write("messages", message, false).unwrap()];
    Update { at: None, node: "n".into(), writes, extra: Map::new() }
}

async fn superstep(writer: &mut StepWriter, text: &str) -> Result<()> {
    for (index, durability) in [(0, Durability::Now), (1, Durability::WithCommit)] {
        let task = writer.start_task(&"n".into(), index);
        let id = format!("{text}{index}");
        let write = writer.write("messages", json!([{"type": "ai", "content": text, "id": id}]), false)?;
        writer.finish_task(task, vec![write], durability).await?;
    }
    writer.commit(Source::Loop, vec!["n".into(), "n".into()], Map::new()).await.map(|_| ())
}

/// Whether the operation wrote part of it before it failed, so that its error may say so.
async fn run(op: Op, a: &StateAccessor, store: &MemorySaver, at: CheckpointId) -> Result<()> {
    let t = ThreadId::from("t");
    let mut head = a.known_head(&t).await?;
    match op {
        Op::Create => a.create(&"new".into(), Map::new()).await.map(|_| ()),
        Op::Update => a.update(&t, saying(a, "u")).await.map(|_| ()),
        Op::Fork => a.update(&t, Update { at: Some(at), ..saying(a, "f") }).await.map(|_| ()),
        Op::Annotate => {
            let state = a.get(&t, None).await?.unwrap();
            a.annotate(&state, Map::new()).await.map(|_| ())
        }
        Op::Linearize => a.linearize(&mut head, at, Map::new()).await.map(|_| ()),
        Op::Restore => {
            let point = a.capture(&mut head).await?;
            // What the run writes does not fail.
            let run =
                StateAccessor::new(Arc::new(store.clone()), Arc::new(a.table().clone()), Arc::default());
            let mut writer = StepWriter::open_known(&run, head, None).await?;
            superstep(&mut writer, "cancelled").await?;
            a.restore(&mut writer.head().clone(), &point, Map::new()).await.map(|_| ())
        }
        Op::RestoreNothing => {
            let thread = ThreadId::from("first");
            let run =
                StateAccessor::new(Arc::new(store.clone()), Arc::new(a.table().clone()), Arc::default());
            let mut head = run.known_head(&thread).await?;
            let point = run.capture(&mut head).await?;
            run.update_known(&mut head, saying(&run, "first")).await?;
            a.restore(&mut head, &point, Map::new()).await.map(|_| ())
        }
        Op::Turn => {
            let mut writer = StepWriter::open(a, &t, None).await?;
            let done = superstep(&mut writer, "a").await;
            // A caller that tries again must not be answered that nothing was written.
            match done {
                Err(Error::InDoubt { .. }) => Err(superstep(&mut writer, "a").await.unwrap_err()),
                done => done,
            }
        }
        Op::TurnWithOneFlush => {
            let mut writer = StepWriter::open(a, &t, None).await?;
            writer.set_flush(Flush::WithNext);
            let task = writer.start_task(&"n".into(), 0);
            writer.finish_task(task, Vec::new(), Durability::WithCommit).await?;
            writer.commit(Source::Loop, Vec::new(), Map::new()).await?;
            writer.flush().await
        }
        Op::Prune => {
            let keep = Prune { boundary: Boundary::FreshSnapshot, ..Prune::keeping(Keep::Latest) };
            prune(&**a.saver(), &t, &keep, a.table()).await.map(|_| ())
        }
        Op::Convert => {
            let other = match a.table().mode() {
                ChannelMode::Full => ChannelMode::Delta,
                ChannelMode::Delta => ChannelMode::Full,
            };
            let table = Schema::thread_state().compile(other, 2).unwrap();
            convert(&**a.saver(), &t, &table).await.map(|_| ())
        }
        Op::Repair => repair(&**a.saver(), &t, a.table()).await.map(|_| ()),
    }
}

/// The checkpoints of the threads; rows of tasks that no checkpoint applied do not make history.
async fn contents(store: &MemorySaver) -> Vec<CheckpointTuple> {
    let mut all = Vec::new();
    for thread in store.threads(None, 10).await.unwrap() {
        let image = store.read_thread(&thread).await.unwrap();
        all.extend(
            image.checkpoints.into_values().map(|tuple| CheckpointTuple { writes: Vec::new(), ..tuple }),
        );
    }
    all
}

/// Takes away the markers of delta mode and the counters, which a repair puts back.
async fn unmark(store: &MemorySaver) {
    let image = store.read_thread(&"t".into()).await.unwrap();
    let mut put: Vec<CheckpointTuple> = image.checkpoints.into_values().collect();
    for tuple in &mut put {
        tuple.metadata.delta_marker = false;
        tuple.metadata.counters.clear();
    }
    let rewrite = Rewrite { put, ..Rewrite::default() };
    store.rewrite_thread(&"t".into(), &image.revision, rewrite).await.unwrap();
}

async fn check(op: Op, mode: ChannelMode, nth: usize, loss: Loss, blind: bool) {
    let store = MemorySaver::new();
    let table = Arc::new(Schema::thread_state().compile(mode, 2).unwrap());
    let healthy = StateAccessor::new(Arc::new(store.clone()), table.clone(), Arc::default());
    let t = ThreadId::from("t");
    let at = healthy.update(&t, saying(&healthy, "one")).await.unwrap().key.id;
    let two = healthy.update(&t, saying(&healthy, "two")).await.unwrap();
    let pending = TaskWrites { task: healthy.ids().task(), node: "n".into(), index: 0, writes: Vec::new() };
    store.put_writes(&two.key, &pending).await.unwrap();
    if let Op::Repair = op {
        unmark(&store).await;
    }

    let failing = Failing {
        inner: store.clone(),
        left: AtomicUsize::new(nth),
        loss,
        poisoned: AtomicBool::new(false),
        blind,
        meanwhile: None,
    };
    let a = StateAccessor::new(Arc::new(failing), table, Arc::new(IdSource::default()));
    let before = contents(&store).await;
    let done = run(op, &a, &store, at).await;
    let after = contents(&store).await;
    let what = format!("{op:?} {mode:?} {nth} {loss:?} {blind}: {done:?}");
    // What a rolled back run wrote itself was there before the rollback.
    let own = |tuple: &CheckpointTuple| {
        let node = tuple.metadata.source == Source::Loop || tuple.thread == "first".into();
        matches!(op, Op::Restore | Op::RestoreNothing) && node
    };
    let new = || after.iter().filter(|tuple| !own(tuple) && !before.contains(tuple));
    match &done {
        Ok(()) => {}
        Err(Error::InDoubt { .. }) => assert!(loss != Loss::Refused || new().count() > 0, "{what}"),
        Err(_) => {
            assert_eq!(new().collect::<Vec<_>>(), Vec::<&CheckpointTuple>::new(), "{what}");
            if let Op::RestoreNothing = op {
                assert!(after.iter().any(|tuple| tuple.thread == "first".into()), "{what}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn unavailable_means_absent_after_the_store_is_opened_again(
        op in prop::sample::select(OPS.to_vec()),
        delta: bool,
        nth in 0..5_usize,
        loss in prop::sample::select(vec![Loss::Refused, Loss::DoubtStored, Loss::DoubtLost, Loss::Nothing]),
        blind: bool,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let mode = if delta { ChannelMode::Delta } else { ChannelMode::Full };
        runtime.block_on(check(op, mode, nth, loss, blind));
    }
}

/// A pass looks what came of its change; if it cannot, or if a later attempt fails, the change is still in doubt.
#[tokio::test]
async fn a_pass_in_doubt_is_not_called_undone() {
    for op in [Op::Prune, Op::Convert] {
        for mode in [ChannelMode::Full, ChannelMode::Delta] {
            for loss in [Loss::Refused, Loss::DoubtStored, Loss::DoubtLost] {
                for blind in [false, true] {
                    check(op, mode, 0, loss, blind).await;
                }
            }
        }
    }
}

/// The repair was stored; only the look at what it left failed.
#[tokio::test]
async fn a_repair_that_was_stored_is_not_called_undone() {
    for loss in [Loss::Refused, Loss::DoubtStored, Loss::DoubtLost, Loss::Nothing] {
        for blind in [false, true] {
            check(Op::Repair, ChannelMode::Delta, 0, loss, blind).await;
        }
    }
}

/// What a conversion in doubt changed is counted, also if somebody else has written to the thread since.
#[tokio::test]
async fn a_conversion_in_doubt_that_was_carried_out_says_what_it_changed() {
    for (mode, other) in [(ChannelMode::Full, ChannelMode::Delta), (ChannelMode::Delta, ChannelMode::Full)] {
        for third_party in [false, true] {
            let store = MemorySaver::new();
            let table = Schema::thread_state().compile(mode, 2).unwrap();
            let accessor = StateAccessor::new(Arc::new(store.clone()), Arc::new(table), Arc::default());
            let t = ThreadId::from("t");
            accessor.update(&t, saying(&accessor, "one")).await.unwrap();
            let head = accessor.update(&t, saying(&accessor, "two")).await.unwrap().key;
            let row = TaskWrites { task: accessor.ids().task(), node: "n".into(), index: 0, writes: vec![] };
            let failing = Failing {
                inner: store.clone(),
                left: AtomicUsize::new(0),
                loss: Loss::DoubtStored,
                poisoned: AtomicBool::new(false),
                blind: false,
                meanwhile: third_party.then_some((head, row)),
            };
            let table = Schema::thread_state().compile(other, 2).unwrap();
            let done = convert(&failing, &t, &table).await.unwrap();
            assert_eq!(done, Conversion { checkpoints: 2, changed: 2, left: 0 }, "{other:?} {third_party}");
            let again = convert(&store, &t, &table).await.unwrap();
            assert_eq!(again.changed, 0, "{other:?} {third_party}");
        }
    }
}

/// The process dies, or the store goes away, right after the commit of a checkpoint that takes the place of another one:
/// the rows of what had finished are under it.
#[tokio::test]
async fn a_checkpoint_that_takes_the_place_of_another_one_has_its_rows_at_once() {
    for mode in [ChannelMode::Full, ChannelMode::Delta] {
        for loss in [Loss::Nothing, Loss::DoubtStored] {
            let store = MemorySaver::new();
            let table = Arc::new(Schema::thread_state().compile(mode, 2).unwrap());
            let healthy = StateAccessor::new(Arc::new(store.clone()), table.clone(), Arc::default());
            let t = ThreadId::from("t");
            let start = || {
                let failing = Failing {
                    inner: store.clone(),
                    left: AtomicUsize::new(0),
                    loss,
                    poisoned: AtomicBool::new(false),
                    blind: false,
                    meanwhile: None,
                };
                StateAccessor::new(Arc::new(failing), table.clone(), Arc::default())
            };
            let rows = async || healthy.get(&t, None).await.unwrap().unwrap().writes;
            let mut writer = StepWriter::open(&healthy, &t, None).await.unwrap();
            writer.commit(Source::Input, vec!["n".into(), "n".into()], Map::new()).await.unwrap();
            let task = writer.start_task(&"n".into(), 0);
            writer.finish_task(task, Vec::new(), Durability::Now).await.unwrap();
            let before = rows().await;
            assert_eq!(before.len(), 1);

            let mut again = StepWriter::open(&start(), &t, None).await.unwrap();
            again.begin_with(before.clone());
            let next = vec!["n".into(), "n".into()];
            let committed = again.commit(Source::Input, next, Map::new()).await.map(|_| ());
            assert_eq!(committed.is_ok(), loss == Loss::Nothing, "{mode:?} {loss:?}: {committed:?}");
            assert_eq!(rows().await, before, "{mode:?} {loss:?}, a step");

            let mut head = healthy.known_head(&t).await.unwrap();
            let point = healthy.capture(&mut head).await.unwrap();
            let update = healthy.update_known(&mut head, saying(&healthy, "of the run")).await.unwrap();
            assert_eq!(update.writes, []);
            let restored = start().restore(&mut head, &point, Map::new()).await;
            assert_eq!(restored.is_ok(), loss == Loss::Nothing, "{mode:?} {loss:?}: {restored:?}");
            assert_eq!(rows().await, before, "{mode:?} {loss:?}, a rollback");
        }
    }
}

/// The repeat of a commit in doubt finds that the store lost history: the error says that the first attempt may have been
/// carried out. One that was not in doubt does not say so.
#[tokio::test]
async fn lost_history_after_a_doubt_says_that_there_was_a_doubt() {
    let store = MemorySaver::new();
    let table = Arc::new(Schema::thread_state().compile(ChannelMode::Full, 2).unwrap());
    let t = ThreadId::from("t");
    let healthy = StateAccessor::new(Arc::new(store.clone()), table.clone(), Arc::default());
    healthy.update(&t, saying(&healthy, "one")).await.unwrap();
    for in_doubt in [true, false] {
        let failing = Failing {
            inner: store.clone(),
            left: AtomicUsize::new(0),
            loss: Loss::HistoryLost,
            poisoned: AtomicBool::new(!in_doubt),
            blind: false,
            meanwhile: None,
        };
        let a = StateAccessor::new(Arc::new(failing), table.clone(), Arc::default());
        let error = a.update(&t, saying(&a, "two")).await.unwrap_err();
        assert!(matches!(&error, Error::HistoryLost { .. }), "{error}");
        let says = "an earlier attempt of this call was in doubt and may have been carried out";
        assert_eq!(error.to_string().matches(says).count(), usize::from(in_doubt), "{error}");
        assert_eq!(error.clone().after_doubt().to_string().matches(says).count(), 1, "once, however often");
    }
}

/// What somebody else does before the answer to a write is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    Deletes,
    /// Deletes the thread and begins it again.
    BeginsAgain,
    GoesOn,
}

/// Carries writes out, and loses the answers.
struct CutAnswers(MemorySaver, Then);

impl CutAnswers {
    async fn cut<T>(&self, thread: &ThreadId) -> Result<T> {
        let other = on(Arc::new(self.0.clone()));
        if self.1 != Then::GoesOn {
            self.0.delete_thread(thread).await?;
        }
        match self.1 {
            Then::Deletes => {}
            Then::BeginsAgain => drop(other.create(thread, Map::new()).await?),
            Then::GoesOn => drop(other.update(thread, saying(&other, "newer")).await?),
        }
        Err(Error::InDoubt { saver: "cut", reason: "the answer was cut".to_owned() })
    }
}

#[async_trait]
impl Saver for CutAnswers {
    async fn get(&self, at: &CheckpointSelector) -> Result<Option<CheckpointTuple>> {
        self.0.get(at).await
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<CheckpointTuple>> {
        self.0.list(query).await
    }

    async fn put_writes(&self, at: &CheckpointKey, task: &TaskWrites) -> Result<()> {
        self.0.put_writes(at, task).await
    }

    async fn commit(&self, step: StepCommit) -> Result<CheckpointKey> {
        let key = self.0.commit(step).await?;
        self.cut(&key.thread).await
    }

    async fn flush(&self, thread: &ThreadId) -> Result<()> {
        self.0.flush(thread).await
    }

    async fn delta_history(
        &self,
        at: &CheckpointKey,
        channels: &BTreeSet<ChannelName>,
        reach: Option<CheckpointId>,
    ) -> Result<DeltaHistory> {
        self.0.delta_history(at, channels, reach).await
    }

    async fn delete_thread(&self, thread: &ThreadId) -> Result<()> {
        self.0.delete_thread(thread).await
    }

    async fn threads(&self, after: Option<&ThreadId>, limit: usize) -> Result<Vec<ThreadId>> {
        self.0.threads(after, limit).await
    }

    async fn read_thread(&self, thread: &ThreadId) -> Result<ThreadImage> {
        self.0.read_thread(thread).await
    }

    async fn rewrite_thread(&self, thread: &ThreadId, expected: &Revision, rewrite: Rewrite) -> Result<()> {
        self.0.rewrite_thread(thread, expected, rewrite).await?;
        self.cut(thread).await
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }
}

/// An accessor on this saver.
fn on(saver: Arc<dyn Saver>) -> StateAccessor {
    let table = Schema::thread_state().compile(ChannelMode::Full, 3).unwrap();
    StateAccessor::new(saver, Arc::new(table), Arc::default())
}

/// A first commit in doubt that is stored, seen and deleted by somebody else does not come back.
#[tokio::test]
async fn a_first_commit_in_doubt_is_not_repeated_over_a_deletion() {
    let store = MemorySaver::new();
    let accessor = on(Arc::new(CutAnswers(store.clone(), Then::Deletes)));
    let created = accessor.create(&"t".into(), Map::new()).await;
    assert!(matches!(created, Err(Error::InDoubt { .. })), "{created:?}");
    assert_eq!(store.threads(None, 10).await.unwrap(), []);
}

/// It can no longer arrive, unless it is there already.
#[tokio::test]
async fn a_first_commit_in_doubt_beside_the_head_of_another_writer_is_settled() {
    let store = MemorySaver::new();
    let accessor = on(Arc::new(CutAnswers(store.clone(), Then::BeginsAgain)));
    let created = accessor.create(&"t".into(), Map::new()).await;
    let head = on(Arc::new(store)).known_head(&"t".into()).await.unwrap().id();
    assert!(head.is_some(), "theirs");
    match created {
        Err(Error::Conflict { expected: None, found, .. }) => assert_eq!(found, head),
        other => panic!("{other:?}"),
    }

    let store = MemorySaver::new();
    let accessor = on(Arc::new(CutAnswers(store.clone(), Then::GoesOn)));
    let created = accessor.create(&"t".into(), Map::new()).await.unwrap();
    let head = on(Arc::new(store)).get(&"t".into(), None).await.unwrap().unwrap();
    assert_eq!(head.parent, Some(created.key.id));
}

/// The rollback of a first run, and the deletion of a thread.
#[tokio::test]
async fn a_deletion_in_doubt_is_done_if_somebody_has_begun_the_thread_again() {
    for then in [Then::Deletes, Then::BeginsAgain] {
        for rolls_back in [true, false] {
            let (store, t) = (MemorySaver::new(), ThreadId::from("t"));
            let healthy = on(Arc::new(store.clone()));
            let mut head = healthy.known_head(&t).await.unwrap();
            let point = healthy.capture(&mut head).await.unwrap();
            healthy.update_known(&mut head, saying(&healthy, "first")).await.unwrap();
            let own = head.id();
            let accessor = on(Arc::new(CutAnswers(store.clone(), then)));
            if rolls_back {
                let restored = accessor.restore(&mut head, &point, Map::new()).await.unwrap();
                assert!(restored.is_none() && head.id().is_none(), "{then:?}");
            } else {
                let seen = healthy.look(&t).await.unwrap();
                accessor.delete_seen(seen).await.unwrap();
            }
            let left = healthy.known_head(&t).await.unwrap().id();
            assert_eq!(left.is_some(), then == Then::BeginsAgain, "{rolls_back}: theirs stays");
            assert_ne!(left, own);
        }
    }
}

/// What is in doubt may still arrive, and only a new head keeps it out. That nothing has changed yet is no rollback.
#[tokio::test]
async fn a_rollback_that_failed_after_a_doubt_is_not_done_when_it_is_repeated() {
    for mode in [ChannelMode::Full, ChannelMode::Delta] {
        let store = MemorySaver::new();
        let table = Arc::new(Schema::thread_state().compile(mode, 2).unwrap());
        let thread = ThreadId::from("t");
        let healthy = StateAccessor::new(Arc::new(store.clone()), table.clone(), Arc::default());
        let before = healthy.update(&thread, saying(&healthy, "one")).await.unwrap();
        let failing = Failing {
            inner: store.clone(),
            left: AtomicUsize::new(0),
            loss: Loss::DoubtLost,
            poisoned: AtomicBool::new(false),
            blind: false,
            meanwhile: None,
        };
        let run = StateAccessor::new(Arc::new(failing), table, Arc::default());
        let mut head = run.known_head(&thread).await.unwrap();
        let point = run.capture(&mut head).await.unwrap();
        let doubt = run.update_known(&mut head, saying(&run, "two")).await;
        assert!(matches!(doubt, Err(Error::InDoubt { .. })), "{doubt:?}");
        for _ in 0..2 {
            let failed = run.restore(&mut head, &point, Map::new()).await;
            assert!(matches!(failed, Err(Error::Unavailable { .. })), "{failed:?}");
            assert!(head.is_in_doubt(), "{mode}");
        }
        let restored = healthy.restore(&mut head, &point, Map::new()).await.unwrap().unwrap();
        assert_eq!(restored.parent, Some(before.key.id), "{mode}");
        assert!(!head.is_in_doubt(), "{mode}");
        assert_eq!(restored.values().unwrap(), before.values().unwrap());
    }
}
