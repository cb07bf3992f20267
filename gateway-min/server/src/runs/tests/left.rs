//! A gateway that stops in order among subagents.

use std::collections::BTreeSet;

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
