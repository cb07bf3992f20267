//! The history of a thread. (Duration notes after an answer are tested next to the code.)

use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;

use crate::support::{ALL, Gateway, MODES, Setup, connect, id, question, texts};

async fn page(gateway: &Gateway, body: Value) -> Vec<Value> {
    gateway.post("/api/threads/t/history", body).await.ok().as_array().unwrap().clone()
}

fn ids(entries: &[Value]) -> Vec<&str> {
    entries.iter().map(id).collect()
}

/// A thread with this many turns, on every backend in every mode.
async fn with_turns(backend: &'static str, mode: &'static str, turns: usize) -> Gateway {
    let gateway = Setup::on(backend, mode).start().await;
    gateway.create("t").await;
    for turn in 0..turns {
        gateway.ask("t", &format!("turn {turn}")).await;
    }
    gateway
}

#[tokio::test]
async fn entries_come_newest_first_each_with_its_messages() {
    for (backend, mode) in ALL {
        let gateway = with_turns(backend, mode, 4).await;
        let entries = gateway.history("t").await;
        // The empty checkpoint, then input, answer and duration note of each turn.
        let steps: Vec<_> = entries.iter().map(|e| e["metadata"]["step"].as_i64().unwrap()).collect();
        assert_eq!(steps, (-1..12).rev().collect::<Vec<_>>());
        for (entry, parent) in entries.iter().zip(&entries[1..]) {
            assert_eq!(entry["parent_checkpoint_id"], id(parent));
            assert_eq!(entry["parent_checkpoint"]["checkpoint_id"], id(parent));
        }
        assert_eq!(entries.last().unwrap()["parent_checkpoint"], Value::Null);
        assert_eq!(texts(&entries[0]).len(), 8);
        assert_eq!(entries[0]["values"]["title"], "turn 0");
        for entry in &entries {
            let keys: Vec<&str> = entry.as_object().unwrap().keys().map(String::as_str).collect();
            assert_eq!(
                keys,
                [
                    "checkpoint",
                    "checkpoint_id",
                    "created_at",
                    "interrupts",
                    "metadata",
                    "next",
                    "parent_checkpoint",
                    "parent_checkpoint_id",
                    "tasks",
                    "values"
                ]
            );
            let state = gateway.get(&format!("/api/threads/t/state/{}", id(entry))).await.ok();
            for key in ["checkpoint", "created_at", "interrupts", "next", "parent_checkpoint", "tasks"] {
                assert_eq!(entry[key], state[key], "{key}");
            }
            let values = entry["values"].as_object().unwrap();
            assert!(values.keys().all(|key| key == "title" || key == "messages"), "{values:?}");
            assert_eq!(
                ids_of_messages(values.get("messages")),
                ids_of_messages(state["values"].get("messages"))
            );
            assert_eq!(values.get("title"), state["values"].get("title"));
        }
        let unfinished = entries.iter().find(|e| e["metadata"]["step"] == 0).unwrap();
        assert_eq!(unfinished["next"], json!(["model"]));
        assert_eq!(unfinished["tasks"][0]["name"], "model");
    }
}

/// The ids of messages, in order; `None` without the channel.
fn ids_of_messages(messages: Option<&Value>) -> Option<Vec<&Value>> {
    messages.map(|messages| messages.as_array().unwrap().iter().map(|message| &message["id"]).collect())
}

/// Where a client that compares entries finds the checkpoint at which a message was first seen, it edits at the right
/// place.
#[tokio::test]
async fn a_message_is_first_seen_in_the_entry_of_its_turn() {
    for mode in MODES {
        let gateway = with_turns("sqlite", mode, 3).await;
        let entries = page(&gateway, json!({"limit": 100})).await;
        let head = entries[0]["values"]["messages"].as_array().unwrap();
        for (turn, message) in head.iter().step_by(2).enumerate() {
            assert_eq!(message["content"], format!("turn {turn}"));
            let has = |entry: &&Value| {
                ids_of_messages(entry["values"].get("messages"))
                    .is_some_and(|ids| ids.contains(&&message["id"]))
            };
            let first_seen = entries.iter().rfind(has).unwrap();
            assert_eq!(texts(first_seen).len(), 2 * turn + 1, "the checkpoint of its input");
            // An edit goes on from the parent.
            let before = first_seen["parent_checkpoint"].clone();
            let mut body = question("edited");
            body["checkpoint"] = before;
            gateway.post("/api/threads/t/runs/wait", body).await.ok();
            let edited = gateway.state("t").await;
            assert_eq!(texts(&edited).len(), 2 * turn + 2, "{mode}, turn {turn}");
        }
    }
}

