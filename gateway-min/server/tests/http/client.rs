//! The embedded client: what it streams, what it stores, whom it refuses, and the gateway next to it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use futures::StreamExt as _;
use serde_json::{Value as Json, json};
use threadkeep::Error;
use threadkeep::mode::ModeRegister;
use threadkeep::saver::Saver;
use threadkeep_agent::model::scripted::gate;
use threadkeep_chat::client::{
    Agent, Checkpointer, Client, ClientError, ClientOptions, Configuration, Event, Message, Turn, TurnOptions,
};
use threadkeep_config::ConfigHandle;
use threadkeep_memory::MemorySaver;
use threadkeep_sqlite::{Options, SqliteSaver};
use threadkeep_testing::Log;

use super::support::{DURABLE, MODES, Setup, texts};

/// A separate mode register simulates a separate process.
fn process() -> &'static ModeRegister {
    Box::leak(Box::new(ModeRegister::new()))
}

async fn client(config: ConfigHandle, checkpointer: Checkpointer) -> Client {
    try_client(config, checkpointer).await.unwrap()
}

async fn try_client(config: ConfigHandle, checkpointer: Checkpointer) -> Result<Client, ClientError> {
    let config = Configuration::Given(config);
    Client::open(ClientOptions {
        config,
        checkpointer,
        frozen_in: Some(process()),
        ..ClientOptions::default()
    })
    .await
}

fn own() -> Checkpointer {
    Checkpointer::Own(Arc::new(MemorySaver::default()))
}

async fn events(turn: Turn) -> Vec<Event> {
    turn.map(Result::unwrap).collect().await
}

async fn say(client: &Client, thread: &str, text: &str) -> String {
    client.chat(text, Some(thread), TurnOptions::default()).await.unwrap()
}

/// The error that a turn ends with, before any event.
async fn refused(mut turn: Turn) -> ClientError {
    let error = turn.next().await.unwrap().expect_err("something happened");
    assert!(turn.next().await.is_none());
    error
}

fn tool_script() -> Json {
    json!({"chunk_chars": 4, "rules": [{"answers": [
        {"text": "Looking.", "tool_calls": [{"name": "ls", "id": "c1"}], "usage": {"input_tokens": 5, "output_tokens": 2}},
        {"text": "It is empty.", "usage": {"input_tokens": 7, "output_tokens": 3}},
    ]}]})
}

#[tokio::test]
async fn a_turn_shows_text_calls_results_values_and_what_it_cost() {
    for mode in MODES {
        let gateway = Setup { mode, script: tool_script(), ..Setup::default() }.start().await;
        let client = client(gateway.config(), own()).await;
        let turn = client.stream("what is here?", None, TurnOptions::default());
        let thread = turn.thread_id().to_owned();
        let events = events(turn).await;
        let mut texts: Vec<(String, String)> = Vec::new();
        let mut seen = Vec::new();
        for event in &events {
            match event {
                Event::MessagesTuple(Message::Ai { content, id, tool_calls }) if tool_calls.is_empty() => {
                    match texts.last_mut() {
                        Some((last, text)) if last == id => text.push_str(content),
                        _ => {
                            seen.push("text".to_owned());
                            texts.push((id.clone(), content.clone()));
                        }
                    }
                }
                Event::MessagesTuple(Message::Ai { tool_calls, .. }) => {
                    seen.push(format!("call {} {}", tool_calls[0].name, tool_calls[0].id));
                }
                Event::MessagesTuple(Message::Tool { name, tool_call_id, .. }) => {
                    seen.push(format!("result {name} {tool_call_id}"));
                }
                Event::Values(values) => seen.push(format!("values {}", values.messages.len())),
                Event::Custom(other) => panic!("{other}"),
                Event::End(end) => seen.push(format!("end {:?}", end.usage.total_tokens)),
            }
        }
        let order = [
            "values 1",
            "text",
            "call ls c1",
            "values 2",
            "result ls c1",
            "values 3",
            "text",
            "values 4",
            "end 17",
        ];
        assert_eq!(seen, order, "{mode}");
        assert_eq!(texts.iter().map(|(_, text)| &**text).collect::<Vec<_>>(), ["Looking.", "It is empty."]);
        let Some(Event::Values(last)) = events.iter().rfind(|event| matches!(event, Event::Values(_))) else {
            panic!("no values")
        };
        assert_eq!(last.title.as_deref(), Some("what is here?"));
        let values = client.get_values(&thread).await.unwrap().unwrap();
        assert_eq!(&values, last);
    }
}

