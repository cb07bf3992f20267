//! The records of a run: writes that fail, and writes whose response is lost.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::json;
use threadkeep_agent::model::scripted::gate;

use super::super::{Gateway, MODES, On, ask, everywhere, frames, from, gated, options};
use super::saver::{Faults, FaultySaver};
use super::{faulty, goes_on, post, said, script};
use crate::app::Parts;
use crate::runs::admission::CreateError;
use crate::runs::ending::DIED;
use crate::runs::journal::Journal;
use crate::runs::request::{RunOptions, RunRequest, StreamMode};
use threadkeep_records::{
    CancelAction, CancelOutcome, EventBackend, EventQuery, MultitaskStrategy, NewRun, NewThread, Records,
    RecordsOptions, RunEnd, RunStatus, RunTotals,
};
use threadkeep_subagents::hooks::{HookStore, Hooks, LifecycleHooks, TaskConclusion, TaskInfo};

/// Whichever of a run's record writes fails at first, or loses its response, the run ends and releases its thread.
#[tokio::test]
async fn a_run_whose_records_cannot_be_written_ends_and_frees_its_thread() {
    let each = |on: On| [(false, false), (true, false), (false, true), (true, true)].map(|how| (on, how));
    // How each database handles a failing statement is shown by the store's own tests.
    for (on, (cancels, told)) in [("memory", "full"), ("sqlite", "delta")].into_iter().flat_map(each) {
        for k in 1.. {
            let name = format!("records-{on:?}-{cancels}-{told}-{k}");
            let (gateway, _) = faulty(on, &name).await;
            let records = &gateway.app.records;
            if told {
                records.fail_statement(k);
            } else {
                records.doubt_commit(k);
            }
            let created = gateway.create(ask(if cancels { "wait" } else { "two tools" })).await;
            let left = said(&gateway.head().await.unwrap()).len();
            let mut rolled_back = false;
            if let Ok(created) = &created {
                let run_id = &created.run.run_id;
                if cancels {
                    let shut = gate(&name);
                    tokio::select! { () = shut.reached() => {}, _ = gateway.app.runs.ended(run_id) => {} }
                    let cancel = || gateway.app.runs.cancel(run_id, CancelAction::Rollback);
                    let cancelled = match cancel().await {
                        Ok(cancelled) => cancelled,
                        Err(_) => cancel().await.unwrap(),
                    };
                    rolled_back = !matches!(cancelled, CancelOutcome::AlreadyTerminal(_));
                }
                let row = gateway.row(run_id).await;
                if rolled_back {
                    assert_eq!(row.error.as_deref(), Some("Rolled back by user"), "{name}");
                    assert_eq!(said(&gateway.head().await.unwrap()), ["first", "You said: first"], "{name}");
                }
                assert!(!row.status.is_active(), "{name}");
                let thread = records.threads().get("t", None).await.unwrap().unwrap();
                assert_ne!(thread.status, threadkeep_records::ThreadStatus::Running, "{name}");
            } else {
                assert!(told, "{name}: a stored run is worked on");
                assert_eq!(left, 2, "a run that was not admitted writes nothing");
            }
            let unused = records.fail_statement(0);
            goes_on(&gateway).await;
            if unused {
                assert!(k > if told { 6 } else { 3 }, "admission, start, status, end, status");
                break;
            }
        }
    }
}

/// As it was decided, or else in error; what was counted stays.
#[tokio::test]
async fn a_run_whose_task_died_ends_in_error_and_frees_its_thread() {
    let gateway = Gateway::start_on(("memory", "full"), &script("none")).await;
    let runs = gateway.app.records.runs();
    let admit = async |id: &str| {
        let run = NewRun { run_id: id.into(), thread_id: "t".into(), ..NewRun::default() };
        runs.admit(run, MultitaskStrategy::Reject).await.unwrap();
        runs.start(id).await.unwrap();
        let totals = RunTotals { total_tokens: 7, ..RunTotals::default() };
        runs.progress(id, &totals).await.unwrap();
    };
    let row = async |id: &str| runs.get(id).await.unwrap().unwrap();
    admit("r").await;
    gateway.app.runs.bury("r", None).await;
    let ended = row("r").await;
    let error = "The gateway failed while it worked on this run; its log says more.";
    assert_eq!((ended.status, ended.error.as_deref()), (RunStatus::Error, Some(error)));
    assert_eq!(ended.totals.total_tokens, 7);
    admit("next").await;
    gateway.app.runs.bury("r", None).await;
    assert_eq!(row("r").await, ended, "once");
    let held = runs.active_for_thread("t").await.unwrap().unwrap();
    assert_eq!(held.run_id, "next", "another run keeps its thread");
    let end = RunEnd { status: RunStatus::Success, error: None, ..RunEnd::failed("") };
    runs.decide("next", &end).await.unwrap();
    gateway.app.runs.bury("next", None).await;
    let ended = row("next").await;
    assert_eq!((ended.status, ended.error), (RunStatus::Success, None));
    gateway.app.runs.bury("none", None).await;
    assert_eq!(runs.active_for_thread("t").await.unwrap(), None);
}

