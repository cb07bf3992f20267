//! Runs that wait for their thread, one after another.

use axum::body::Body;
use axum::http::{Method, Request};
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;

use crate::sse::{Frames, names};
use crate::support::{ALL, Answer, Gateway, MODES, Setup, question, texts};

fn setup(backend: &'static str, mode: &'static str, gate: &str) -> Setup {
    let script = json!({"rules": [
        {"when": {"contains": ["wait"]}, "answers": [{"text": "late", "gate": {"name": gate}}]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]});
    Setup { script, ..Setup::on(backend, mode) }
}

fn queued(text: &str) -> Value {
    let mut body = question(text);
    body["multitask_strategy"] = json!("enqueue");
    body
}

async fn enqueue(gateway: &Gateway, text: &str) -> String {
    let run = gateway.post("/api/threads/t/runs", queued(text)).await.ok();
    assert_eq!((&run["status"], &run["multitask_strategy"]), (&json!("pending"), &json!("enqueue")));
    run["run_id"].as_str().unwrap().to_owned()
}

/// A request for a stream, with a body or to follow one.
async fn stream(gateway: &Gateway, path: &str, body: Option<Value>) -> Frames {
    let request = Request::builder().uri(path).header("content-type", "application/json");
    let request = match body {
        Some(body) => request.method(Method::POST).body(body.to_string().into()),
        None => request.body(Body::empty()),
    };
    Frames::of(gateway.open_answer(request.unwrap()).await)
}

async fn cancel(gateway: &Gateway, run: &str, action: &str) -> Answer {
    let path = format!("/api/threads/t/runs/{run}/cancel?wait=true&action={action}");
    gateway.call(Method::POST, &path, None).await
}

/// A thread `t` with a run that waits at the gate of this name, and the run's id.
async fn busy(setup: Setup, name: &str) -> (Gateway, String) {
    let gateway = setup.start().await;
    gateway.create("t").await;
    let first = gateway.start_run("t", "wait").await;
    gate(name).reached().await;
    (gateway, first)
}

#[tokio::test]
async fn enqueued_runs_follow_each_other_in_the_order_of_their_requests() {
    for (backend, mode) in ALL {
        let name = format!("queue-{backend}-{mode}");
        let (gateway, first) = busy(setup(backend, mode, &name), &name).await;
        let mut runs = vec![first];
        for text in ["c", "a", "b"] {
            runs.push(enqueue(&gateway, text).await);
        }
        assert_eq!(texts(&gateway.state("t").await), ["wait"], "nobody comes in between");
        let refused = gateway.post("/api/threads/t/runs", question("now")).await;
        refused.refused(409, "Thread t already has an active run");
        gate(&name).open();
        for run in &runs {
            gateway.join("t", run).await;
            assert_eq!(gateway.run("t", run).await["status"], "success", "{backend} {mode}");
        }
        let expected = ["wait", "late", "c", "You said: c", "a", "You said: a", "b", "You said: b"];
        assert_eq!(texts(&gateway.state("t").await), expected);
        assert_eq!(gateway.get("/api/threads/t").await.ok()["status"], "idle");
        assert_eq!(gateway.post("/api/threads/t/runs", queued("free")).await.status, 200);
    }
}

#[tokio::test]
async fn waiting_and_streaming_requests_get_what_their_own_run_leaves() {
    for mode in MODES {
        let name = format!("queue-forms-{mode}");
        let (gateway, _) = busy(setup("memory", mode, &name), &name).await;
        let stream = stream(&gateway, "/api/threads/t/runs/stream", Some(queued("one"))).await;
        let mut stateless = queued("two");
        stateless["config"] = json!({"configurable": {"thread_id": "t"}});
        let wait = gateway.post("/api/runs/wait", stateless);
        let open = async {
            while gateway.get("/api/threads/t/runs").await.ok().as_array().unwrap().len() < 3 {
                tokio::task::yield_now().await;
            }
            gate(&name).open();
        };
        let (values, ()) = tokio::join!(wait, open);
        let said = |values: &Value| values["messages"].as_array().unwrap().last().unwrap()["content"].clone();
        assert_eq!(said(&values.ok()), "You said: two");
        let frames = stream.rest().await;
        assert_eq!(frames[0].name, "metadata");
        let last = frames.iter().rfind(|frame| frame.name == "values").unwrap();
        assert_eq!(said(&last.data), "You said: one");
    }
}

/// Scenarios 18 and 74: a run that never started leaves no checkpoint, and its stream has only the end.
#[tokio::test]
async fn a_run_that_is_cancelled_in_the_queue_leaves_its_record_and_nothing_else() {
    for (backend, mode) in ALL {
        let name = format!("queue-cancel-{backend}-{mode}");
        let (gateway, first) = busy(setup(backend, mode, &name), &name).await;
        let [one, two, three] = [
            enqueue(&gateway, "one").await,
            enqueue(&gateway, "two").await,
            enqueue(&gateway, "three").await,
        ];
        let history = gateway.history("t").await;
        let path = format!("/api/threads/t/runs/{one}");
        gateway.delete(&path).await.refused(409, &format!("Run {one} is active. Cancel it first."));
        let stream = stream(&gateway, &format!("{path}/stream"), None).await;
        assert_eq!(cancel(&gateway, &one, "interrupt").await.status, 204);
        assert_eq!(cancel(&gateway, &two, "rollback").await.status, 204);
        assert_eq!(names(&stream.rest().await), ["end"]);
        let status = async |run: &str| {
            let run = gateway.run("t", run).await;
            (run["status"].as_str().unwrap().to_owned(), run["error"].clone())
        };
        assert_eq!(status(&one).await, ("interrupted".to_owned(), Value::Null));
        assert_eq!(status(&two).await, ("error".to_owned(), json!("Rolled back by user")));
        assert_eq!(gateway.history("t").await, history, "nothing was written or restored");
        assert_eq!(gateway.delete(&path).await.status, 204);

        gate(&name).open();
        gateway.join("t", &three).await;
        assert_eq!(gateway.run("t", &first).await["status"], "success", "{backend} {mode}");
        assert_eq!(texts(&gateway.state("t").await), ["wait", "late", "three", "You said: three"]);
    }
}

#[tokio::test]
async fn a_client_that_leaves_takes_its_run_out_of_the_queue() {
    for mode in MODES {
        let name = format!("queue-leave-{mode}");
        let (gateway, _) = busy(setup("memory", mode, &name), &name).await;
        let stream = stream(&gateway, "/api/threads/t/runs/stream", Some(queued("left"))).await;
        let newest = gateway.get("/api/threads/t/runs?limit=1").await.ok();
        let run = newest[0]["run_id"].as_str().unwrap().to_owned();
        let next = enqueue(&gateway, "stays").await;
        drop(stream);
        gateway.join("t", &run).await;
        assert_eq!(gateway.run("t", &run).await["status"], "interrupted");
        gate(&name).open();
        gateway.join("t", &next).await;
        assert_eq!(texts(&gateway.state("t").await), ["wait", "late", "stays", "You said: stays"]);
    }
}

#[tokio::test]
async fn a_run_that_takes_over_interrupts_all_that_wait() {
    for (mode, strategy, kept) in [("full", "interrupt", vec!["wait"]), ("delta", "rollback", vec![])] {
        let name = format!("queue-take-over-{mode}");
        let (gateway, first) = busy(setup("sqlite", mode, &name), &name).await;
        let waiting = [enqueue(&gateway, "one").await, enqueue(&gateway, "two").await];
        let mut body = question("instead");
        body["multitask_strategy"] = json!(strategy);
        let over = gateway.post("/api/threads/t/runs", body).await.ok();
        let behind = enqueue(&gateway, "behind").await;
        gateway.join("t", over["run_id"].as_str().unwrap()).await;
        gateway.join("t", &behind).await;
        for run in &waiting {
            assert_eq!(gateway.run("t", run).await["status"], "interrupted");
        }
        assert_ne!(gateway.run("t", &first).await["status"], "success");
        let then = ["instead", "You said: instead", "behind", "You said: behind"];
        assert_eq!(texts(&gateway.state("t").await), [kept, then.to_vec()].concat(), "{strategy}");
    }
}

#[tokio::test]
async fn the_hundred_and_first_waiting_run_is_refused() {
    let (gateway, _) = busy(setup("memory", "delta", "queue-full"), "queue-full").await;
    for n in 0..100 {
        enqueue(&gateway, &n.to_string()).await;
    }
    let refused = gateway.post("/api/threads/t/runs", queued("more")).await;
    let text = "Thread t has 100 waiting runs, which is the maximum; try again when some have ended";
    refused.refused(409, text);
    gateway.post("/api/runs/cancel", json!({"status": "all"})).await;
}

#[tokio::test]
async fn a_gateway_that_stops_interrupts_the_runs_that_wait() {
    for mode in MODES {
        let name = format!("queue-stop-{mode}");
        let (gateway, first) = busy(setup("sqlite", mode, &name), &name).await;
        let waiting = [enqueue(&gateway, "one").await, enqueue(&gateway, "two").await];
        let gateway = gateway.reopen(mode).await;
        for run in waiting.iter().chain([&first]) {
            assert_eq!(gateway.run("t", run).await["status"], "interrupted");
        }
        gateway.ask("t", "on").await;
        assert_eq!(texts(&gateway.state("t").await), ["wait", "on", "You said: on"], "{mode}");
    }
}

/// No process executes them any more, and their requests are not stored whole: they end like every active run.
#[test]
fn a_restart_ends_the_runs_that_waited_in_a_dead_process_and_frees_the_thread() {
    for mode in MODES {
        let name = format!("queue-dead-{mode}");
        let first = tokio::runtime::Runtime::new().unwrap();
        let (gateway, runs) = first.block_on(async {
            let (gateway, run) = busy(setup("sqlite", mode, &name), &name).await;
            let runs = [run, enqueue(&gateway, "one").await, enqueue(&gateway, "two").await];
            (gateway, runs)
        });
        drop(first);
        tokio::runtime::Runtime::new().unwrap().block_on(async {
            let gateway = gateway.reopen_dead().await;
            for run in &runs {
                let record = gateway.run("t", run).await;
                let text = "Gateway restarted before this run reached a durable final state.";
                assert_eq!((&record["status"], &record["error"]), (&json!("error"), &json!(text)));
            }
            gateway.ask("t", "on").await;
            assert_eq!(texts(&gateway.state("t").await), ["wait", "on", "You said: on"], "{mode}");
        });
    }
}
