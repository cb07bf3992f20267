//! The number of requests to the server, counted on the wire.

use std::collections::BTreeSet;

use serde_json::json;
use threadkeep::checkpoint::{ChannelEntry, CheckpointKey, Stored};
use threadkeep::saver::{CheckpointSelector, Flush, ListQuery, Saver, StepCommit};
use threadkeep_postgres::PostgresSaver;

use crate::common::proxy::Proxy;
use crate::common::talk::{MESSAGES, Talk, note};
use crate::common::{database, open};

/// The cost of `call`.
async fn cost<T>(proxy: &Proxy, call: impl Future<Output = T>) -> (usize, T) {
    let before = proxy.requests();
    let done = call.await;
    (proxy.requests() - before, done)
}

async fn grow(saver: &PostgresSaver, talk: &mut Talk, steps: std::ops::Range<usize>) -> Vec<CheckpointKey> {
    let mut keys = Vec::new();
    for n in steps {
        let step = talk.say(&note(n));
        saver.commit(step.clone()).await.unwrap();
        talk.accept(&step);
        keys.push(talk.key());
    }
    keys
}

#[tokio::test(flavor = "multi_thread")]
async fn a_superstep_is_one_request() {
    let database = database().await;
    let proxy = Proxy::before(database.url()).await;
    let saver = open(proxy.url()).await;
    let mut prepared = BTreeSet::new();
    for mut talk in [Talk::new("full"), Talk::delta("delta", 10)] {
        for n in 0..40 {
            let step = talk.say(&note(n));
            let (requests, done) = cost(&proxy, saver.commit(step.clone())).await;
            done.unwrap();
            // The first call of each function in a session prepares it.
            let function = if n == 0 { "threadkeep_write" } else { "threadkeep_commit" };
            let expected = if prepared.insert(function) { 2 } else { 1 };
            assert_eq!(requests, expected, "step {n} of {}", talk.thread);
            talk.accept(&step);
            if n % 4 == 1 {
                let row = talk.task(talk.messages.last().unwrap());
                let (requests, done) = cost(&proxy, saver.put_writes(&talk.key(), &row)).await;
                done.unwrap();
                assert_eq!(requests, 1, "writes after step {n} of {}", talk.thread);
            }
        }
    }
}

