//! Cancelling many runs, and deleting the record of one.

use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;

use crate::support::{ALL, Gateway, MODES, Setup, texts};

async fn status(gateway: &Gateway, thread: &str, run: &str) -> Value {
    gateway.run(thread, run).await["status"].clone()
}

#[tokio::test]
async fn a_run_that_has_ended_is_deleted_and_its_turn_stays() {
    for (backend, mode) in ALL {
        for events in ["db", "memory"] {
            let gateway = Setup { events, ..Setup::on(backend, mode) }.start().await;
            gateway.create("t").await;
            let first = gateway.ask("t", "one").await;
            let second = gateway.ask("t", "two").await;
            let state = gateway.state("t").await;
            let path = |run: &str| format!("/api/threads/t/runs/{run}");
            let kept = gateway.get(&format!("{}/events", path(&second))).await.ok();
            gateway
                .delete(&format!("/api/threads/other/runs/{first}"))
                .await
                .refused(404, &format!("Run {first} not found"));
            assert_eq!(gateway.delete(&path(&first)).await.status, 204);
            let gone = format!("Run {first} not found");
            gateway.get(&path(&first)).await.refused(404, &gone);
            gateway.delete(&path(&first)).await.refused(404, &gone);
            assert_eq!(gateway.get(&format!("{}/events", path(&first))).await.ok(), json!([]));
            assert_eq!(gateway.get(&format!("{}/events", path(&second))).await.ok(), kept);
            assert_eq!(gateway.state("t").await, state);
            gateway.ask("t", "three").await;
            assert_eq!(texts(&gateway.state("t").await)[4..], ["three", "You said: three"]);
        }
    }
}

#[tokio::test]
async fn runs_at_work_are_not_deleted_and_are_cancelled_together() {
    for mode in MODES {
        let name = format!("many-{mode}");
        let script = json!({"rules": [{"answers": [{"text": "never", "gate": {"name": name}}]}]});
        let gateway = Setup { script, ..Setup::on("sqlite", mode) }.start().await;
        let start = async |thread: &str| {
            gateway.create(thread).await;
            let run = gateway.start_run(thread, "wait").await;
            gate(&name).reached().await;
            // The other one may have reached it.
            while status(&gateway, thread, &run).await != "running" {
                tokio::task::yield_now().await;
            }
            run
        };
        let (a, b) = (start("a").await, start("b").await);
        let refused = gateway.delete(&format!("/api/threads/a/runs/{a}")).await;
        refused.refused(409, &format!("Run {a} is active. Cancel it first."));

        let cancel = async |body: Value| gateway.post("/api/runs/cancel?action=interrupt", body).await;
        for body in [
            json!({}),
            json!({"run_ids": [a]}),
            json!({"thread_id": "a"}),
            json!({"thread_id": "a", "run_ids": [a], "status": "all"}),
        ] {
            cancel(body).await.invalid("value_error", &json!(["body", "run_ids"]));
        }
        let of_other = json!({"thread_id": "a", "run_ids": [a, b]});
        cancel(of_other).await.refused(404, &format!("Run {b} not found"));
        assert_eq!(cancel(json!({"status": "pending"})).await.status, 204);
        assert_eq!(cancel(json!({"status": "all", "thread_id": "none"})).await.status, 204);
        for (thread, run) in [("a", &a), ("b", &b)] {
            assert_ne!(status(&gateway, thread, run).await, "interrupted");
        }
        assert_eq!(cancel(json!({"thread_id": "a", "run_ids": [a]})).await.status, 204);
        gateway.join("a", &a).await;
        assert_eq!(status(&gateway, "a", &a).await, "interrupted");
        assert_ne!(status(&gateway, "b", &b).await, "interrupted");
        assert_eq!(cancel(json!({"status": "all"})).await.status, 204);
        gateway.join("b", &b).await;
        assert_eq!(status(&gateway, "b", &b).await, "interrupted");
        assert_eq!(cancel(json!({"thread_id": "a", "run_ids": [a]})).await.status, 204, "it has ended");
        assert_eq!(gateway.delete(&format!("/api/threads/a/runs/{a}")).await.status, 204);
    }
}

#[tokio::test]
async fn a_request_cancels_at_most_a_thousand_runs() {
    let gateway = Setup::default().start().await;
    gateway.create("t").await;
    let run = gateway.ask("t", "one").await;
    let cancel = async |number: usize| {
        let body = json!({"thread_id": "t", "run_ids": vec![run.as_str(); number]});
        gateway.post("/api/runs/cancel", body).await
    };
    assert_eq!(cancel(1000).await.status, 204);
    cancel(1001).await.invalid("too_long", &json!(["body", "run_ids"]));
}

#[tokio::test]
async fn runs_that_are_rolled_back_together_leave_the_states_from_before_them() {
    for mode in MODES {
        let name = format!("many-rollback-{mode}");
        let never =
            json!({"when": {"contains": ["wait"]}, "answers": [{"text": "never", "gate": {"name": name}}]});
        let script = json!({"rules": [never, {"answers": [{"text": "hi"}]}]});
        let gateway = Setup { script, ..Setup::on("sqlite", mode) }.start().await;
        let mut runs = Vec::new();
        for thread in ["a", "b"] {
            gateway.create(thread).await;
            gateway.ask(thread, "one").await;
            let run = gateway.start_run(thread, "wait").await;
            while status(&gateway, thread, &run).await != "running" {
                tokio::task::yield_now().await;
            }
            runs.push((thread, run));
        }
        let all = gateway.post("/api/runs/cancel?action=rollback", json!({"status": "all"})).await;
        assert_eq!(all.status, 204, "{}", all.body);
        for (thread, run) in runs {
            gateway.join(thread, &run).await;
            let record = gateway.run(thread, &run).await;
            assert_eq!(
                (&record["status"], &record["error"]),
                (&json!("error"), &json!("Rolled back by user"))
            );
            assert_eq!(texts(&gateway.state(thread).await), ["one", "hi"], "{mode} {thread}");
        }
    }
}
