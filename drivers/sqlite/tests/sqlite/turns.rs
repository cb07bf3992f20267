//! How often a turn of the engine's step writer waits for the disk.

use std::sync::Arc;

use serde_json::{Map, json};
use threadkeep::channel::Schema;
use threadkeep::id::IdSource;
use threadkeep::metadata::Source;
use threadkeep::mode::ChannelMode;
use threadkeep::saver::{Flush, Saver};
use threadkeep::state::StateAccessor;
use threadkeep::step::{Durability, StepWriter};
use threadkeep_sqlite::{Options, SqliteSaver};

async fn step(writer: &mut StepWriter, text: &str) {
    let write =
        writer.write("messages", json!([{"type": "human", "content": text, "id": text}]), false).unwrap();
    let task = writer.start_task(&"n".into(), 0);
    writer.finish_task(task, vec![write], Durability::WithCommit).await.unwrap();
    writer.commit(Source::Loop, vec!["n".into()], Map::new()).await.unwrap();
}

#[tokio::test]
async fn a_turn_is_flushed_at_each_step_or_once_as_its_writer_asks() {
    let dir = tempfile::tempdir().unwrap();
    let saver = Arc::new(SqliteSaver::open(dir.path().join("db"), &Options::default()).unwrap());
    let flushes = || saver.stats().flushes;
    for mode in [ChannelMode::Full, ChannelMode::Delta] {
        let table = Arc::new(Schema::thread_state().compile(mode, 3).unwrap());
        let shared: Arc<dyn Saver> = saver.clone();
        let accessor = StateAccessor::new(shared, table, Arc::new(IdSource::default()));
        let thread = mode.as_str().into();
        accessor.create(&thread, Map::new()).await.unwrap();
        let mut writer = StepWriter::open(&accessor, &thread, None).await.unwrap();
        for turn in 0..3 {
            let before = flushes();
            for n in 0..3 {
                step(&mut writer, &format!("{turn} {n}")).await;
            }
            writer.flush().await.unwrap();
            assert_eq!(flushes() - before, 3, "every step is on the disk when it is acknowledged");
        }
        writer.set_flush(Flush::WithNext);
        for turn in 3..6 {
            let before = flushes();
            for n in 0..3 {
                step(&mut writer, &format!("{turn} {n}")).await;
            }
            assert_eq!(flushes(), before, "none of them is waited for");
            writer.flush().await.unwrap();
            writer.flush().await.unwrap();
            assert_eq!(flushes() - before, 1, "the turn is");
        }
        // A turn whose last step is known to be the last needs no flush after it.
        let before = flushes();
        step(&mut writer, "first").await;
        writer.set_flush(Flush::Now);
        step(&mut writer, "last").await;
        writer.flush().await.unwrap();
        assert_eq!(flushes() - before, 1);
    }
    saver.close().await;
}
