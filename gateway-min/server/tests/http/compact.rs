//! Compacting a conversation.

use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;

use crate::support::{ALL, Answer, Gateway, MODES, Setup, id, texts};

fn setup(backend: &'static str, mode: &'static str, summarization: Value) -> Setup {
    let script = json!({"rules": [
        {"when": {"caller": "middleware:summarization", "contains": ["unspeakable"]},
         "answers": [{"error": {"kind": "fatal", "message": "no"}}]},
        {"when": {"caller": "middleware:summarization"}, "answers": [{"text": "They talked."}]},
        {"when": {"contains": ["wait"]}, "answers": [{"text": "late", "gate": {"name": format!("compact-{mode}")}}]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]});
    Setup { script, sections: json!({ "summarization": summarization }), ..Setup::on(backend, mode) }
}

async fn compact(gateway: &Gateway, body: Value) -> Answer {
    gateway.post("/api/threads/t/compact", body).await
}

#[tokio::test]
async fn a_summary_takes_the_place_of_the_beginning() {
    for (backend, mode) in ALL {
        for frequency in [1, 10] {
            let setup = Setup { frequency, ..setup(backend, mode, json!({"enabled": true})) };
            let gateway = setup.start().await;
            gateway.create("t").await;
            for text in ["one", "two", "three"] {
                gateway.ask("t", text).await;
            }
            let before = gateway.state("t").await;
            let keep = json!({"type": "messages", "value": 2.0});
            let done = compact(&gateway, json!({ "keep": keep })).await.ok();
            let after = gateway.state("t").await;
            assert!(done["total_tokens"].as_u64().unwrap() > 0);
            assert_eq!(
                done,
                json!({"thread_id": "t", "compacted": true, "reason": null, "removed_message_count": 4,
                       "preserved_message_count": 2, "summary_updated": true, "checkpoint_id": id(&after),
                       "total_tokens": done["total_tokens"]})
            );
            assert_eq!(after["parent_checkpoint_id"], id(&before));
            assert_eq!((&after["next"], &after["metadata"]["source"]), (&json!([]), &json!("update")));
            assert_eq!(after["metadata"]["svc_agent_name"], "__default__");
            let mut expected = before["values"].clone();
            expected["messages"] = json!(before["values"]["messages"].as_array().unwrap()[4..]);
            expected["summary_text"] = json!("They talked.");
            assert_eq!(after["values"], expected, "all else is kept");

            let again = compact(&gateway, json!({ "keep": keep })).await.ok();
            assert_eq!(
                (&again["compacted"], &again["reason"]),
                (&json!(false), &json!("not_enough_messages"))
            );
            assert_eq!(id(&gateway.state("t").await), id(&after), "nothing was written");
            gateway.ask("t", "four").await;
            let gateway = if backend == "memory" { gateway } else { gateway.reopen(mode).await };
            let state = gateway.state("t").await;
            assert_eq!(texts(&state), ["three", "You said: three", "four", "You said: four"]);
            assert_eq!(state["values"]["summary_text"], "They talked.");
            let old = gateway.get(&format!("/api/threads/t/state/{}", id(&before))).await.ok();
            assert_eq!(old["values"], before["values"]);
        }
    }
}

#[tokio::test]
async fn what_cannot_be_compacted_is_refused_or_left_and_nothing_is_written() {
    for mode in MODES {
        let mut gateway = setup("sqlite", mode, json!({"enabled": true})).start().await;
        gateway.create("t").await;
        gateway.ask("t", "unspeakable").await;
        gateway.ask("t", "two").await;
        let rows = gateway.rows().await;
        let keep = json!({"type": "messages", "value": 2});
        compact(&gateway, json!({ "keep": keep })).await.refused(500, "Failed to compact thread context.");
        for body in [
            json!({}),
            json!({"keep": keep, "force": false}),
            json!({"keep": {"type": "fraction", "value": 1.0}}),
        ] {
            let left = compact(&gateway, body.clone()).await.ok();
            assert_eq!(left["reason"], "not_enough_messages", "{body}");
            assert_eq!(
                (&left["removed_message_count"], &left["preserved_message_count"]),
                (&json!(0), &json!(4))
            );
        }
        for bad in [
            json!({"type": "messages", "value": 0}),
            json!({"type": "messages", "value": 2.5}),
            json!({"type": "messages", "value": 2, "unit": "turns"}),
        ] {
            compact(&gateway, json!({ "keep": bad })).await.invalid("value_error", &json!(["body", "keep"]));
        }
        let long = json!({"model_name": "x".repeat(129)});
        compact(&gateway, long).await.invalid("string_too_long", &json!(["body", "model_name"]));
        let text = "Model 'gpt-9' is not in the configured model allowlist";
        compact(&gateway, json!({"model_name": "gpt-9"})).await.refused(400, text);
        let none = gateway.post("/api/threads/none/compact", json!({})).await;
        none.refused(404, "Thread none not found");
        assert_eq!(gateway.rows().await, rows);

        let run = gateway.start_run("t", "wait").await;
        gate(&format!("compact-{mode}")).reached().await;
        let busy = "Thread has a run in flight. Compact after the run finishes.";
        compact(&gateway, json!({})).await.refused(409, busy);
        gate(&format!("compact-{mode}")).open();
        gateway.join("t", &run).await;
        gateway.reconfigure(|setup| setup.sections = json!({}));
        compact(&gateway, json!({})).await.refused(409, "Context compaction is disabled.");
    }
}

#[tokio::test]
async fn a_mismatch_is_told() {
    let gateway = setup("sqlite", "delta", json!({"enabled": true})).start().await;
    gateway.create("t").await;
    gateway.ask("t", "one").await;
    let gateway = gateway.reopen("full").await;
    let text = "Thread t: Thread requires delta mode; materialize and convert its checkpoints before using full mode.";
    compact(&gateway, json!({})).await.refused(409, text);
}

/// What a compaction leaves is the state before the next run: summary, binding and other channels.
#[tokio::test]
async fn a_run_behind_a_compaction_is_rolled_back_to_what_the_compaction_left() {
    for (backend, mode) in ALL {
        let setup = setup(backend, mode, json!({"enabled": true}));
        let name = format!("compact-rollback-{backend}-{mode}");
        let script = json!({"rules": [
            {"when": {"contains": ["hang"]}, "answers": [{"text": "never", "gate": {"name": name}}]},
            setup.script["rules"][1], setup.script["rules"][3],
        ]});
        let gateway = Setup { script, ..setup }.start().await;
        gateway.create("t").await;
        for text in ["one", "two"] {
            gateway.ask_as("t", "writer", text).await;
        }
        gateway
            .post("/api/threads/t/state", json!({"values": {"artifacts": ["x"], "todos": ["y"]}}))
            .await
            .ok();
        let keep = json!({"type": "messages", "value": 2});
        assert_eq!(compact(&gateway, json!({ "keep": keep })).await.ok()["compacted"], true);
        let before = gateway.state("t").await;
        assert_eq!(before["metadata"]["svc_agent_name"], "writer");
        let run = gateway.start_run("t", "hang").await;
        gate(&name).reached().await;
        let stop = format!("/api/threads/t/runs/{run}/cancel?wait=true&action=rollback");
        assert_eq!(gateway.post(&stop, json!({})).await.status, 204);
        let gateway = if backend == "sqlite" { gateway.reopen(mode).await } else { gateway };
        let state = gateway.state("t").await;
        assert_eq!(state["values"], before["values"], "{backend} {mode}");
        assert_eq!(state["metadata"]["svc_agent_name"], "writer", "not the cancelled run's");
        assert_eq!(
            (texts(&state), &state["values"]["summary_text"]),
            (vec!["two", "You said: two"], &json!("They talked."))
        );
        gateway.ask("t", "three").await;
        assert_eq!(texts(&gateway.state("t").await)[2..], ["three", "You said: three"]);
    }
}

/// With a limit of tokens, the question of the turn keeps what the messages used that are summarized: a run that goes on
/// with the turn has no more to spend than before.
#[tokio::test]
async fn a_compaction_gives_no_tokens_back() {
    let answer = |number: usize| {
        json!({"text": format!("{number}."), "tool_calls": [{"name": "glob", "args": {"pattern": number.to_string()}}],
               "usage": {"input_tokens": 9, "output_tokens": 1}})
    };
    let script = json!({"rules": [
        {"when": {"caller": "middleware:summarization"}, "answers": [{"text": "They searched."}]},
        {"answers": [answer(0), answer(1), {"text": "Done.", "usage": {"input_tokens": 9, "output_tokens": 1}}]},
    ]});
    for (limit, kept) in [
        (
            json!({"enabled": true, "max_tokens": 1000}),
            json!({"input_tokens": 18, "output_tokens": 2, "total_tokens": 20}),
        ),
        (json!({"enabled": false}), Value::Null),
    ] {
        let sections = json!({"summarization": {"enabled": true}, "token_budget": limit});
        let setup = Setup { script: script.clone(), sections, ..Setup::on("memory", "delta") };
        let gateway = setup.start().await;
        gateway.create("t").await;
        gateway.ask("t", "go").await;
        let keep = json!({"type": "messages", "value": 1});
        let done = compact(&gateway, json!({ "keep": keep })).await.ok();
        assert_eq!(done["removed_message_count"], 4, "{done}");
        let state = gateway.state("t").await;
        let question = &state["values"]["messages"][0];
        assert_eq!(question["content"], "go");
        assert_eq!(question["additional_kwargs"]["summarized_token_usage"], kept);
    }
}
