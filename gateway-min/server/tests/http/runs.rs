//! Creating runs in their three forms, on a thread and stateless; reading, listing and joining them.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::body::Body;
use axum::http::Request;
use chrono::DateTime;
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;
#[cfg(unix)]
use threadkeep_testing::Log;

use crate::sse;
use crate::support::{ALL, Gateway, MODES, Setup, question, texts};

/// Answers, fails on `fail`, and waits at `gate` on `wait`.
fn script(gate: &str) -> Value {
    json!({"rules": [
        {"when": {"contains": ["wait"]}, "answers": [{"text": "late", "gate": {"name": gate}}]},
        {"when": {"contains": ["fail"]}, "answers": [{"error": {"kind": "fatal", "message": "no such model"}}]},
        {"answers": [{"text": "You said: {{input}}", "usage": {"input_tokens": 3, "output_tokens": 4}}]},
    ]})
}

fn time(value: &Value) -> DateTime<chrono::FixedOffset> {
    let text = value.as_str().unwrap();
    assert!(text.ends_with("+00:00"), "{text}");
    DateTime::parse_from_rfc3339(text).unwrap()
}

/// The thread and the run of an answer's headers, checked: `Content-Location` and `Location`.
fn place(headers: &axum::http::HeaderMap) -> (String, String) {
    let header = |name: &str| headers[name].to_str().unwrap().to_owned();
    let content = header("content-location");
    let parts: Vec<&str> = content.split('/').collect();
    let ["", "api", "threads", thread, "runs", run] = parts[..] else { panic!("{content}") };
    let again = header("location");
    let places = ["stream", "join"].map(|form| format!("/threads/{thread}/runs/{run}/{form}"));
    assert!(places.contains(&again), "{again}");
    (thread.to_owned(), run.to_owned())
}