/// The first entry has its messages whatever their size.
#[tokio::test]
async fn beyond_the_limit_in_bytes_entries_come_without_their_messages() {
    for (bytes, expected) in [(0, 1..=1), (8_000, 2..=8), (8 << 20, 12..=12)] {
        let sections = json!({"gateway": {"history_max_bytes": bytes}});
        let gateway = Setup { sections, ..Setup::on("sqlite", "full") }.start().await;
        gateway.create("t").await;
        for turn in 0..4 {
            gateway.ask("t", &format!("turn {turn} {}", "x".repeat(80))).await;
        }
        let entries = page(&gateway, json!({"limit": 100})).await;
        assert_eq!(entries.len(), 13);
        let has = |entry: &Value| entry["values"].get("messages").is_some();
        let omitted = |entry: &Value| entry["metadata"].get("messages_omitted") == Some(&json!(true));
        let with = entries.iter().take_while(|entry| has(entry)).count();
        assert!(expected.contains(&with), "{bytes}: {with} entries have messages");
        assert!(!entries[..with].iter().any(omitted), "{bytes}");
        // The checkpoint before the first turn has none to leave out.
        let (first, rest) = entries[with..].split_last().unwrap();
        assert!(rest.iter().all(|entry| omitted(entry) && !has(entry)), "{bytes}");
        assert!(!omitted(first) && !has(first), "{bytes}");
        assert_eq!(texts(&entries[0]).len(), 8);
        assert!(entries.iter().take(10).all(|entry| entry["values"]["title"].is_string()));
    }
}

#[tokio::test]
async fn metadata_keeps_the_marker_and_the_counters_and_hides_the_rest() {
    for (backend, mode) in ALL {
        let gateway = with_turns(backend, mode, 2).await;
        let entries = gateway.history("t").await;
        for entry in &entries {
            let metadata = entry["metadata"].as_object().unwrap();
            for hidden in [
                "created_at",
                "updated_at",
                "source",
                "writes",
                "parents",
                "run_durations",
                "run_message_ids",
            ] {
                assert!(!metadata.contains_key(hidden), "{hidden}");
            }
            assert!(metadata["step"].is_i64());
            assert_eq!(metadata.contains_key("svc_checkpoint_channel_mode"), mode == "delta");
        }
        let with_counters =
            entries.iter().filter(|e| e["metadata"].get("counters_since_delta_snapshot").is_some());
        assert_eq!(with_counters.count() > 0, mode == "delta");
    }
}

#[tokio::test]
async fn the_limit_has_a_default_and_two_bounds() {
    for (backend, mode) in ALL {
        let gateway = with_turns(backend, mode, 4).await;
        assert_eq!(page(&gateway, json!({})).await.len(), 10);
        assert_eq!(
            gateway
                .call(axum::http::Method::POST, "/api/threads/t/history", None)
                .await
                .ok()
                .as_array()
                .unwrap()
                .len(),
            10
        );
        assert_eq!(page(&gateway, json!({"limit": 1})).await.len(), 1);
        assert_eq!(page(&gateway, json!({"limit": 13})).await.len(), 13);
        for limit in [0, -1] {
            let answer = gateway.post("/api/threads/t/history", json!({ "limit": limit })).await;
            answer.invalid("greater_than_equal", &json!(["body", "limit"]));
        }
    }
    let gateway = with_turns("memory", "full", 0).await;
    for turn in 0..110 {
        gateway.post("/api/threads/t/state", json!({"values": {"title": turn.to_string()}})).await.ok();
    }
    for limit in [100, 101, 1000, i64::MAX] {
        let entries = page(&gateway, json!({ "limit": limit })).await;
        assert_eq!((entries.len(), &entries[0]["values"]["title"]), (100, &json!("109")));
    }
}