/// The cancellation was accepted before the end could be written.
#[tokio::test]
async fn a_cancelled_run_whose_success_was_to_be_written_later_frees_its_thread() {
    let gateway = Gateway::start_on(("memory", "full"), &script("none")).await;
    let runs = gateway.app.records.runs();
    for (action, error) in [(CancelAction::Rollback, "Rolled back by user"), (CancelAction::Interrupt, DIED)]
    {
        let run = NewRun { run_id: error.into(), thread_id: "t".into(), ..NewRun::default() };
        runs.admit(run, MultitaskStrategy::Reject).await.unwrap();
        runs.start(error).await.unwrap();
        assert_eq!(runs.request_cancel(error, action).await.unwrap(), CancelOutcome::Accepted);
        let end = RunEnd { status: RunStatus::Success, error: None, ..RunEnd::failed("") };
        gateway.app.runs.bury(error, Some(end)).await;
        let ended = gateway.row(error).await;
        assert_eq!((ended.status, ended.error.as_deref()), (RunStatus::Error, Some(error)));
        assert_eq!(runs.active_for_thread("t").await.unwrap(), None);
    }
}

/// From some write of a run on the database is unavailable for longer than any of its attempts, and then it is back. A
/// process without leases has nobody else who would end the row.
#[tokio::test]
async fn a_run_whose_end_cannot_be_written_ends_when_the_database_is_back() {
    let mut ends = BTreeSet::new();
    for k in 1.. {
        let (gateway, _) = faulty(("sqlite", "delta"), "none").await;
        let records = &gateway.app.records;
        records.fail_from(k);
        let created = gateway.create(ask("two tools")).await;
        if let Ok(created) = created {
            let run_id = created.run.run_id;
            // Its clients do not wait for the database.
            created.stream.ended().await;
            let row = gateway.row(&run_id).await;
            let failed = records.failed();
            assert_eq!(row.status.is_active(), failed > 0);
            let said = said(&gateway.head().await.unwrap());
            records.fail_statement(0);
            until_free(&gateway).await;
            let row = records.runs().get(&run_id).await.unwrap().unwrap();
            let done = said.last().is_some_and(|last| last == "done");
            // One that was decided to be a success is one.
            assert!(
                row.status == RunStatus::Error || done && row.status == RunStatus::Success,
                "{k}: {row:?}"
            );
            assert_eq!(row.status == RunStatus::Error, row.error.is_some());
            ends.insert(row.status.as_str());
            let thread = records.threads().get("t", None).await.unwrap().unwrap();
            assert_ne!(thread.status, threadkeep_records::ThreadStatus::Running, "{k}");
            goes_on(&gateway).await;
            if failed == 0 {
                assert!(k > 6, "admission, start, events, decision, end");
                break;
            }
        } else {
            records.fail_statement(0);
            goes_on(&gateway).await;
        }
    }
    assert_eq!(ends, BTreeSet::from(["error", "success"]));
}

/// The response to the admission is lost, and the database is away when it is looked for: nobody knows the run.
#[tokio::test]
async fn a_run_whose_admission_cannot_be_settled_holds_its_thread_no_longer_than_the_database_is_away() {
    let mut unknown = 0;
    for k in 1.. {
        let (gateway, _) = faulty(("sqlite", "delta"), "none").await;
        let records = &gateway.app.records;
        records.doubt_commit(1);
        records.fail_from(k);
        let created = gateway.create(ask("two tools")).await;
        let held = records.runs().active_for_thread("t").await.unwrap();
        records.fail_statement(0);
        until_free(&gateway).await;
        goes_on(&gateway).await;
        if created.is_ok() {
            break;
        }
        if let Some(run) = held {
            unknown += 1;
            assert_eq!(gateway.row(&run.run_id).await.status, RunStatus::Error, "{k}");
        }
    }
    assert!(unknown > 0, "of one the admission was stored");
}

