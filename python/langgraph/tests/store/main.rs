//! LangGraph's calls on a saver that fails, and beside others who change the thread.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test.

mod carried;
mod lab;
mod runs;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde_json::{Value as Json, json};
use threadkeep::Error;
use threadkeep::channel::Schema;
use threadkeep::checkpoint::{ChannelEntry, Checkpoint, CheckpointTuple, Stored, TaskWrites, Write};
use threadkeep::id::{IdSource, TaskId, Version};
use threadkeep::metadata::{Counters, Metadata, RESTORED_KEY, Source};
use threadkeep::mode::ChannelMode;
use threadkeep::saver::{CheckpointSelector, Flush, Saver, StepCommit};
use threadkeep::state::{StateAccessor, Update};
use threadkeep::value::ChannelValue;
use threadkeep_langgraph::{ListRequest, Place, Put, Strategy};

use crate::lab::{Lab, Meanwhile, text};

#[tokio::test]
async fn writes_that_waited_for_a_checkpoint_outlive_a_store_that_fails() {
    for (repeated, tasks) in [("the put", vec!["a", "b"]), ("a write", vec!["a", "b", "c"])] {
        let lab = Lab::new();
        lab.put(0).await.unwrap();
        lab.write(1, "a").await.unwrap();
        lab.write(1, "b").await.unwrap();
        lab.meanwhile(Meanwhile::PutWritesFails);
        let error = lab.put(1).await.unwrap_err();
        assert!(matches!(error, Error::InDoubt { .. }), "the checkpoint is stored: {error}");
        assert!(error.to_string().contains(&format!("checkpoint {} is stored", lab.id(1))), "{error}");
        match repeated {
            "the put" => lab.put(1).await.unwrap(),
            _ => lab.write(1, "c").await.unwrap(),
        }
        assert_eq!(lab.tasks(1).await, tasks, "after {repeated} is repeated");
    }
}

#[tokio::test]
async fn of_special_writes_of_a_task_the_last_stay_although_the_first_waited() {
    for first in ["fail", "are being stored"] {
        let lab = Lab::new();
        lab.put(0).await.unwrap();
        lab.write(1, "b").await.unwrap();
        lab.write_values(1, "a", &[("__error__", "first")]).await.unwrap();
        if first == "fail" {
            lab.meanwhile(Meanwhile::PutWritesFails);
            assert!(matches!(lab.put(1).await, Err(Error::InDoubt { .. })));
            lab.write_values(1, "a", &[("__error__", "last")]).await.unwrap();
        } else {
            lab.meanwhile(Meanwhile::PutWritesWaits);
            let last = lab.write_values(1, "a", &[("__error__", "last")]);
            let (put, written) = tokio::join!(lab.put(1), lab.begun_while_one_waits(last));
            put.and(written).unwrap();
        }
        let found = lab.graphs.get(&lab.place, Some(lab.id(1))).await.unwrap().unwrap();
        let (_, _, value) = found.writes.into_iter().find(|(task, ..)| task == "a").unwrap();
        assert_eq!(value, text("last"), "the first {first}");
        assert_eq!(lab.tasks(1).await, ["a", "b"], "the first {first}");
    }
}

#[tokio::test]
async fn of_two_who_store_what_waited_one_waits_for_the_other() {
    for other in ["a put", "a write"] {
        let lab = Lab::new();
        lab.put(0).await.unwrap();
        for value in ["first", "last"] {
            lab.write_values(1, "a", &[("__error__", value)]).await.unwrap();
        }
        lab.meanwhile(Meanwhile::PutWritesWaits);
        let call = async { if other == "a put" { lab.put(1).await } else { lab.write(1, "b").await } };
        let (put, called) = tokio::join!(lab.put(1), lab.begun_while_one_waits(call));
        put.and(called).unwrap();
        let found = lab.graphs.get(&lab.place, Some(lab.id(1))).await.unwrap().unwrap();
        let errors: Vec<_> = found.writes.iter().filter(|(task, ..)| task == "a").collect();
        assert_eq!(errors, [&("a".to_owned(), "__error__".to_owned(), text("last"))], "beside {other}");
        assert_eq!(found.writes.len(), if other == "a put" { 1 } else { 2 });
    }
}

