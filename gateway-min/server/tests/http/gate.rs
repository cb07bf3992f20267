//! A process in full mode opens a thread that was written in delta mode (service reference, "Compatibility gate").

use axum::http::Method;
use serde_json::{Value, json};

use threadkeep_testing::Log;

use crate::support::{DURABLE, Gateway, Setup, id, question, texts};

const MISMATCH: &str =
    "Thread t: Thread requires delta mode; materialize and convert its checkpoints before using full mode.";

/// A thread `t` written in delta mode, in a gateway that runs in full mode, and the id of one of its checkpoints.
async fn mismatching(backend: &'static str) -> (Gateway, String) {
    let gateway = Setup::on(backend, "delta").start().await;
    gateway.create("t").await;
    gateway.create("other").await;
    gateway.ask("t", "one").await;
    let checkpoint = id(&gateway.state("t").await).to_owned();
    gateway.ask("t", "two").await;
    (gateway.reopen("full").await, checkpoint)
}

#[tokio::test]
async fn every_gated_route_answers_409_before_anything_else_and_changes_nothing() {
    for backend in DURABLE {
        let (gateway, checkpoint) = mismatching(backend).await;
        let none = "0199aaaa-0000-7000-8000-000000000000";
        let rows = gateway.rows().await;
        let state = "/api/threads/t/state";
        let at = |id: &str| format!("{state}/{id}");
        let requests: Vec<(Method, String, Option<Value>)> = vec![
            (Method::GET, "/api/threads/t".into(), None),
            (Method::GET, state.into(), None),
            (Method::GET, at(&checkpoint), None),
            (Method::GET, at(none), None),
            (Method::GET, at("x"), None),
            (Method::POST, at("checkpoint"), Some(json!({}))),
            (Method::POST, at("checkpoint"), Some(json!({"checkpoint": {"checkpoint_id": none}}))),
            (Method::POST, at("checkpoint"), Some(json!({"checkpoint": "x"}))),
            (Method::POST, state.into(), Some(json!({"values": {"title": "x"}}))),
            (Method::POST, state.into(), Some(json!({"values": {"no_such": 1}}))),
            (Method::POST, state.into(), Some(json!({"checkpoint_id": ""}))),
            (Method::POST, state.into(), Some(json!({"checkpoint_id": none, "values": {"title": "x"}}))),
            (Method::POST, "/api/threads/t/history".into(), Some(json!({}))),
            (
                Method::POST,
                "/api/threads/t/history".into(),
                Some(json!({"limit": 1000, "before": checkpoint})),
            ),
            (Method::POST, "/api/threads/t/history".into(), Some(json!({"metadata": {"no": "match"}}))),
        ];
        for (method, path, body) in requests {
            let answer = gateway.call(method.clone(), &path, body.clone()).await;
            answer.refused(409, MISMATCH);
            assert_eq!(answer.body.as_object().unwrap().len(), 1, "{method} {path} {body:?}");
        }
        assert_eq!(gateway.rows().await, rows, "nothing was written");
        let malformed = gateway.post("/api/threads/t/history", json!({"limit": 0})).await;
        malformed.invalid("greater_than_equal", &json!(["body", "limit"]));
    }
}

/// The newest checkpoint of a thread decides, even if the thread has no record.
#[tokio::test]
async fn a_thread_without_a_record_is_gated_too() {
    let (gateway, _) = mismatching("sqlite").await;
    let gateway = gateway
        .reopen_after("full", |data| async move {
            let db = crate::support::connect(&data.join("gateway.db"));
            db.execute_batch("DELETE FROM threads_meta WHERE thread_id = 't'").unwrap();
        })
        .await;
    gateway.get("/api/threads/t").await.refused(409, MISMATCH);
    gateway.post("/api/threads/t/state", json!({"values": {}})).await.refused(409, MISMATCH);
}

#[tokio::test]
async fn routes_on_records_do_not_look_at_the_mode() {
    for backend in DURABLE {
        let (gateway, _) = mismatching(backend).await;
        let found = gateway.post("/api/threads/search", json!({"ids": ["t"]})).await.ok();
        assert_eq!((&found[0]["thread_id"], &found[0]["values"]), (&json!("t"), &json!({"title": "one"})));
        assert_eq!(gateway.post("/api/threads/count", json!({})).await.ok(), json!(2));
        let patched = gateway.patch("/api/threads/t", json!({"metadata": {"a": 1}})).await.ok();
        assert_eq!(patched["metadata"], json!({"a": 1}));
        let created = gateway.post("/api/threads", json!({"thread_id": "t"})).await.ok();
        assert_eq!(created["metadata"], json!({"a": 1}), "creating it again finds it");
        let runs = gateway.get("/api/threads/t/runs").await.ok();
        let run = runs[0]["run_id"].as_str().unwrap();
        let events = gateway.get(&format!("/api/threads/t/runs/{run}/events")).await.ok();
        assert_eq!(events[0]["event_type"], "run.start");
        gateway.delete("/api/threads/t").await.ok();
        gateway.get("/api/threads/t").await.refused(404, "Thread t not found");
        gateway.create("t").await;
        gateway.ask("t", "new").await;
        assert_eq!(
            texts(&gateway.state("t").await),
            ["new", "You said: new"],
            "the id is free for this mode"
        );
    }
}

