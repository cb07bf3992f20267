//! Conversion between the modes, and writers whose head is rewritten.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Map, Value as Json, json};
use threadkeep::Error;
use threadkeep::channel::{ChannelTable, Schema};
use threadkeep::checkpoint::Stored;
use threadkeep::convert::{Conversion, convert, plan_conversion};
use threadkeep::deletion::{Boundary, Keep, Prune, prune};
use threadkeep::id::{CheckpointId, IdSource, ThreadId};
use threadkeep::metadata::{DURATION_NODE, Source};
use threadkeep::mode::ChannelMode::{self, Delta, Full};
use threadkeep::saver::{Rewrite, Saver};
use threadkeep::state::{HistoryQuery, StateAccessor, Update};
use threadkeep::step::{Durability, StepWriter};
use threadkeep::verify::verify_image;
use threadkeep_memory::MemorySaver;
use threadkeep_sqlite::{Options, SqliteSaver, Synchronous};

fn table(mode: ChannelMode, frequency: u64) -> Arc<ChannelTable> {
    Arc::new(Schema::thread_state().compile(mode, frequency).unwrap())
}

fn accessor(saver: &Arc<dyn Saver>, mode: ChannelMode, frequency: u64) -> StateAccessor {
    StateAccessor::new(saver.clone(), table(mode, frequency), Arc::new(IdSource::default()))
}

fn thread() -> ThreadId {
    "t".into()
}

async fn step(writer: &mut StepWriter, ids: &[u32]) {
    for (index, id) in (0..).zip(ids) {
        let message =
            json!([{ "type": "ai", "content": format!("{id} of {}", ids.len()), "id": format!("m{id}") }]);
        let write = writer.write("messages", message, false).unwrap();
        let task = writer.start_task(&"n".into(), index);
        writer.finish_task(task, vec![write], Durability::WithCommit).await.unwrap();
    }
    writer.commit(Source::Loop, vec![], Map::new()).await.unwrap();
}

async fn states(accessor: &StateAccessor) -> BTreeMap<CheckpointId, Map<String, Json>> {
    let history = accessor.history(&thread(), HistoryQuery::default()).await.unwrap();
    history.into_iter().map(|state| (state.key.id, state.values().unwrap())).collect()
}

#[derive(Debug, Clone)]
enum Op {
    Step { at: Option<usize>, ids: Vec<u32> },
    Title(u8),
    Annotate,
    Pend,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (prop::option::weighted(0.2, any::<usize>()), prop::collection::vec(0..30_u32, 0..3))
            .prop_map(|(at, ids)| Op::Step { at, ids }),
        1 => any::<u8>().prop_map(Op::Title),
        2 => Just(Op::Annotate),
        1 => Just(Op::Pend),
    ]
}

async fn play(accessor: &StateAccessor, ops: &[Op]) {
    let thread = thread();
    for op in ops {
        match op {
            Op::Step { at, ids } => {
                let made: Vec<_> = states(accessor).await.into_keys().collect();
                let at = at.filter(|_| !made.is_empty()).map(|at| made[at % made.len()]);
                step(&mut StepWriter::open(accessor, &thread, at).await.unwrap(), ids).await;
            }
            Op::Title(title) => {
                let write = accessor.write("title", json!(title), false).unwrap();
                let update = Update { at: None, node: "u".into(), writes: vec![write], extra: Map::new() };
                accessor.update(&thread, update).await.unwrap();
            }
            Op::Annotate => {
                let Some(head) = accessor.get(&thread, None).await.unwrap() else { continue };
                let extra = Map::from_iter([("writes".to_owned(), json!({ DURATION_NODE: {} }))]);
                accessor.annotate(&head, extra).await.unwrap();
            }
            Op::Pend => {
                let mut writer = StepWriter::open(accessor, &thread, None).await.unwrap();
                let write = writer.write("title", json!("pending"), false).unwrap();
                let task = writer.start_task(&"n".into(), 0);
                writer.finish_task(task, vec![write], Durability::Now).await.unwrap();
            }
        }
    }
}