/// Polls the record until the run has ended.
async fn polled(gateway: &Gateway, thread: &str, run: &str) -> Value {
    loop {
        let record = gateway.run(thread, run).await;
        if !["pending", "running"].contains(&record["status"].as_str().unwrap()) {
            return record;
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_background_run_answers_with_its_whole_record_and_is_polled_to_success() {
    for (backend, mode) in ALL {
        let gateway = Setup::on(backend, mode).start().await;
        gateway.create("t").await;
        let mut body = question("hello");
        body["assistant_id"] = json!("lead_agent");
        body["metadata"] = json!({"purpose": "test", "nested": {"a": [1]}});
        body["config"] = json!({"recursion_limit": 50, "context": {"mine": {"api_key": "hunter2"}}});
        body["multitask_strategy"] = json!("interrupt");
        let answer = gateway.post("/api/threads/t/runs", body.clone()).await;
        let (thread, run) = place(&answer.headers);
        let record = answer.ok();
        assert_eq!((thread.as_str(), &record["run_id"]), ("t", &json!(run)));
        assert_eq!(uuid::Uuid::parse_str(&run).unwrap().get_version_num(), 4);
        let created_at = record["created_at"].clone();
        let expected = |status: &str, updated_at: &Value, tokens: [u8; 6], messages: u8| {
            json!({
                "run_id": run, "thread_id": "t", "assistant_id": "lead_agent", "status": status,
                "metadata": body["metadata"],
                "kwargs": {
                    "input": body["input"],
                    "config": {"recursion_limit": 50, "context": {"mine": {"api_key": "[redacted]"}}},
                },
                "multitask_strategy": "interrupt", "created_at": created_at, "updated_at": updated_at,
                "total_input_tokens": tokens[0], "total_output_tokens": tokens[1], "total_tokens": tokens[2],
                "llm_call_count": tokens[3], "lead_agent_tokens": tokens[4], "subagent_tokens": 0,
                "middleware_tokens": tokens[5], "message_count": messages, "stop_reason": null, "error": null,
            })
        };
        assert_eq!(record, expected("pending", &created_at, [0; 6], 0));

        let done = polled(&gateway, "t", &run).await;
        assert!(time(&done["updated_at"]) >= time(&created_at));
        assert_eq!(done, expected("success", &done["updated_at"], [3, 4, 7, 1, 7, 0], 2));
        gateway.join("t", &run).await;
        assert_eq!(texts(&gateway.state("t").await), ["hello", "You said: hello"]);
    }
}

#[tokio::test]
async fn a_run_is_found_only_in_its_own_thread() {
    let gateway = Setup::default().start().await;
    gateway.create("t").await;
    gateway.create("other").await;
    let run = gateway.ask("t", "hello").await;
    let gone = format!("Run {run} not found");
    for path in ["", "/join", "/stream"] {
        gateway.get(&format!("/api/threads/other/runs/{run}{path}")).await.refused(404, &gone);
        gateway.get(&format!("/api/threads/none/runs/{run}{path}")).await.refused(404, &gone);
        gateway.get(&format!("/api/threads/t/runs/x{path}")).await.refused(404, "Run x not found");
    }
    let stop = format!("/api/threads/other/runs/{run}/stream?action=interrupt");
    gateway.post(&stop, json!({})).await.refused(404, &gone);
    gateway.post(&format!("/api/threads/other/runs/{run}/cancel"), json!({})).await.refused(404, &gone);
    assert_eq!(gateway.get("/api/threads/other/runs").await.ok(), json!([]));
    assert_eq!(gateway.get("/api/threads/none/runs").await.ok(), json!([]));
}

#[tokio::test]
async fn runs_are_listed_newest_first_by_status_and_in_pages() {
    let gateway = Setup { script: script("none"), ..Setup::default() }.start().await;
    gateway.create("t").await;
    let mut newest_first = Vec::new();
    for text in ["one", "fail", "two", "fail", "three"] {
        newest_first.insert(0, gateway.ask("t", text).await);
    }
    let list = async |query: &str| -> Vec<String> {
        let runs = gateway.get(&format!("/api/threads/t/runs{query}")).await.ok();
        runs.as_array().unwrap().iter().map(|run| run["run_id"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(list("").await, newest_first);
    assert_eq!(list("?limit=2").await, newest_first[..2]);
    assert_eq!(list("?limit=2&offset=3").await, newest_first[3..]);
    assert_eq!(list("?offset=5").await, [""; 0]);
    let failed = [&newest_first[1], &newest_first[3]].map(String::clone);
    assert_eq!(list("?status=error").await, failed);
    assert_eq!(list("?status=error&limit=1&offset=1").await, failed[1..]);
    assert_eq!(list("?status=running").await, [""; 0]);
    let listed = gateway.get("/api/threads/t/runs?limit=1").await.ok();
    assert_eq!(listed[0], gateway.run("t", &newest_first[0]).await, "the same record");
    for (query, kind) in [
        ("limit=0", "greater_than_equal"),
        ("offset=-1", "greater_than_equal"),
        ("status=x", "literal_error"),
    ] {
        let field = query.split('=').next().unwrap();
        let answer = gateway.get(&format!("/api/threads/t/runs?{query}")).await;
        answer.invalid(kind, &json!(["query", field]));
    }
}

#[tokio::test]
async fn at_most_a_hundred_runs_are_listed() {
    let gateway = Setup::default().start().await;
    gateway.create("t").await;
    for turn in 0..102 {
        let mut body = question(&turn.to_string());
        body["input"] = json!({"messages": [{"type": "human", "id": "same", "content": turn.to_string()}]});
        gateway.post("/api/threads/t/runs/wait", body).await.ok();
    }
    for query in ["", "?limit=1000", "?limit=100"] {
        let runs = gateway.get(&format!("/api/threads/t/runs{query}")).await.ok();
        assert_eq!(runs.as_array().unwrap().len(), 100, "{query}");
    }
    let rest = gateway.get("/api/threads/t/runs?offset=100").await.ok();
    assert_eq!(rest.as_array().unwrap().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_fifty_parallel_requests_on_a_thread_one_runs() {
    for (backend, mode) in ALL {
        let name = format!("fifty-{backend}-{mode}");
        let gateway = Setup { script: script(&name), ..Setup::on(backend, mode) }.start().await;
        gateway.create("t").await;
        let gateway = Arc::new(gateway);
        let requests = (0..50).map(|n| {
            let gateway = Arc::clone(&gateway);
            let form = ["", "/stream"][n % 2];
            tokio::spawn(async move {
                let mut body = question(&format!("wait {n}"));
                body["on_disconnect"] = json!("continue");
                let path = format!("/api/threads/t/runs{form}");
                let request = Request::post(path).header("content-type", "application/json");
                let answer = gateway.open_answer(request.body(body.to_string().into()).unwrap()).await;
                match answer.status().as_u16() {
                    200 => Some(place(answer.headers()).1),
                    409 => {
                        let body = axum::body::to_bytes(answer.into_body(), usize::MAX).await.unwrap();
                        assert_eq!(
                            serde_json::from_slice::<Value>(&body).unwrap(),
                            json!({"detail": "Thread t already has an active run"})
                        );
                        None
                    }
                    other => panic!("{other}"),
                }
            })
        });
        let answers = futures::future::join_all(requests.collect::<Vec<_>>()).await;
        let admitted: Vec<String> = answers.into_iter().filter_map(Result::unwrap).collect();
        assert_eq!(admitted.len(), 1, "{backend} {mode}");
        gate(&name).open();
        gateway.join("t", &admitted[0]).await;
        let runs = gateway.get("/api/threads/t/runs").await.ok();
        assert_eq!(runs.as_array().unwrap().len(), 1, "those that were refused left no record");
        assert_eq!(runs[0]["status"], "success");
        let state = gateway.state("t").await;
        assert_eq!((texts(&state).len(), texts(&state)[1]), (2, "late"));
    }
}

#[tokio::test]
async fn waiting_for_a_run_gives_the_values_that_it_left() {
    for (backend, mode) in ALL {
        let gateway = Setup::on(backend, mode).start().await;
        gateway.create("t").await;
        let answer = gateway.post("/api/threads/t/runs/wait", question("hello")).await;
        let (thread, run) = place(&answer.headers);
        let values = answer.ok();
        assert_eq!(thread, "t");
        assert_eq!(values, gateway.state("t").await["values"]);
        assert_eq!((&values["title"], values.get("status")), (&json!("hello"), None));
        assert_eq!(gateway.run("t", &run).await["status"], "success", "everything is written");
    }
}

#[tokio::test]
async fn waiting_for_a_run_that_fails_says_so_beside_the_values() {
    for mode in MODES {
        let gateway = Setup { mode, script: script("none"), ..Setup::default() }.start().await;
        gateway.create("t").await;
        gateway.ask("t", "one").await;
        let answer = gateway.post("/api/threads/t/runs/wait", question("fail")).await;
        let (_, run) = place(&answer.headers);
        let mut values = answer.ok();
        let record = gateway.run("t", &run).await;
        assert_eq!(record["status"], "error");
        let error = record["error"].as_str().unwrap();
        assert!(error.contains("no such model"), "{error}");
        let failure = values.as_object_mut().unwrap();
        assert_eq!(failure.remove("status"), Some(json!("error")));
        assert_eq!(failure.remove("error"), Some(json!(error)));
        assert_eq!(failure.remove("__error__"), Some(json!({"error": "RunError", "message": error})));
        assert_eq!(values, gateway.state("t").await["values"]);
        let last = &values["messages"][3];
        assert_eq!(last["additional_kwargs"]["svc_error_fallback"], true);
        let joined = gateway.get(&format!("/api/threads/t/runs/{run}/join")).await.ok();
        assert_eq!((&joined["status"], &joined["__error__"]["message"]), (&json!("error"), &json!(error)));

        gateway.ask("t", "two").await;
        assert_eq!(gateway.get("/api/threads/t").await.ok()["status"], "idle", "the thread goes on");
    }
}

#[tokio::test]
async fn joining_gives_values_or_by_accept_the_stream() {
    for mode in MODES {
        let name = format!("join-{mode}");
        let gateway = Setup { mode, script: script(&name), ..Setup::default() }.start().await;
        gateway.create("t").await;
        let run = gateway.start_run("t", "wait").await;
        gate(&name).reached().await;
        let path = format!("/api/threads/t/runs/{run}/join");
        let as_stream = || {
            let request = Request::get(&path).header("accept", "application/json, text/event-stream");
            request.body(Body::empty()).unwrap()
        };
        let (values, stream) = tokio::join!(gateway.get(&path), async {
            let stream = gateway.open_answer(as_stream()).await;
            gate(&name).open();
            stream
        });
        assert_eq!(place(&values.headers), ("t".to_owned(), run.clone()));
        assert_eq!(values.ok(), gateway.state("t").await["values"]);
        assert_eq!(stream.headers()["content-type"], "text/event-stream");
        let live = sse::all(stream).await;
        assert_eq!(sse::names(&live), ["metadata", "values", "values", "end"]);

        assert_eq!(
            gateway.get(&path).await.ok(),
            gateway.state("t").await["values"],
            "of a finished run too"
        );
        assert_eq!(sse::all(gateway.open_answer(as_stream()).await).await, live, "replayed");
    }
}

/// A client whose connection breaks off in an answer asks there, and expects an answer of the same form.
#[tokio::test]
async fn the_location_of_a_result_has_that_result_again() {
    let gateway = Setup::default().start().await;
    gateway.create("t").await;
    let run = gateway.ask("t", "one").await;
    for answer in [
        gateway.post("/api/threads/t/runs/wait", question("two")).await,
        gateway.post("/api/runs/wait", question("three")).await,
        gateway.get(&format!("/api/threads/t/runs/{run}/join")).await,
    ] {
        let location = answer.headers["location"].to_str().unwrap().to_owned();
        let again = gateway.get(&format!("/api{location}")).await;
        assert_eq!(again.headers["content-type"], "application/json", "{location}");
        assert_eq!(again.ok(), answer.ok());
    }
}

#[tokio::test]
async fn a_stateless_run_makes_a_thread_of_its_own() {
    for mode in MODES {
        let gateway = Setup::on("sqlite", mode).start().await;
        let mut threads = BTreeSet::new();
        for form in ["", "/stream", "/wait"] {
            let path = format!("/api/runs{form}");
            let request = Request::post(path).header("content-type", "application/json");
            let answer =
                gateway.open_answer(request.body(question("hello").to_string().into()).unwrap()).await;
            assert_eq!(answer.status(), 200);
            let (thread, run) = place(answer.headers());
            axum::body::to_bytes(answer.into_body(), usize::MAX).await.unwrap();
            gateway.join(&thread, &run).await;
            assert_eq!(uuid::Uuid::parse_str(&thread).unwrap().get_version_num(), 4);
            assert_eq!(gateway.run(&thread, &run).await["status"], "success");
            assert_eq!(gateway.get(&format!("/api/threads/{thread}")).await.ok()["status"], "idle");
            assert_eq!(texts(&gateway.state(&thread).await), ["hello", "You said: hello"]);
            threads.insert(thread);
        }
        assert_eq!(threads.len(), 3);
        assert_eq!(gateway.post("/api/threads/count", json!({})).await.ok(), json!(3));
    }
}

#[tokio::test]
async fn a_stateless_run_goes_on_with_the_thread_that_it_names() {
    for mode in MODES {
        let name = format!("stateless-{mode}");
        let gateway = Setup { mode, script: script(&name), ..Setup::default() }.start().await;
        let asking = |text: &str| {
            let mut body = question(text);
            body["config"] = json!({"configurable": {"thread_id": "named"}});
            body
        };
        let answer = gateway.post("/api/runs/wait", asking("one")).await;
        assert_eq!(place(&answer.headers).0, "named");
        answer.ok();
        let record = gateway.post("/api/runs", asking("wait")).await.ok();
        assert_eq!(record["thread_id"], "named");
        gate(&name).reached().await;
        for form in ["", "/stream", "/wait"] {
            let busy = gateway.post(&format!("/api/runs{form}"), asking("three")).await;
            busy.refused(409, "Thread named already has an active run");
        }
        gate(&name).open();
        gateway.join("named", record["run_id"].as_str().unwrap()).await;
        let answer = gateway.post("/api/runs/stream", asking("two")).await;
        assert_eq!(place(&answer.headers).0, "named");
        let state = gateway.state("named").await;
        assert_eq!(texts(&state), ["one", "You said: one", "wait", "late", "two", "You said: two"]);
        assert_eq!(gateway.get("/api/threads/named/runs").await.ok().as_array().unwrap().len(), 3);
    }
}

/// As one that another program has made on the store. Its messages come before the run's in the feed.
#[tokio::test]
async fn a_stateless_run_goes_on_with_a_thread_that_has_no_record() {
    for events in ["memory", "db"] {
        let gateway = Setup { events, ..Setup::on("sqlite", "full") }.start().await;
        gateway.create("t").await;
        gateway.ask("t", "one").await;
        let gateway = gateway
            .reopen_after("full", |data| async move {
                let db = crate::support::connect(&data.join("gateway.db"));
                let sql = "DELETE FROM threads_meta; DELETE FROM runs; DELETE FROM run_events";
                db.execute_batch(sql).unwrap();
            })
            .await;
        let mut body = question("two");
        body["config"] = json!({"configurable": {"thread_id": "t"}});
        gateway.post("/api/runs/wait", body).await.ok();
        assert_eq!(texts(&gateway.state("t").await), ["one", "You said: one", "two", "You said: two"]);
        let seeded = gateway.get("/api/threads/t/runs/checkpoint-seed-t-0/events").await.ok();
        assert_eq!(seeded.as_array().unwrap().len(), 2, "{events}");
    }
}

/// The first run of a list has its request whatever its size; another one has it when it is read alone.
#[tokio::test]
async fn requests_beyond_the_limit_in_bytes_are_null_in_a_list() {
    for (bytes, has_both) in [(0, false), (8 << 20, true)] {
        let sections = json!({"gateway": {"history_max_bytes": bytes}});
        let gateway =
            Setup { sections, script: script("unused"), ..Setup::on("sqlite", "full") }.start().await;
        gateway.create("t").await;
        let older = gateway.ask("t", "one").await;
        gateway.ask("t", "two").await;
        let listed = gateway.get("/api/threads/t/runs").await.ok();
        assert!(listed[0]["kwargs"].is_object(), "{listed}");
        assert_eq!((&listed[1]["run_id"], listed[1]["kwargs"].is_object()), (&json!(older), has_both));
        let alone = gateway.get(&format!("/api/threads/t/runs/{older}")).await.ok();
        assert!(alone["kwargs"].is_object(), "{alone}");
    }
}

/// What is committed to a file that has no name, or another one, is lost. The operator needs the cause, not the client.
#[cfg(unix)]
#[tokio::test]
async fn a_turn_on_records_whose_file_is_gone_is_refused_and_the_log_says_why() {
    for replaced in [false, true] {
        let log = Log::default();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(log.clone()).finish();
        let _logged = tracing::subscriber::set_default(subscriber);
        let gateway = Setup::on("sqlite", "full").start().await;
        gateway.create("t").await;
        gateway.ask("t", "one").await;
        let (file, copy) = (gateway.data().join("gateway.db"), gateway.data().join("copy"));
        if replaced {
            std::fs::copy(&file, &copy).unwrap();
            std::fs::rename(&copy, &file).unwrap();
        } else {
            std::fs::remove_file(&file).unwrap();
        }
        gateway.post("/api/threads/t/runs/wait", question("two")).await.refused(503, "Failed to create run");
        for part in ["gateway.db: the file", "removed, renamed or replaced", "threadkeep backup"] {
            assert!(log.text().contains(part), "{part}: {}", log.text());
        }
        assert_eq!(texts(&gateway.state("t").await), ["one", "You said: one"], "nothing was run");
    }
}