#[tokio::test]
async fn who_waited_for_one_that_failed_to_store_what_waited_does_not_try_again() {
    let lab = Lab::new();
    lab.put(0).await.unwrap();
    lab.write(1, "a").await.unwrap();
    lab.meanwhile(Meanwhile::PutWritesWaits);
    let call = async {
        // The one that waits will fail.
        lab.meanwhile(Meanwhile::PutWritesFails);
        lab.write(1, "b").await
    };
    let (put, written) = tokio::join!(lab.put(1), lab.begun_while_one_waits(call));
    assert!(matches!(put, Err(Error::InDoubt { .. })), "{put:?}");
    let error = written.unwrap_err();
    assert!(error.to_string().contains("the writes of task b wait in memory"), "{error}");
    assert!(lab.tasks(1).await.is_empty());
    lab.put(1).await.unwrap();
    assert_eq!(lab.tasks(1).await, ["a", "b"]);
}

#[tokio::test]
async fn writes_of_a_checkpoint_that_exists_need_no_room_to_wait_in() {
    let lab = Lab::new();
    lab.put(0).await.unwrap();
    lab.write(1, "a").await.unwrap();
    let large = "x".repeat(1 << 20);
    while lab.write_values(9, "a", &[("d", large.as_str())]).await.is_ok() {}
    while lab.write(9, "a").await.is_ok() {}
    let error = lab.write(1, "b").await.unwrap_err();
    assert!(matches!(error, Error::InvalidInput(_)), "the checkpoint does not exist: {error}");
    lab.meanwhile(Meanwhile::PutWritesFails);
    assert!(matches!(lab.put(1).await, Err(Error::InDoubt { .. })), "the write of a still waits");
    lab.meanwhile(Meanwhile::PutWritesFails);
    let error = lab.write(1, "b").await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "nothing was written: {error}");
    lab.write(1, "b").await.unwrap();
    assert_eq!(lab.tasks(1).await, ["a", "b"]);
}

#[tokio::test]
async fn a_call_that_fails_after_its_first_step_says_what_was_done() {
    let lab = Lab::new();
    lab.put(0).await.unwrap();
    // Nothing is done before the first step.
    lab.meanwhile(Meanwhile::PutOrdinaryFails);
    assert!(matches!(lab.write(0, "a").await, Err(Error::Unavailable { .. })));
    lab.meanwhile(Meanwhile::PutOrdinaryFails);
    let error = lab.write_to(0, "a", &["__error__", "d"]).await.unwrap_err();
    assert!(matches!(error, Error::InDoubt { .. }), "{error}");
    assert!(error.to_string().contains("the special writes of task a are stored"), "{error}");
    assert_eq!(lab.tasks(0).await, ["a"]);
    // What waited for the checkpoint is stored after what is put now.
    lab.write(1, "a").await.unwrap();
    lab.meanwhile(Meanwhile::PutWritesFails);
    assert!(matches!(lab.put(1).await, Err(Error::InDoubt { .. })));
    lab.write_to(1, "b", &["__error__"]).await.unwrap();

    let threads = ["y", "z"].map(|thread| lab.thread(thread));
    let names = threads.each_ref().map(|lab| lab.place.thread.clone());
    let runs = BTreeSet::from(["r".to_owned()]);
    for strategy in [Some(Strategy::KeepLatest), Some(Strategy::Delete), None] {
        for thread in &threads {
            for n in 0..3 {
                thread.put_after(None, n).await.unwrap();
            }
        }
        if let Some(strategy) = strategy {
            lab.meanwhile(Meanwhile::LastThreadFails);
            let error = lab.graphs.prune(&names[1..], strategy).await.unwrap_err();
            assert!(matches!(error, Error::Unavailable { .. }), "{error}");
        }
        lab.meanwhile(Meanwhile::LastThreadFails);
        let error = match strategy {
            Some(strategy) => lab.graphs.prune(&names, strategy).await.unwrap_err(),
            None => lab.graphs.delete_for_runs(&runs).await.unwrap_err(),
        };
        assert!(matches!(error, Error::InDoubt { .. }), "{error}");
        let expected =
            if strategy.is_some() { "1 of 2 threads were pruned" } else { "2 of 3 threads were changed" };
        assert!(error.to_string().contains(expected), "{error}");
        lab.graphs.prune(&names, Strategy::Delete).await.unwrap();
    }
}