/// `before` is the first entry of the answer. Checkpoints that only note durations count like any other.
#[tokio::test]
async fn pages_of_any_size_follow_each_other_without_gap_or_repetition() {
    for (backend, mode) in ALL {
        let gateway = with_turns(backend, mode, 3).await;
        let all = gateway.history("t").await;
        for limit in 2..=all.len() {
            let mut paged = page(&gateway, json!({ "limit": limit })).await;
            loop {
                let last = id(paged.last().unwrap()).to_owned();
                let next = page(&gateway, json!({"limit": limit, "before": last})).await;
                assert_eq!(id(&next[0]), last);
                if next.len() == 1 {
                    break;
                }
                paged.extend(next.into_iter().skip(1));
            }
            assert_eq!(ids(&paged), ids(&all), "{limit}");
        }
        let third = id(&all[2]);
        let expected = page(&gateway, json!({"limit": 4, "before": third})).await;
        assert_eq!(ids(&expected), ids(&all[2..6]));
        assert_eq!(
            texts(&expected[0]).len(),
            texts(&gateway.get(&format!("/api/threads/t/state/{third}")).await.ok()).len()
        );
        for before in [
            json!({"checkpoint_id": third}),
            all[2]["checkpoint"].clone(),
            json!({"configurable": {"thread_id": "t", "checkpoint_id": third}}),
        ] {
            assert_eq!(page(&gateway, json!({"limit": 4, "before": before})).await, expected);
        }
        for none in [json!(null), json!({}), json!({"checkpoint_id": null}), json!({"configurable": {}})] {
            assert_eq!(ids(&page(&gateway, json!({"limit": 100, "before": none})).await), ids(&all));
        }
        for (bad, kind) in [
            (json!("x"), "checkpoint_id"),
            (json!({"checkpoint_id": "x"}), "checkpoint_id"),
            (json!(5), "string_type"),
            (json!({"configurable": []}), "dict_type"),
            (json!({"checkpoint_id": third, "configurable": {"checkpoint_id": {}}}), "string_type"),
            (
                json!({"checkpoint_id": third, "configurable": {"checkpoint_id": id(&all[3])}}),
                "checkpoint_id",
            ),
            (json!({"checkpoint_id": third, "turn": 2}), "extra_forbidden"),
            (json!({"checkpoint_id": third, "thread_id": 7}), "string_type"),
        ] {
            let answer = gateway.post("/api/threads/t/history", json!({ "before": bad })).await;
            answer.invalid(kind, &json!(["body", "before"]));
        }
        for other in [
            json!({"thread_id": "other", "checkpoint_id": third}),
            json!({"thread_id": "t", "configurable": {"thread_id": "other", "checkpoint_id": third}}),
        ] {
            let answer = gateway.post("/api/threads/t/history", json!({ "before": other })).await;
            answer.refused(400, "before thread_id does not match request thread_id");
        }
        let first_of_all = page(&gateway, json!({"before": id(all.last().unwrap())})).await;
        assert_eq!(ids(&first_of_all), [id(all.last().unwrap())]);
    }
}

/// Nothing of it is passed over: a history would begin elsewhere than its client means.
#[tokio::test]
async fn a_history_begins_where_all_of_its_bound_says() {
    for (backend, mode) in ALL {
        let gateway = with_turns(backend, mode, 1).await;
        let all = gateway.history("t").await;
        let (second, third) = (id(&all[1]), id(&all[2]));
        for before in [
            json!({"id": third}),
            json!({"checkpoint_id": third, "id": third, "checkpoint_ns": "", "checkpoint_map": {}}),
            json!({"configurable": {"id": third, "checkpoint_ns": ""}, "checkpoint_id": third}),
        ] {
            let found = page(&gateway, json!({ "before": before })).await;
            assert_eq!(ids(&found), ids(&all[2..]), "{backend} {mode}: {before}");
        }
        for (bad, kind) in [
            (json!({"checkpoint_id": third, "id": second}), "checkpoint_id"),
            (json!({"checkpoint_id": third, "id": 5}), "string_type"),
            (json!({"checkpoint_id": third, "ts": 5}), "string_type"),
            (json!({"checkpoint_id": third, "checkpoint_ns": 5}), "string_type"),
            (json!({"checkpoint_id": third, "checkpoint_map": {"": third}}), "unsupported"),
            (json!({"checkpoint_id": third, "checkpoint_map": []}), "unsupported"),
            (json!({"configurable": {"configurable": {"checkpoint_id": third}}}), "extra_forbidden"),
        ] {
            let answer = gateway.post("/api/threads/t/history", json!({ "before": bad })).await;
            answer.invalid(kind, &json!(["body", "before"]));
        }
        let nested = json!({"before": {"checkpoint_id": third, "checkpoint_ns": "tools:1"}});
        let answer = gateway.post("/api/threads/t/history", nested).await;
        answer.refused(400, "before checkpoint_ns does not match that of the history");
    }
}