#[tokio::test]
async fn a_thread_is_the_gateways_too_and_leaves_no_run_behind() {
    for (backend, mode) in [("sqlite", "full"), ("sqlite", "delta"), ("postgres", "delta")] {
        let gateway = Setup::on(backend, mode).start().await;
        let client = client(gateway.config(), Checkpointer::default()).await;
        assert_eq!(say(&client, "t", "one").await, "You said: one");
        let rows = gateway.rows().await;
        for table in ["gateway.db.runs", "gateway.db.run_events", "gateway.db.threads_meta"] {
            assert_eq!(rows[table], 0, "{backend} {mode} {table}");
        }
        assert_eq!(texts(&gateway.state("t").await), ["one", "You said: one"]);
        gateway.create("t").await;
        gateway.ask("t", "two").await;
        assert_eq!(say(&client, "t", "three").await, "You said: three");
        let said = ["one", "You said: one", "two", "You said: two", "three", "You said: three"];
        assert_eq!(texts(&gateway.state("t").await), said);
        let thread = client.get_thread("t").await.unwrap().unwrap();
        let durations = thread.checkpoints.iter().filter(|it| it.metadata["source"] == "update").count();
        assert_eq!(durations, 1, "the duration-only checkpoint of the gateway's run");
        assert!(thread.checkpoints.windows(2).all(|pair| {
            pair[1].parent_checkpoint_id.as_ref() == Some(&pair[0].checkpoint_id) && pair[0].ts <= pair[1].ts
        }));
        assert_eq!(thread.checkpoints.last().unwrap().values["messages"].as_array().unwrap().len(), 6);
        client.close().await;
    }
}

#[tokio::test]
async fn a_thread_that_needs_delta_mode_is_refused_in_full_mode_before_anything_is_done() {
    let gateway = Setup::on("sqlite", "delta").start().await;
    gateway.create("t").await;
    gateway.ask("t", "one").await;
    let gateway = gateway.reopen("full").await;
    let before = gateway.rows().await;
    let client = client(gateway.config(), Checkpointer::default()).await;
    // Not even the model's name is checked.
    let options = TurnOptions { model_name: Some("nobody".into()), ..TurnOptions::default() };
    let error = refused(client.stream("two", Some("t"), options)).await;
    assert!(matches!(error, ClientError::Engine(Error::ModeMismatch)), "{error}");
    assert_eq!(error.class_name(), "CheckpointModeMismatchError");
    let text = "Thread requires delta mode; materialize and convert its checkpoints before using full mode.";
    assert_eq!(error.to_string(), text);
    for error in [client.get_thread("t").await.unwrap_err(), client.get_values("t").await.unwrap_err()] {
        assert!(matches!(error, ClientError::Engine(Error::ModeMismatch)), "{error}");
    }
    assert_eq!(gateway.rows().await, before);
    // Lists and goals do not depend on the mode.
    assert_eq!(client.list_threads(9).await.unwrap().thread_list.len(), 1);
    client.set_goal("t", "done", None).await.unwrap();
}

#[tokio::test]
async fn mode_and_cadence_are_frozen_by_the_first_client_of_a_process() {
    let config = async |mode, frequency| {
        let gateway = Setup { mode, frequency, ..Setup::default() }.start().await;
        (gateway.config(), gateway)
    };
    let frozen_in = Some(process());
    let open = async |config: &ConfigHandle| {
        let config = Configuration::Given(config.clone());
        Client::open(ClientOptions { config, checkpointer: own(), frozen_in, ..ClientOptions::default() })
            .await
    };
    let (delta, mut gateway) = config("delta", 3).await;
    let client = open(&delta).await.unwrap();
    assert_eq!(
        open(&config("full", 3).await.0).await.unwrap_err().to_string(),
        "checkpoint_channel_mode is restart-required and cannot change in a running process"
    );
    assert_eq!(
        open(&config("delta", 4).await.0).await.unwrap_err().to_string(),
        "checkpoint_delta.snapshot_frequency is restart-required and cannot change in a running process"
    );
    open(&delta).await.unwrap();
    // An edit of the cadence takes effect with the next turn.
    say(&client, "t", "one").await;
    gateway.reconfigure(|setup| setup.frequency = 5);
    let error = refused(client.stream("two", Some("t"), TurnOptions::default())).await;
    assert_eq!(error.class_name(), "CheckpointModeReconfigurationError");
    gateway.reconfigure(|setup| (setup.frequency, setup.mode) = (3, "full"));
    say(&client, "t", "an edited mode is ignored").await;
}