/// Plays a program, converts to the other mode, continues in that, and converts back. Every state stays the same
/// throughout.
async fn there_and_back(saver: Arc<dyn Saver>, first: ChannelMode, frequency: u64, ops: [&[Op]; 2]) {
    let thread = thread();
    let second = if first == Full { Delta } else { Full };
    let reader = accessor(&saver, Delta, frequency);
    play(&accessor(&saver, first, frequency), ops[0]).await;
    let before = states(&reader).await;
    for (mode, ops) in [(second, ops[1]), (first, &[]), (second, &[])] {
        let lineage = saver.read_thread(&thread).await.unwrap();
        let planned = plan_conversion(&lineage, &table(mode, frequency)).unwrap().0;
        let done = convert(&*saver, &thread, &table(mode, frequency)).await.unwrap();
        assert_eq!(done.changed, planned.put.len());
        let again = convert(&*saver, &thread, &table(mode, frequency)).await.unwrap();
        assert_eq!(again, Conversion { changed: 0, ..done }, "a second pass has nothing to do");

        let image = saver.read_thread(&thread).await.unwrap();
        assert_eq!(verify_image(&image, &table(mode, frequency)), []);
        for (place, tuple) in &image.checkpoints {
            let old = &lineage.checkpoints[place];
            assert_eq!((&tuple.parent, &tuple.writes), (&old.parent, &old.writes));
            assert_eq!(tuple.metadata.extra, old.metadata.extra);
            if mode == Full {
                assert!(!tuple.metadata.is_delta() && tuple.metadata.counters.is_empty());
                let whole = |stored: &Stored| matches!(stored, Stored::Value(_));
                assert!(tuple.checkpoint.channels.values().all(|entry| whole(&entry.stored)));
            } else {
                assert!(tuple.metadata.is_delta());
                assert!(!matches!(
                    tuple.checkpoint.channels.get("messages").map(|entry| &entry.stored),
                    Some(Stored::Value(_))
                ));
            }
        }
        let mine = accessor(&saver, mode, frequency);
        let now = states(&mine).await;
        assert!(before.iter().all(|(id, state)| now[id] == *state), "in {mode}");
        play(&mine, ops).await;
        let on = states(&mine).await;
        assert!(now.iter().all(|(id, state)| on[id] == *state), "in {mode}, after going on");
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

fn programs() -> impl Strategy<Value = Vec<Op>> {
    prop::collection::vec(op(), 0..25)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn conversion_keeps_every_state_in_memory(
        full in any::<bool>(), frequency in prop::sample::select(vec![1_u64, 2, 3, 10, 1000]),
        before in programs(), after in programs()
    ) {
        let mode = if full { Full } else { Delta };
        block_on(there_and_back(Arc::new(MemorySaver::new()), mode, frequency, [&before, &after]));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 25, ..ProptestConfig::default() })]

    #[test]
    fn conversion_keeps_every_state_on_sqlite(
        full in any::<bool>(), frequency in prop::sample::select(vec![1_u64, 2, 3, 10, 1000]),
        before in programs(), after in programs()
    ) {
        let dir = tempfile::tempdir().unwrap();
        let options = Options { synchronous: Synchronous::Normal, ..Options::default() };
        let saver = Arc::new(SqliteSaver::open(dir.path().join("db"), &options).unwrap());
        let mode = if full { Full } else { Delta };
        block_on(there_and_back(saver, mode, frequency, [&before, &after]));
    }
}

#[tokio::test]
async fn a_full_process_reads_a_converted_thread_and_only_that() {
    let saver: Arc<dyn Saver> = Arc::new(MemorySaver::new());
    let delta = accessor(&saver, Delta, 3);
    for id in 0..8 {
        step(&mut StepWriter::open(&delta, &thread(), None).await.unwrap(), &[id]).await;
    }
    let full = accessor(&saver, Full, 3);
    assert_eq!(full.get(&thread(), None).await.unwrap_err(), Error::ModeMismatch);
    let expected = states(&delta).await;
    let done = convert(&*saver, &thread(), full.table()).await.unwrap();
    assert_eq!(done, Conversion { checkpoints: 8, changed: 8, left: 0 });
    assert_eq!(states(&full).await, expected, "the whole history");
    step(&mut StepWriter::open(&full, &thread(), None).await.unwrap(), &[9]).await;
}

