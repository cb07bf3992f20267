//! Runs that go on from one checkpoint, one after the other and at one time.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde_json::json;
use threadkeep::Error;
use threadkeep_langgraph::{Caller, Fence, LangGraph, ListRequest, Place, Put};

use crate::lab::{Beside, Lab, Meanwhile};

#[tokio::test]
async fn a_run_with_the_number_of_an_ended_one_applies_what_it_was_shown() {
    let lab = Lab::new();
    lab.put(0).await.unwrap();
    let (ended, longer) = (lab.of_run(1), lab.of_run(2));
    ended.tasks(0).await;
    ended.write_to(0, "a", &["d"]).await.unwrap();
    longer.tasks(0).await;
    longer.write_to(0, "a", &["d", "d", "d"]).await.unwrap();
    let next = lab.of_run(1);
    assert_eq!(next.tasks(0).await, ["a"; 3], "the longest is shown");
    next.put(1).await.unwrap();
    assert_eq!(lab.replayed(1).await, ["a"; 3]);
}

#[tokio::test]
async fn an_update_that_is_given_again_after_it_failed_is_what_is_replayed() {
    let lab = Lab::new();
    lab.put(0).await.unwrap();
    // A reducer refused it after its writes were stored, so its checkpoint never came.
    lab.write_to(0, "a", &["d", "d", "d"]).await.unwrap();
    lab.tasks(0).await;
    lab.write_to(0, "a", &["d", "e"]).await.unwrap();
    lab.put(1).await.unwrap();
    assert_eq!(lab.replayed(1).await, ["a"]);
}

#[tokio::test]
async fn two_updates_of_one_step_that_have_one_task_are_both_replayed() {
    let lab = Lab::new();
    lab.put(0).await.unwrap();
    lab.write_to(0, "a", &["d", "e"]).await.unwrap();
    lab.write_to(0, "a", &["d", "d"]).await.unwrap();
    // Somebody looks at the thread.
    lab.called_by(Caller::Other(1)).tasks(0).await;
    lab.put(1).await.unwrap();
    assert_eq!(lab.replayed(1).await, ["a"; 3]);
    lab.put(2).await.unwrap();
    assert_eq!(lab.replayed(2).await, ["a"; 3]);
}

#[tokio::test]
async fn two_updates_at_one_time_that_have_one_task_each_replay_their_own() {
    let lab = Lab::new();
    lab.put(0).await.unwrap();
    let [one, two] = [1, 2].map(|caller| lab.called_by(Caller::Other(caller)));
    for update in [&one, &two] {
        assert!(update.tasks(0).await.is_empty());
    }
    one.write_to(0, "a", &["d", "d", "d"]).await.unwrap();
    two.write_to(0, "a", &["d"]).await.unwrap();
    one.put_after(Some(0), 1).await.unwrap();
    two.put_after(Some(0), 2).await.unwrap();
    assert_eq!(lab.replayed(1).await, ["a"; 3]);
    assert_eq!(lab.replayed(2).await, ["a"]);
}

#[tokio::test]
async fn two_updates_at_one_time_that_have_two_tasks_each_replay_their_own() {
    let lab = Lab::new();
    lab.put(0).await.unwrap();
    lab.write(0, "a").await.unwrap();
    let [one, two] = [1, 2].map(|caller| lab.called_by(Caller::Other(caller)));
    for update in [&one, &two] {
        assert_eq!(update.tasks(0).await, ["a"]);
    }
    one.write(0, "b").await.unwrap();
    two.write(0, "c").await.unwrap();
    // A run goes on from there meanwhile.
    lab.of_run(3).write(0, "d").await.unwrap();
    one.put_after(Some(0), 1).await.unwrap();
    two.put_after(Some(0), 2).await.unwrap();
    assert_eq!(lab.replayed(1).await, ["a", "b"]);
    assert_eq!(lab.replayed(2).await, ["a", "c"]);
}

