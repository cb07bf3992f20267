//! Writers that are open while their thread is converted or pruned: either order works, or the writer gets an error and
//! changes nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Map, Value as Json, json};
use threadkeep::Error;
use threadkeep::channel::{Behaviour, ChannelTable, Schema};
use threadkeep::convert::convert;
use threadkeep::deletion::{Boundary, Keep, Prune, prune};
use threadkeep::id::{CheckpointId, IdSource, ThreadId};
use threadkeep::metadata::{DURATION_NODE, Source};
use threadkeep::mode::ChannelMode::{self, Delta, Full};
use threadkeep::saver::{Load, Saver};
use threadkeep::state::{HistoryQuery, StateAccessor, StateSnapshot};
use threadkeep::step::{Durability, StepWriter};
use threadkeep::verify::verify;
use threadkeep_memory::MemorySaver;
use threadkeep_sqlite::{Options, SqliteSaver};

const CADENCE: u64 = 100;

fn table(mode: ChannelMode) -> Arc<ChannelTable> {
    Arc::new(Schema::thread_state().compile(mode, CADENCE).unwrap())
}

fn accessor(saver: &Arc<dyn Saver>, mode: ChannelMode) -> StateAccessor {
    StateAccessor::new(saver.clone(), table(mode), Arc::new(IdSource::default()))
}

fn thread() -> ThreadId {
    "t".into()
}

/// An empty store of each kind.
fn stores() -> [(Arc<dyn Saver>, Option<tempfile::TempDir>); 2] {
    let dir = tempfile::tempdir().unwrap();
    let sqlite = SqliteSaver::open(dir.path().join("db"), &Options::default()).unwrap();
    [(Arc::new(MemorySaver::new()), None), (Arc::new(sqlite), Some(dir))]
}

/// Adds messages; returns their checkpoints.
async fn talk(accessor: &StateAccessor, ids: std::ops::Range<u32>) -> Vec<StateSnapshot> {
    let mut writer = StepWriter::open(accessor, &thread(), None).await.unwrap();
    let mut states = Vec::new();
    for id in ids {
        write(&mut writer, "messages", json!([{ "type": "ai", "content": "x", "id": format!("m{id}") }]))
            .await;
        states.push(writer.commit(Source::Loop, vec![], Map::new()).await.unwrap().clone());
    }
    states
}

async fn write(writer: &mut StepWriter, channel: &str, value: Json) {
    let write = writer.write(channel, value, false).unwrap();
    let task = writer.start_task(&"n".into(), 0);
    writer.finish_task(task, vec![write], Durability::WithCommit).await.unwrap();
}

fn note() -> Map<String, Json> {
    Map::from_iter([("writes".to_owned(), json!({ DURATION_NODE: {} }))])
}

/// Every checkpoint, as a cold process reads it; `verify` finds nothing.
async fn states(saver: &Arc<dyn Saver>) -> BTreeMap<CheckpointId, Map<String, Json>> {
    assert_eq!(verify(&**saver, &thread(), &table(Delta)).await.unwrap(), []);
    let history = accessor(saver, Delta).history(&thread(), HistoryQuery::default()).await.unwrap();
    history.into_iter().map(|state| (state.key.id, state.values().unwrap())).collect()
}

/// A note on a head that somebody stored in another form since it was read repeats that form.
#[tokio::test]
async fn a_note_repeats_its_head_in_the_form_that_it_has_by_then() {
    let pruned = Prune { boundary: Boundary::FreshSnapshot, ..Prune::keeping(Keep::Latest) };
    for load in [Load::All, Load::None] {
        for what in ["converted", "pruned"] {
            for (saver, _dir) in stores() {
                let delta = accessor(&saver, Delta);
                talk(&delta, 0..5).await;
                let head = delta.get_loading(&thread(), None, load.clone()).await.unwrap().unwrap();
                assert!(!head.metadata.counters.is_empty(), "the head stores changes");
                match what {
                    "converted" => drop(convert(&*saver, &thread(), &table(Full)).await.unwrap()),
                    _ => drop(prune(&*saver, &thread(), &pruned, delta.table()).await.unwrap()),
                }
                let before = states(&saver).await;
                let noted = delta.annotate(&head, note()).await.unwrap();
                assert!(noted.metadata.is_duration_only() && noted.metadata.counters.is_empty());
                let after = states(&saver).await;
                assert_eq!(after[&noted.key.id], before[&head.key.id], "{what}");
                // The writer goes on from the note that it has in memory.
                let next = talk(&delta, 5..7).await;
                assert_eq!(states(&saver).await[&next[1].key.id], next[1].values().unwrap());
            }
        }
    }
}