/// A gateway goes back along the names of what it restored, as along parents.
#[tokio::test]
async fn the_name_of_a_restored_checkpoint_that_goes_is_grafted_as_a_parent_is() {
    let lab = Lab::new();
    let thread = &lab.place.thread;
    let table = Schema::thread_state().compile(ChannelMode::Full, 1).unwrap();
    let saver = Arc::new(lab.beside.saver.clone());
    let accessor = StateAccessor::new(saver, Arc::new(table), Arc::new(IdSource::default()));
    let turn = async |at, extra: Json| {
        let writes = vec![accessor.write("title", json!("a title"), false).unwrap()];
        let extra = extra.as_object().unwrap().clone();
        accessor.update(thread, Update { at, node: "n".into(), writes, extra }).await.unwrap().key.id
    };
    let first = turn(None, json!({"run_id": "first"})).await;
    let before = turn(None, json!({"run_id": "before"})).await;
    let cancelled = turn(None, json!({"run_id": "cancelled"})).await;
    let restored = turn(Some(before), json!({RESTORED_KEY: before.to_string()})).await;
    let lines = async || {
        let image = lab.beside.saver.read_thread(thread).await.unwrap();
        let line = |tuple: &CheckpointTuple| (tuple.checkpoint.id, tuple.parent, tuple.metadata.restored());
        image.checkpoints.values().map(line).collect::<Vec<_>>()
    };
    lab.graphs.delete_for_runs(&["before".to_owned()].into()).await.unwrap();
    let expected =
        [(first, None, None), (cancelled, Some(first), None), (restored, Some(first), Some(first))];
    assert_eq!(lines().await, expected);
    lab.graphs.prune(std::slice::from_ref(thread), Strategy::KeepLatest).await.unwrap();
    assert_eq!(lines().await, [(restored, None, Some(first))], "nothing is left of what it restored");
}

#[tokio::test]
async fn a_thread_that_another_process_deleted_may_be_put_again() {
    let lab = Lab::new();
    lab.put(0).await.unwrap();
    lab.put(1).await.unwrap();
    // Not through this process's memory, which has the old head.
    lab.beside.saver.delete_thread(&lab.place.thread).await.unwrap();
    lab.put(0).await.unwrap();
    lab.put(1).await.unwrap();
    // What is older than the head that exists comes too late.
    lab.put_after(None, 3).await.unwrap();
    let error = lab.put_after(None, 2).await.unwrap_err();
    assert!(matches!(error, Error::Conflict { found, .. } if found == Some(lab.id(3))), "{error}");
}

#[tokio::test]
async fn what_others_wrote_to_a_thread_is_not_taken_back() {
    let lab = Lab::new();
    let thread = &lab.place.thread;
    let key = |n| (lab.place.namespace.clone(), lab.id(n));
    let tasks = |tasks: &[&str]| tasks.iter().map(|task| (*task).to_owned()).collect::<BTreeSet<_>>();
    let put = BTreeMap::from([(key(0), tasks(&["a"])), (key(1), tasks(&[]))]);
    assert!(lab.graphs.take_back(thread, &put).await.unwrap(), "nothing is left of nothing");
    lab.put(0).await.unwrap();
    lab.write(0, "a").await.unwrap();
    let less = BTreeMap::from([(key(0), tasks(&[]))]);
    assert!(!lab.graphs.take_back(thread, &less).await.unwrap(), "somebody else wrote");
    assert!(!lab.graphs.take_back(thread, &BTreeMap::new()).await.unwrap(), "somebody else put");
    assert_eq!(lab.tasks(0).await, ["a"]);
    assert!(lab.graphs.take_back(thread, &put).await.unwrap());
    assert!(lab.graphs.get(&lab.place, None).await.unwrap().is_none());
    lab.put(0).await.unwrap();
    lab.put(1).await.unwrap();
    lab.put(2).await.unwrap();
    assert!(!lab.graphs.take_back(thread, &put).await.unwrap());
    assert!(lab.graphs.get(&lab.place, Some(lab.id(0))).await.unwrap().is_some());
}

