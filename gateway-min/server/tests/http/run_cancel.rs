//! Cancelling runs: what stays, what is restored, and how the thread continues.

use axum::http::Method;
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpListener;

use crate::support::{ALL, Answer, Gateway, MODES, Setup, id, question, texts};

/// Calls a tool and then waits at `gate` on `work`; else answers.
fn script(gate: &str) -> Value {
    json!({"rules": [
        {"when": {"contains": ["work"]}, "answers": [
            {"text": "Looking.", "tool_calls": [{"name": "ls"}]},
            {"text": "late", "gate": {"name": gate}},
        ]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]})
}

async fn cancel(gateway: &Gateway, run: &str, query: &str) -> Answer {
    gateway.call(Method::POST, &format!("/api/threads/t/runs/{run}/cancel{query}"), None).await
}

/// The status of an answer without a body.
#[track_caller]
fn empty(answer: &Answer) -> u16 {
    assert_eq!(answer.body, Value::Null);
    answer.status
}

fn kinds(state: &Value) -> Vec<&str> {
    let messages = state["values"]["messages"].as_array().unwrap();
    messages.iter().map(|message| message["type"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn an_interrupted_run_keeps_its_completed_steps_and_the_next_run_goes_on() {
    for (backend, mode) in ALL {
        let name = format!("interrupt-{backend}-{mode}");
        let gateway = Setup { script: script(&name), ..Setup::on(backend, mode) }.start().await;
        gateway.create("t").await;
        gateway.ask("t", "before").await;
        let run = gateway.start_run("t", "work").await;
        gate(&name).reached().await;
        let committed = gateway.state("t").await;

        assert_eq!(empty(&cancel(&gateway, &run, "").await), 202);
        assert_eq!(gateway.run("t", &run).await["status"], "interrupted", "from the answer on");
        assert_eq!(empty(&cancel(&gateway, &run, "?action=interrupt").await), 202, "again");
        assert_eq!(empty(&cancel(&gateway, &run, "?wait=true").await), 204, "and again, to its end");
        let record = gateway.run("t", &run).await;
        assert_eq!((&record["status"], &record["error"]), (&json!("interrupted"), &Value::Null));
        assert_eq!(empty(&cancel(&gateway, &run, "?wait=1").await), 204, "also when it has ended");
        assert_eq!(gateway.run("t", &run).await, record, "that changed nothing");

        let state = gateway.state("t").await;
        assert_eq!(state, committed, "the head is the last completed step, without a note of the duration");
        assert_eq!(kinds(&state), ["human", "ai", "human", "ai", "tool"], "{backend} {mode}");
        assert_eq!(state["next"], json!(["model"]));
        assert_eq!(gateway.get("/api/threads/t").await.ok()["status"], "interrupted");

        let next = gateway.ask("t", "after").await;
        assert_eq!(gateway.run("t", &next).await["status"], "success");
        let state = gateway.state("t").await;
        assert_eq!(kinds(&state), ["human", "ai", "human", "ai", "tool", "human", "ai"]);
        assert_eq!(texts(&state)[5..], ["after", "You said: after"]);
        assert_eq!((&state["next"], &state["values"]["title"]), (&json!([]), &json!("before")));
    }
}

/// The record says `interrupted` from the request on, so the thread is not at work for its client.
#[tokio::test]
async fn who_cancels_a_run_and_asks_again_at_once_is_answered() {
    for mode in MODES {
        let name = format!("cancel-ask-{mode}");
        let gateway = Setup { script: script(&name), ..Setup::on("sqlite", mode) }.start().await;
        gateway.create("t").await;
        for (turn, action) in ["interrupt", "rollback"].into_iter().enumerate() {
            let run = gateway.start_run("t", "work").await;
            if turn == 0 {
                gate(&name).reached().await;
            }
            cancel(&gateway, &run, &format!("?action={action}")).await;
            let next = gateway.ask("t", "after").await;
            assert_eq!(gateway.run("t", &next).await["status"], "success", "{action}");
            assert_eq!(texts(&gateway.state("t").await).last(), Some(&"You said: after"));
        }
    }
}

/// What the run left is no result.
#[tokio::test]
async fn who_waits_for_a_run_that_is_interrupted_is_told_so_beside_the_values() {
    for mode in MODES {
        let name = format!("wait-interrupted-{mode}");
        let gateway = Setup { script: script(&name), ..Setup::on("memory", mode) }.start().await;
        gateway.create("t").await;
        let (waited, ()) = tokio::join!(gateway.post("/api/threads/t/runs/wait", question("work")), async {
            gate(&name).reached().await;
            let run = gateway.get("/api/threads/t/runs").await.ok()[0]["run_id"].clone();
            assert_eq!(cancel(&gateway, run.as_str().unwrap(), "").await.status, 202);
        });
        let body = waited.ok();
        assert_eq!((&body["status"], &body["error"]), (&json!("interrupted"), &Value::Null), "{mode}");
        assert_eq!(body.get("__error__"), None, "nothing has failed");
        assert_eq!(body["messages"], gateway.state("t").await["values"]["messages"]);
    }
}

/// The model continues with what the cancelled run left undone.
#[tokio::test]
async fn a_run_without_input_takes_up_what_the_interrupted_one_left() {
    for mode in MODES {
        let name = format!("take-up-{mode}");
        let gateway = Setup { mode, script: script(&name), ..Setup::default() }.start().await;
        gateway.create("t").await;
        let run = gateway.start_run("t", "work").await;
        gate(&name).reached().await;
        assert_eq!(cancel(&gateway, &run, "?wait=true").await.status, 204);
        gate(&name).open();
        let values = gateway.post("/api/threads/t/runs/wait", json!({"input": null})).await.ok();
        let messages = values["messages"].as_array().unwrap();
        assert_eq!((messages.len(), &messages[3]["content"]), (4, &json!("late")));
    }
}

#[tokio::test]
async fn a_thread_is_free_when_a_waiting_cancellation_has_answered() {
    let gateway = Setup { script: script("wait-true"), ..Setup::on("sqlite", "delta") }.start().await;
    gateway.create("t").await;
    let run = gateway.start_run("t", "work").await;
    gate("wait-true").reached().await;
    assert_eq!(empty(&cancel(&gateway, &run, "?wait=true").await), 204);
    let deleted = gateway.delete("/api/threads/t").await;
    assert_eq!(deleted.status, 200, "the thread is free: {}", deleted.body);
}

/// Scenario 73.
#[tokio::test]
async fn nothing_is_written_after_a_waiting_cancellation_has_answered() {
    for mode in MODES {
        for action in ["interrupt", "rollback"] {
            let name = format!("late-{mode}-{action}");
            let gateway = Setup { script: script(&name), ..Setup::on("sqlite", mode) }.start().await;
            gateway.create("t").await;
            gateway.ask("t", "before").await;
            let run = gateway.start_run("t", "work").await;
            gate(&name).reached().await;
            assert_eq!(cancel(&gateway, &run, &format!("?wait=true&action={action}")).await.status, 204);
            let (rows, history) = (gateway.rows().await, gateway.history("t").await);
            gate(&name).open();
            let gateway = gateway.reopen(mode).await;
            assert_eq!(gateway.rows().await, rows, "{mode} {action}");
            assert_eq!(gateway.history("t").await, history);
        }
    }
}

#[tokio::test]
async fn a_run_that_has_ended_or_is_not_there_cannot_be_cancelled() {
    for mode in MODES {
        let gateway = Setup::on("sqlite", mode).start().await;
        gateway.create("t").await;
        let run = gateway.ask("t", "hello").await;
        let rows = gateway.rows().await;
        let ended = format!("Run {run} is not cancellable (status: success)");
        for query in ["", "?wait=true", "?action=rollback", "?action=interrupt&wait=0"] {
            cancel(&gateway, &run, query).await.refused(409, &ended);
        }
        for query in ["?action=interrupt", "?action=rollback&wait=1"] {
            let stop = format!("/api/threads/t/runs/{run}/stream{query}");
            gateway.call(Method::POST, &stop, None).await.refused(409, &ended);
        }
        cancel(&gateway, "x", "").await.refused(404, "Run x not found");
        let elsewhere =
            gateway.call(Method::POST, &format!("/api/threads/none/runs/{run}/cancel"), None).await;
        elsewhere.refused(404, "Thread none not found");
        for (query, kind, field) in
            [("action=stop", "literal_error", "action"), ("wait=perhaps", "bool_parsing", "wait")]
        {
            let answer = cancel(&gateway, &run, &format!("?{query}")).await;
            answer.invalid(kind, &json!(["query", field]));
        }
        assert_eq!(gateway.run("t", &run).await["status"], "success");
        assert_eq!(gateway.rows().await, rows);
    }
}

#[tokio::test]
async fn a_rolled_back_run_leaves_the_values_from_before_it() {
    for (backend, mode) in ALL {
        let name = format!("rollback-{backend}-{mode}");
        let gateway = Setup { script: script(&name), ..Setup::on(backend, mode) }.start().await;
        gateway.create("t").await;
        gateway.ask("t", "before").await;
        let before = gateway.state("t").await;
        let run = gateway.start_run("t", "work").await;
        gate(&name).reached().await;
        let cancelled = gateway.state("t").await;
        assert_eq!(kinds(&cancelled).len(), 5);
        assert_eq!(empty(&cancel(&gateway, &run, "?action=rollback&wait=true").await), 204);

        let record = gateway.run("t", &run).await;
        assert_eq!((&record["status"], &record["error"]), (&json!("error"), &json!("Rolled back by user")));
        let state = gateway.state("t").await;
        assert_eq!((&state["values"], &state["next"]), (&before["values"], &json!([])), "{backend} {mode}");
        assert!(id(&state) > id(&cancelled), "a new head, which does not hide what was");
        let parent = if mode == "delta" { &cancelled } else { &before };
        assert_eq!(state["parent_checkpoint_id"], id(parent));
        cancel(&gateway, &run, "")
            .await
            .refused(409, &format!("Run {run} is not cancellable (status: error)"));

        gateway.ask("t", "after").await;
        let expected = ["before", "You said: before", "after", "You said: after"];
        assert_eq!(texts(&gateway.state("t").await), expected);
        if backend == "sqlite" {
            let gateway = gateway.reopen(mode).await;
            assert_eq!(texts(&gateway.state("t").await), expected, "also for the next process");
        }
    }
}

#[tokio::test]
async fn rolling_back_the_first_run_of_a_thread_leaves_it_empty() {
    for (backend, mode) in ALL {
        let name = format!("rollback-first-{backend}-{mode}");
        let gateway = Setup { script: script(&name), ..Setup::on(backend, mode) }.start().await;
        gateway.create("t").await;
        let run = gateway.start_run("t", "work").await;
        gate(&name).reached().await;
        assert_eq!(cancel(&gateway, &run, "?action=rollback&wait=true").await.status, 204);
        let state = gateway.state("t").await;
        let messages = state["values"].get("messages").cloned().unwrap_or(json!([]));
        assert_eq!((messages, &state["next"]), (json!([]), &json!([])), "{backend} {mode}: {state}");
        gateway.ask("t", "after").await;
        assert_eq!(texts(&gateway.state("t").await), ["after", "You said: after"]);

        // A thread that the run itself created has nothing to go back to.
        let mut body = question("work");
        body["config"] = json!({"configurable": {"thread_id": "bare"}});
        let record = gateway.post("/api/runs", body).await.ok();
        let path = format!("/api/threads/bare/runs/{}", record["run_id"].as_str().unwrap());
        let stopped =
            gateway.call(Method::POST, &format!("{path}/cancel?action=rollback&wait=true"), None).await;
        assert_eq!(stopped.status, 204);
        assert_eq!(gateway.get(&path).await.ok()["error"], "Rolled back by user");
        assert_eq!(gateway.history("bare").await, Vec::<Value>::new());
    }
}

#[tokio::test]
async fn a_run_that_takes_over_interrupts_or_rolls_back_the_one_before_it() {
    for (backend, mode) in ALL {
        for (strategy, status, expected) in [
            ("interrupt", "interrupted", vec!["work", "Looking.", "", "instead", "You said: instead"]),
            ("rollback", "error", vec!["instead", "You said: instead"]),
        ] {
            let name = format!("take-over-{backend}-{mode}-{strategy}");
            let gateway = Setup { script: script(&name), ..Setup::on(backend, mode) }.start().await;
            gateway.create("t").await;
            let run = gateway.start_run("t", "work").await;
            gate(&name).reached().await;
            let mut body = question("instead");
            body["multitask_strategy"] = json!(strategy);
            gateway.post("/api/threads/t/runs/wait", body).await.ok();
            assert_eq!(gateway.run("t", &run).await["status"], status);
            let state = gateway.state("t").await;
            let mut found = texts(&state);
            if strategy == "interrupt" {
                assert_eq!(kinds(&state)[2], "tool");
                found[2] = "";
            }
            assert_eq!(found, expected, "{backend} {mode}");
            assert_eq!(gateway.get("/api/threads/t").await.ok()["status"], "idle");
        }
    }
}

/// A provider refuses a conversation with an unanswered tool call; here the answer shows the result that the model got.
#[tokio::test]
async fn a_tool_that_is_cancelled_at_work_is_stopped_and_the_next_request_to_the_model_has_a_result_for_its_call()
 {
    for mode in MODES {
        // The command keeps a connection to the test open until it is stopped.
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let command = format!("exec cat </dev/tcp/127.0.0.1/{}", listener.local_addr().unwrap().port());
        let script = json!({"rules": [
            {"when": {"contains": ["work"]}, "answers": [
                {"tool_calls": [{"name": "bash", "args": {"command": command}, "id": "call-1"}]},
            ]},
            {"answers": [{"text": "Told: {{tool_result}}"}]},
        ]});
        let sections = json!({"sandbox": {"use": "local", "allow_host_bash": true}});
        let gateway = Setup { mode, script, sections, ..Setup::default() }.start().await;
        gateway.create("t").await;
        let run = gateway.start_run("t", "work").await;
        let (mut connection, _) = listener.accept().await.unwrap();
        assert_eq!(cancel(&gateway, &run, "?wait=true").await.status, 204);
        assert_eq!(connection.read(&mut [0]).await.unwrap(), 0, "the command is gone");
        let state = gateway.state("t").await;
        assert_eq!((kinds(&state), &state["next"]), (vec!["human", "ai"], &json!(["tools"])));

        let next = gateway.ask("t", "after").await;
        assert_eq!(gateway.run("t", &next).await["status"], "success");
        let state = gateway.state("t").await;
        assert_eq!(kinds(&state), ["human", "ai", "human", "ai"], "the repair is for the model only");
        assert_eq!(
            texts(&state)[3],
            "Told: Error: the tool call was interrupted and returned no result. Repeat it if you still need it."
        );
    }
}

/// The first turn: there is no title yet.
#[tokio::test]
async fn an_interrupted_and_a_failed_first_turn_have_a_title_that_a_restart_keeps() {
    for mode in MODES {
        let name = format!("untitled-{mode}");
        let gateway = Setup { script: script(&name), ..Setup::on("sqlite", mode) }.start().await;
        for thread in ["cancelled", "failed"] {
            gateway.create(thread).await;
        }
        let run = gateway.start_run("cancelled", "work for me").await;
        gate(&name).reached().await;
        let stop = format!("/api/threads/cancelled/runs/{run}/cancel?wait=true");
        assert_eq!(gateway.call(Method::POST, &stop, None).await.status, 204);
        let mut body = question("work and fail");
        body["config"] = json!({"recursion_limit": 1});
        let failed = gateway.post("/api/threads/failed/runs/wait", body).await.ok();
        assert_eq!(failed["status"], "error");

        let titles = ["work for me", "work and fail"];
        let before = [gateway.state("cancelled").await, gateway.state("failed").await];
        let gateway = gateway.reopen(mode).await;
        for ((thread, title), before) in ["cancelled", "failed"].into_iter().zip(titles).zip(&before) {
            let state = gateway.state(thread).await;
            assert_eq!(&state, before, "{mode} {thread}");
            assert_eq!(state["values"]["title"], title);
            let found = gateway.post("/api/threads/search", json!({"ids": [thread]})).await.ok();
            assert_eq!(found[0]["values"]["title"], title);
        }
        assert_eq!((&before[0]["next"], &before[1]["next"]), (&json!(["model"]), &json!(["tools"])));
        assert_eq!(gateway.get("/api/threads/cancelled").await.ok()["status"], "interrupted");
        assert_eq!(gateway.get("/api/threads/failed").await.ok()["status"], "error");

        gateway.ask("cancelled", "something else").await;
        let state = gateway.state("cancelled").await;
        assert_eq!(
            (texts(&state).last(), &state["values"]["title"]),
            (Some(&"You said: something else"), &json!(titles[0]))
        );
    }
}
