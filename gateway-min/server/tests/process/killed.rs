//! `kill -9` in the middle of streams, cancellations, rollbacks, resumes and branches. How far each gets depends on the
//! machine: in any case the next process finds all of it or nothing, every invariant of the store holds, and the thread
//! continues.

use std::path::Path;

use serde_json::{Value as Json, json};
use threadkeep_testing::unconfigured;

use super::{Gateway, configured};

const MODES: [&str; 2] = ["full", "delta"];
const RECOVERED: &str = "Gateway restarted before this run reached a durable final state.";

fn question(text: &str) -> Json {
    json!({"input": {"messages": [{"role": "user", "content": text}]}})
}

/// A gateway on the directory, with a thread `t` of two turns.
async fn with_turns(dir: &Path) -> Gateway {
    let gateway = Gateway::start(dir);
    gateway.post("/api/threads", json!({"thread_id": "t"})).await;
    gateway.ask("one").await;
    gateway.ask("two").await;
    gateway
}

fn two_turns() -> Vec<String> {
    ["one", "You said: one", "two", "You said: two"].map(str::to_owned).to_vec()
}

fn texts(values: &Json) -> Vec<&str> {
    let messages = values["messages"].as_array().into_iter().flatten();
    messages.map(|message| message["content"].as_str().unwrap()).collect()
}

/// The texts at the head.
async fn said(gateway: &Gateway) -> Vec<String> {
    texts(&gateway.get("/api/threads/t/state").await["values"]).into_iter().map(str::to_owned).collect()
}

/// Starts a run that hangs after its input; returns its id.
async fn hanging(gateway: &Gateway, mut body: Json) -> String {
    body["input"] = question("hang")["input"].clone();
    let (status, run) = gateway.post("/api/threads/t/runs", body).await;
    assert_eq!(status, 200, "{run}");
    while said(gateway).await.last().map(String::as_str) != Some("hang") {
        tokio::task::yield_now().await;
    }
    run["run_id"].as_str().unwrap().to_owned()
}

/// Sends a request, lets the gateway work on it for the time of `reads` reads, and kills the gateway.
async fn killed_after(gateway: Gateway, path: String, body: Json, reads: usize) {
    let request = gateway.client.post(format!("{}{path}", gateway.base)).json(&body);
    let sent = tokio::spawn(async move { request.send().await.map(|answer| answer.status().as_u16()) });
    for _ in 0..reads {
        gateway.get("/api/threads/t").await;
    }
    gateway.signal("-9");
    drop(gateway);
    // It was answered, or the connection broke.
    let _: Result<u16, reqwest::Error> = sent.await.unwrap();
}

