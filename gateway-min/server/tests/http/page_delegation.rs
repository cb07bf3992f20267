//! What happens inside of a delegation: its steps over the API, and on the page.

use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;

use crate::page::html;
use crate::support::{ALL, Setup, question};

#[tokio::test]
async fn the_steps_of_a_subagent_are_shown_while_it_works_and_afterwards() {
    for (backend, mode) in ALL {
        let name = format!("page-delegation-{backend}-{mode}");
        let task = json!({"name": "task", "args": {"prompt": "look <there>", "description": "rivers",
            "subagent_type": "general-purpose"}});
        let script = json!({"rules": [
            {"when": {"caller": "subagent"}, "answers": [
                {"text": "Looking <b>.", "tool_calls": [{"name": "ls", "args": {"path": "."}}]},
                {"text": "Found <i>.", "gate": {"name": name}},
            ]},
            {"answers": [{"tool_calls": [task]}, {"text": "Done."}]},
        ]});
        let gateway = Setup { script, ..Setup::on(backend, mode) }.start().await;
        gateway.create("t").await;
        let mut body = question("go");
        body["context"] = json!({"subagent_enabled": true});
        let run = gateway.post("/api/threads/t/runs", body).await.ok();
        gate(&name).reached().await;

        let executions = gateway.get("/api/threads/t/executions").await.ok();
        let id = executions["executions"][0]["execution_id"].as_str().unwrap().to_owned();
        let path = format!("/api/threads/t/executions/{id}/steps");
        let steps = gateway.get(&path).await.ok();
        assert_eq!(
            (&steps["execution_id"], &steps["attempt"], &steps["status"]),
            (&json!(id), &json!(1), &json!("running"))
        );
        let said = steps["steps"].as_array().unwrap();
        assert_eq!(
            said[0],
            json!({"message_index": 1, "kind": "ai", "text": "Looking <b>.", "truncated": false,
                   "tool_calls": [{"name": "ls", "args": {"path": "."}}]})
        );
        assert_eq!(
            (&said[1]["kind"], &said[1]["tool_name"], &said[1]["message_index"]),
            (&json!("tool"), &json!("ls"), &json!(2))
        );
        assert_eq!(said.len(), 2, "{steps}");

        let page = gateway.get("/threads/t").await;
        let shown = html(&page);
        assert!(shown.contains("<ol class=\"steps\">") && shown.contains("Looking &lt;b&gt;."), "{shown}");
        assert!(shown.contains(&format!("href=\"/threads/t/executions/{id}\"")), "{shown}");
        let watched = gateway.get(&format!("/threads/t/executions/{id}")).await;
        assert!(
            html(&watched).contains("2 steps") && html(&watched).contains("data-watch"),
            "{}",
            html(&watched)
        );

        gate(&name).open();
        gateway.join("t", run["run_id"].as_str().unwrap()).await;
        let ended = gateway.get(&path).await.ok();
        assert_eq!(
            (&ended["status"], &ended["steps"][2]["text"]),
            (&json!("completed"), &json!("Found <i>."))
        );
        let page = gateway.get("/threads/t").await;
        assert!(!html(&page).contains("<ol class=\"steps\">"), "the result says it now: {}", html(&page));
        let all = gateway.get(&format!("/threads/t/executions/{id}")).await;
        let shown = html(&all);
        assert!(
            shown.contains("3 steps") && shown.contains("Found &lt;i&gt;.") && !shown.contains("data-watch"),
            "{shown}"
        );

        gateway.create("other").await;
        let text = format!("Execution {id} not found");
        gateway.get(&format!("/api/threads/other/executions/{id}/steps")).await.refused(404, &text);
        assert_eq!(gateway.get(&format!("/threads/other/executions/{id}")).await.status, 404);
        gateway.delete("/api/threads/t").await.ok();
        assert_ne!(
            gateway.get(&path).await.body["steps"],
            Value::Array(said.clone()),
            "they go with their thread"
        );
    }
}

/// Service reference, "Database checkpoint settings": `token_usage.enabled`.
#[tokio::test]
async fn the_card_of_a_delegation_shows_tokens_unless_they_are_hidden() {
    for enabled in [true, false] {
        let task = json!({"name": "task", "args": {"prompt": "look", "description": "rivers",
            "subagent_type": "general-purpose"}});
        let script = json!({"rules": [
            {"when": {"caller": "subagent"},
             "answers": [{"text": "Found.", "usage": {"input_tokens": 20, "output_tokens": 7}}]},
            {"answers": [{"tool_calls": [task]}, {"text": "Done."}]},
        ]});
        let sections = json!({"token_usage": {"enabled": enabled}});
        let gateway = Setup { script, sections, ..Setup::on("memory", "delta") }.start().await;
        gateway.create("t").await;
        let mut body = question("go");
        body["context"] = json!({"subagent_enabled": true});
        gateway.post("/api/threads/t/runs/wait", body).await.ok();
        let executions = gateway.get("/api/threads/t/executions").await.ok();
        let id = executions["executions"][0]["execution_id"].as_str().unwrap().to_owned();
        for path in ["/threads/t".to_owned(), format!("/threads/t/executions/{id}")] {
            let page = gateway.get(&path).await;
            assert!(html(&page).contains("rivers"), "{path}: {}", html(&page));
            assert_eq!(html(&page).contains("27 tokens"), enabled, "{path}: {}", html(&page));
        }
    }
}
