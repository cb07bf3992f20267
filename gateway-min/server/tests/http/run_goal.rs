//! Runs of a thread that has a goal: they continue until it is reached or something blocks it.

use axum::http::Method;
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;

use crate::support::{ALL, Gateway, MODES, Setup, question};

/// The answer of the judging model.
fn verdict(satisfied: bool, blocker: &str, reason: &str) -> Value {
    let verdict =
        json!({"satisfied": satisfied, "blocker": blocker, "reason": reason, "evidence_summary": "as shown"});
    json!({"answers": [{"text": verdict.to_string(), "usage": {"input_tokens": 2, "output_tokens": 1}}]})
}

fn when(rule: Value, condition: Value) -> Value {
    let mut rule = rule;
    rule["when"] = condition;
    rule
}

/// The judge finds the goal reached once the conversation says `shipped`; else it answers `blocker`.
fn setup(backend: &'static str, mode: &'static str, blocker: &str, agent: Value) -> Setup {
    let judge = "middleware:goal";
    let script = json!({"rules": [
        when(verdict(true, "none", "it is there"), json!({"caller": judge, "contains": ["ai: shipped"]})),
        when(verdict(false, blocker, "it is not shipped"), json!({"caller": judge})),
        agent,
    ]});
    Setup { script, ..Setup::on(backend, mode) }
}

/// A gateway with a thread `t` whose goal allows `continuations` continuations.
async fn with_goal(setup: Setup, continuations: u64) -> Gateway {
    let gateway = setup.start().await;
    gateway.create("t").await;
    let body = json!({"objective": "Ship it", "max_continuations": continuations});
    gateway.call(Method::PUT, "/api/threads/t/goal", Some(body)).await.ok();
    gateway
}

async fn goal(gateway: &Gateway) -> Value {
    gateway.get("/api/threads/t/goal").await.ok()["goal"].clone()
}

/// Each message's author and text; those of the gateway are `told`.
fn said(state: &Value) -> Vec<(&str, &str)> {
    let mut said = Vec::new();
    for message in state["values"]["messages"].as_array().into_iter().flatten() {
        let hidden = message["additional_kwargs"]["hide_from_ui"] == true;
        let (who, what) = (message["type"].as_str().unwrap(), message["content"].as_str().unwrap());
        said.push(if hidden { ("told", "") } else { (who, what) });
    }
    said
}

fn answers(texts: &[&str]) -> Value {
    let answers: Vec<Value> = texts
        .iter()
        .map(|text| json!({"text": text, "usage": {"input_tokens": 10, "output_tokens": 5}}))
        .collect();
    json!({ "answers": answers })
}

#[tokio::test]
async fn a_run_goes_on_until_its_goal_is_reached_and_the_goal_is_cleared() {
    for (backend, mode) in ALL {
        let agent = answers(&["built", "tested", "shipped"]);
        let gateway = with_goal(setup(backend, mode, "goal_not_met_yet", agent), 8).await;
        let run = gateway.ask("t", "go").await;
        let state = gateway.state("t").await;
        let expected = [
            ("human", "go"),
            ("ai", "built"),
            ("told", ""),
            ("ai", "tested"),
            ("told", ""),
            ("ai", "shipped"),
        ];
        assert_eq!(said(&state), expected, "{backend} {mode}");
        let told = state["values"]["messages"][2]["content"].as_str().unwrap();
        assert!(told.contains("Ship it") && told.contains("it is not shipped"), "{told}");
        assert_eq!((goal(&gateway).await, &state["next"]), (Value::Null, &json!([])));
        assert_eq!(state["values"]["title"], "go", "the title of the first exchange");

        let record = gateway.run("t", &run).await;
        assert_eq!(record["status"], "success");
        assert_eq!(
            (&record["llm_call_count"], &record["lead_agent_tokens"], &record["middleware_tokens"]),
            (&json!(6), &json!(45), &json!(9)),
            "three answers, three verdicts"
        );
        let runs = gateway.get("/api/threads/t/runs").await.ok();
        assert_eq!(runs.as_array().unwrap().len(), 1, "one run");
        let history = gateway.history("t").await;
        for message in history[0]["values"]["messages"].as_array().unwrap() {
            if message["type"] == "ai" {
                assert_eq!(message["run_id"], json!(run), "all of it is the run's");
            }
        }
        let gateway = if backend == "sqlite" { gateway.reopen(mode).await } else { gateway };
        assert_eq!(said(&gateway.state("t").await), expected);
        gateway.ask("t", "and now").await;
        let state = gateway.state("t").await;
        assert_eq!(said(&state)[6..], [("human", "and now"), ("ai", "built")], "no goal, no continuation");
    }
}