#[tokio::test]
async fn a_list_of_all_threads_reads_the_values_that_it_answers() {
    let lab = Lab::new();
    for n in 0..5 {
        lab.thread(&format!("t{n}")).put(0).await.unwrap();
    }
    let filter = json!({"step": 0.0, "absent": null}).as_object().unwrap().clone();
    for (request, found) in [
        (ListRequest { limit: Some(2), ..ListRequest::default() }, 2),
        (ListRequest { limit: Some(2), filter: filter.clone(), ..ListRequest::default() }, 2),
        (ListRequest { limit: Some(9), filter: filter.clone(), ..ListRequest::default() }, 5),
        (ListRequest { limit: Some(1), thread: Some("t3".into()), filter, ..ListRequest::default() }, 1),
        (ListRequest { id: Some(lab.id(0)), limit: Some(3), ..ListRequest::default() }, 3),
        (ListRequest { limit: Some(0), ..ListRequest::default() }, 0),
        (ListRequest::default(), 5),
    ] {
        lab.beside.values.store(0, Ordering::Relaxed);
        let listed = lab.graphs.list(&request).await.unwrap();
        assert_eq!((listed.len(), lab.beside.values.load(Ordering::Relaxed)), (found, found), "{request:?}");
        assert!(listed.iter().all(|tuple| tuple.values.get("d") == Some(&text("seed"))));
    }
}

