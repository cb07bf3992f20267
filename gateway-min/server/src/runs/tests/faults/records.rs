//! The records of a run: writes that fail, and writes whose response is lost.

use std::collections::BTreeSet;
use std::time::Duration;

use threadkeep_agent::model::scripted::gate;

use super::super::{Gateway, On, ask, everywhere, options};
use super::{faulty, goes_on, said, script};
use crate::runs::admission::OnThread;
use crate::runs::request::{RunOptions, RunRequest, StreamMode};
use threadkeep_records::{CancelAction, MultitaskStrategy, NewRun, RunEnd, RunStatus, RunTotals};

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
            if let Ok(created) = &created {
                let run_id = &created.run.run_id;
                if cancels {
                    let shut = gate(&name);
                    tokio::select! { () = shut.reached() => {}, () = gateway.app.runs.ended(run_id) => {} }
                    let cancel = || gateway.app.runs.cancel(run_id, CancelAction::Rollback);
                    if cancel().await.is_err() {
                        cancel().await.unwrap();
                    }
                }
                let row = gateway.row(run_id).await;
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
            gateway.app.runs.ended(&run_id).await;
            let failed = records.failed();
            assert_eq!(records.runs().get(&run_id).await.unwrap().unwrap().status.is_active(), failed > 0);
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

/// Waits until nothing holds the thread.
async fn until_free(gateway: &Gateway) {
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
            gateway.app.runs.create("t", OnThread::Existing, request, None, key).await.unwrap().run.run_id
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