/// Every invariant holds, every checkpoint can be read, and the thread `id` continues from its head.
async fn whole(dir: &Path, gateway: &Gateway, id: &str) {
    let (status, history) = gateway.post(&format!("/api/threads/{id}/history"), json!({"limit": 100})).await;
    assert_eq!(status, 200);
    for entry in history.as_array().unwrap() {
        let checkpoint = entry["checkpoint_id"].as_str().unwrap();
        let state = gateway.get(&format!("/api/threads/{id}/state/{checkpoint}")).await;
        assert_eq!(state["checkpoint_id"], checkpoint, "{state}");
    }
    let before = gateway.get(&format!("/api/threads/{id}/state")).await;
    let (status, values) = gateway.post(&format!("/api/threads/{id}/runs/wait"), question("next")).await;
    assert_eq!((status, values.get("error")), (200, None), "{values}");
    let mut expected = texts(&before["values"]);
    expected.extend(["next", "You said: next"]);
    assert_eq!(texts(&values), expected);
    let mut verify = unconfigured(env!("CARGO_BIN_EXE_threadkeep"));
    let output = verify
        .current_dir(dir)
        .args(["verify", "--all"])
        .env("SVC_HOME", dir.join("state"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// The record of a run.
async fn record(gateway: &Gateway, run: &str) -> Json {
    gateway.get(&format!("/api/threads/t/runs/{run}")).await
}

#[tokio::test]
async fn in_the_middle_of_a_stream_its_input_stays_and_half_an_answer_does_not() {
    for mode in MODES {
        for pieces in [1, 4, 12] {
            let dir = configured(mode);
            let gateway = with_turns(dir.path()).await;
            let mut body = question("slow");
            body["stream_mode"] = json!(["messages-tuple"]);
            let path = format!("{}/api/threads/t/runs/stream", gateway.base);
            let mut answer = gateway.client.post(path).json(&body).send().await.unwrap();
            let place = answer.headers()["content-location"].to_str().unwrap().to_owned();
            let mut streamed = String::new();
            while streamed.matches("event: messages").count() < pieces {
                let Some(more) = answer.chunk().await.unwrap() else { break };
                streamed.push_str(std::str::from_utf8(&more).unwrap());
            }
            gateway.signal("-9");
            drop(gateway);

            let gateway = Gateway::start(dir.path());
            let run = gateway.get(&place).await;
            let left = said(&gateway).await;
            let mut expected = two_turns();
            expected.push("slow".to_owned());
            if left.len() == 6 {
                expected.push("one two three four".to_owned());
            } else {
                assert_eq!((&run["status"], &run["error"]), (&json!("error"), &json!(RECOVERED)));
            }
            assert_eq!(left, expected, "{mode} {pieces}");
            whole(dir.path(), &gateway, "t").await;
        }
    }
}

#[tokio::test]
async fn in_the_middle_of_a_cancellation_the_state_is_the_one_before_it_or_behind_it() {
    for mode in MODES {
        for (action, reads) in
            [("interrupt", 0), ("interrupt", 1), ("rollback", 0), ("rollback", 1), ("rollback", 2)]
        {
            let dir = configured(mode);
            let gateway = with_turns(dir.path()).await;
            let run = hanging(&gateway, json!({})).await;
            let path = format!("/api/threads/t/runs/{run}/cancel?wait=true&action={action}");
            killed_after(gateway, path, json!({}), reads).await;

            let gateway = Gateway::start(dir.path());
            // A rollback that the dead process did not carry out is carried out while this one already serves.
            gateway.get(&format!("/api/threads/t/runs/{run}/join")).await;
            let run = record(&gateway, &run).await;
            let left = said(&gateway).await;
            if left == two_turns() {
                assert_eq!((action, &run["status"]), ("rollback", &json!("error")));
            } else {
                let mut expected = two_turns();
                expected.push("hang".to_owned());
                assert_eq!(left, expected, "{mode} {action} {reads}");
                assert_ne!(run["error"], "Rolled back by user", "only what was restored is called so");
            }
            whole(dir.path(), &gateway, "t").await;
        }
    }
}

#[tokio::test]
async fn in_the_middle_of_a_resume_the_head_is_the_old_one_or_the_selected_state() {
    for mode in MODES {
        for reads in 0..4 {
            let dir = configured(mode);
            let gateway = with_turns(dir.path()).await;
            let (_, history) = gateway.post("/api/threads/t/history", json!({"limit": 100})).await;
            let mut selected = Json::Null;
            for entry in history.as_array().unwrap() {
                let checkpoint = entry["checkpoint_id"].as_str().unwrap();
                let state = gateway.get(&format!("/api/threads/t/state/{checkpoint}")).await;
                if texts(&state["values"]).len() == 2 && state["next"] == json!([]) {
                    selected = json!({"checkpoint_id": checkpoint});
                }
            }
            assert!(!selected.is_null(), "{history}");
            let mut body = question("hang");
            body["checkpoint"] = selected;
            killed_after(gateway, "/api/threads/t/runs".to_owned(), body, reads).await;

            let gateway = Gateway::start(dir.path());
            let left = said(&gateway).await;
            let selected = &two_turns()[..2];
            let behind_input = [selected, &["hang".to_owned()]].concat();
            let linearized = mode == "delta" && left == selected;
            assert!(left == two_turns() || linearized || left == behind_input, "{mode} {reads}: {left:?}");
            whole(dir.path(), &gateway, "t").await;
        }
    }
}

#[tokio::test]
async fn in_the_middle_of_a_branch_it_is_whole_or_nobody_finds_it() {
    for mode in MODES {
        for reads in 0..4 {
            let dir = configured(mode);
            let gateway = with_turns(dir.path()).await;
            let state = gateway.get("/api/threads/t/state").await;
            let message = state["values"]["messages"][3]["id"].clone();
            let body = json!({"message_id": message});
            killed_after(gateway, "/api/threads/t/branches".to_owned(), body, reads).await;

            let gateway = Gateway::start(dir.path());
            assert_eq!(said(&gateway).await, two_turns(), "{mode} {reads}: the source is as it was");
            let (_, found) = gateway.post("/api/threads/search", json!({})).await;
            for thread in found.as_array().unwrap() {
                let id = thread["thread_id"].as_str().unwrap();
                let state = gateway.get(&format!("/api/threads/{id}/state")).await;
                assert_eq!(texts(&state["values"]), two_turns(), "{mode} {reads}");
                whole(dir.path(), &gateway, id).await;
            }
        }
    }
}