#[tokio::test]
async fn a_metadata_filter_selects_entries() {
    for (backend, mode) in ALL {
        let gateway = with_turns(backend, mode, 1).await;
        let run = gateway.ask("t", "the one").await;
        let of_run = page(&gateway, json!({"metadata": {"run_id": run}})).await;
        assert_eq!(of_run.len(), 3);
        assert_eq!(texts(&of_run[0]).len(), 4, "the first entry of the answer has messages");
        let inputs = page(&gateway, json!({"metadata": {"source": "input"}})).await;
        assert_eq!(inputs.len(), 3, "the empty checkpoint and one a run");
        assert_eq!(page(&gateway, json!({"metadata": {"run_id": "none"}})).await, Vec::<Value>::new());
    }
}

#[tokio::test]
async fn answers_and_tool_results_have_their_run_and_the_last_answer_of_each_its_duration() {
    for (backend, mode) in ALL {
        let script = json!({"rules": [
            {"when": {"contains": ["tool"]}, "answers": [{"tool_calls": [{"name": "ls"}]}, {"text": "done"}]},
            {"answers": [{"text": "plain"}]},
        ]});
        let gateway = Setup { script, ..Setup::on(backend, mode) }.start().await;
        gateway.create("t").await;
        let runs = [
            gateway.ask("t", "tool one").await,
            gateway.ask("t", "two").await,
            gateway.ask("t", "tool three").await,
        ];
        let expected: Vec<(&str, Option<&str>, bool)> = vec![
            ("human", None, false),
            ("ai", Some(&runs[0]), false),
            ("tool", Some(&runs[0]), false),
            ("ai", Some(&runs[0]), true),
            ("human", None, false),
            ("ai", Some(&runs[1]), true),
            ("human", None, false),
            ("ai", Some(&runs[2]), false),
            ("tool", Some(&runs[2]), false),
            ("ai", Some(&runs[2]), true),
        ];
        let shown = |entry: &Value| -> Vec<(String, Option<String>, bool)> {
            let messages = entry["values"]["messages"].as_array().unwrap().iter();
            let shown = messages.map(|m| {
                let run = m.get("run_id").map(|run| run.as_str().unwrap().to_owned());
                let duration = m["additional_kwargs"].get("turn_duration");
                assert!(duration.is_none_or(Value::is_u64), "{m}");
                (m["type"].as_str().unwrap().to_owned(), run, duration.is_some())
            });
            shown.collect()
        };
        let expected: Vec<_> = expected
            .into_iter()
            .map(|(kind, run, last)| (kind.to_owned(), run.map(str::to_owned), last))
            .collect();
        let first = gateway.history("t").await;
        assert_eq!(shown(&first[0]), expected);
        for _ in 0..3 {
            assert_eq!(gateway.history("t").await, first, "reading writes nothing");
        }
        let second_turn = first.iter().position(|e| e["metadata"]["run_id"] == runs[1].as_str()).unwrap();
        let older = page(&gateway, json!({"limit": 1, "before": id(&first[second_turn])})).await;
        assert_eq!(shown(&older[0]), expected[..6], "also where the page begins further back");
    }
}

