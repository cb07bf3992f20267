//! The records of a run: writes that fail, and writes whose response is lost.

use threadkeep_agent::model::scripted::gate;

use super::super::{On, ask, everywhere, options};
use super::{faulty, goes_on, said};
use crate::runs::admission::OnThread;
use crate::runs::request::{RunOptions, RunRequest, StreamMode};
use threadkeep_records::{CancelAction, MultitaskStrategy, RunStatus};

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
