//! `threadkeep batches` on the records of a gateway.

use chrono::TimeDelta;
use threadkeep::mode::ChannelMode;
use threadkeep_records::{
    BatchItemStatus, ItemEnd, ItemResult, JsonObject, MultitaskStrategy, NewBatch, NewBatchItem, NewRun,
    NewThread, Records, RecordsOptions, RunEnd,
};

use super::store::{Store, TALK};

/// A batch of the thread with two items, of which the first has a result.
async fn submitted(store: &Store) -> Records {
    let path = store.path().with_file_name("gateway.db");
    let records = Records::open(&path, RecordsOptions::default()).await.unwrap();
    let item =
        |key: &str| NewBatchItem { key: key.to_owned(), prompt: "do".to_owned(), acceptance_criteria: None };
    let new = NewBatch {
        id: "subagent-batch-1".to_owned(),
        thread_id: TALK.to_owned(),
        run_id: "r".to_owned(),
        tool_call_id: "c".to_owned(),
        submission_key: "k".to_owned(),
        title: "Files".to_owned(),
        subagent_type: "bash".to_owned(),
        max_live_items: 2,
        max_running_items: 2,
        max_attempts: 1,
        execution_spec: JsonObject::new(),
        budget_id: None,
        items: vec![item("a"), item("b")],
    };
    // Only a run that is active submits one.
    let thread = NewThread { thread_id: TALK.to_owned(), ..NewThread::default() };
    records.threads().create(thread).await.unwrap();
    let run = NewRun { run_id: "r".to_owned(), thread_id: TALK.to_owned(), ..NewRun::default() };
    records.runs().admit(run, MultitaskStrategy::Reject).await.unwrap();
    records.batches().submit(new).await.unwrap();
    records.runs().finish("r", &RunEnd::failed("done")).await.unwrap();
    end(&records, "one").await;
    records
}

/// Claims an item and ends it with this result.
async fn end(records: &Records, result: &str) {
    let batches = records.batches();
    let lease = TimeDelta::seconds(60);
    let claimed = batches.claim("subagent-batch-1", result, lease, 1, true).await.unwrap().unwrap();
    let done = ItemResult::Succeeded {
        result: result.to_owned(),
        preview: result.to_owned(),
        truncated: false,
        verdict: None,
    };
    let end = ItemEnd { result: done, model_name: None, stop_reason: None, token_usage: None };
    assert!(batches.finalize(&claimed.items[0].claim, end, None).await.unwrap());
}

#[tokio::test]
async fn batches_are_listed_shown_exported_and_followed() {
    let store = Store::new(ChannelMode::Delta).await;
    let records = submitted(&store).await;
    let listed = store.run(&["batches", "list", TALK]).done();
    assert!(listed.contains("subagent-batch-1") && listed.contains("running"), "{listed}");
    assert!(listed.lines().nth(1).is_some_and(|row| row.ends_with('Z')), "a time has its zone: {listed}");
    assert_eq!(store.run(&["batches", "list", "other"]).done().trim(), "The thread has no batches.");
    let typo = store.run(&["batches", "list", "tlak"]);
    assert!(typo.code == 1 && typo.err.contains("the nearest id is talk"), "{typo:?}");
    let missing = store.run(&["batches", "show", TALK, "another"]);
    assert!(missing.err.contains("`threadkeep batches list talk --sqlite DB` lists them"), "{missing:?}");
    let json = store.run(&["batches", "list", TALK, "--json"]).json();
    assert_eq!((&json[0]["counts"]["succeeded"], &json[0]["counts"]["queued"]), (&1.into(), &1.into()));
    let shown = store.run(&["batches", "show", TALK, "subagent-batch"]).done();
    assert!(shown.contains("1 queued, 1 succeeded"), "{shown}");
    let some = store.run(&["batches", "show", TALK, "subagent-batch", "--status", "queued", "--json"]).json();
    assert_eq!(some.iter().filter_map(|line| line["item_key"].as_str()).collect::<Vec<_>>(), ["b"]);
    end(&records, "two").await;
    let exported = store.run(&["batches", "export", TALK, "subagent-batch-1"]).json();
    assert_eq!(exported.iter().map(|line| line["result"].clone()).collect::<Vec<_>>(), ["one", "two"]);
    assert_eq!(exported[0]["status"], BatchItemStatus::Succeeded.as_str());
    let watched = store.run(&["batches", "watch", TALK, "subagent-batch-1"]).done();
    assert_eq!(watched.trim(), "subagent-batch-1: completed (2 items: 2 succeeded)");
    records.close().await;
}