/// Scenario 11. The duration note needs the thread, which the run holds.
#[tokio::test]
async fn reading_during_a_run_neither_waits_nor_writes() {
    for mode in MODES {
        let name = format!("history-{mode}");
        let script = json!({"rules": [
            {"when": {"contains": ["wait"]}, "answers": [{"text": "late", "gate": {"name": name}}]},
            {"answers": [{"text": "now"}]},
        ]});
        let gateway = Setup { script, ..Setup::on("sqlite", mode) }.start().await;
        gateway.create("t").await;
        gateway.ask("t", "one").await;
        let run = gateway.start_run("t", "wait").await;
        gate(&name).reached().await;
        let rows = gateway.rows().await;
        for _ in 0..5 {
            let entries = gateway.history("t").await;
            assert_eq!(texts(&entries[0]), ["one", "now", "wait"]);
        }
        assert_eq!(gateway.rows().await, rows);
        gate(&name).open();
        gateway.join("t", &run).await;
        let head = gateway.history("t").await.remove(0);
        assert_eq!(texts(&head), ["one", "now", "wait", "late"]);
    }
}

#[tokio::test]
async fn an_interrupted_thread_shows_its_tasks() {
    for mode in MODES {
        let script = json!({"rules": [{"answers": [{"tool_calls": [{"name": "ls"}]}, {"text": "done"}]}]});
        let gateway = Setup { mode, script, ..Setup::default() }.start().await;
        gateway.create("t").await;
        let mut body = question("go");
        body["interrupt_before"] = json!(["tools"]);
        gateway.post("/api/threads/t/runs/wait", body).await.ok();
        let entry = gateway.history("t").await.remove(0);
        assert_eq!(entry["next"], json!(["tools"]));
        let task = &entry["tasks"][0];
        assert_eq!((&task["name"], &task["error"]), (&json!("tools"), &Value::Null));
        for field in ["id", "interrupts", "checkpoint", "state", "result"] {
            assert!(task.get(field).is_some(), "{field}");
        }
    }
}

/// A failed run has no duration note; its record has the duration.
#[tokio::test]
async fn the_duration_of_a_failed_run_comes_from_its_record() {
    for mode in MODES {
        let script = json!({"rules": [
            {"when": {"contains": ["fail"]}, "answers": [{"error": {"kind": "fatal", "message": "no"}}]},
            {"answers": [{"text": "now"}]},
        ]});
        let gateway = Setup { script, ..Setup::on("sqlite", mode) }.start().await;
        gateway.create("t").await;
        gateway.ask("t", "one").await;
        let run = gateway.ask("t", "fail").await;
        let failed = run.clone();
        let gateway = gateway
            .reopen_after(mode, |data| async move {
                let db = connect(&data.join("gateway.db"));
                let times = "created_at = '2026-01-01T00:00:00.600000+00:00', updated_at = '2026-01-01T00:01:15.500000+00:00'";
                let sql = format!("UPDATE runs SET {times} WHERE run_id = $1");
                assert_eq!(db.execute(&sql, [failed]).unwrap(), 1);
            })
            .await;
        let entry = page(&gateway, json!({"limit": 1})).await.remove(0);
        let messages = entry["values"]["messages"].as_array().unwrap();
        let last = messages.last().unwrap();
        assert_eq!((&last["run_id"], &last["additional_kwargs"]["turn_duration"]), (&json!(run), &json!(74)));
        assert!(
            messages[1]["additional_kwargs"]["turn_duration"].is_u64(),
            "the other one is known from its note"
        );
    }
}

/// A read of the history notes what it had to look up. A run that comes at the same moment is not refused for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_right_after_a_read_is_not_refused_because_of_the_note_of_the_read() {
    let script = json!({"rules": [{"answers": [{"error": {"kind": "fatal", "message": "no"}}]}]});
    let gateway = Setup { script, ..Setup::on("sqlite", "full") }.start().await;
    gateway.create("t").await;
    for turn in 0..20 {
        // A failed run has noted nothing.
        let run = gateway.post("/api/threads/t/runs", question(&turn.to_string())).await;
        assert_eq!(run.status, 200, "turn {turn}: {}", run.body);
        gateway.join("t", run.body["run_id"].as_str().unwrap()).await;
        gateway.history("t").await;
    }
}