#[tokio::test]
async fn what_somebody_else_reads_takes_nothing_from_an_update() {
    let lab = Lab::new();
    lab.put(0).await.unwrap();
    let [update, reader] = [1, 2].map(|caller| lab.called_by(Caller::Other(caller)));
    update.tasks(0).await;
    update.write_to(0, "a", &["d", "e"]).await.unwrap();
    reader.tasks(0).await;
    update.write_to(0, "a", &["d", "d"]).await.unwrap();
    update.put(1).await.unwrap();
    assert_eq!(lab.replayed(1).await, ["a"; 3]);
}

#[tokio::test]
async fn what_others_wrote_for_somebody_is_applied() {
    let lab = Lab::new();
    lab.put(0).await.unwrap();
    // Two threads write for a third one.
    let [one, two, third] = [1, 2, 3].map(|caller| lab.called_by(Caller::Other(caller)));
    one.write_to(0, "a", &["d", "d"]).await.unwrap();
    two.write_to(0, "b", &["d"]).await.unwrap();
    third.put_after(Some(0), 1).await.unwrap();
    assert_eq!(lab.replayed(1).await, ["a", "a", "b"]);
}

#[tokio::test]
async fn what_waited_for_a_checkpoint_is_of_the_run_that_put_it() {
    let lab = Lab::new();
    lab.put(0).await.unwrap();
    let (failed, next) = (lab.of_run(1), lab.of_run(2));
    failed.write_to(1, "a", &["d", "d", "d"]).await.unwrap();
    lab.meanwhile(Meanwhile::PutWritesFails);
    assert!(matches!(failed.put(1).await, Err(Error::InDoubt { .. })));
    assert!(next.tasks(1).await.is_empty());
    next.write_to(1, "a", &["d"]).await.unwrap();
    assert_eq!(lab.tasks(1).await, ["a"; 3], "what waited is stored with it");
    next.put(2).await.unwrap();
    assert_eq!(lab.replayed(2).await, ["a"]);
}

/// LangGraph says of a copy neither what it copies nor which run made that.
#[tokio::test]
async fn a_copy_of_a_branch_replays_what_the_branch_does() {
    let lab = Lab::new();
    lab.put(0).await.unwrap();
    let (one, two) = (lab.of_run(1), lab.of_run(2));
    one.write(0, "a").await.unwrap();
    one.put_after(Some(0), 1).await.unwrap();
    two.write_to(0, "a", &["d", "d", "d"]).await.unwrap();
    two.put_after(Some(0), 2).await.unwrap();
    lab.called_by(Caller::Other(1)).write(0, "b").await.unwrap();
    let branches = [lab.replayed(1).await, lab.replayed(2).await];
    assert_eq!(branches, [vec!["a"], vec!["a"; 3]]);
    // More checkpoints than are looked at in one read.
    for n in 3..100 {
        lab.put_after(Some(2), n).await.unwrap();
    }
    for (n, branch) in [(1, &branches[0]), (2, &branches[1])] {
        let (id, next) = (100 + 10 * n, 101 + 10 * n);
        let mut put = copy(&lab, n, id).await;
        lab.graphs.put(&put).await.unwrap();
        assert_eq!(lab.replayed(id).await, *branch);
        // What is no copy applies what a reader of the parent is shown.
        put.id = lab.id(next);
        put.metadata.insert("source".to_owned(), json!("update"));
        lab.graphs.put(&put).await.unwrap();
        assert_eq!(lab.replayed(next).await, ["a", "a", "a", "b"]);
    }
}

#[tokio::test]
async fn a_copy_of_what_another_process_put_replays_what_that_does() {
    let lab = Lab::new();
    lab.put(0).await.unwrap();
    let process = lab.opened_again();
    process.write(0, "a").await.unwrap();
    process.put(1).await.unwrap();
    // This one remembers its parent without the row.
    let head = lab.graphs.get(&lab.place, None).await.unwrap().unwrap();
    assert_eq!(head.id, lab.id(1));
    lab.graphs.put(&copy(&lab, 1, 2).await).await.unwrap();
    assert_eq!(lab.replayed(2).await, ["a"]);
}