/// A turn that is at work when the file goes does not succeed on it, and ends when it is back.
#[cfg(unix)]
#[tokio::test]
async fn a_turn_whose_records_lose_their_file_has_not_ended_before_it_is_back() {
    let name = "records-gone";
    let (gateway, _) = faulty(("sqlite", "delta"), name).await;
    let file = gateway.dir.path().join("state/data/gateway.db");
    let kept = file.with_file_name("kept");
    let created = gateway.create(ask("wait")).await.unwrap();
    let run_id = created.run.run_id;
    gate(name).reached().await;
    // A second name, so that it can be put back.
    std::fs::hard_link(&file, &kept).unwrap();
    std::fs::remove_file(&file).unwrap();
    gate(name).open();
    let shown = frames(created.stream).await;
    assert!(shown.iter().any(|(name, _)| name == "error"), "{shown:?}");
    assert!(gateway.row(&run_id).await.status.is_active());
    let records = &gateway.app.records;
    let new = NewThread { thread_id: "u".into(), ..NewThread::default() };
    let error = records.threads().create(new.clone()).await.unwrap_err().to_string();
    assert!(error.contains("removed, renamed or replaced"), "{error}");

    std::fs::rename(&kept, &file).unwrap();
    until_free(&gateway).await;
    assert!(!gateway.row(&run_id).await.status.is_active());
    assert!(records.threads().create(new).await.unwrap().created);
    goes_on(&gateway).await;
}

/// Waits until nothing holds the thread.
pub(super) async fn until_free(gateway: &Gateway) {
    let free = async {
        while gateway.app.records.runs().active_for_thread("t").await.unwrap().is_some() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(10), free).await.expect("the thread is held for ever");
}

/// Scenario 60: the response to the admission is lost, and the client asks again.
#[tokio::test]
async fn an_admission_that_nobody_was_told_of_is_one_run_that_is_worked_on() {
    for on in everywhere() {
        let name = format!("doubt-{on:?}");
        let (gateway, _) = faulty(on, &name).await;
        let ask = async |text: &str, strategy| {
            let options = RunOptions { multitask_strategy: strategy, ..options([StreamMode::Values]) };
            let request = RunRequest { options, ..ask(text) };
            let key = Some(format!("key of {text}"));
            gateway.create_on("t", request, key).await.unwrap().run.run_id
        };
        gateway.app.records.doubt_commit(1);
        let first = ask("wait", MultitaskStrategy::Reject).await;
        gate(&name).reached().await;
        assert_eq!(ask("wait", MultitaskStrategy::Reject).await, first, "{on:?}");
        // A run that takes over: the run it cancels is notified anyway.
        gateway.app.records.doubt_commit(1);
        let second = ask("instead", MultitaskStrategy::Interrupt).await;
        assert!(!gateway.app.records.fail_statement(0), "it was in doubt");
        assert_eq!(ask("instead", MultitaskStrategy::Interrupt).await, second);
        assert_eq!(gateway.row(&first).await.status, RunStatus::Interrupted);
        assert_eq!(gateway.row(&second).await.status, RunStatus::Success);
        let expected = ["first", "You said: first", "wait", "instead", "You said: instead"];
        assert_eq!(said(&gateway.head().await.unwrap()), expected);
        goes_on(&gateway).await;
    }
}

/// A write of the feed that is lost, or whose response is, is stored once and not the end of the run.
#[tokio::test]
async fn events_whose_write_is_in_doubt_are_stored_once() {
    for happens in [true, false] {
        let faults = doubted_everywhere(happens).await;
        assert!(faults > 4, "admission, start, events, decision, end");
    }
}

/// Puts each commit of a run in doubt, and checks its events. Returns the number of commits.
async fn doubted_everywhere(happens: bool) -> usize {
    let calls: Vec<_> = (0..20).map(|n| json!({"name": "ls", "id": format!("call-{n}")})).collect();
    let script = json!({"rules": [{"answers": [{"text": "Look.", "tool_calls": calls}, {"text": "done"}]}]});
    for k in 1.. {
        let options = RecordsOptions { event_backend: EventBackend::Database, ..RecordsOptions::default() };
        let records = Records::open_memory(options).await.unwrap();
        let parts = Parts { records: Some(records.clone()), ..Parts::default() };
        let gateway = Gateway::start_with(("memory", "full"), 3, &script, parts).await;
        if happens {
            records.doubt_commit(k)
        } else {
            records.lose_commit(k)
        };
        let Ok(created) = gateway.create(ask("go")).await else { continue };
        let row = gateway.row(&created.run.run_id).await;
        let unused = records.fail_statement(0);
        assert_eq!((row.status, &row.error), (RunStatus::Success, &None), "{k}");
        let events = records.events().list(&EventQuery::new("t", row.run_id)).await.unwrap();
        let messages: Vec<_> = events.iter().filter(|event| event.category == "message").collect();
        let ids: BTreeSet<_> = messages.iter().map(|event| event.content["id"].as_str().unwrap()).collect();
        assert_eq!((ids.len(), messages.len()), (23, 23), "{k}: the question, two answers, the results");
        let kinds: Vec<&str> = events.iter().map(|event| &*event.event_type).collect();
        assert_eq!((kinds[0], kinds[events.len() - 1]), ("run.start", "run.delivery"), "{k}");
        if unused {
            return k;
        }
    }
    unreachable!()
}

