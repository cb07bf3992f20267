//! The embedded client delegates: on the gateway's records, or without a gateway's store.

use std::sync::Arc;

use futures::StreamExt as _;
use serde_json::{Value as Json, json};
use threadkeep::mode::ModeRegister;
use threadkeep_chat::client::{
    Agent, Checkpointer, Client, ClientOptions, Configuration, Event, Turn, TurnOptions,
};
use threadkeep_gateway::directory::DirectoryLock;
use threadkeep_memory::MemorySaver;
use threadkeep_records::{MultitaskStrategy, NewRun};

use crate::support::{ALL, Gateway, Setup, question, texts};

/// A lead that delegates two tasks, and subagents of two turns.
fn script() -> Json {
    let task = |prompt: &str| json!({"name": "task", "args": {"prompt": prompt, "subagent_type": "general-purpose"}});
    json!({"rules": [
        {"when": {"caller": "subagent"}, "answers": [
            {"text": "Looking.", "tool_calls": [{"name": "ls"}], "usage": {"input_tokens": 5, "output_tokens": 1}},
            {"text": "Done: {{input}}", "usage": {"input_tokens": 7, "output_tokens": 2}},
        ]},
        {"when": {"contains": ["delegate"], "offered": ["task"]}, "answers": [
            {"text": "I delegate.", "tool_calls": [task("one"), task("two")], "usage": {"input_tokens": 10, "output_tokens": 2}},
            {"text": "Both are done.", "usage": {"input_tokens": 20, "output_tokens": 3}},
        ]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]})
}

fn delegating() -> TurnOptions {
    TurnOptions { subagent_enabled: Some(true), ..TurnOptions::default() }
}

async fn client(gateway: &Gateway, checkpointer: Checkpointer) -> Client {
    let frozen_in: &'static ModeRegister = Box::leak(Box::new(ModeRegister::new()));
    Client::open(ClientOptions {
        config: Configuration::Given(gateway.config()),
        checkpointer,
        turn: delegating(),
        frozen_in: Some(frozen_in),
    })
    .await
    .unwrap()
}

/// The types of the turn's `task_*` events, and its tokens.
async fn followed(turn: Turn) -> (Vec<String>, i64) {
    let (mut types, mut tokens) = (Vec::new(), 0);
    for event in turn.collect::<Vec<_>>().await {
        match event.unwrap() {
            Event::Custom(event) => types.push(event["type"].as_str().unwrap().to_owned()),
            Event::End(end) => tokens = end.usage.total_tokens,
            _ => {}
        }
    }
    types.sort();
    (types, tokens)
}

fn expected() -> (Vec<String>, i64) {
    let types = [&["task_completed"; 2][..], &["task_running"; 6], &["task_started"; 2]].concat();
    (types.into_iter().map(str::to_owned).collect(), 65)
}

#[tokio::test]
async fn what_the_client_delegates_is_the_gateways_too_and_goes_with_the_thread() {
    for (backend, mode) in ALL.into_iter().filter(|(backend, _)| *backend != "memory") {
        let gateway = Setup { script: script(), ..Setup::on(backend, mode) }.start().await;
        let client = client(&gateway, Checkpointer::default()).await;
        assert!(client.tools().iter().any(|(name, _)| name == "task"));
        let turn = client.stream("please delegate", Some("t"), TurnOptions::default());
        assert_eq!(followed(turn).await, expected(), "{backend} {mode}");
        let listed = gateway.get("/api/threads/t/executions").await.ok();
        let executions = listed["executions"].as_array().unwrap();
        assert_eq!(executions.len(), 2, "{backend} {mode}");
        assert!(executions.iter().all(|it| it["status"] == "completed" && it["delivered"] == true));
        let threads = client.list_threads(9).await.unwrap().thread_list;
        assert_eq!(threads.iter().map(|thread| thread.thread_id.as_str()).collect::<Vec<_>>(), ["t"]);

        // And the other way round.
        gateway.create("t").await;
        let mut body = question("please delegate again");
        body["context"] = json!({"subagent_enabled": true});
        gateway.post("/api/threads/t/runs/wait", body).await.ok();
        assert_eq!(texts(&gateway.state("t").await).last(), Some(&"Both are done."));
        assert_eq!(gateway.rows().await["gateway.db.executions"], 4, "{backend} {mode}");

        client.delete_thread("t").await.unwrap();
        assert_eq!(client.get_values("t").await.unwrap(), None);
        assert_eq!(gateway.rows().await["gateway.db.executions"], 0, "{backend} {mode}");
        assert_eq!(gateway.get("/api/threads/t").await.status, 404);
        client.delete_thread("t").await.unwrap();
        client.close().await;
    }
}

#[tokio::test]
async fn a_store_of_its_own_or_none_delegates_too() {
    let gateway = Setup { script: script(), ..Setup::default() }.start().await;
    for checkpointer in [
        Checkpointer::Own(Arc::new(MemorySaver::default())),
        Checkpointer::Stateless,
        Checkpointer::default(),
    ] {
        let named = format!("{checkpointer:?}");
        let client = client(&gateway, checkpointer).await;
        let turn = client.stream("please delegate", Some("t"), TurnOptions::default());
        assert_eq!(followed(turn).await, expected(), "{named}");
        let off = TurnOptions { subagent_enabled: Some(false), ..TurnOptions::default() };
        assert_eq!(client.chat("delegate", Some("u"), off).await.unwrap(), "You said: delegate", "{named}");
        client.close().await;
    }
    let agent = Agent::build(Configuration::Given(gateway.config()), None, delegating()).await.unwrap();
    let turn = agent.stream("please delegate", None, TurnOptions::default());
    assert_eq!(followed(turn).await, expected());
}

#[tokio::test]
async fn a_thread_in_memory_is_deleted_with_its_subagents() {
    let gateway = Setup { script: script(), ..Setup::default() }.start().await;
    let saver = Arc::new(MemorySaver::default());
    let client = client(&gateway, Checkpointer::Own(Arc::clone(&saver) as _)).await;
    followed(client.stream("please delegate", Some("t"), TurnOptions::default())).await;
    let stored = async || threadkeep::saver::Saver::threads(&*saver, None, 9).await.unwrap().len();
    assert_eq!(stored().await, 3);
    client.delete_thread("t").await.unwrap();
    assert_eq!(stored().await, 0);
    let again = client.resume("t", TurnOptions::default()).answer().await.unwrap_err();
    assert!(again.to_string().contains("has nothing to go on with"), "{again}");
}

/// While a run of a gateway is at work, its subagents are not taken away from it, nor counted by somebody else.
#[tokio::test]
async fn a_client_leaves_the_subagents_of_a_run_at_work_alone() {
    for (backend, mode) in ALL.into_iter().filter(|(backend, _)| *backend != "memory") {
        let gate = format!("{backend} {mode} at work");
        let mut script = script();
        script["rules"][0]["answers"][1]["gate"] = json!({ "name": gate });
        let gateway = Setup { script, ..Setup::on(backend, mode) }.start().await;
        // As the program does: where there is no lease, the lock shows that the gateway is alive.
        let lock = DirectoryLock::take(&gateway.config().current()).unwrap();
        gateway.create("t").await;
        let mut body = question("please delegate");
        body["context"] = json!({"subagent_enabled": true});
        let run = gateway.post("/api/threads/t/runs", body).await.ok();
        let run = run["run_id"].as_str().unwrap();
        let executions = async || {
            let listed = gateway.get("/api/threads/t/executions").await.ok();
            let of = |it: &Json| (it["run_id"].clone(), it["status"].clone());
            listed["executions"].as_array().unwrap().iter().map(of).collect::<Vec<_>>()
        };
        let at_work = vec![(json!(run), json!("running")); 2];
        while executions().await != at_work {
            tokio::task::yield_now().await;
        }
        let client = client(&gateway, Checkpointer::default()).await;
        for turn in [
            client.resume("t", TurnOptions::default()),
            client.stream("something else", Some("t"), TurnOptions::default()),
        ] {
            let error = turn.answer().await.unwrap_err().to_string();
            assert!(error.contains(run) && error.contains("cancel it"), "{error}");
        }
        assert_eq!(executions().await, at_work, "{backend} {mode}");
        threadkeep_agent::model::scripted::gate(&gate).open();
        gateway.join("t", run).await;
        assert_eq!(texts(&gateway.state("t").await).last(), Some(&"Both are done."));
        let answer = client.chat("something else", Some("t"), TurnOptions::default()).await.unwrap();
        assert_eq!(answer, "You said: something else");
        client.close().await;
        drop(lock);
    }
}

/// A row that a gateway has left which is gone, without a lease or with one that has expired, is in nobody's way.
#[tokio::test]
async fn a_client_does_not_wait_for_a_gateway_that_is_gone() {
    let gateway = Setup { script: script(), ..Setup::on("sqlite", "full") }.start().await;
    gateway.create("t").await;
    let config = gateway.config().current();
    let records = threadkeep_storage::open_records(&config).await.unwrap();
    let left = NewRun { run_id: "left".into(), thread_id: "t".into(), ..NewRun::default() };
    records.runs().admit(left, MultitaskStrategy::Reject).await.unwrap();
    let client = client(&gateway, Checkpointer::default()).await;
    let lock = DirectoryLock::take(&config).unwrap();
    let error = client.chat("please delegate", Some("t"), TurnOptions::default()).await.unwrap_err();
    assert!(error.to_string().starts_with("run left of a gateway is at work on thread 't'"), "{error}");
    drop(lock);
    // A process that another test starts at this moment shares the lock until it executes its program.
    while threadkeep_storage::is_served(&config) {
        tokio::task::yield_now().await;
    }
    let turn = client.stream("please delegate", Some("t"), TurnOptions::default());
    assert_eq!(followed(turn).await, expected());
    client.close().await;
    records.close().await;
}
