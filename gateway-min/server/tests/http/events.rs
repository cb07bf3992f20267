//! The events of a run.

use serde_json::{Value, json};

use crate::support::{Gateway, Setup};

async fn events(gateway: &Gateway, run: &str, query: &str) -> Vec<Value> {
    let path = format!("/api/threads/t/runs/{run}/events{query}");
    gateway.get(&path).await.ok().as_array().unwrap().clone()
}

fn types(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["event_type"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn the_events_of_a_run_come_in_order_and_can_be_filtered_and_paged() {
    for store in ["memory", "db"] {
        let script = json!({"rules": [{"answers": [{"tool_calls": [{"name": "ls"}]}, {"text": "done"}]}]});
        let gateway = Setup { events: store, script, ..Setup::default() }.start().await;
        gateway.create("t").await;
        gateway.ask("t", "first").await;
        let run = gateway.ask("t", "second").await;
        let all = events(&gateway, &run, "").await;
        assert_eq!(
            types(&all),
            [
                "run.start",
                "llm.human.input",
                "llm.ai.response",
                "llm.tool.result",
                "llm.ai.response",
                "run.end",
                "run.delivery"
            ]
        );
        let seqs: Vec<i64> = all.iter().map(|event| event["seq"].as_i64().unwrap()).collect();
        assert_eq!(seqs, (8..15).collect::<Vec<_>>(), "the numbers are the thread's");
        let keys: Vec<&str> = all[1].as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(
            keys,
            ["category", "content", "created_at", "event_type", "metadata", "run_id", "seq", "thread_id"]
        );
        assert_eq!((&all[1]["thread_id"], &all[1]["run_id"]), (&json!("t"), &json!(run)));
        assert_eq!(
            (&all[1]["category"], &all[1]["content"]["content"]),
            (&json!("message"), &json!("second"))
        );
        assert_eq!(all[2]["metadata"]["caller"], "lead_agent");
        assert!(all[0]["created_at"].as_str().unwrap().ends_with("+00:00"));

        let one = events(&gateway, &run, "?event_types=llm.ai.response").await;
        assert_eq!(types(&one), ["llm.ai.response", "llm.ai.response"]);
        let two = events(&gateway, &run, "?event_types=run.end,run.start").await;
        assert_eq!(types(&two), ["run.start", "run.end"]);
        for none in ["?event_types=none", "?event_types=run.end%20", "?event_types=RUN.END", "?event_types=,"]
        {
            assert_eq!(events(&gateway, &run, none).await, Vec::<Value>::new(), "{none}");
        }
        assert_eq!(events(&gateway, &run, "?event_types=").await, all);
        assert_eq!(events(&gateway, &run, "?task_id=none").await, Vec::<Value>::new());
        assert_eq!(events(&gateway, &run, "?after_seq=10").await, all[3..]);
        assert_eq!(events(&gateway, &run, "?limit=2").await, all[..2]);
        assert_eq!(
            events(&gateway, &run, "?limit=1&after_seq=12&event_types=run.end,run.delivery").await,
            all[5..6]
        );
        let mut paged = Vec::new();
        loop {
            let after = paged.last().map_or(1, |event: &Value| event["seq"].as_i64().unwrap());
            let next = events(&gateway, &run, &format!("?limit=3&after_seq={after}")).await;
            if next.is_empty() {
                break;
            }
            paged.extend(next);
        }
        assert_eq!(paged, all);
    }
}

#[tokio::test]
async fn parameters_have_bounds_and_unknown_runs_have_no_events() {
    let gateway = Setup::default().start().await;
    for (query, kind, field) in [
        ("limit=0", "greater_than_equal", "limit"),
        ("limit=2001", "less_than_equal", "limit"),
        ("limit=x", "int_parsing", "limit"),
        ("after_seq=0", "greater_than_equal", "after_seq"),
    ] {
        let answer = gateway.get(&format!("/api/threads/t/runs/r/events?{query}")).await;
        answer.invalid(kind, &json!(["query", field]));
    }
    assert_eq!(events(&gateway, "r", "?limit=2000&after_seq=1").await, Vec::<Value>::new());
    gateway.create("t").await;
    let run = gateway.ask("t", "hello").await;
    assert_eq!(events(&gateway, "r", "").await, Vec::<Value>::new());
    let other = gateway.get(&format!("/api/threads/u/runs/{run}/events")).await.ok();
    assert_eq!(other, json!([]), "a run is found in its own thread only");
}