/// The answer says no more than that the usage of the context is unknown.
#[tokio::test]
async fn the_token_usage_of_a_mismatching_thread_says_in_the_log_what_it_lacks() {
    for backend in DURABLE {
        let log = Log::default();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(log.clone()).finish();
        let _logged = tracing::subscriber::set_default(subscriber);
        let (gateway, _) = mismatching(backend).await;
        let warnings = || {
            let text = log.text();
            let about = text.lines().filter(|line| line.contains("cannot determine the context usage"));
            about.map(str::to_owned).collect::<Vec<String>>()
        };
        assert!(warnings().is_empty(), "{}", log.text());
        let usage = gateway.get("/api/threads/t/token-usage").await.ok();
        assert_eq!((&usage["context_usage"], &usage["total_runs"]), (&Value::Null, &json!(2)), "{backend}");
        let logged = warnings();
        let [warning] = &logged[..] else { panic!("{backend}: {}", log.text()) };
        let mismatch = MISMATCH.trim_start_matches("Thread t: ");
        assert!(warning.contains(" WARN ") && warning.contains("thread=t"), "{backend}: {warning}");
        assert!(warning.contains(mismatch), "{backend}: {warning}");
    }
}

/// A delta process converts full threads; after that a full process refuses them.
#[tokio::test]
async fn a_full_thread_goes_on_in_delta_mode_and_does_not_come_back() {
    for backend in DURABLE {
        let gateway = Setup::on(backend, "full").start().await;
        gateway.create("t").await;
        gateway.ask("t", "one").await;
        let full = gateway.history("t").await;
        let gateway = gateway.reopen("delta").await;
        assert_eq!(texts(&gateway.state("t").await), ["one", "You said: one"]);
        let titled = gateway.post("/api/threads/t/state", json!({"values": {"title": "x"}})).await.ok();
        assert_eq!(titled["metadata"]["svc_checkpoint_channel_mode"], "delta");
        gateway.ask("t", "two").await;
        let entries = gateway.history("t").await;
        assert_eq!(texts(&entries[0]), ["one", "You said: one", "two", "You said: two"]);
        let ids = |entries: &[Value]| entries.iter().map(|e| id(e).to_owned()).collect::<Vec<_>>();
        assert_eq!(ids(&entries[entries.len() - full.len()..]), ids(&full));
        for entry in &full {
            let state = gateway.get(&format!("/api/threads/t/state/{}", id(entry))).await.ok();
            assert_eq!(state["metadata"].get("svc_checkpoint_channel_mode"), None);
        }
        let gateway = gateway.reopen("full").await;
        gateway.get("/api/threads/t").await.refused(409, MISMATCH);
        let old = gateway.get(&format!("/api/threads/t/state/{}", id(&full[0]))).await;
        old.refused(409, MISMATCH);
        let refused = gateway.post("/api/threads/t/runs/wait", question("three")).await.ok();
        assert_eq!(refused["status"], "error");
    }
}

/// Each of two processes in different forms would serve; only the warning says what is wrong.
#[tokio::test]
async fn a_process_in_another_form_than_the_database_says_so_at_each_start() {
    let mode = "the threads of this database are stored in full mode, and database.checkpoint_channel_mode of this \
                process is delta: a process in full mode refuses threads that one in delta mode has written to";
    let cadence = "database.checkpoint_delta.snapshot_frequency of this database is 3, and that of this process is 7: \
                   in delta mode";
    for backend in DURABLE {
        let log = Log::default();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(log.clone()).finish();
        let _logged = tracing::subscriber::set_default(subscriber);
        let counts = || [mode, cadence, "of this process is"].map(|part| log.count(part));
        let mut gateway = Setup::on(backend, "full").start().await.reopen("full").await;
        assert_eq!(counts(), [0; 3], "{backend}: {}", log.text());
        // Whichever processes have started since, the database keeps what the first one wrote: nobody has changed it.
        for _ in 0..2 {
            for (ours, frequency, more, command) in [
                ("delta", 3, [1, 0, 1], "'threadkeep convert --all --to delta'"),
                ("full", 7, [0, 1, 1], "'threadkeep convert --all --to full --frequency 7'"),
                ("delta", 7, [1, 1, 2], "'threadkeep convert --all --to delta --frequency 7'"),
                ("full", 3, [0, 0, 0], ""),
            ] {
                let (before, warnings) = (counts(), log.count(command));
                gateway.reconfigure(|setup| setup.frequency = frequency);
                gateway = gateway.reopen(ours).await;
                let after = counts();
                let said = [0, 1, 2].map(|each| after[each] - before[each]);
                assert_eq!(said, more, "{backend} {ours} {frequency}: {}", log.text());
                assert!(
                    command.is_empty() || log.count(command) == warnings + 1,
                    "{command}: {}",
                    log.text()
                );
            }
        }
    }
}