#[tokio::test]
async fn a_goal_stands_down_after_its_continuations_or_without_progress_and_stays() {
    for mode in MODES {
        for (limit, texts, continuations, reason) in [
            (1, vec!["a", "b", "c", "d"], 1, "max_continuations"),
            (0, vec!["a"], 0, "max_continuations"),
            (8, vec!["same"; 8], 2, "no_progress"),
        ] {
            let gateway = with_goal(setup("memory", mode, "goal_not_met_yet", answers(&texts)), limit).await;
            let run = gateway.ask("t", "go").await;
            assert_eq!(gateway.run("t", &run).await["status"], "success");
            let state = gateway.state("t").await;
            assert_eq!(said(&state).len(), 2 + 2 * continuations, "{mode} {reason}");
            let goal = goal(&gateway).await;
            let evaluation = &goal["last_evaluation"];
            assert_eq!(
                (&goal["status"], &goal["continuation_count"]),
                (&json!("active"), &json!(continuations))
            );
            assert_eq!(evaluation["stand_down_reason"], reason);
            assert_eq!(
                (&evaluation["satisfied"], &evaluation["blocker"], &evaluation["run_id"]),
                (&json!(false), &json!("goal_not_met_yet"), &json!(run))
            );
            assert_eq!(
                (&evaluation["reason"], &evaluation["evidence_summary"]),
                (&json!("it is not shipped"), &json!("as shown"))
            );
            assert_eq!(state["values"]["goal"], goal);
        }
    }
}

#[tokio::test]
async fn what_stands_in_the_way_stops_the_agent_and_is_noted() {
    let call =
        json!({"answers": [{"tool_calls": [{"name": "ask_clarification", "args": {"question": "Which?"}}]}]});
    for mode in MODES {
        for (blocker, agent, noted, calls) in [
            ("needs_user_input", answers(&["Which one?"]), "needs_user_input", 2),
            ("external_wait", answers(&["Queued."]), "external_wait", 2),
            ("missing_evidence", answers(&["Hm."]), "missing_evidence", 2),
            ("run_failed", answers(&["Hm."]), "run_failed", 2),
            ("no such thing", answers(&["Hm."]), "evaluation_failed", 2),
            ("goal_not_met_yet", call.clone(), "needs_user_input", 1),
        ] {
            let gateway = with_goal(setup("memory", mode, blocker, agent), 8).await;
            let run = gateway.ask("t", "go").await;
            let record = gateway.run("t", &run).await;
            assert_eq!(
                (&record["status"], &record["llm_call_count"]),
                (&json!("success"), &json!(calls)),
                "{noted}"
            );
            let goal = goal(&gateway).await;
            assert_eq!(goal["last_evaluation"]["stand_down_reason"], noted, "{mode} {blocker}");
            assert_eq!(goal["continuation_count"], 0);
        }
    }
}

#[tokio::test]
async fn a_judge_that_fails_or_is_not_asked_leaves_the_run_as_it_is() {
    for mode in MODES {
        let script = json!({"rules": [
            {"when": {"caller": "middleware:goal"}, "answers": [{"error": {"kind": "fatal", "message": "no judge"}}]},
            {"when": {"contains": ["fail"]}, "answers": [{"error": {"kind": "fatal", "message": "no agent"}}]},
            {"answers": [{"text": "You said: {{input}}"}]},
        ]});
        let gateway = with_goal(Setup { script, ..Setup::on("sqlite", mode) }, 8).await;
        let run = gateway.ask("t", "go").await;
        assert_eq!(gateway.run("t", &run).await["status"], "success", "the run did what it was asked");
        let noted = goal(&gateway).await;
        assert_eq!(noted["last_evaluation"]["stand_down_reason"], "evaluation_failed");
        let events =
            gateway.get(&format!("/api/threads/t/runs/{run}/events?event_types=llm.error")).await.ok();
        assert_eq!(events[0]["metadata"]["caller"], "middleware:goal");

        // Neither a failed run nor one that stops at a breakpoint is judged.
        gateway.post("/api/threads/t/runs/wait", question("fail")).await.ok();
        let mut body = question("stop");
        body["interrupt_before"] = json!(["model"]);
        gateway.post("/api/threads/t/runs/wait", body).await.ok();
        assert_eq!(goal(&gateway).await, noted, "{mode}");
    }
}