#[tokio::test]
async fn the_process_wide_store_is_shared_and_its_history_cache_is_in_memory_only() {
    let gateway = Setup::on("sqlite", "delta").start().await;
    let one = client(gateway.config(), Checkpointer::default()).await;
    let two = client(gateway.config(), Checkpointer::default()).await;
    say(&one, "t", "hello").await;
    one.close().await;
    assert_eq!(say(&two, "t", "still open").await, "You said: still open");
    two.close().await;
    let again = client(gateway.config(), Checkpointer::default()).await;
    assert_eq!(again.get_values("t").await.unwrap().unwrap().messages.len(), 4);

    let memory = Setup::on("memory", "full").start().await;
    let thread = uuid();
    say(&client(memory.config(), Checkpointer::default()).await, &thread, "one").await;
    let later = client(memory.config(), Checkpointer::default()).await;
    assert_eq!(
        later.get_values(&thread).await.unwrap().unwrap().messages.len(),
        2,
        "it lives as long as the process"
    );

    let redis = json!({"database": {"backend": "memory", "checkpoint_cache": {"type": "redis"}}});
    let redis = Setup { sections: redis, ..Setup::default() }.start().await;
    let error = try_client(redis.config(), Checkpointer::default()).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "database.checkpoint_cache.type 'redis' is not supported on the sync checkpointer path (TUI/embedded); use 'memory'."
    );
    assert_eq!(error.class_name(), "ValueError");
    try_client(redis.config(), own()).await.unwrap();
}