/// Where ancestors of a snapshot were deleted, as the Python savers delete those of a run, its rows are gone, and those of the
/// checkpoint that it follows now lead elsewhere. A page may also lack the snapshot.
#[tokio::test]
async fn a_page_is_not_replayed_across_a_snapshot_whose_ancestors_were_deleted() {
    for mode in [Delta, Full] {
        let saver: Arc<dyn Saver> = Arc::new(MemorySaver::new());
        let made = accessor(&saver, mode, 3);
        for id in 0..14 {
            step(&mut StepWriter::open(&made, &thread(), None).await.unwrap(), &[id]).await;
        }
        let expected = states(&made).await;
        let image = saver.read_thread(&thread()).await.unwrap();
        let line: Vec<_> = image.checkpoints.iter().collect();
        let is_snapshot = |at: &usize| {
            mode == Full || matches!(line[*at].1.checkpoint.channels["messages"].stored, Stored::Snapshot(_))
        };
        let at = (5..10).find(is_snapshot).unwrap();
        let mut grafted = line[at].1.clone();
        grafted.parent = Some(line[at - 4].1.checkpoint.id);
        grafted.checkpoint.applied.clear();
        let filtered_out = grafted.checkpoint.id;
        let remove = line[at - 3..at].iter().map(|(place, _)| (*place).clone()).collect();
        let rewrite = Rewrite { remove, put: vec![grafted] };
        saver.rewrite_thread(&thread(), &image.revision, rewrite).await.unwrap();

        let delta = accessor(&saver, Delta, 3);
        convert(&*saver, &thread(), delta.table()).await.unwrap();
        let left = states(&delta).await;
        assert_eq!(left.len(), 11);
        assert!(left.iter().all(|(id, state)| expected[id] == *state), "{mode}");
        // The steps of the grafted checkpoint's neighbours, without its own.
        for step in 0..14 {
            let filter = json!({ "step": step }).as_object().unwrap().clone();
            let query = HistoryQuery { filter, ..HistoryQuery::default() };
            for state in delta.history(&thread(), query).await.unwrap() {
                assert_eq!(state.values().unwrap(), expected[&state.key.id], "{mode}");
            }
        }
        assert!(left.contains_key(&filtered_out));
    }
}

/// Writers that read the head before it was rewritten, and continue afterwards.
#[tokio::test]
async fn a_live_writer_goes_on_after_its_head_was_rewritten() {
    for (mode, target, boundary) in [
        (Delta, Some(Full), Boundary::KeepSet),
        (Full, Some(Delta), Boundary::KeepSet),
        (Delta, None, Boundary::FreshSnapshot),
        (Delta, None, Boundary::KeepSet),
        (Full, None, Boundary::FreshSnapshot),
    ] {
        for sqlite in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let saver: Arc<dyn Saver> = if sqlite {
                Arc::new(SqliteSaver::open(dir.path().join("db"), &Options::default()).unwrap())
            } else {
                Arc::new(MemorySaver::new())
            };
            let mine = accessor(&saver, mode, 1000);
            let mut writer = StepWriter::open(&mine, &thread(), None).await.unwrap();
            for id in 0..7 {
                step(&mut writer, &[id]).await;
            }
            if let Some(target) = target {
                convert(&*saver, &thread(), &table(target, 1000)).await.unwrap();
            } else {
                let asked = Prune { boundary, ..Prune::keeping(Keep::Latest) };
                prune(&*saver, &thread(), &asked, mine.table()).await.unwrap();
            }
            // A step that writes a message, one that writes another channel, one that writes a message again.
            step(&mut writer, &[7]).await;
            let title = writer.write("title", json!("a title"), false).unwrap();
            let task = writer.start_task(&"n".into(), 0);
            writer.finish_task(task, vec![title], Durability::Now).await.unwrap();
            writer.commit(Source::Loop, vec![], Map::new()).await.unwrap();
            step(&mut writer, &[8]).await;
            let live = writer.state().unwrap().values().unwrap();
            assert_eq!(live["messages"].as_array().unwrap().len(), 9);
            let reader = accessor(&saver, Delta, 1000);
            let read = reader.get(&thread(), None).await.unwrap().unwrap();
            assert_eq!(
                read.values().unwrap(),
                live,
                "{mode} after {target:?} {boundary:?}, sqlite: {sqlite}"
            );
            let all = states(&reader).await;
            assert!(all.len() >= 4, "every checkpoint can be read: {}", all.len());
            // Another pass converts what the writer left.
            convert(&*saver, &thread(), &table(Full, 1000)).await.unwrap();
            assert_eq!(states(&accessor(&saver, Full, 1000)).await, all);
        }
    }
}
