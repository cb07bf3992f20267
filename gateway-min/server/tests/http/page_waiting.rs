//! What a conversation on the page says that it waits for, and that it says so only then.

use axum::http::Method;
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;

use crate::page::html;
use crate::support::{Gateway, MODES, Setup, question};

/// What a person is asked with.
const FORM: &str = "class=\"panel asks\"";

async fn start(mode: &'static str, answers: Value) -> Gateway {
    let script = json!({"rules": [
        {"when": {"contains": ["paint"]}, "answers": answers},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]});
    let gateway = Setup { script, ..Setup::on("sqlite", mode) }.start().await;
    gateway.create("t").await;
    gateway
}

async fn page(gateway: &Gateway) -> String {
    html(&gateway.get("/threads/t").await).to_owned()
}

#[tokio::test]
async fn the_agents_question_is_asked_with_its_options_until_it_is_answered() {
    for mode in MODES {
        let asks = json!([{"text": "I ask.", "tool_calls": [
            {"name": "ls", "id": "c1"},
            {"name": "ask_clarification", "id": "c2",
             "args": {"question": "Which <one>?", "options": ["red", "\"blue\""]}},
        ]}]);
        let gateway = start(mode, asks).await;
        gateway.ask("t", "paint").await;
        let asked = page(&gateway).await;
        assert!(asked.contains("data-does=\"answer\"") && asked.contains("Which &lt;one&gt;?"), "{asked}");
        assert!(asked.contains("value=\"red\"") && asked.contains("value=\"&quot;blue&quot;\""), "{asked}");
        assert!(asked.contains("data-key=\"c2\">"), "it is not shown twice: {asked}");
        let head = gateway.state("t").await["checkpoint_id"].as_str().unwrap().to_owned();
        let old = gateway.get(&format!("/threads/t?at={head}")).await;
        assert!(!html(&old).contains(FORM), "an older state asks nothing: {}", html(&old));

        let answer = json!({"command": {"resume": "red"}});
        gateway.post("/api/threads/t/runs/wait", answer).await.ok();
        let answered = page(&gateway).await;
        assert!(
            !answered.contains("data-does=\"answer\"") && answered.contains("You said: red"),
            "{answered}"
        );
        assert!(answered.contains("data-key=\"c2\" open"), "what was asked is shown: {answered}");
    }
}

#[tokio::test]
async fn several_questions_are_asked_together() {
    let ask =
        |id: &str, text: &str| json!({"name": "ask_clarification", "id": id, "args": {"question": text}});
    let asks = json!([{"text": "", "tool_calls": [ask("c1", "Which colour?"), ask("c2", "When?")]}]);
    let gateway = start("delta", asks).await;
    gateway.ask("t", "paint").await;
    let asked = page(&gateway).await;
    assert_eq!((asked.matches("<fieldset>").count(), asked.matches(FORM).count()), (2, 1), "{asked}");
    assert!(asked.contains("Which colour?") && asked.contains("When?"), "{asked}");
}

#[tokio::test]
async fn a_run_that_was_stopped_can_be_continued_and_one_at_work_cannot() {
    for mode in MODES {
        let name = format!("page-waiting-{mode}");
        let gateway = start(mode, json!([{"text": "painted", "gate": {"name": name}}])).await;
        assert!(!page(&gateway).await.contains(FORM), "an empty thread waits for nothing");
        let mut body = question("paint");
        body["interrupt_before"] = json!("*");
        gateway.post("/api/threads/t/runs/wait", body).await.ok();
        let stopped = page(&gateway).await;
        assert!(stopped.contains("data-does=\"continue\""), "{stopped}");
        assert!(stopped.contains("The run was stopped before model"), "{stopped}");
        assert!(!stopped.contains("name=\"value\""), "nothing asks for a value: {stopped}");

        let run = gateway.post("/api/threads/t/runs", json!({"input": null})).await.ok();
        gate(&name).reached().await;
        assert!(!page(&gateway).await.contains(FORM), "it is at work");
        gate(&name).open();
        gateway.join("t", run["run_id"].as_str().unwrap()).await;
        let done = page(&gateway).await;
        assert!(done.contains("painted") && !done.contains(FORM), "{done}");
    }
}

#[tokio::test]
async fn a_goal_is_shown_with_what_is_missing_and_can_be_set_when_no_run_is_at_work() {
    for mode in MODES {
        let name = format!("page-goal-{mode}");
        let verdict = json!({"satisfied": false, "blocker": "needs_user_input", "reason": "no <colour> yet",
            "evidence_summary": ""});
        let script = json!({"rules": [
            {"when": {"caller": "middleware:goal"}, "answers": [{"text": verdict.to_string()}]},
            {"when": {"contains": ["hold"]}, "answers": [{"text": "held", "gate": {"name": name}}]},
            {"answers": [{"text": "You said: {{input}}"}]},
        ]});
        let gateway = Setup { script, ..Setup::on("sqlite", mode) }.start().await;
        gateway.create("t").await;
        let none = page(&gateway).await;
        assert!(none.contains("data-does=\"goal\"") && !none.contains("data-do=\"unset\""), "{none}");
        let goal = json!({"objective": "Paint <it>", "max_continuations": 3});
        gateway.call(Method::PUT, "/api/threads/t/goal", Some(goal)).await.ok();
        gateway.ask("t", "go").await;
        let shown = page(&gateway).await;
        for part in [
            "Paint &lt;it&gt;",
            "0 of 3 continuations",
            "suspended",
            "no &lt;colour&gt; yet",
            "(needs user input)",
            "data-do=\"unset\"",
        ] {
            assert!(shown.contains(part), "{part}: {shown}");
        }
        let head = gateway.state("t").await["checkpoint_id"].as_str().unwrap().to_owned();
        let old = gateway.get(&format!("/threads/t?at={head}")).await;
        assert!(!html(&old).contains("data-key=\"goal\""), "{}", html(&old));

        let run = gateway.start_run("t", "hold").await;
        gate(&name).reached().await;
        let busy = page(&gateway).await;
        assert!(busy.contains("Paint &lt;it&gt;") && busy.contains("when no run is at work"), "{busy}");
        assert!(!busy.contains("data-does=\"goal\""), "{busy}");
        gate(&name).open();
        gateway.join("t", &run).await;
        gateway.delete("/api/threads/t/goal").await.ok();
        assert!(!page(&gateway).await.contains("Paint"));
    }
}
