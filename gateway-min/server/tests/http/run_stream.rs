//! The stream of a run: headers, frames, reconnecting, and disconnecting.

use axum::body::Body;
use axum::http::{Method, Request, Response};
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;

use crate::sse::{self, Frame, Frames};
use crate::support::{ALL, Gateway, MODES, Setup, question, texts};

/// Answers in pieces of four characters; on `wait`, waits at `gate` after the first of them.
fn script(gate: &str) -> Value {
    json!({"chunk_chars": 4, "rules": [
        {"when": {"contains": ["wait"]}, "answers": [
            {"text": "One piece after the other.", "gate": {"name": gate, "after_chunks": 1}},
        ]},
        {"when": {"contains": ["fail"]}, "answers": [{"error": {"kind": "fatal", "message": "no such model"}}]},
        {"when": {"contains": ["tool"]}, "answers": [
            {"tool_calls": [{"name": "ls", "id": "call-1"}]}, {"text": "done"},
        ]},
        {"when": {"contains": ["loop"]}, "repeat_last": true, "answers": [{"tool_calls": [{"name": "ls"}]}]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]})
}

/// A gateway with a thread `t`.
async fn started(setup: Setup, gate: &str) -> Gateway {
    let gateway = Setup { script: script(gate), ..setup }.start().await;
    gateway.create("t").await;
    gateway
}

/// Creates a run on `t` and follows it.
async fn stream(gateway: &Gateway, body: Value) -> Response<Body> {
    let request = Request::post("/api/threads/t/runs/stream").header("content-type", "application/json");
    gateway.open_answer(request.body(body.to_string().into()).unwrap()).await
}

/// Reconnects to a run.
async fn reconnect(gateway: &Gateway, path: &str, last_event_id: Option<&str>) -> Response<Body> {
    let mut request = Request::get(path);
    if let Some(id) = last_event_id {
        request = request.header("last-event-id", id);
    }
    gateway.open_answer(request.body(Body::empty()).unwrap()).await
}

/// The run of a stream, and the path for reconnecting: its `Location` under the base of the API.
fn place(answer: &Response<Body>) -> (String, String) {
    let location = answer.headers()["location"].to_str().unwrap();
    let run = location.strip_suffix("/stream").unwrap().rsplit_once('/').unwrap().1;
    (run.to_owned(), format!("/api{location}"))
}

fn asking(text: &str, modes: Value) -> Value {
    let mut body = question(text);
    body["stream_mode"] = modes;
    body
}

#[tokio::test]
async fn a_stream_has_the_headers_by_which_proxies_pass_it_on_and_clients_find_the_run() {
    let gateway = started(Setup::default(), "none").await;
    let answer = stream(&gateway, question("hello")).await;
    let (run, _) = place(&answer);
    let headers = answer.headers().clone();
    for (name, value) in [
        ("content-type", "text/event-stream"),
        ("cache-control", "no-cache"),
        ("connection", "keep-alive"),
        ("x-accel-buffering", "no"),
        ("content-location", &format!("/api/threads/t/runs/{run}")),
        ("location", &format!("/threads/t/runs/{run}/stream")),
    ] {
        assert_eq!(headers[name], value);
    }
    let frames = sse::all(answer).await;
    assert_eq!(frames[0].data, json!({"run_id": run, "thread_id": "t"}));
    assert_eq!(gateway.run("t", &run).await["status"], "success");
    let again = reconnect(&gateway, &format!("/api/threads/t/runs/{run}/stream"), None).await;
    assert_eq!(*again.headers(), headers, "a joiner gets the same");
}

#[tokio::test]
async fn frames_are_numbered_without_gaps_between_metadata_and_an_end_without_an_id() {
    for (backend, mode) in ALL {
        let gateway = started(Setup::on(backend, mode), "none").await;
        let modes = ["values", "messages-tuple", "updates", "debug", "tasks", "checkpoints", "custom"];
        let frames = sse::all(stream(&gateway, asking("use a tool", json!(modes))).await).await;
        let (end, numbered) = frames.split_last().unwrap();
        assert_eq!(*end, Frame { name: "end".to_owned(), data: Value::Null, id: None });
        assert_eq!((numbered[0].name.as_str(), numbered[0].data.as_object().unwrap().len()), ("metadata", 2));
        let ids: Vec<(u64, usize)> = numbered
            .iter()
            .map(|frame| {
                let (ms, seq) = frame.id.as_deref().unwrap().split_once('-').unwrap();
                (ms.parse().unwrap(), seq.parse().unwrap())
            })
            .collect();
        assert!(ids.is_sorted());
        let numbers: Vec<usize> = ids.iter().map(|(_, seq)| *seq).collect();
        assert_eq!(numbers, (0..numbered.len()).collect::<Vec<_>>());

        let mut steps = sse::names(numbered);
        steps.retain(|name| *name != "debug");
        steps.dedup();
        let input = ["metadata", "values", "checkpoints"];
        let superstep = ["tasks", "messages", "updates", "tasks", "values", "checkpoints"];
        assert_eq!(steps, [&input[..], &superstep, &superstep, &superstep].concat(), "model, tools, model");
        let values = numbered.iter().rfind(|frame| frame.name == "values").unwrap();
        assert_eq!(values.data, gateway.state("t").await["values"], "{backend} {mode}");
    }
}

#[tokio::test]
async fn the_pieces_of_an_answer_make_up_its_message() {
    for mode in MODES {
        let gateway = started(Setup::on("memory", mode), "none").await;
        let frames = sse::all(stream(&gateway, asking("hello", json!("messages-tuple"))).await).await;
        let chunks: Vec<&Value> =
            frames.iter().filter(|f| f.name == "messages").map(|f| &f.data[0]).collect();
        let text: String = chunks.iter().map(|chunk| chunk["content"].as_str().unwrap()).collect();
        assert_eq!((text.as_str(), chunks.len() > 2), ("You said: hello", true));
        let message = gateway.state("t").await["values"]["messages"][1].clone();
        for chunk in &chunks {
            assert_eq!((&chunk["type"], &chunk["id"]), (&json!("AIMessageChunk"), &message["id"]));
        }
        assert_eq!(chunks.last().unwrap()["chunk_position"], "last");
    }
}

/// A title and a summary are model calls as well.
#[tokio::test]
async fn the_gateways_own_calls_of_the_model_never_show_as_messages() {
    for mode in MODES {
        let own =
            |caller: &str| json!({"when": {"caller": caller}, "answers": [{"text": "between ourselves"}]});
        let mut script = script("none");
        let rules = script["rules"].as_array_mut().unwrap();
        rules.splice(0..0, [own("middleware:title"), own("middleware:summarization")]);
        let sections = json!({
            "title": {"model_name": "m"},
            "summarization": {"enabled": true, "trigger": {"type": "messages", "value": 3},
                              "keep": {"type": "messages", "value": 1}},
        });
        let gateway = Setup { script, sections, ..Setup::on("memory", mode) }.start().await;
        gateway.create("t").await;
        for text in ["one", "two"] {
            let body = asking(text, json!(["messages-tuple", "values"]));
            let frames = sse::all(stream(&gateway, body).await).await;
            let shown = frames.iter().filter(|frame| frame.name == "messages");
            let shown: String = shown.map(|frame| frame.data[0]["content"].as_str().unwrap()).collect();
            assert_eq!(shown, format!("You said: {text}"), "{mode}");
        }
        let values = &gateway.state("t").await["values"];
        assert_eq!(
            (&values["title"], &values["summary_text"]),
            (&json!("between ourselves"), &values["title"])
        );
    }
}

#[tokio::test]
async fn a_run_that_fails_shows_an_error_unless_it_is_the_models() {
    for mode in MODES {
        let gateway = started(Setup::on("memory", mode), "none").await;
        let mut body = question("loop");
        body["config"] = json!({"recursion_limit": 2});
        let answer = stream(&gateway, body).await;
        let (run, _) = place(&answer);
        let frames = sse::all(answer).await;
        assert_eq!(sse::names(&frames), ["metadata", "values", "values", "values", "error", "end"]);
        let text = "Recursion limit of 2 reached without hitting a stop condition.";
        assert_eq!(frames[4].data, json!({"name": "GraphRecursionError", "message": text}));
        let record = gateway.run("t", &run).await;
        assert_eq!((&record["status"], &record["error"]), (&json!("error"), &json!(text)));

        let answer = stream(&gateway, question("fail")).await;
        let (run, _) = place(&answer);
        assert_eq!(sse::names(&sse::all(answer).await), ["metadata", "values", "values", "end"]);
        assert_eq!(gateway.run("t", &run).await["status"], "error");
    }
}

#[tokio::test]
async fn a_breakpoint_ends_the_stream_with_the_interrupt_and_a_command_goes_on() {
    for mode in MODES {
        let gateway = started(Setup::on("memory", mode), "none").await;
        let mut body = asking("use a tool", json!(["values", "updates"]));
        body["interrupt_before"] = json!(["tools"]);
        let frames = sse::all(stream(&gateway, body).await).await;
        assert_eq!(
            sse::names(&frames),
            ["metadata", "values", "updates", "values", "updates", "values", "end"]
        );
        assert_eq!(frames[4].data, json!({"__interrupt__": []}));
        assert_eq!(frames[5].data["__interrupt__"], json!([]));
        assert_eq!(gateway.state("t").await["next"], json!(["tools"]));
        let frames = sse::all(stream(&gateway, json!({"command": {"resume": true}})).await).await;
        assert_eq!(frames.last().unwrap().name, "end");
        let state = gateway.state("t").await;
        assert_eq!((texts(&state).len(), texts(&state)[3]), (4, "done"));
    }
}

#[tokio::test]
async fn a_client_that_comes_back_gets_what_it_misses_during_the_run_and_after_it() {
    for mode in MODES {
        let name = format!("back-{mode}");
        let gateway = started(Setup::on("sqlite", mode), &name).await;
        let mut body = asking("wait", json!(["values", "messages-tuple"]));
        body["on_disconnect"] = json!("continue");
        let answer = stream(&gateway, body).await;
        let (run, path) = place(&answer);
        let mut live = Frames::of(answer);
        let first = live.next().await.unwrap();
        let piece = live.until("messages").await;
        drop(live);
        gate(&name).reached().await;
        let back = Frames::of(reconnect(&gateway, &path, piece.id.as_deref()).await);
        gate(&name).open();
        let missed = back.rest().await;
        gateway.join("t", &run).await;

        let all = sse::all(reconnect(&gateway, &path, None).await).await;
        assert_eq!((&all[0], &all[2]), (&first, &piece));
        assert_eq!(missed, all[3..], "nothing is lost and nothing comes twice");
        let numbered = &all[..all.len() - 1];
        for (at, frame) in numbered.iter().enumerate() {
            let rest = sse::all(reconnect(&gateway, &path, frame.id.as_deref()).await).await;
            assert_eq!(rest, all[at + 1..], "after {:?}", frame.id);
        }
        let last = numbered.last().unwrap().id.clone().unwrap();
        let beyond = format!("{last}9");
        for unknown in ["-1", "", "x", "1-0", "5", " ", &beyond] {
            let replayed = sse::all(reconnect(&gateway, &path, Some(unknown)).await).await;
            assert_eq!(replayed, all, "from the start after {unknown:?}");
        }

        let gateway = gateway.reopen(mode).await;
        for id in [None, Some(last.as_str()), Some("-1")] {
            let end = sse::all(reconnect(&gateway, &path, id).await).await;
            assert_eq!(sse::names(&end), ["end"], "the stream did not outlive its process");
        }
        assert_eq!(gateway.run("t", &run).await["status"], "success");
    }
}

/// What clients may have of a run whose stream did not outlive its process: this event, none, or one of a later number.
fn had(seen: &Frame) -> Vec<Option<String>> {
    let id = seen.id.clone().unwrap();
    let (ms, seq) = id.split_once('-').unwrap();
    let (next, far) = (seq.parse::<u64>().unwrap() + 1, u64::MAX);
    vec![
        None,
        Some(id.clone()),
        Some(format!("{ms}-{next}")),
        Some(format!("{ms}-{far}")),
        Some("-1".to_owned()),
    ]
}

/// Checks that a client gets the error of this run, whatever it has.
async fn shown_to_all(gateway: &Gateway, run: &str, had: &[Option<String>], text: &str) {
    let path = format!("/api/threads/t/runs/{run}/stream");
    for last in had {
        let frames = sse::all(reconnect(gateway, &path, last.as_deref()).await).await;
        assert_eq!(sse::names(&frames), ["error", "end"], "{last:?}");
        assert_eq!(frames[0].data, json!({"message": text, "name": "RunError"}));
    }
    // The stream of a thread goes on after what a client has.
    for id in had.iter().flatten() {
        let last = format!("{run}:{id}");
        let mut frames = Frames::of(reconnect(gateway, "/api/threads/t/stream", Some(&last)).await);
        assert_eq!(frames.until("error").await.data["message"], text, "{last}");
        assert_eq!(frames.until("metadata").await.data["status"], "run_done");
    }
}

#[test]
fn a_client_that_comes_back_after_a_restart_sees_why_its_run_failed() {
    for mode in MODES {
        let name = format!("dead-{mode}");
        let first = tokio::runtime::Runtime::new().unwrap();
        let (gateway, run, seen) = first.block_on(async {
            let gateway = started(Setup::on("sqlite", mode), &name).await;
            let mut body = asking("wait", json!(["values", "messages-tuple"]));
            body["on_disconnect"] = json!("continue");
            let answer = stream(&gateway, body).await;
            let (run, _) = place(&answer);
            let seen = Frames::of(answer).until("messages").await;
            (gateway, run, seen)
        });
        drop(first);
        tokio::runtime::Runtime::new().unwrap().block_on(async {
            let gateway = gateway.reopen_dead().await;
            let text = "Gateway restarted before this run reached a durable final state.";
            assert_eq!(gateway.run("t", &run).await["error"], text);
            shown_to_all(&gateway, &run, &had(&seen), text).await;
        });
    }
}

#[tokio::test]
async fn who_comes_back_to_a_run_that_a_stopping_gateway_interrupted_is_shown_why_it_ended() {
    for mode in MODES {
        let name = format!("stopped-{mode}");
        let gateway = started(Setup::on("sqlite", mode), &name).await;
        let mut body = asking("wait", json!(["values", "messages-tuple"]));
        body["on_disconnect"] = json!("continue");
        let answer = stream(&gateway, body).await;
        let (run, _) = place(&answer);
        let seen = Frames::of(answer).until("messages").await;
        let mut queued = question("next");
        queued["multitask_strategy"] = json!("enqueue");
        let queued =
            gateway.post("/api/threads/t/runs", queued).await.ok()["run_id"].as_str().unwrap().to_owned();
        // That a user cancelled a run is no failure.
        let mut cancelled = question("never");
        cancelled["multitask_strategy"] = json!("enqueue");
        let cancelled =
            gateway.post("/api/threads/t/runs", cancelled).await.ok()["run_id"].as_str().unwrap().to_owned();
        let cancel = format!("/api/threads/t/runs/{cancelled}/cancel");
        assert_eq!(gateway.call(Method::POST, &cancel, None).await.status, 202);

        let gateway = gateway.reopen(mode).await;
        let text = "The gateway stopped before this run ended. What it completed is kept; run the thread again to go on.";
        for run in [&run, &queued] {
            let record = gateway.run("t", run).await;
            assert_eq!((&record["status"], &record["error"]), (&json!("interrupted"), &json!(text)));
            shown_to_all(&gateway, run, &had(&seen), text).await;
        }
        let record = gateway.run("t", &cancelled).await;
        assert_eq!((&record["status"], &record["error"]), (&json!("interrupted"), &Value::Null));
        let path = format!("/api/threads/t/runs/{cancelled}/stream");
        assert_eq!(sse::names(&sse::all(reconnect(&gateway, &path, None).await).await), ["end"]);
        gateway.ask("t", "on").await;
    }
}

#[tokio::test]
async fn a_client_that_falls_behind_gets_a_gap_and_the_run_goes_on() {
    for mode in MODES {
        let name = format!("gap-{mode}");
        let sections = json!({"stream_bridge": {"queue_maxsize": 2}});
        let gateway = started(Setup { sections, ..Setup::on("memory", mode) }, &name).await;
        // The client does not read until there are three frames, of which two are kept.
        let answer = stream(&gateway, asking("wait", json!(["values", "messages-tuple"]))).await;
        let (run, path) = place(&answer);
        gate(&name).reached().await;
        let frames = sse::all(answer).await;
        assert_eq!(sse::names(&frames), ["gap"], "closed without an end");
        let gap = &frames[0];
        let id = |which: &str| gap.data[which].as_str().unwrap();
        assert!(id("earliest_available_event_id").ends_with("-1"));
        assert!(id("latest_available_event_id").ends_with("-2"));
        let expected = json!({
            "code": "stream_replay_gap", "run_id": run, "requested_event_id": null,
            "earliest_available_event_id": id("earliest_available_event_id"),
            "latest_available_event_id": id("latest_available_event_id"), "recovery": "reload_durable_state",
        });
        assert_eq!((&gap.data, &gap.id), (&expected, &None));

        let latest = Some(id("latest_available_event_id"));
        let back = Frames::of(reconnect(&gateway, &path, latest).await);
        assert_eq!(gateway.run("t", &run).await["status"], "running", "the gap did not cancel it");
        gate(&name).open();
        drop(back);
        gateway.join("t", &run).await;
        assert_eq!(gateway.run("t", &run).await["status"], "success");
        let frames = sse::all(reconnect(&gateway, &path, latest).await).await;
        assert_eq!(
            (sse::names(&frames), &frames[0].data["requested_event_id"]),
            (vec!["gap"], &json!(latest))
        );
    }
}

/// What happens to a run when the client of its stream or answer disconnects.
#[tokio::test]
async fn the_client_that_created_a_run_cancels_it_by_leaving_unless_it_asked_to_continue() {
    for (backend, mode) in ALL {
        for (on_disconnect, status) in
            [(None, "interrupted"), (Some("cancel"), "interrupted"), (Some("continue"), "success")]
        {
            for form in ["stream", "wait"] {
                let name = format!("leave-{backend}-{mode}-{on_disconnect:?}-{form}");
                let gateway = started(Setup::on(backend, mode), &name).await;
                let mut body = question("wait");
                if let Some(on_disconnect) = on_disconnect {
                    body["on_disconnect"] = json!(on_disconnect);
                }
                if form == "stream" {
                    let answer = stream(&gateway, body).await;
                    gate(&name).reached().await;
                    drop(answer);
                } else {
                    tokio::select! {
                        answer = gateway.post("/api/threads/t/runs/wait", body) => panic!("{answer:?}"),
                        () = async { gate(&name).reached().await } => {}
                    }
                }
                if status == "success" {
                    gate(&name).open();
                }
                let runs = gateway.get("/api/threads/t/runs").await.ok();
                let run = runs[0]["run_id"].as_str().unwrap();
                gateway.join("t", run).await;
                assert_eq!(gateway.run("t", run).await["status"], status, "{name}");
                let expected = if status == "success" { 2 } else { 1 };
                assert_eq!(texts(&gateway.state("t").await).len(), expected, "{name}");
            }
        }
    }
}

#[tokio::test]
async fn the_client_of_a_stateless_run_cancels_it_by_leaving() {
    for form in ["stream", "wait"] {
        let name = format!("leave-stateless-{form}");
        let gateway = started(Setup::default(), &name).await;
        let mut body = question("wait");
        body["config"] = json!({"configurable": {"thread_id": "named"}});
        let path = format!("/api/runs/{form}");
        let request = Request::post(path).header("content-type", "application/json");
        let request = request.body(Body::from(body.to_string())).unwrap();
        if form == "stream" {
            let answer = gateway.open_answer(request).await;
            gate(&name).reached().await;
            drop(answer);
        } else {
            tokio::select! {
                answer = gateway.open_answer(request) => panic!("{answer:?}"),
                () = async { gate(&name).reached().await } => {}
            }
        }
        let runs = gateway.get("/api/threads/named/runs").await.ok();
        let run = runs[0]["run_id"].as_str().unwrap();
        gateway.join("named", run).await;
        assert_eq!(gateway.run("named", run).await["status"], "interrupted", "{form}");
    }
}

#[tokio::test]
async fn a_client_that_joined_a_run_cancels_it_by_leaving_only_if_it_asked_to() {
    for mode in MODES {
        for (query, status) in [("", "success"), ("?cancel_on_disconnect=true", "interrupted")] {
            let name = format!("joiner-{mode}-{status}");
            let gateway = started(Setup::on("memory", mode), &name).await;
            // The creator stays; its disconnecting would cancel the run.
            let answer = stream(&gateway, question("wait")).await;
            let (run, path) = place(&answer);
            let mut creator = Frames::of(answer);
            gate(&name).reached().await;
            let mut joiner = Frames::of(reconnect(&gateway, &format!("{path}{query}"), None).await);
            assert_eq!(joiner.next().await, creator.next().await);
            drop(joiner);
            if status == "success" {
                gate(&name).open();
            }
            let frames = creator.rest().await;
            assert_eq!(frames.last().unwrap().name, "end");
            gateway.join("t", &run).await;
            assert_eq!(gateway.run("t", &run).await["status"], status);
        }
    }
}

/// The JavaScript client joins a stateless run so: it need not know on which thread that is.
#[tokio::test]
async fn a_run_is_followed_without_its_thread() {
    let gateway = started(Setup::default(), "alone").await;
    let mut body = asking("wait", json!(["values", "updates"]));
    body["on_disconnect"] = json!("continue");
    let (run, path) = place(&stream(&gateway, body).await);
    gate("alone").reached().await;
    let alone = format!("/api/runs/{run}/stream");
    let live = Frames::of(reconnect(&gateway, &format!("{alone}?cancel_on_disconnect=0"), Some("-1")).await);
    gate("alone").open();
    let live = live.rest().await;
    gateway.join("t", &run).await;
    for query in ["", "?stream_mode=updates"] {
        let named = sse::all(reconnect(&gateway, &format!("{path}{query}"), None).await).await;
        assert_eq!(sse::all(reconnect(&gateway, &format!("{alone}{query}"), None).await).await, named);
        assert_eq!(named == live, query.is_empty(), "{query}");
    }
    let ended = format!("Run {run} is not cancellable (status: success)");
    gateway.get(&format!("{alone}?action=interrupt")).await.refused(409, &ended);
    gateway.get("/api/runs/none/stream").await.refused(404, "Run none not found");
}

/// No client's disconnecting affects a background run.
#[tokio::test]
async fn a_background_run_does_not_depend_on_who_follows_it() {
    let gateway = started(Setup::default(), "background").await;
    let mut body = question("wait");
    body["on_disconnect"] = json!("cancel");
    let record = gateway.post("/api/threads/t/runs", body).await.ok();
    let run = record["run_id"].as_str().unwrap();
    gate("background").reached().await;
    drop(reconnect(&gateway, &format!("/api/threads/t/runs/{run}/stream"), None).await);
    gate("background").open();
    gateway.join("t", run).await;
    assert_eq!(gateway.run("t", run).await["status"], "success");
}

/// The stop button of clients: cancel, then read the rest of the stream.
#[tokio::test]
async fn a_stream_request_with_an_action_cancels_the_run_and_follows_it_to_its_end() {
    for (query, status) in [("?action=interrupt", "interrupted"), ("?action=rollback", "error")] {
        for method in [Method::GET, Method::POST] {
            for wait in [false, true] {
                let name = format!("stop-{method}-{status}-{wait}");
                let gateway = started(Setup::on("memory", "delta"), &name).await;
                let run = gateway.start_run("t", "wait").await;
                gate(&name).reached().await;
                let path = format!("/api/threads/t/runs/{run}/stream{query}&wait={}", u8::from(wait));
                let request = Request::builder().method(method.clone()).uri(path).body(Body::empty());
                let answer = gateway.open_answer(request.unwrap()).await;
                if wait {
                    assert_eq!(answer.status(), 204);
                    assert_eq!(gateway.run("t", &run).await["status"], status, "it has stopped");
                } else {
                    assert_eq!(sse::names(&sse::all(answer).await), ["metadata", "values", "end"]);
                    gateway.join("t", &run).await;
                    assert_eq!(gateway.run("t", &run).await["status"], status);
                }
            }
        }
    }
}

#[tokio::test]
async fn a_run_whose_cadence_was_edited_shows_the_error_and_nothing_else() {
    let mut gateway = started(Setup::on("memory", "delta"), "none").await;
    gateway.reconfigure(|setup| setup.frequency += 1);
    let answer = stream(&gateway, question("hello")).await;
    let (run, _) = place(&answer);
    let frames = sse::all(answer).await;
    let text =
        "checkpoint_delta.snapshot_frequency is restart-required and cannot change in a running process";
    assert_eq!(sse::names(&frames), ["error", "end"]);
    assert_eq!(frames[0].data, json!({"name": "CheckpointModeReconfigurationError", "message": text}));
    assert_eq!(gateway.run("t", &run).await["error"], text);
}
