//! What a run leaves: the state in which it ended, and its subagents when a gateway stops in order.

use std::collections::BTreeSet;

use threadkeep::id::{Clock, IdSource};
use threadkeep::saver::Load;
use threadkeep_records::ExecutionStatus;

use super::*;

/// Its clients see no end of a subagent that the next process goes on with, and neither does the feed.
#[tokio::test]
async fn a_stopping_gateway_reports_no_end_of_a_subagent_that_goes_on() {
    for mode in MODES {
        let name = format!("left, {mode}");
        let task = |prompt: &str| json!({"name": "task", "args": {"prompt": prompt, "subagent_type": "general-purpose"}});
        let script = json!({"rules": [
            {"when": {"caller": "lead_agent"}, "answers": [
                {"tool_calls": [task("a"), task("b"), task("c")]}, {"text": "All is done."},
            ]},
            {"when": {"contains": ["c"]}, "answers": [{"text": "At once."}]},
            {"answers": [
                {"text": "Looking.", "tool_calls": [{"name": "ls", "args": {}}]},
                {"text": "Late.", "gate": {"name": name}},
            ]},
        ]});
        let gateway = Gateway::start_on(("sqlite", mode), &script).await;
        let request = RunRequest {
            delegation: Delegation { enabled: true, max_concurrent: 3, max_total: 6 },
            options: options([StreamMode::Custom]),
            ..ask("go")
        };
        let created = gateway.create(request).await.unwrap();
        gate(&name).reached().await;
        let executions = gateway.app.records.executions();
        let ended = |status: ExecutionStatus| status.is_terminal();
        // One of the three ends by itself before.
        while !executions.of_thread("t").await.unwrap().iter().any(|row| ended(row.status)) {
            tokio::task::yield_now().await;
        }
        let (app, run_id) = (Arc::clone(&gateway.app), created.run.run_id);
        let stopping = tokio::spawn(async move { app.stop_runs().await });
        let frames = frames(created.stream).await;
        stopping.await.unwrap();
        assert_eq!(frames.last().map(|(name, _)| name.as_str()), Some("end"));
        let kinds: BTreeSet<&str> = frames.iter().filter_map(|(_, frame)| frame["type"].as_str()).collect();
        assert_eq!(kinds, BTreeSet::from(["task_started", "task_running", "task_completed"]), "{mode}");
        let recorded = gateway.events(&run_id).await;
        assert_eq!(recorded.iter().filter(|kind| *kind == "subagent.end").count(), 1, "{mode}: {recorded:?}");
        let left = executions.of_thread("t").await.unwrap();
        assert_eq!(left.iter().filter(|row| !ended(row.status)).count(), 2, "{mode}: {left:?}");
    }
}

/// A clock beside that of the records: it stands still, or is an hour ahead.
enum Odd {
    Still,
    Ahead,
}

impl Clock for Odd {
    fn now_ms(&self) -> u64 {
        match self {
            Self::Still => 1_700_000_000_123,
            Self::Ahead => u64::try_from(chrono::Utc::now().timestamp_millis()).unwrap() + 3_600_000,
        }
    }
}

async fn with_clock(on: On, script: &Json, clock: Odd) -> Gateway {
    let parts = Parts { ids: Arc::new(IdSource::seeded(clock, 1)), ..Parts::default() };
    Gateway::start_with(on, 3, script, parts).await
}

/// The messages of the state in which the run ended.
pub(super) async fn left_by(gateway: &Gateway, run: &RunRow) -> Option<Vec<Json>> {
    let left = gateway.app.threads.left_by(run, &Load::All).await.unwrap()?;
    let messages = left.json("messages").unwrap().unwrap_or_default();
    Some(messages.as_array().unwrap().iter().map(|message| message["content"].clone()).collect())
}

#[tokio::test]
async fn what_a_run_left_does_not_depend_on_clocks() {
    for on in everywhere() {
        let gateway = with_clock(on, &script(), Odd::Still).await;
        let (_, one) = gateway.run(ask("one")).await;
        let (_, two) = gateway.run(ask("two")).await;
        let first = json!(["one", "You said: one"]);
        let both = json!(["one", "You said: one", "two", "You said: two"]);
        assert_eq!(json!(left_by(&gateway, &one).await), first, "{on:?}");
        assert_eq!(json!(left_by(&gateway, &two).await), both, "{on:?}");

        let name = format!("left-ahead-{on:?}");
        let gateway = with_clock(on, &gated(&name), Odd::Ahead).await;
        gateway.run(ask("one")).await;
        let created = gateway.create(ask("wait")).await.unwrap();
        gate(&name).reached().await;
        gateway.app.runs.cancel(&created.run.run_id, CancelAction::Rollback).await.unwrap();
        let rolled_back = gateway.row(&created.run.run_id).await;
        gateway.run(ask("two")).await;
        assert_eq!(json!(left_by(&gateway, &rolled_back).await), first, "{on:?}");
    }
}

/// The first run of a thread leaves nothing if it is rolled back, whatever comes later.
#[tokio::test]
async fn a_run_that_left_nothing_shows_nothing_of_later_runs() {
    for mode in MODES {
        let name = format!("left-nothing-{mode}");
        let gateway = Gateway::start(mode, &gated(&name)).await;
        let created = gateway.create(ask("wait")).await.unwrap();
        gate(&name).reached().await;
        gateway.app.runs.cancel(&created.run.run_id, CancelAction::Rollback).await.unwrap();
        let row = gateway.row(&created.run.run_id).await;
        gateway.run(ask("two")).await;
        assert_eq!(left_by(&gateway, &row).await, None, "{mode}");
    }
}