/// The server plans the text of a statement each time it is sent, but a statement in a function once per session; and it
/// parses the call of a function once per session.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_asked_all_the_time_is_parsed_and_planned_once() {
    let database = database().await;
    let proxy = Proxy::before(database.url()).await;
    let saver = open(proxy.url()).await;
    proxy.statements();
    // Each repeats the nonce that it sets, which identifies the answer, and asks for warnings.
    let warned = "pg_catalog.set_config('client_min_messages', 'warning', true)";
    let call = |nonce: &str, function: &str, arguments: usize| {
        let arguments: Vec<_> = (1..=arguments).map(|n| format!("${n}")).collect();
        format!("SELECT {nonce}, \"public\".threadkeep_{function}({}), {warned}", arguments.join(", "))
    };
    // The first commit creates the thread; the last call puts writes.
    let mut writes = vec![call("$8", "write", 27), call("$6", "commit", 24)];
    let read = |call: &str| format!("SELECT * FROM \"public\".threadkeep_{call}");
    let mut reads = vec![read("head($1, $2)"), read("by_id($1, $2, $3)"), read("lineage($1, $2, $3, $4)")];
    for name in ["one", "two"] {
        let mut talk = Talk::new(name);
        for n in 0..20 {
            let flush = if n % 3 == 0 { Flush::Now } else { Flush::WithNext };
            let step = StepCommit { flush, ..talk.say(&note(n)) };
            saver.commit(step.clone()).await.unwrap();
            talk.accept(&step);
        }
        saver.put_writes(&talk.key(), &talk.task(talk.messages.last().unwrap())).await.unwrap();
        assert_eq!(proxy.statements(), std::mem::take(&mut writes), "{name}");
        saver.get(&CheckpointSelector::head(&talk.thread)).await.unwrap();
        saver.get(&CheckpointSelector::at(&talk.key())).await.unwrap();
        saver.delta_history(&talk.key(), &[MESSAGES.into()].into(), None).await.unwrap();
        let mut asked = proxy.statements();
        // Values are read by runs of their numbers; the cost grows with their count.
        asked.retain(|text| !text.starts_with("SELECT 0 AS kind"));
        assert_eq!(asked, std::mem::take(&mut reads), "{name}");
    }
    let languages =
        "SELECT string_agg(DISTINCT l.lanname, ' ') FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang
                     WHERE p.proname LIKE 'threadkeep%'";
    let client = crate::common::damage::connect(database.url()).await;
    // The language that keeps plans; functions in SQL are planned for each call.
    assert_eq!(client.query_one(languages, &[]).await.unwrap().get::<_, String>(0), "plpgsql");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_saver_that_does_not_know_the_thread_asks_once_more() {
    let database = database().await;
    let mut talk = Talk::new("t");
    grow(&open(database.url()).await, &mut talk, 0..20).await;
    let proxy = Proxy::before(database.url()).await;
    let saver = open(proxy.url()).await;
    // Prepares the calls.
    grow(&saver, &mut Talk::new("another"), 0..2).await;
    // Begin, lock, read; then the write and the commit: two round trips.
    let step = talk.say(&note(20));
    let (requests, done) = cost(&proxy, saver.commit(step.clone())).await;
    done.unwrap();
    assert_eq!(requests, 5);
    talk.accept(&step);
    let (requests, done) = cost(&proxy, saver.commit(talk.say(&note(21)))).await;
    done.unwrap();
    assert_eq!(requests, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn head_pages_and_histories_of_any_length_and_age_are_two_requests() {
    let database = database().await;
    let proxy = Proxy::before(database.url()).await;
    let saver = open(proxy.url()).await;
    let mut full = Talk::new("full");
    // Prepares the calls; nothing is there yet.
    assert_eq!(saver.get(&CheckpointSelector::head(&full.thread)).await.unwrap(), None);
    let nowhere =
        CheckpointKey { thread: "full".into(), namespace: "".into(), id: full.ids.checkpoint_after(None) };
    saver.delta_history(&nowhere, &BTreeSet::new(), None).await.unwrap_err();
    // No snapshot but the first: the longest possible history.
    let mut delta = Talk::delta("delta", i64::MAX);
    let mut old = Vec::new();
    for steps in [0..3, 3..300] {
        grow(&saver, &mut full, steps.clone()).await;
        let keys = grow(&saver, &mut delta, steps.clone()).await;
        old.push(keys[2].clone());

        let (requests, head) = cost(&proxy, saver.get(&CheckpointSelector::head(&full.thread))).await;
        assert_eq!(requests, 2);
        assert_eq!(
            head.unwrap().unwrap().checkpoint.channels[MESSAGES].stored,
            Stored::Value(full.messages.clone().into())
        );
        let page = ListQuery { limit: Some(100), ..ListQuery::new(&full.thread) };
        let (requests, page) = cost(&proxy, saver.list(&page)).await;
        assert_eq!((requests, page.unwrap().len()), (2, 100.min(steps.end)));

        for (at, reach, len) in [
            (delta.key(), None, steps.end),
            (delta.key(), Some(old[0].id), steps.end),
            (old[0].clone(), None, 3),
        ] {
            let channels = [MESSAGES.into()].into();
            let (requests, history) = cost(&proxy, saver.delta_history(&at, &channels, reach)).await;
            assert_eq!(requests, 2, "{at:?}");
            let history = &history.unwrap()[MESSAGES];
            assert_eq!(history.steps.len(), len - 1);
            let seed = history.seed.as_ref().unwrap().value.to_json().unwrap();
            assert_eq!(seed, json!([note(0)]));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_walk_ends_at_the_nearest_snapshots_when_channels_take_turns() {
    let database = database().await;
    let saver = open(database.url()).await;
    let mut talk = Talk::delta("t", 10);
    for n in 0..100 {
        let mut step = talk.say(&note(n));
        let notes = &mut step.checkpoint.channels;
        // The other channel has its snapshots between those of the first one.
        let stored = match n {
            0 => None,
            n if n % 10 == 5 => Some(Stored::Snapshot(talk.messages.clone().into())),
            1 => Some(Stored::Value(talk.messages.clone().into())),
            _ => Some(Stored::Sentinel),
        };
        let version = notes[MESSAGES].version;
        notes.extend(stored.map(|stored| ("notes".into(), ChannelEntry { version, stored })));
        saver.commit(step.clone()).await.unwrap();
        talk.accept(&step);
    }
    let client = crate::common::damage::connect(database.url()).await;
    // A walk reads no further than the oldest seed that a row names.
    let spans =
        "SELECT max((SELECT count(*) FROM threadkeep_checkpoint o WHERE o.id BETWEEN c.seed AND c.id))
                 FROM threadkeep_checkpoint c WHERE seed IS NOT NULL";
    assert_eq!(client.query_one(spans, &[]).await.unwrap().get::<_, i64>(0), 10);
}
