//! Numbers that were read as large as they can be, as a damaged or hostile row has them: what goes on from them does not
//! begin again, and nothing overflows.

use std::sync::Arc;

use serde_json::{Map, json};
use threadkeep::channel::Schema;
use threadkeep::id::{ChannelName, IdSource, ThreadId};
use threadkeep::metadata::Counters;
use threadkeep::mode::ChannelMode;
use threadkeep::saver::{Rewrite, Saver};
use threadkeep::state::{StateAccessor, Update};
use threadkeep_memory::MemorySaver;

#[tokio::test]
async fn numbers_at_their_end_stay_there() {
    for mode in [ChannelMode::Full, ChannelMode::Delta] {
        let (saver, thread) = (MemorySaver::new(), ThreadId::from("t"));
        let table = Arc::new(Schema::thread_state().compile(mode, 100).unwrap());
        let open =
            || StateAccessor::new(Arc::new(saver.clone()), table.clone(), Arc::new(IdSource::default()));
        let say = |text: &str| {
            let message = json!([{"type": "human", "content": text, "id": text}]);
            let writes = vec![open().write("messages", message, false).unwrap()];
            Update { at: None, node: "n".into(), writes, extra: Map::new() }
        };
        for text in ["a", "b"] {
            open().update(&thread, say(text)).await.unwrap();
        }

        let image = saver.read_thread(&thread).await.unwrap();
        let mut head = image.checkpoints.last_key_value().unwrap().1.clone();
        head.metadata.step = i64::MAX;
        for entry in head.checkpoint.channels.values_mut() {
            entry.version.counter = u64::MAX;
        }
        let most = Counters { updates: u64::MAX, supersteps: u64::MAX };
        for counters in head.metadata.counters.values_mut() {
            *counters = most;
        }
        let counted = head.metadata.counters.contains_key(&ChannelName::from("messages"));
        assert_eq!(counted, mode == ChannelMode::Delta);
        let rewrite = Rewrite { put: vec![head], ..Rewrite::default() };
        saver.rewrite_thread(&thread, &image.revision, rewrite).await.unwrap();

        let head = open().get(&thread, None).await.unwrap().unwrap();
        let noted = open().annotate(&head, Map::new()).await.unwrap();
        assert_eq!(noted.metadata.step, i64::MAX);
        let state = open().update(&thread, say("c")).await.unwrap();
        assert_eq!(state.metadata.step, i64::MAX);
        assert_eq!(state.version("messages").unwrap().counter, u64::MAX);
        let messages = state.json("messages").unwrap().unwrap();
        assert_eq!(messages.as_array().unwrap().len(), 3, "{mode:?}");
    }
}