#[tokio::test]
async fn a_run_is_cancelled_while_its_goal_is_looked_at_and_a_rollback_restores_the_goal() {
    for (backend, mode) in ALL {
        let name = format!("goal-cancel-{backend}-{mode}");
        let mut setup = setup(backend, mode, "goal_not_met_yet", answers(&["one", "two", "three"]));
        let waits = json!({"when": {"caller": "middleware:goal", "contains": ["ai: two"]},
            "answers": [{"text": "{}", "gate": {"name": name}}]});
        setup.script["rules"].as_array_mut().unwrap().insert(0, waits);
        let gateway = with_goal(setup, 8).await;
        let before = gateway.state("t").await;
        for action in ["rollback", "interrupt"] {
            let run = gateway.start_run("t", "go").await;
            gate(&name).reached().await;
            while said(&gateway.state("t").await).last() != Some(&("ai", "two")) {
                tokio::task::yield_now().await;
            }
            let path = format!("/api/threads/t/runs/{run}/cancel?wait=true&action={action}");
            assert_eq!(gateway.call(Method::POST, &path, None).await.status, 204);
            if action == "rollback" {
                assert_eq!(goal(&gateway).await, before["values"]["goal"], "{backend} {mode}");
            } else {
                assert_eq!(gateway.run("t", &run).await["status"], "interrupted");
                assert_eq!(goal(&gateway).await["continuation_count"], 1, "what was committed stays");
            }
        }
    }
}

/// The goal is judged again after the waiting run.
#[tokio::test]
async fn a_run_that_waits_goes_before_the_continuations_of_a_goal() {
    for (backend, mode) in ALL {
        let name = format!("goal-waits-{backend}-{mode}");
        let mut agent = answers(&["built", "tested", "shipped"]);
        agent["answers"][0]["gate"] = json!({ "name": name });
        let mut setup = setup(backend, mode, "goal_not_met_yet", agent);
        let other = when(answers(&["noted", "shipped"]), json!({"contains": ["by the way"]}));
        setup.script["rules"].as_array_mut().unwrap().insert(2, other);
        let gateway = with_goal(setup, 8).await;
        let first = gateway.start_run("t", "go").await;
        gate(&name).reached().await;
        let mut body = question("by the way");
        body["multitask_strategy"] = json!("enqueue");
        let second = gateway.post("/api/threads/t/runs", body).await.ok();
        gate(&name).open();
        gateway.join("t", second["run_id"].as_str().unwrap()).await;
        let expected = [
            ("human", "go"),
            ("ai", "built"),
            ("human", "by the way"),
            ("ai", "noted"),
            ("told", ""),
            ("ai", "tested"),
            ("told", ""),
            ("ai", "shipped"),
        ];
        let state = gateway.state("t").await;
        assert_eq!(said(&state)[..4], expected[..4], "{backend} {mode}");
        assert_eq!(gateway.run("t", &first).await["middleware_tokens"], 0, "no verdict was asked for");
        assert_eq!(goal(&gateway).await, Value::Null, "the second run has reached it: {:?}", said(&state));
    }
}

#[tokio::test]
async fn the_recursion_limit_holds_for_all_that_a_run_does_for_its_goal() {
    for mode in MODES {
        let agent = answers(&["one", "two", "three", "four"]);
        let gateway = with_goal(setup("memory", mode, "goal_not_met_yet", agent), 8).await;
        let mut body = question("go");
        body["config"] = json!({"recursion_limit": 3});
        let answer = gateway.post("/api/threads/t/runs/wait", body).await.ok();
        let text = "Recursion limit of 3 reached without hitting a stop condition.";
        assert_eq!((&answer["status"], &answer["error"]), (&json!("error"), &json!(text)));
        let state = gateway.state("t").await;
        let expected = [
            ("human", "go"),
            ("ai", "one"),
            ("told", ""),
            ("ai", "two"),
            ("told", ""),
            ("ai", "three"),
            ("told", ""),
        ];
        assert_eq!(said(&state), expected, "{mode}");
    }
}