/// Checkpoint `id`, a copy of checkpoint `n`, as LangGraph puts it.
async fn copy(lab: &Lab, n: u8, id: u8) -> Put {
    let copied = lab.graphs.get(&lab.place, Some(lab.id(n))).await.unwrap().unwrap();
    let mut put = Put { parent: copied.parent, versions: copied.versions, ..begins(&lab.place, id) };
    put.metadata = copied.metadata;
    put.metadata.insert("source".to_owned(), json!("fork"));
    put
}

/// A checkpoint without a parent.
fn begins(place: &Place, id: u8) -> Put {
    let id = place.id(&format!("1ef4f797-8335-6428-8001-0000000000{id:02x}")).unwrap();
    Put::new(place.clone(), id, None, json!({"step": 0}).as_object().unwrap().clone())
}

#[tokio::test]
async fn a_run_that_is_given_an_id_applies_what_it_was_shown_first() {
    let lab = Lab::new();
    lab.put(0).await.unwrap();
    let (run, other) = (lab.of_run(1), lab.called_by(Caller::Other(1)));
    assert!(run.tasks(0).await.is_empty());
    other.write(0, "b").await.unwrap();
    // LangGraph asks whether it is the head.
    let head = run.graphs.get(&lab.place, None).await.unwrap().unwrap();
    assert_eq!((head.id, head.writes.len()), (lab.id(0), 1));
    run.write(0, "a").await.unwrap();
    run.put(1).await.unwrap();
    assert_eq!(lab.replayed(1).await, ["a"]);
}

#[tokio::test]
async fn a_run_that_goes_back_has_not_looked_for_the_head_of_its_subgraph() {
    let graphs = LangGraph::new(Arc::new(Beside::default()), Fence::Error);
    let place = Place::new("t", "nested");
    let run = graphs.called_by(Caller::Run(1));
    // It fails before it puts anything.
    assert!(run.get(&place, None).await.unwrap().is_none());
    graphs.called_by(Caller::Run(2)).put(&begins(&place, 2)).await.unwrap();
    // Another one has its number.
    let before = ListRequest {
        thread: Some(place.thread.clone()),
        namespace: Some(place.namespace.clone()),
        before: Some(begins(&place, 1).id),
        limit: Some(1),
        ..ListRequest::default()
    };
    assert!(run.list(&before).await.unwrap().is_empty());
    run.put(&begins(&place, 3)).await.unwrap();
    assert_eq!(graphs.get(&place, None).await.unwrap().map(|head| head.id), Some(begins(&place, 3).id));
}

#[tokio::test]
async fn two_runs_that_begin_a_subgraph_at_one_time_are_fenced() {
    let graphs = LangGraph::new(Arc::new(Beside::default()), Fence::Error);
    let place = Place::new("t", "nested");
    let first = |id: u8| begins(&place, id);
    let [one, two, back] = [1, 2, 3].map(|run| graphs.called_by(Caller::Run(run)));
    for run in [&one, &two] {
        assert!(run.get(&place, None).await.unwrap().is_none());
    }
    one.put(&first(1)).await.unwrap();
    let error = two.put(&first(2)).await.unwrap_err();
    assert!(matches!(error, Error::Conflict { found, .. } if found == Some(first(1).id)), "{error}");
    // A run that goes back to before the subgraph began has not looked for its head.
    back.put(&first(3)).await.unwrap();
    assert_eq!(graphs.get(&place, None).await.unwrap().map(|head| head.id), Some(first(3).id));
}

/// The runs of hundreds of threads, each of which puts a checkpoint and then what a task wrote.
#[tokio::test]
async fn what_hundreds_of_runs_at_one_time_go_on_from_is_not_read_again() {
    let lab = Lab::new();
    let threads: Vec<Lab> = (0..500).map(|n| lab.thread(&format!("t{n}"))).collect();
    for n in 0..3 {
        if n == 1 {
            // The first put of a thread looked for its head.
            lab.beside.gets.store(0, Ordering::Relaxed);
        }
        for thread in &threads {
            thread.put(n).await.unwrap();
        }
        for thread in &threads {
            thread.write(n, "a").await.unwrap();
        }
    }
    assert_eq!(lab.beside.gets.load(Ordering::Relaxed), 0);
}
