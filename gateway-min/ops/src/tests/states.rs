//! What commands show of states that hold more than JSON can express, and of those that hold nothing.

use serde_json::Value as Json;
use threadkeep::checkpoint::{ChannelEntry, Checkpoint, CheckpointTuple, Stored};
use threadkeep::id::{IdSource, Namespace};
use threadkeep::metadata::{Metadata, Source};
use threadkeep::saver::{Revision, Rewrite, Saver as _};
use threadkeep::value::{ChannelValue, Codec, Encoded};

use super::commands::{carried_out, filled};

/// JSON shows only their length.
#[tokio::test]
async fn values_of_one_length_that_json_cannot_express_are_not_taken_for_equal() {
    let store = filled().await;
    let image = store.store.read_thread(&"a".into()).await.unwrap();
    let mut put: Vec<_> = image.checkpoints.into_values().collect();
    let mut ids = Vec::new();
    for (tuple, last) in put.iter_mut().zip([1_u8, 1, 2, 2]) {
        // Two bytes of Python's.
        let encoded = Encoded { codec: Codec::MessagePack, bytes: vec![0xc4, 2, 0, last].into() };
        let stored = Stored::Value(ChannelValue::from_encoded(encoded).unwrap());
        let version = tuple.checkpoint.channels["messages"].version;
        tuple.checkpoint.channels.insert("raw".into(), ChannelEntry { version, stored });
        ids.push(tuple.checkpoint.id.to_string());
    }
    let rewrite = Rewrite { put, ..Rewrite::default() };
    store.store.rewrite_thread(&"a".into(), &image.revision, rewrite).await.unwrap();
    let home = tempfile::tempdir().unwrap();
    for (a, b, differs) in [(0, 1, false), (1, 2, true), (2, 3, false)] {
        let diff = ["checkpoints", "diff", &ids[a], &ids[b], "--thread", "a"];
        let (result, printed) = carried_out(&store, home.path(), "memory", &diff).await;
        result.unwrap();
        assert_eq!(printed.lines().any(|line| line.starts_with("raw ")), differs, "{printed}");
        let diff = [&diff[..], &["--json"]].concat();
        let (_, printed) = carried_out(&store, home.path(), "memory", &diff).await;
        let shown: Json = serde_json::from_str(&printed).unwrap();
        let expected: Json = if differs { "changed".into() } else { Json::Null };
        assert_eq!(shown["channels"]["raw"]["change"], expected, "{printed}");
    }
}

#[tokio::test]
async fn one_checkpoint_without_channels_is_shown_without_empty_tables_and_counted_as_one() {
    let store = filled().await;
    let id = IdSource::default().checkpoint_after(None);
    let tuple = CheckpointTuple {
        thread: "empty".into(),
        namespace: Namespace::root(),
        checkpoint: Checkpoint { id, channels: [].into(), next: Vec::new(), applied: Vec::new() },
        parent: None,
        metadata: Metadata::new(Source::Input, 0),
        writes: Vec::new(),
    };
    let rewrite = Rewrite { put: vec![tuple], ..Rewrite::default() };
    store.store.rewrite_thread(&"empty".into(), &Revision::absent(), rewrite).await.unwrap();
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("empty.ndjson").display().to_string();
    for (command, says) in [
        (&["checkpoints", "show", "--thread", "empty"][..], "It holds no channels."),
        (&["export", "--thread", "empty", "--out", &file], "1 checkpoint, 0 elements, "),
        (&["import", &file, "--as", "again"], "1 checkpoint was imported."),
    ] {
        let (result, printed) = carried_out(&store, home.path(), "memory", command).await;
        result.unwrap();
        assert!(printed.contains(says) && !printed.contains("CHANNEL"), "{printed}");
    }
}