#[tokio::test]
async fn what_a_thread_has_is_found_without_the_values() {
    let lab = Lab::new();
    lab.put(0).await.unwrap();
    lab.write_to(0, "a", &["__error__", "d"]).await.unwrap();
    lab.write(0, "b").await.unwrap();
    lab.put(1).await.unwrap();
    lab.beside.values.store(0, Ordering::Relaxed);
    let key = |n| (lab.place.namespace.clone(), lab.id(n));
    let tasks = [("a", false), ("a", true), ("b", false)].map(|(task, special)| (task.to_owned(), special));
    let expected = BTreeMap::from([(key(0), BTreeSet::from(tasks)), (key(1), BTreeSet::new())]);
    assert_eq!(lab.graphs.written(&lab.place.thread).await.unwrap(), expected);
    assert_eq!(lab.beside.values.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_thread_is_read_once_to_be_copied() {
    let lab = Lab::new();
    lab.put(0).await.unwrap();
    lab.put(1).await.unwrap();
    lab.beside.values.store(0, Ordering::Relaxed);
    let copy = lab.thread("copy");
    for from in ["absent", "t"] {
        assert!(copy.graphs.get(&copy.place, None).await.unwrap().is_none());
        lab.graphs.copy_thread(&from.into(), &copy.place.thread).await.unwrap();
    }
    assert_eq!(lab.beside.values.load(Ordering::Relaxed), 1);
    assert_eq!(copy.graphs.get(&copy.place, None).await.unwrap().map(|head| head.id), Some(lab.id(1)));
}

#[tokio::test]
async fn a_thread_that_is_deleted_while_it_is_copied_is_copied_to_nothing() {
    let lab = Lab::new();
    lab.put(0).await.unwrap();
    let copy = lab.thread("copy");
    lab.meanwhile(Meanwhile::DeletedBeforeRead);
    lab.graphs.copy_thread(&lab.place.thread, &copy.place.thread).await.unwrap();
    assert!(copy.graphs.get(&copy.place, None).await.unwrap().is_none());
}

#[tokio::test]
async fn what_waits_for_a_checkpoint_outlives_what_was_refused() {
    for refused in ["a copy", "a deletion", "a thread that is taken back"] {
        let lab = Lab::new().thread("z");
        let thread = &lab.place.thread;
        lab.put(0).await.unwrap();
        let other = lab.thread("x");
        other.put(0).await.unwrap();
        lab.write(1, "a").await.unwrap();
        let error = match refused {
            "a copy" => lab.graphs.copy_thread(&other.place.thread, thread).await.unwrap_err(),
            "a deletion" => {
                lab.meanwhile(Meanwhile::LastThreadFails);
                lab.graphs.delete_thread(thread).await.unwrap_err()
            }
            _ => {
                lab.meanwhile(Meanwhile::LastThreadFails);
                let put = BTreeMap::from([((lab.place.namespace.clone(), lab.id(0)), BTreeSet::new())]);
                lab.graphs.take_back(thread, &put).await.unwrap_err()
            }
        };
        assert!(matches!(error, Error::InvalidInput(_) | Error::Unavailable { .. }), "{refused}: {error}");
        lab.put(1).await.unwrap();
        assert_eq!(lab.tasks(1).await, ["a"], "{refused}");
        // With the thread goes what waits for it.
        lab.write(2, "a").await.unwrap();
        lab.graphs.delete_thread(thread).await.unwrap();
        lab.put_after(None, 2).await.unwrap();
        assert!(lab.tasks(2).await.is_empty(), "{refused}");
    }
}

#[tokio::test]
async fn a_child_applies_what_was_written_while_its_parent_was_forgotten() {
    let before = Lab::new();
    for n in 0..3 {
        before.put_after(None, n).await.unwrap();
    }
    let lab = before.opened_again();
    lab.meanwhile(Meanwhile::GetWaits);
    let pruned = async {
        lab.beside.read.notified().await;
        lab.write(2, "b").await.unwrap();
        lab.graphs.prune(std::slice::from_ref(&lab.place.thread), Strategy::KeepLatest).await.unwrap();
        lab.beside.goes_on.notify_one();
    };
    let (written, ()) = tokio::join!(lab.write(2, "a"), pruned);
    written.unwrap();
    lab.put_after(Some(2), 3).await.unwrap();
    let channels = BTreeSet::from(["d".to_owned()]);
    let history = lab.graphs.history(&lab.place, Some(lab.id(3)), &channels).await.unwrap();
    let tasks: Vec<&str> = history["d"].writes.iter().map(|(task, ..)| task.as_str()).collect();
    assert_eq!(tasks, ["a", "b"]);
}

#[tokio::test]
async fn a_list_finds_as_many_as_there_are_beside_deletions() {
    let filter = json!({"step": 0}).as_object().unwrap().clone();
    for filter in [serde_json::Map::new(), filter] {
        let lab = Lab::new();
        for n in 0..5 {
            lab.thread(&format!("t{n}")).put_after(None, n).await.unwrap();
        }
        lab.meanwhile(Meanwhile::DeletedBeforeGet);
        let request = ListRequest { limit: Some(1), filter, ..ListRequest::default() };
        let listed = lab.graphs.list(&request).await.unwrap();
        assert_eq!(listed.iter().map(|tuple| tuple.id).collect::<Vec<_>>(), [lab.id(3)]);
    }
}

#[tokio::test]
async fn a_list_finds_as_many_as_there_are_beside_deletions_that_go_on() {
    let filter = json!({"step": 0}).as_object().unwrap().clone();
    for filter in [serde_json::Map::new(), filter] {
        let lab = Lab::new();
        for n in 0..200 {
            lab.thread(&format!("t{n}")).put_after(None, n).await.unwrap();
        }
        lab.meanwhile(Meanwhile::DeletedBeforeEachGet);
        let request = ListRequest { limit: Some(2), filter, ..ListRequest::default() };
        let listed = lab.graphs.list(&request).await.unwrap();
        let ids: Vec<_> = listed.iter().map(|tuple| tuple.id).collect();
        // Each attempt but the last one lost the two that it had found.
        assert_eq!(ids, [lab.id(199 - 2 * 63), lab.id(198 - 2 * 63)]);
    }
}

/// A checkpoint of the gateway: its messages are stored as the change that a task made.
async fn change(lab: &Lab) {
    let message = json!({"type": "human", "id": "m1", "content": "hello"});
    let messages = |json: serde_json::Value| ChannelValue::from_json(&json).unwrap();
    let step = |n, stored, parent, counters| StepCommit {
        thread: lab.place.thread.clone(),
        namespace: lab.place.namespace.clone(),
        parent,
        expected_head: parent,
        checkpoint: Checkpoint {
            id: lab.id(n),
            channels: [(
                "messages".into(),
                ChannelEntry { version: Version { counter: u64::from(n) + 1, random: 7 }, stored },
            )]
            .into_iter()
            .collect(),
            next: Vec::new(),
            applied: Vec::new(),
        },
        metadata: Metadata { delta_marker: n > 0, counters, ..Metadata::new(Source::Loop, i64::from(n)) },
        writes: Vec::new(),
        pending: Vec::new(),
        flush: Flush::Now,
    };
    let first = step(0, Stored::Value(messages(json!([]))), None, BTreeMap::new());
    lab.beside.saver.commit(first).await.unwrap();
    let counted = BTreeMap::from([("messages".into(), Counters { updates: 1, supersteps: 1 })]);
    let mut second = step(1, Stored::Sentinel, Some(lab.id(0)), counted);
    let write = Write { channel: "messages".into(), value: messages(json!([message])), overwrite: false };
    let task = TaskId::from_bytes([5; 16]);
    second.checkpoint.applied = vec![task];
    second.writes = vec![TaskWrites { task, node: "agent".into(), index: 0, writes: vec![write] }];
    lab.beside.saver.commit(second).await.unwrap();
}

#[tokio::test]
async fn a_thread_of_the_gateway_that_is_deleted_while_it_is_listed_is_not_listed() {
    let lab = Lab::new();
    change(&lab).await;
    assert_eq!(lab.graphs.list(&ListRequest::default()).await.unwrap().len(), 2);
    lab.meanwhile(Meanwhile::DeletedBeforeGet);
    let left = lab.graphs.list(&ListRequest::default()).await.unwrap();
    assert!(left.iter().all(|tuple| tuple.id == lab.id(0)), "{left:?}");
    assert_eq!(lab.graphs.list(&ListRequest::default()).await.unwrap().len(), 0);
}

#[tokio::test]
async fn a_history_beside_a_change_of_its_thread_is_that_of_one_moment() {
    for (meanwhile, seed, writes) in [
        (None, Some("seed"), 2),
        (Some(Meanwhile::DeletedBeforeList), None, 0),
        (Some(Meanwhile::PrunedBeforeList), None, 0),
    ] {
        let lab = Lab::new();
        for n in 0..3 {
            lab.put(n).await.unwrap();
            lab.write(n, "a").await.unwrap();
        }
        *lab.beside.meanwhile.lock().unwrap() = meanwhile;
        let channels = BTreeSet::from(["d".to_owned()]);
        let history = lab.graphs.history(&lab.place, Some(lab.id(2)), &channels).await;
        let replay = &history.unwrap()["d"];
        assert_eq!(replay.seed.as_ref().map(|seed| seed.value.clone()), seed.map(text), "{meanwhile:?}");
        assert_eq!(replay.writes.len(), writes, "{meanwhile:?}");
    }
}

#[tokio::test]
async fn values_are_of_the_checkpoint_that_was_asked_for_whatever_its_versions_are() {
    let lab = Lab::new();
    lab.put_after(None, 1).await.unwrap();
    let ours = lab.beside.saver.get(&CheckpointSelector::head(&lab.place.thread)).await.unwrap().unwrap();
    // Another process has drawn the same versions.
    let mut channels = ours.checkpoint.channels;
    channels.get_mut("d").unwrap().stored = Stored::Value(text("other"));
    let step = StepCommit {
        thread: lab.place.thread.clone(),
        namespace: lab.place.namespace.clone(),
        parent: None,
        expected_head: Some(lab.id(1)),
        checkpoint: Checkpoint { id: lab.id(2), channels, next: Vec::new(), applied: Vec::new() },
        metadata: ours.metadata,
        writes: Vec::new(),
        pending: Vec::new(),
        flush: Flush::Now,
    };
    lab.beside.saver.commit(step).await.unwrap();
    let head = lab.graphs.get(&lab.place, None).await.unwrap().unwrap();
    assert_eq!((head.id, &head.values["d"]), (lab.id(2), &text("other")));
}

/// The gateway's checkpoints carry on a graph's changes of messages, as where it stores a goal.
#[tokio::test]
async fn changes_that_the_gateway_carries_on_are_looked_at_once() {
    let lab = Lab::new();
    let messages = BTreeSet::from(["messages".to_owned()]);
    let metadata = |n: u8| {
        let counters = if n == 0 { json!({}) } else { json!({"messages": [n, n]}) };
        json!({"source": "loop", "step": n, "parents": {}, "counters_since_delta_snapshot": counters})
    };
    let put = |n: u8| Put {
        versions: BTreeMap::from([("messages".to_owned(), json!(n))]),
        new: messages.clone(),
        values: (n == 0).then(|| ("messages".to_owned(), text("seed"))).into_iter().collect(),
        ..Put::new(
            lab.place.clone(),
            lab.id(n),
            (n > 0).then(|| lab.id(0)),
            metadata(n).as_object().unwrap().clone(),
        )
    };
    lab.graphs.put(&put(0)).await.unwrap();
    lab.write_to(0, "a", &["messages"]).await.unwrap();
    lab.graphs.put(&put(1)).await.unwrap();
    for n in 2..12 {
        let head = CheckpointSelector::head(&lab.place.thread);
        let head = lab.beside.saver.get(&head).await.unwrap().unwrap();
        let mut channels = head.checkpoint.channels;
        for entry in channels.values_mut().filter(|entry| entry.stored != Stored::Sentinel) {
            entry.stored = Stored::Held;
        }
        let step = StepCommit {
            thread: lab.place.thread.clone(),
            namespace: lab.place.namespace.clone(),
            parent: Some(lab.id(n - 1)),
            expected_head: Some(lab.id(n - 1)),
            checkpoint: Checkpoint { id: lab.id(n), channels, next: Vec::new(), applied: Vec::new() },
            metadata: head.metadata,
            writes: Vec::new(),
            pending: Vec::new(),
            flush: Flush::Now,
        };
        lab.beside.saver.commit(step).await.unwrap();
    }
    let history = lab.graphs.history(&lab.place, Some(lab.id(11)), &messages).await.unwrap();
    let replay = &history["messages"];
    assert_eq!(replay.seed.as_ref().map(|seed| &seed.value), Some(&text("seed")));
    assert_eq!(replay.writes.len(), 1);
    assert_eq!(lab.beside.paths.load(Ordering::Relaxed), 1, "paths read for ten checkpoints");
}

#[tokio::test]
async fn a_page_does_not_end_between_equal_ids_of_two_namespaces() {
    let lab = Lab::new();
    let nested = Place::new("t", "nested");
    let step = |place: &Place, n: u8, wanted: bool| {
        // Not what a saver decides.
        let metadata = json!({"step": n, "wanted": [wanted]}).as_object().unwrap().clone();
        Put::new(place.clone(), lab.id(n), None, metadata)
    };
    let filter = json!({"wanted": [true]}).as_object().unwrap().clone();
    for wanted in [&lab.place, &nested] {
        let lab = lab.thread("t");
        lab.graphs.delete_thread(&lab.place.thread).await.unwrap();
        // The newest id is of one namespace only, so a page of an even length ends at the first one of an id.
        for n in 0..=200 {
            for place in [&lab.place, &nested] {
                if n < 200 || *place == lab.place {
                    lab.graphs.put(&step(place, n, place == wanted)).await.unwrap();
                }
            }
        }
        for limit in [201, 300] {
            let request =
                ListRequest { limit: Some(limit), filter: filter.clone(), ..ListRequest::default() };
            for thread in [None, Some(lab.place.thread.clone())] {
                let listed = lab.graphs.list(&ListRequest { thread, ..request.clone() }).await.unwrap();
                let found: BTreeSet<_> = listed.iter().map(|tuple| tuple.id).collect();
                let expected = if *wanted == nested { 200 } else { 201 };
                assert_eq!((listed.len(), found.len()), (expected, expected), "{wanted:?}, limit {limit}");
                assert!(listed.iter().all(|tuple| tuple.place == *wanted));
            }
        }
    }
}

#[tokio::test]
async fn a_page_of_one_source_does_not_end_between_equal_ids_of_two_namespaces() {
    let filter = json!({"source": "input"}).as_object().unwrap().clone();
    for wanted in ["", "nested"] {
        let lab = Lab::new();
        // The newest id is of one namespace only, so a page of an even length ends at the first one of an id.
        for n in 0..=4 {
            for namespace in ["", "nested"] {
                if n == 4 && namespace == "nested" {
                    continue;
                }
                // The store has this source, too, for what says none.
                let metadata = if n < 4 && namespace == wanted {
                    json!({"source": "input", "step": n})
                } else {
                    json!({"step": n})
                };
                let metadata = metadata.as_object().unwrap().clone();
                let put = Put::new(Place::new("t", namespace), lab.id(n), None, metadata);
                lab.graphs.put(&put).await.unwrap();
            }
        }
        for thread in [None, Some(lab.place.thread.clone())] {
            let request =
                ListRequest { thread, limit: Some(2), filter: filter.clone(), ..ListRequest::default() };
            let listed = lab.graphs.list(&request).await.unwrap();
            assert!(listed.iter().all(|tuple| tuple.place.namespace.to_string() == wanted));
            let ids: Vec<_> = listed.iter().map(|tuple| tuple.id).collect();
            assert_eq!(ids, [lab.id(3), lab.id(2)], "{wanted:?}");
        }
    }
}
