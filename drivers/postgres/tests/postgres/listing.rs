//! Listings of several pages.

use std::sync::Arc;

use serde_json::json;
use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple, TaskWrites};
use threadkeep::saver::{ListQuery, Saver};
use threadkeep::value::Element;

use crate::common::proxy::Proxy;
use crate::common::talk::{Talk, note};
use crate::common::{database, open};

/// More rows than the first page has.
const LONG: usize = 150;

/// Somebody else puts writes beside the newest of the listed checkpoints, and then beside the oldest, after the first page was
/// read: the listing has both or none.
#[tokio::test(flavor = "multi_thread")]
async fn a_filtered_listing_is_of_one_moment() {
    let database = database().await;
    let proxy = Proxy::before(database.url()).await;
    let (saver, other) = (Arc::new(open(proxy.url()).await), open(database.url()).await);
    let mut talk = Talk::new("t");
    let mut keys: Vec<CheckpointKey> = Vec::new();
    for n in 0..LONG {
        let mut step = talk.say(&note(n));
        // Only the newest and the oldest are wanted.
        let wanted = n == 0 || n + 1 == LONG;
        step.metadata.extra.insert("wanted".to_owned(), json!(wanted));
        other.commit(step.clone()).await.unwrap();
        talk.accept(&step);
        keys.push(talk.key());
    }
    let filter = [("wanted".to_owned(), json!(true))].into_iter().collect();
    let query = ListQuery { filter, ..ListQuery::new(&talk.thread) };
    let task = |n: usize| TaskWrites { ..talk.task(&Element::from_json(&note(n)).unwrap()) };
    let has = |tuples: &[CheckpointTuple], n: usize, task: &TaskWrites| {
        tuples[n].writes.iter().any(|stored| stored.task == task.task)
    };
    // Each request of a listing in turn waits until that is done; the last number is that of none.
    for nth in 0..6 {
        let (come, go) = proxy.hold(nth);
        let listing = tokio::spawn({
            let (saver, query) = (saver.clone(), query.clone());
            async move { saver.list(&query).await.unwrap() }
        });
        let (newest, oldest) = (task(1000 + nth), task(2000 + nth));
        let held = tokio::select! {
            () = come.notified() => true,
            () = async { while !listing.is_finished() { tokio::task::yield_now().await } } => false,
        };
        other.put_writes(&keys[LONG - 1], &newest).await.unwrap();
        other.put_writes(&keys[0], &oldest).await.unwrap();
        go.notify_one();
        let tuples = listing.await.unwrap();
        assert_eq!(tuples.len(), 2);
        let found = (has(&tuples, 0, &newest), has(&tuples, 1, &oldest));
        assert!(found.0 == found.1, "request {nth}: the newest, the oldest: {found:?}");
        if !held {
            assert!(nth >= 3, "the listing had {nth} requests");
            return;
        }
    }
    panic!("the listing had more requests than it should");
}