fn uuid() -> String {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    format!("client-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

#[tokio::test]
async fn without_a_checkpointer_each_turn_begins_anew_in_either_mode() {
    let script = json!({"rules": [{"when": {"turn": 0}, "answers": [{"text": "first"}]}, {"answers": [{"text": "later"}]}]});
    for mode in MODES {
        let gateway = Setup { mode, script: script.clone(), ..Setup::default() }.start().await;
        let client = client(gateway.config(), Checkpointer::Stateless).await;
        assert_eq!(
            (say(&client, "t", "a").await, say(&client, "t", "b").await),
            ("first".into(), "first".into())
        );
        for refused in [
            client.list_threads(1).await.err(),
            client.get_goal("t").await.err(),
            client.get_thread("t").await.err(),
        ] {
            assert!(matches!(refused, Some(ClientError::Stateless)), "{refused:?}");
        }
    }
}

#[tokio::test]
async fn the_factory_for_agents_refuses_delta_mode_with_a_checkpointer_and_nothing_else() {
    for mode in MODES {
        let gateway = Setup { mode, ..Setup::default() }.start().await;
        let build = async |saver: Option<Arc<dyn Saver>>| {
            Agent::build(Configuration::Given(gateway.config()), saver, TurnOptions::default()).await
        };
        let alone = build(None).await.unwrap();
        assert_eq!(alone.stream("hi", None, TurnOptions::default()).answer().await.unwrap(), "You said: hi");
        let memory = MemorySaver::default();
        match (mode, build(Some(Arc::new(memory.clone()))).await) {
            ("full", Ok(agent)) => {
                agent.stream("hi", Some("t"), TurnOptions::default()).answer().await.unwrap();
                assert_eq!(memory.threads(None, 9).await.unwrap().len(), 1);
            }
            ("delta", Err(error)) => {
                assert!(matches!(error, ClientError::DeltaWithCheckpointer), "{error}");
                assert_eq!(error.class_name(), "ValueError");
                assert!(memory.threads(None, 9).await.unwrap().is_empty());
            }
            (_, other) => panic!("{mode}: {other:?}"),
        }
    }
}

/// Answers after waiting at the gate of this name.
fn gated(name: &str) -> Json {
    json!({"chunk_chars": 1, "rules": [
        {"when": {"contains": ["wait"]}, "answers": [{"text": "late", "gate": {"name": name, "after_chunks": 2}}]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]})
}

#[tokio::test]
async fn a_writer_whose_thread_was_written_meanwhile_gets_a_conflict_and_nothing_is_lost() {
    for mode in MODES {
        for other_is_gateway in [false, true] {
            let name = format!("client-conflict-{mode}-{other_is_gateway}");
            let gateway = Setup { script: gated(&name), ..Setup::on("sqlite", mode) }.start().await;
            let slow = client(gateway.config(), Checkpointer::default()).await;
            let mut turn = slow.stream("wait", Some("t"), TurnOptions::default());
            gate(&name).reached().await;
            if other_is_gateway {
                gateway.create("t").await;
                gateway.ask("t", "quick").await;
            } else {
                // On a connection of its own, as in another process.
                let file = gateway.data().join("checkpoints.db");
                let saver = Arc::new(SqliteSaver::open_async(file, Options::default()).await.unwrap());
                say(&client(gateway.config(), Checkpointer::Own(saver)).await, "t", "quick").await;
            }
            gate(&name).open();
            let error = loop {
                match turn.next().await.unwrap() {
                    Ok(Event::End(_)) => panic!("the head was moved"),
                    Ok(_) => {}
                    Err(error) => break error,
                }
            };
            assert!(matches!(error, ClientError::Engine(Error::Conflict { .. })), "{error}");
            assert!(error.to_string().contains("thread t") && error.to_string().contains("retry"), "{error}");
            assert_eq!(texts(&gateway.state("t").await), ["wait", "quick", "You said: quick"], "{mode}");
            assert_eq!(say(&slow, "t", "again").await, "You said: again");
        }
    }
}

#[tokio::test]
async fn a_cancelled_or_dropped_turn_stops_where_nothing_is_half_written() {
    for dropped in [false, true] {
        let name = format!("client-cancel-{dropped}");
        let gateway = Setup { script: gated(&name), ..Setup::default() }.start().await;
        let client = client(gateway.config(), own()).await;
        let turn = client.stream("wait", Some("t"), TurnOptions::default());
        gate(&name).reached().await;
        if dropped {
            drop(turn);
        } else {
            turn.cancel();
            assert!(matches!(events(turn).await.last(), Some(Event::End(_))));
        }
        assert_eq!(say(&client, "t", "next").await, "You said: next");
        // The gate is never opened, so this would wait for ever if the turn continued.
        client.close().await;
    }
}

/// Ids of two threads that are drawn in one millisecond do not say which is newer.
async fn next_millisecond() {
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis();
    let began = now();
    while now() == began {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_list_of_threads_counts_threads_however_long_they_are() {
    let gateway = Setup::default().start().await;
    let client = client(gateway.config(), own()).await;
    for thread in ["a", "b", "c"] {
        for turn in ["one", "two", "three", "four"] {
            say(&client, thread, &format!("{thread} {turn}")).await;
        }
        next_millisecond().await;
    }
    say(&client, "a", "again").await;
    let list = client.list_threads(2).await.unwrap().thread_list;
    assert_eq!(
        list.iter().map(|t| (&*t.thread_id, t.title.as_deref())).collect::<Vec<_>>(),
        [("a", Some("a one")), ("c", Some("c one"))]
    );
    let history = client.get_thread("a").await.unwrap().unwrap();
    let (first, last) = (history.checkpoints.first().unwrap(), history.checkpoints.last().unwrap());
    assert_eq!((&list[0].created_at, &list[0].updated_at), (&first.ts, &last.ts));
    assert_eq!(list[0].latest_checkpoint_id, last.checkpoint_id);
    assert_eq!(first.parent_checkpoint_id, None);
    assert_eq!(client.list_threads(0).await.unwrap().thread_list, []);
    assert_eq!(client.get_thread("nobody").await.unwrap(), None, "absent, not empty");
}

#[tokio::test]
async fn a_goal_is_set_pursued_and_cleared() {
    let script = json!({"rules": [
        {"when": {"caller": "middleware:goal"}, "answers": [
            {"text": "{\"satisfied\": false, \"blocker\": \"goal_not_met_yet\", \"reason\": \"more\"}"}]},
        {"when": {"contains": ["more"]}, "answers": [{"text": "worked on"}]},
        {"answers": [{"text": "began"}]},
    ]});
    for mode in MODES {
        let gateway = Setup { script: script.clone(), ..Setup::on("memory", mode) }.start().await;
        let client = client(gateway.config(), own()).await;
        assert_eq!(client.get_goal("t").await.unwrap(), None);
        let goal = client.set_goal("t", "  reach \n the top ", Some(1)).await.unwrap();
        assert_eq!((&goal["objective"], &goal["status"]), (&json!("reach the top"), &json!("active")));
        assert_eq!(client.get_goal("t").await.unwrap(), Some(goal));
        let turn = client.stream("go", Some("t"), TurnOptions::default());
        let answers = events(turn).await;
        let answers =
            answers.iter().filter(|event| matches!(event, Event::MessagesTuple(Message::Ai { .. })));
        assert!(answers.count() >= 2, "the agent went on by itself");
        let goal = client.get_goal("t").await.unwrap().unwrap();
        assert_eq!(goal["continuation_count"], 1, "{mode}");
        client.clear_goal("t").await.unwrap();
        assert_eq!(client.get_goal("t").await.unwrap(), None);
        for (objective, limit) in [(" ", None), (&*"x".repeat(4001), None), ("x", Some(9)), ("x", Some(-1))] {
            let refused = client.set_goal("t", objective, limit).await.unwrap_err();
            assert!(matches!(refused, ClientError::Invalid(_)), "{refused}");
        }
    }
}

#[tokio::test]
async fn arguments_that_name_nothing_are_refused_and_nothing_is_written() {
    let gateway = Setup::default().start().await;
    let saver = Arc::new(MemorySaver::default());
    let client = client(gateway.config(), Checkpointer::Own(Arc::clone(&saver) as Arc<dyn Saver>)).await;
    let default = TurnOptions::default;
    for (thread, options, text) in [
        ("../etc", default(), "valid thread id"),
        ("", default(), "valid thread id"),
        ("t", TurnOptions { model_name: Some("x".into()), ..default() }, "'x'"),
        ("t", TurnOptions { agent_name: Some("a b".into()), ..default() }, "valid agent name"),
    ] {
        let error = refused(client.stream("hi", Some(thread), options)).await;
        assert_eq!(error.class_name(), "ValueError");
        assert!(error.to_string().contains(text), "{error}");
    }
    assert!(saver.threads(None, 9).await.unwrap().is_empty());
    let models = client.models().await;
    assert_eq!((models.len(), &*models[0].name), (1, "m"));
    assert!(client.model("m").await.is_some() && client.model("x").await.is_none());
    assert!(client.tools().iter().any(|(name, _)| name == "read_file"));
}

#[tokio::test]
async fn what_a_turn_is_told_is_noted_on_its_checkpoints() {
    let gateway = Setup::default().start().await;
    let config = Configuration::Given(gateway.config());
    let turn = TurnOptions {
        agent_name: Some("Re_search".into()),
        thinking_enabled: Some(false),
        ..TurnOptions::default()
    };
    let options = ClientOptions { config, checkpointer: own(), turn, frozen_in: Some(process()) };
    let client = Client::open(options).await.unwrap();
    let named =
        TurnOptions { model_name: Some("m".into()), recursion_limit: Some(1), ..TurnOptions::default() };
    client.chat("hi", Some("t"), named).await.unwrap();
    let history = client.get_thread("t").await.unwrap().unwrap();
    let metadata = &history.checkpoints.last().unwrap().metadata;
    assert_eq!(
        (&metadata["svc_agent_name"], &metadata["thinking_enabled"], &metadata["model_name"]),
        (&json!("re-search"), &json!(false), &json!("m"))
    );
}

#[tokio::test]
async fn a_turn_stops_at_its_recursion_limit_and_its_supersteps_stay() {
    let script = json!({"rules": [{"repeat_last": true, "answers": [{"tool_calls": [{"name": "ls"}]}]}]});
    let gateway = Setup { script, ..Setup::default() }.start().await;
    let client = client(gateway.config(), own()).await;
    let options = TurnOptions { recursion_limit: Some(2), ..TurnOptions::default() };
    let error = client.chat("hi", Some("t"), options).await.unwrap_err();
    assert_eq!(error.class_name(), "GraphRecursionError");
    assert_eq!(client.get_values("t").await.unwrap().unwrap().messages.len(), 3);
}

#[tokio::test]
async fn a_client_in_another_form_than_the_database_says_so_in_the_log() {
    for backend in DURABLE {
        let log = Log::default();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(log.clone()).finish();
        let _logged = tracing::subscriber::set_default(subscriber);
        let mut gateway = Setup::on(backend, "full").start().await;
        client(gateway.config(), Checkpointer::default()).await.close().await;
        assert_eq!(log.count("of this process is"), 0, "{backend}: {}", log.text());
        gateway.reconfigure(|setup| (setup.mode, setup.frequency) = ("delta", 7));
        for starts in 1..3 {
            client(gateway.config(), Checkpointer::default()).await.close().await;
            for part in [
                "database.checkpoint_channel_mode of this process is delta",
                "of this database is 3, and that of this process is 7",
                "'threadkeep convert --all --to delta --frequency 7'",
            ] {
                assert_eq!(log.count(part), starts, "{backend} {part}: {}", log.text());
            }
        }
    }
}
