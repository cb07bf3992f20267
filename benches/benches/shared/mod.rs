//! Threads to measure on.

use std::sync::Arc;

use serde_json::{Map, Value as Json, json};
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::id::{IdSource, ThreadId};
use threadkeep::metadata::Source;
use threadkeep::saver::Saver;
use threadkeep::state::StateAccessor;
use threadkeep::step::{Durability, StepWriter};
use threadkeep_benches::case::Mode;
use threadkeep_benches::transcript::Transcript;

/// Realistic messages, in order.
pub(crate) fn transcript(count: usize) -> Vec<Json> {
    let mut transcript = Transcript::new(7);
    (0..count).map(|n| if n.is_multiple_of(2) { transcript.human() } else { transcript.ai() }).collect()
}

/// An accessor with nothing cached.
pub(crate) fn accessor(saver: &Arc<dyn Saver>, mode: Mode) -> StateAccessor {
    StateAccessor::new(saver.clone(), Arc::new(mode.table().unwrap()), Arc::new(IdSource::default()))
}

/// A superstep that writes one message.
pub(crate) async fn step(run: &mut StepWriter, message: Json) {
    let write = run.write(MESSAGES_CHANNEL, json!([message]), false).unwrap();
    let task = run.start_task(&"model".into(), 0);
    run.finish_task(task, vec![write], Durability::WithCommit).await.unwrap();
    run.commit(Source::Loop, vec!["model".into()], Map::new()).await.unwrap();
}

/// A writer on a thread with these messages; all but the last `steps` of them were written in one superstep.
pub(crate) async fn grown(
    accessor: &StateAccessor,
    thread: &ThreadId,
    messages: &[Json],
    steps: usize,
) -> StepWriter {
    accessor.create(thread, Map::new()).await.unwrap();
    let mut run = StepWriter::open(accessor, thread, None).await.unwrap();
    let (first, rest) = messages.split_at(messages.len() - steps);
    if !first.is_empty() {
        let write = run.write(MESSAGES_CHANNEL, Json::Array(first.to_vec()), false).unwrap();
        let task = run.start_task(&"model".into(), 0);
        run.finish_task(task, vec![write], Durability::WithCommit).await.unwrap();
        run.commit(Source::Input, vec!["model".into()], Map::new()).await.unwrap();
    }
    for message in rest {
        step(&mut run, message.clone()).await;
    }
    run
}