/// A note on a checkpoint that is not the head any more, or that is gone, is refused.
#[tokio::test]
async fn a_note_on_a_converted_head_is_still_refused_after_a_newer_one() {
    for (saver, _dir) in stores() {
        let delta = accessor(&saver, Delta);
        let head = talk(&delta, 0..3).await.pop().unwrap();
        convert(&*saver, &thread(), &table(Full)).await.unwrap();
        talk(&accessor(&saver, Full), 3..4).await;
        let before = states(&saver).await;
        let refused = delta.annotate(&head, note()).await;
        assert!(matches!(refused, Err(Error::Conflict { .. })), "{refused:?}");
        assert_eq!(states(&saver).await, before);
    }
}

/// A fork holds the value that it read; a conversion stores changes there, which its checkpoint could not count.
#[tokio::test]
async fn a_fork_in_full_mode_is_refused_once_its_parent_stores_changes() {
    for (saver, _dir) in stores() {
        let full = accessor(&saver, Full);
        let old = talk(&full, 0..5).await.swap_remove(2);
        let mut fork = StepWriter::open(&full, &thread(), Some(old.key.id)).await.unwrap();
        write(&mut fork, "title", json!("T")).await;
        convert(&*saver, &thread(), &table(Delta)).await.unwrap();
        let before = states(&saver).await;
        let refused = fork.commit(Source::Loop, vec![], Map::new()).await.cloned();
        assert!(matches!(refused, Err(Error::Stale { .. })), "{refused:?}");
        assert_eq!(states(&saver).await, before, "nothing was stored");

        // In the new mode it works, on what is stored by then.
        let delta = accessor(&saver, Delta);
        let mut fork = StepWriter::open(&delta, &thread(), Some(old.key.id)).await.unwrap();
        write(&mut fork, "title", json!("T")).await;
        let forked = fork.commit(Source::Loop, vec![], Map::new()).await.unwrap().clone();
        assert_eq!(states(&saver).await[&forked.key.id], forked.values().unwrap());
    }
}

/// A fork in delta mode counts from the value that it read; after a conversion there is more to replay than it counts.
#[tokio::test]
async fn a_fork_in_delta_mode_is_refused_once_its_parent_counts_more() {
    for (saver, _dir) in stores() {
        let old = talk(&accessor(&saver, Full), 0..5).await.swap_remove(2);
        let delta = accessor(&saver, Delta);
        let mut fork = StepWriter::open(&delta, &thread(), Some(old.key.id)).await.unwrap();
        write(&mut fork, "messages", json!([{ "type": "ai", "content": "x", "id": "fork" }])).await;
        convert(&*saver, &thread(), &table(Delta)).await.unwrap();
        let before = states(&saver).await;
        let refused = fork.commit(Source::Loop, vec![], Map::new()).await.cloned();
        assert!(matches!(refused, Err(Error::Stale { .. })), "{refused:?}");
        assert_eq!(states(&saver).await, before, "nothing was stored");
    }
}

/// A channel that the schema no longer has keeps its counters, so that steps go on beside it.
#[tokio::test]
async fn a_channel_that_the_schema_lost_is_held_with_its_counters() {
    for (saver, _dir) in stores() {
        talk(&accessor(&saver, Delta), 0..3).await;
        let schema = Schema::new().with("title", Behaviour::LastValue);
        let other = StateAccessor::new(
            saver.clone(),
            Arc::new(schema.compile(Delta, CADENCE).unwrap()),
            Arc::new(IdSource::default()),
        );
        for n in 0..3 {
            let mut writer = StepWriter::open(&other, &thread(), None).await.unwrap();
            write(&mut writer, "title", json!(format!("T{n}"))).await;
            writer.commit(Source::Loop, vec![], Map::new()).await.unwrap();
        }
        let states = states(&saver).await;
        assert_eq!(states.values().next_back().unwrap()["messages"].as_array().unwrap().len(), 3);
    }
}