/// Records with a run, and its journal.
async fn begun(options: RecordsOptions) -> (Records, Journal) {
    let records = Records::open_memory(options).await.unwrap();
    let thread = NewThread { thread_id: "t".into(), ..NewThread::default() };
    records.threads().create(thread).await.unwrap();
    let run = NewRun { run_id: "r".into(), thread_id: "t".into(), ..NewRun::default() };
    records.runs().admit(run, MultitaskStrategy::Reject).await.unwrap();
    let journal = Journal::new(records.clone(), "t", "r");
    (records, journal)
}

/// Polls a future when it is woken, this many times at most; its output if it is ready by then.
async fn polled<F: Future>(future: F, times: usize) -> Option<F::Output> {
    let (mut future, mut left) = (std::pin::pin!(future), times);
    std::future::poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending if left <= 1 => Poll::Ready(None),
        Poll::Pending => {
            left -= 1;
            Poll::Pending
        }
    })
    .await
}

/// A run that is cancelled gives up the write of what a tool reported, wherever it is.
#[tokio::test]
async fn events_whose_write_is_given_up_are_stored_once() {
    for event_backend in [EventBackend::Memory, EventBackend::Database, EventBackend::Jsonl] {
        for times in 1.. {
            let directory = tempfile::tempdir().unwrap();
            let event_directory = directory.path().to_owned();
            let options = RecordsOptions { event_backend, event_directory, ..RecordsOptions::default() };
            let (records, mut journal) = begun(options).await;
            for n in 0..19 {
                journal.human_input(&json!({"id": n})).await.unwrap();
            }
            let last = json!({"id": 19});
            let written = polled(journal.human_input(&last), times).await;
            journal.close().await;
            let query = EventQuery { limit: EventQuery::MAX_LIMIT, ..EventQuery::new("t", "r") };
            let events = records.events().list(&query).await.unwrap();
            let messages = events.iter().filter(|event| event.category == "message");
            let ids: Vec<_> = messages.map(|event| event.content["id"].as_i64().unwrap()).collect();
            assert_eq!(ids, (0..20).collect::<Vec<_>>(), "{event_backend:?}, given up at {times}");
            if written.is_some() {
                break;
            }
        }
    }
}

/// The feed cannot be asked at once whether it has them, as while another server takes over.
#[tokio::test]
async fn events_in_doubt_are_looked_for_again_and_stored_once() {
    for happens in [true, false] {
        let options = RecordsOptions { event_backend: EventBackend::Database, ..RecordsOptions::default() };
        let (records, mut journal) = begun(options).await;
        for n in 0..25 {
            if n == 19 {
                if happens {
                    records.doubt_commit(1)
                } else {
                    records.lose_commit(1)
                };
                records.fail_reads(3);
            }
            journal.human_input(&json!({"id": n})).await.unwrap();
        }
        journal.close().await;
        assert!(!records.fail_statement(0), "all was used");
        let events = records.events().list(&EventQuery::new("t", "r")).await.unwrap();
        let (receipt, events) = events.split_last().unwrap();
        let ids: Vec<_> = events.iter().map(|event| event.content["id"].as_i64().unwrap()).collect();
        assert_eq!(ids, (0..25).collect::<Vec<_>>(), "{happens}");
        assert_eq!(receipt.event_type, "run.delivery");
    }
}

/// Who waits for the run gets its end, which is written after its stream has ended.
#[tokio::test]
async fn a_run_whose_task_panics_ends_before_who_waits_for_it_is_answered() {
    for mode in MODES {
        let (gateway, faults) = faulty(("sqlite", mode), "none").await;
        faults.before_write(async { panic!("a saver that panics") });
        let body = json!({"input": {"messages": [{"role": "user", "content": "next"}]}});
        let (status, ended) = post(&gateway, "/api/threads/t/runs/wait", body).await;
        assert_eq!(
            (status, &ended["status"], &ended["error"]),
            (200, &json!("error"), &json!(DIED)),
            "{mode}"
        );
        goes_on(&gateway).await;
    }
}

/// Notes how runs end.
#[derive(Default)]
struct Ends(Mutex<Vec<&'static str>>);

#[async_trait]
impl LifecycleHooks for Ends {
    async fn on_task_stop(&self, _: &HookStore, _: &HookStore, _: &TaskInfo, outcome: TaskConclusion) {
        self.0.lock().unwrap().push(outcome.as_str());
    }
}

#[tokio::test]
async fn a_run_whose_task_panics_has_an_end_for_extensions_too() {
    let (faults, ends) = (Faults::default(), Arc::<Ends>::default());
    let wrapped = faults.clone();
    let parts = Parts {
        wrap_saver: Box::new(move |inner| Arc::new(FaultySaver { inner, faults: wrapped })),
        hooks: Some(Hooks::new(vec![ends.clone()])),
        ..Parts::default()
    };
    let gateway = Gateway::start_with(("memory", "delta"), 3, &script("none"), parts).await;
    faults.before_write(async { panic!("a saver that panics") });
    let body = json!({"input": {"messages": [{"role": "user", "content": "next"}]}});
    let (_, ended) = post(&gateway, "/api/threads/t/runs/wait", body).await;
    assert_eq!(ended["error"], DIED);
    assert_eq!(*ends.0.lock().unwrap(), ["failed"]);
    gateway.run(ask("next")).await;
    assert_eq!(*ends.0.lock().unwrap(), ["failed", "completed"], "each once");
}

/// The row of a run that was cancelled cannot be read at first: what was asked for is done all the same.
#[tokio::test]
async fn a_cancelled_run_whose_row_cannot_be_read_at_first_is_rolled_back() {
    for mode in MODES {
        let name = format!("unread-{mode}");
        let (gateway, _) = faulty(("sqlite", mode), &name).await;
        let created = gateway.create(ask("wait")).await.unwrap();
        gate(&name).reached().await;
        gateway.app.records.fail_reads(2);
        gateway.app.runs.cancel(&created.run.run_id, CancelAction::Rollback).await.unwrap();
        let shown = frames(created.stream).await;
        assert!(shown.iter().all(|(name, _)| name != "error"), "{shown:?}");
        assert!(!gateway.app.records.fail_statement(0), "the reads failed");
        let row = gateway.row(&created.run.run_id).await;
        assert_eq!(row.error.as_deref(), Some("Rolled back by user"));
        assert_eq!(said(&gateway.head().await.unwrap()), ["first", "You said: first"], "{mode}");
    }
}

#[tokio::test]
async fn a_waiting_run_whose_row_cannot_be_read_goes_on_waiting() {
    let gateway = Gateway::start_on(("sqlite", "delta"), &gated("unread-waits")).await;
    let first = gateway.create(ask("wait")).await.unwrap();
    gate("unread-waits").reached().await;
    let options =
        RunOptions { multitask_strategy: MultitaskStrategy::Enqueue, ..options([StreamMode::Values]) };
    let second = gateway.create(RunRequest { options, ..ask("next") }).await.unwrap();
    gateway.app.records.fail_reads(1);
    let until_read = async {
        while gateway.app.records.reads_to_fail() > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(10), until_read).await.expect("nobody looks");
    gate("unread-waits").open();
    assert_eq!(gateway.row(&first.run.run_id).await.status, RunStatus::Success);
    assert_eq!(gateway.row(&second.run.run_id).await.status, RunStatus::Success);
    let all = ["wait", "late", "next", "You said: next"];
    assert_eq!(said(&gateway.head().await.unwrap()), all);
}

/// The gateway begins to stop while a run is being created: it is not started after all others have stopped.
#[tokio::test]
async fn no_run_is_admitted_once_the_gateway_stops() {
    for mode in MODES {
        let (gateway, faults) = faulty(("sqlite", mode), "none").await;
        let head = gateway.head().await.unwrap();
        let app = std::sync::Arc::clone(&gateway.app);
        faults.before_read(async move { app.stop_runs().await });
        let created = gateway.create(from(&head, ask("late"))).await;
        assert!(matches!(created.err(), Some(CreateError::Stopping)), "{mode}");
        assert_eq!(gateway.app.records.runs().active_for_thread("t").await.unwrap(), None);
        assert_eq!(gateway.head().await.unwrap().key, head.key);
    }
}
