//! The terminal UI without a terminal: keys and events in, effects and screens out.

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use serde_json::{Value as Json, json};
use tempfile::TempDir;
use threadkeep::mode::ModeRegister;

use super::command::Goal;
use super::event::ViewEvent;
use super::session::Session;
use super::state::{Action, Effect, State, TranscriptEntry};
use super::view;
use crate::client::{Client, ClientOptions, Configuration, ThreadSummary, Usage, Values};
use threadkeep_config::{ConfigHandle, Environment, LoadOptions};
use threadkeep_records::{ThreadQuery, ThreadRow};

fn key(code: KeyCode) -> Action {
    Action::Key(KeyEvent::from(code))
}

fn control(character: char) -> Action {
    Action::Key(KeyEvent::new(KeyCode::Char(character), KeyModifiers::CONTROL))
}

/// Types a line and sends it.
fn enter(state: &mut State, line: &str) -> Option<Effect> {
    state.update(Action::Paste(line.to_owned()));
    state.update(key(KeyCode::Enter))
}

fn show(state: &mut State, events: impl IntoIterator<Item = ViewEvent>) {
    for event in events {
        assert_eq!(state.update(Action::View(event)), None);
    }
}

fn delta(id: &str, text: &str) -> ViewEvent {
    ViewEvent::AssistantDelta { id: id.into(), text: text.into() }
}

fn result(call: &str, text: &str) -> ViewEvent {
    ViewEvent::ToolResult { call: call.into(), message: json!({"type": "tool", "content": text}) }
}

fn notice(state: &State) -> &str {
    match state.entries.last() {
        Some(TranscriptEntry::Notice(text) | TranscriptEntry::Error(text)) => text,
        other => panic!("{other:?}"),
    }
}

fn sized(columns: u16, rows: u16) -> State {
    let mut state = State::default();
    state.update(Action::Resize(columns, rows));
    state
}

fn screen(state: &State) -> TestBackend {
    let mut terminal = Terminal::new(TestBackend::new(state.size.0, state.size.1)).unwrap();
    terminal.draw(|frame| view::render(state, false, frame)).unwrap();
    terminal.backend().clone()
}

/// A complete turn with a tool call.
fn conversation(state: &mut State) {
    assert_eq!(enter(state, "What is in here?"), Some(Effect::Say("What is in here?".into())));
    state.update(Action::Began("thread-1".into()));
    let args = json!({"path": "."});
    show(
        state,
        [
            ViewEvent::RunStarted,
            delta("a", "Let me "),
            delta("a", "look."),
            ViewEvent::ToolCall { id: "c".into(), name: "ls".into(), args },
            result("c", "one.txt\ntwo.txt"),
            delta("b", "Two files: one.txt and two.txt, which is all that there is."),
            ViewEvent::Title("What is in here?".into()),
            ViewEvent::Usage(Usage { input_tokens: 40, output_tokens: 2, total_tokens: 42 }),
            ViewEvent::RunEnded,
        ],
    );
}

#[test]
fn a_turn_is_shown_as_it_happens() {
    let mut state = sized(60, 18);
    conversation(&mut state);
    assert!(!state.running);
    insta::assert_snapshot!(screen(&state));
    state.update(Action::Paste("日本".into()));
    assert_eq!(enter(&mut state, "/details"), Some(Effect::Say("日本/details".into())), "a message");
    state.update(Action::View(ViewEvent::RunStarted));
    insta::assert_snapshot!("a_turn_at_work", screen(&state));
}

/// One line a delegation, which changes in place, with its latest message under it.
#[test]
fn a_delegation_is_a_line_that_follows_its_subagent() {
    let mut state = sized(60, 18);
    enter(&mut state, "research");
    let task = |id: &str, about: &str| ViewEvent::ToolCall {
        id: id.into(),
        name: "task".into(),
        args: json!({"prompt": "p", "description": about, "subagent_type": "general-purpose"}),
    };
    let event = |call: &str, event: Json| ViewEvent::Task { call: call.into(), event };
    show(&mut state, [ViewEvent::RunStarted, task("a", "the first"), task("b", "the second")]);
    show(
        &mut state,
        [event("a", json!({"type": "task_started", "description": "the first", "model_name": "m"}))],
    );
    let before = state.entries.len();
    let said = json!({"type": "ai", "content": "", "tool_calls": [{"name": "ls", "args": {}, "id": "x"}]});
    let usage = json!({"input_tokens": 9, "output_tokens": 1, "total_tokens": 10});
    show(&mut state, [event("a", json!({"type": "task_running", "message": said, "usage": usage}))]);
    insta::assert_snapshot!("delegations_at_work", screen(&state));
    let tool = json!({"type": "tool", "content": "a.txt\u{1b}[31m\nb.txt"});
    let more = json!({"type": "ai", "content": "All is well, and this is a long report of it on more than one line."});
    let usage = json!({"input_tokens": 20, "output_tokens": 5, "total_tokens": 25});
    show(
        &mut state,
        [
            event("a", json!({"type": "task_running", "message": tool, "usage": null})),
            event("a", json!({"type": "task_running", "message": more, "usage": usage})),
            event("a", json!({"type": "task_completed", "result": more["content"], "usage": usage})),
            event("b", json!({"type": "task_started", "description": "the second"})),
            event("b", json!({"type": "task_timed_out", "error": "Execution timed out after 5 seconds"})),
            event("nobody", json!({"type": "task_started"})),
            result("a", "Task Succeeded. Result: All is well"),
        ],
    );
    assert_eq!(state.entries.len(), before, "in place");
    insta::assert_snapshot!("delegations_done", screen(&state));
    enter(&mut state, "/details");
    assert!(screen(&state).to_string().contains("Task Succeeded."));
}

#[test]
fn delegations_of_a_thread_show_how_they_ended() {
    let call = |id: &str| json!({"name": "task", "args": {"prompt": id}, "id": id});
    let messages = json!([
        {"type": "ai", "content": "", "id": "1", "tool_calls": [call("x"), call("y"), call("z")]},
        {"type": "tool", "content": "Task Succeeded. Result: r", "tool_call_id": "x", "id": "2", "additional_kwargs": {
            "subagent_status": "completed", "subagent_result_brief": "r", "subagent_token_usage": {"total_tokens": 7}}},
        {"type": "tool", "content": "unknown tool", "tool_call_id": "y", "id": "3"},
    ]);
    let Json::Array(messages) = messages else { panic!() };
    let mut state = sized(60, 18);
    state.update(Action::Switched("t".into(), Values { messages, ..Values::default() }));
    let lines = |hides_tokens: bool| -> Vec<String> {
        let of = |entry: &TranscriptEntry| match entry {
            TranscriptEntry::Task { task, .. } => task.line(hides_tokens),
            other => panic!("{other:?}"),
        };
        state.entries.iter().map(of).collect()
    };
    assert_eq!(lines(false), ["completed, 7 tokens: x", "refused: y", "asked: z"]);
    assert_eq!(lines(true)[0], "completed: x");
    assert_eq!(enter(&mut state, "/continue"), Some(Effect::Continue));
}

#[test]
fn wide_characters_break_where_they_must_and_control_characters_do_nothing() {
    let mut state = sized(20, 12);
    enter(&mut state, "説明してください");
    show(&mut state, [delta("a", "これはとても長い文章です。\u{1b}[31mred\u{1b}[0m\tok")]);
    state.update(Action::Paste("漢字かな交じり文を書く".into()));
    insta::assert_snapshot!(screen(&state));
}

#[test]
fn a_refused_thread_shows_the_error_and_the_end_of_the_run() {
    let mut state = sized(50, 12);
    enter(&mut state, "hi");
    let error = crate::client::ClientError::Engine(threadkeep::Error::ModeMismatch);
    show(&mut state, [ViewEvent::RunStarted]);
    show(&mut state, super::event::of(&Err(error)));
    assert!(!state.running);
    insta::assert_snapshot!(screen(&state));
}

#[test]
fn no_size_is_too_small() {
    for columns in [1, 2, 3, 5, 10, 25] {
        for rows in [1, 2, 4, 5, 6, 7, 11] {
            let mut state = sized(columns, rows);
            conversation(&mut state);
            state.update(Action::Paste("日本語 text".into()));
            for _ in 0..3 {
                state.update(key(KeyCode::PageUp));
            }
            screen(&state);
            state.update(Action::Threads(vec![thread("a", None)]));
            screen(&state);
        }
    }
}

#[test]
fn the_view_scrolls_to_its_ends_and_follows_the_conversation_at_its_end() {
    let mut state = sized(40, 12);
    for turn in 0..20 {
        show(&mut state, [delta(&turn.to_string(), &format!("answer {turn}"))]);
    }
    let top = view::hidden_lines(&state);
    assert_eq!(top, 40 - 7, "two lines an answer, seven rows");
    for _ in 0..20 {
        state.update(key(KeyCode::PageUp));
    }
    assert_eq!(state.scrolled, top);
    assert!(screen(&state).to_string().contains("answer 0"));
    state.update(key(KeyCode::Down));
    assert_eq!(state.scrolled, top - 1);
    state.update(Action::Resize(40, 60));
    assert_eq!(state.scrolled, 0, "now everything fits");
    state.update(Action::Resize(40, 12));
    assert!(screen(&state).to_string().contains("answer 19"));
    state.update(key(KeyCode::Up));
    enter(&mut state, "more");
    assert_eq!(state.scrolled, 0);
}

fn thread(id: &str, title: Option<&str>) -> ThreadSummary {
    ThreadSummary {
        thread_id: id.to_owned(),
        created_at: "2026-01-01T10:00:00.000000+00:00".to_owned(),
        updated_at: "2026-01-02T10:30:00.000000+00:00".to_owned(),
        latest_checkpoint_id: String::new(),
        title: title.map(str::to_owned),
    }
}

#[test]
fn a_thread_is_chosen_from_the_list_and_shown_with_what_was_said() {
    let mut state = sized(60, 12);
    conversation(&mut state);
    assert_eq!(enter(&mut state, "/threads"), Some(Effect::ListThreads));
    state.update(Action::Threads(Vec::new()));
    assert_eq!(notice(&state), "there are no threads yet");
    state.update(Action::Threads(vec![thread("a", Some("旅行の計画")), thread("b", None)]));
    for code in [KeyCode::Up, KeyCode::Down, KeyCode::Down, KeyCode::Char('x')] {
        assert_eq!(state.update(key(code)), None);
    }
    insta::assert_snapshot!(screen(&state));
    assert_eq!(state.update(key(KeyCode::Enter)), Some(Effect::Switch("b".into())));
    let messages = json!([
        {"type": "human", "content": "look", "id": "1"},
        {"type": "human", "content": "hidden", "id": "h", "additional_kwargs": {"hide_from_ui": true}},
        {"type": "ai", "content": "", "id": "2", "tool_calls": [{"name": "ls", "args": {}, "id": "c"}]},
        {"type": "tool", "content": "empty", "tool_call_id": "c", "name": "ls", "id": "3"},
        {"type": "ai", "content": "Nothing.", "id": "4", "tool_calls": []},
    ]);
    let Json::Array(messages) = messages else { panic!() };
    let values = Values { title: Some("Look".into()), messages, artifacts: Vec::new() };
    state.update(Action::Switched("b".into(), values));
    assert_eq!((state.thread.as_deref(), state.title.as_deref()), (Some("b"), Some("Look")));
    assert_eq!(
        state.entries,
        [
            TranscriptEntry::User("look".into()),
            TranscriptEntry::Call {
                id: "c".into(),
                name: "ls".into(),
                args: "{}".into(),
                result: Some("empty".into())
            },
            TranscriptEntry::Assistant { id: "4".into(), text: "Nothing.".into() },
        ]
    );
    state.update(Action::Threads(vec![thread("a", None)]));
    state.update(key(KeyCode::Esc));
    assert_eq!(state.picker, None);
}

#[test]
fn commands_do_what_the_help_says() {
    let mut state = sized(80, 24);
    enter(&mut state, "/help");
    assert!(notice(&state).contains("/switch THREAD") && notice(&state).contains("/quit"));
    enter(&mut state, "/goal x");
    assert!(notice(&state).contains("no thread yet"));
    conversation(&mut state);
    for (line, effect) in [
        ("/goal reach it", Effect::Goal(Goal::Set("reach it".into()))),
        ("/goal", Effect::Goal(Goal::Show)),
        ("/switch the trip", Effect::Switch("the trip".into())),
        ("/resume b", Effect::Switch("b".into())),
        ("/resume", Effect::ListThreads),
        ("/model", Effect::Model(None)),
        ("/tools", Effect::Tools),
        ("/config", Effect::Config),
        ("/quit", Effect::Quit),
    ] {
        assert_eq!(enter(&mut state, line), Some(effect), "{line}");
    }
    enter(&mut state, "/usage");
    assert_eq!(notice(&state), "42 tokens: 40 asked, 2 answered");
    let brief = screen(&state).to_string();
    enter(&mut state, "/details");
    assert_ne!(screen(&state).to_string(), brief, "the results of tools have more lines");
    enter(&mut state, "/skills");
    assert!(notice(&state).contains("not supported"));
    assert_eq!(state.update(Action::Model("big".into())), None);
    assert!(screen(&state).to_string().contains("big"));
    enter(&mut state, "/clear");
    assert_eq!((state.entries.len(), state.thread.as_deref()), (0, Some("thread-1")));
    enter(&mut state, "/new");
    assert_eq!((state.thread.as_deref(), state.title.as_deref()), (None, None));
}

#[test]
fn a_text_that_begins_like_a_command_and_is_none_is_not_lost() {
    let mut state = sized(80, 24);
    for text in ["/etc/hosts", "/srv is full:\nwhat can go?"] {
        assert_eq!(enter(&mut state, text), None);
        assert!(notice(&state).contains("unknown command"), "{text}");
        assert_eq!(state.input.take(), text);
    }
    assert_eq!(enter(&mut state, "/hepl"), None);
    assert_eq!(state.input.take(), "");
}

#[test]
fn a_turn_at_work_can_be_stopped_and_nothing_else_begun() {
    let mut state = sized(60, 18);
    assert_eq!(state.update(control('c')), Some(Effect::Quit));
    assert_eq!(state.update(key(KeyCode::Esc)), None);
    conversation(&mut state);
    state.update(Action::View(ViewEvent::RunStarted));
    assert_eq!(state.update(control('c')), Some(Effect::Stop));
    assert_eq!(state.update(key(KeyCode::Esc)), Some(Effect::Stop));
    for line in ["/new", "/clear", "/threads", "/switch b", "/goal clear"] {
        assert_eq!(enter(&mut state, line), None);
        assert!(notice(&state).contains("Esc stops it"), "{line}");
    }
    assert_eq!(enter(&mut state, "more"), None);
    assert_eq!(state.input.take(), "more", "it is not lost");
    assert_eq!(state.thread.as_deref(), Some("thread-1"));
    assert_eq!(state.update(control('d')), Some(Effect::Quit));
}

/// A configuration in its own directory, with a credential in it.
fn configured(mode: &str) -> (TempDir, ConfigHandle) {
    let dir = TempDir::new().unwrap();
    let script = json!({"rules": [{"answers": [{"text": "You said: {{input}}"}]}]});
    std::fs::write(dir.path().join("script.json"), script.to_string()).unwrap();
    let config = json!({
        "config_version": 49,
        "database": {"backend": "sqlite", "checkpoint_channel_mode": mode,
            "postgres_url": "postgres://u:hunter2@h/d",
            "checkpoint_cache": {"redis_url": "redis://:hunter2@h"}},
        "models": [{"name": "m", "use": "scripted", "model": "m", "script": "script.json", "api_key": "hunter2"}],
    });
    std::fs::write(dir.path().join("config.yaml"), config.to_string()).unwrap();
    let home = ("SVC_HOME".to_owned(), dir.path().join("state").display().to_string());
    let options = LoadOptions {
        config_path: None,
        environment: Environment::from_iter([home]),
        working_dir: dir.path().to_owned(),
    };
    let handle = ConfigHandle::open(&options).unwrap();
    (dir, handle)
}

async fn session(config: &ConfigHandle) -> Session {
    let config = Configuration::Given(config.clone());
    let frozen_in: Option<&'static ModeRegister> = Some(Box::leak(Box::new(ModeRegister::new())));
    let client = Client::open(ClientOptions { config, frozen_in, ..ClientOptions::default() }).await.unwrap();
    Session::open(client).await.unwrap()
}

/// Executes an effect, and shows the results until the turn has ended.
async fn done(session: &mut Session, state: &mut State, effect: Effect) {
    for action in session.carry_out(effect).await {
        state.update(action);
    }
    while state.running {
        let item = session.next().await;
        for action in session.happened(item).await.unwrap() {
            state.update(action);
        }
    }
}

async fn rows(config: &ConfigHandle) -> Vec<ThreadRow> {
    let records = threadkeep_storage::open_records(&config.current()).await.unwrap();
    let rows = records.threads().search(&ThreadQuery { limit: 9, ..ThreadQuery::default() }).await.unwrap();
    records.close().await;
    rows
}

#[tokio::test]
async fn a_thread_begun_here_is_in_the_gateways_list() {
    let (_dir, config) = configured("full");
    let (mut session, mut state) = (session(&config).await, sized(60, 20));
    done(&mut session, &mut state, Effect::Say("hello".into())).await;
    let thread = state.thread.clone().unwrap();
    assert!(screen(&state).to_string().contains("You said: hello"));
    done(&mut session, &mut state, Effect::Say("again".into())).await;
    assert_eq!(state.thread.as_ref(), Some(&thread));
    let found = rows(&config).await;
    assert_eq!(found.len(), 1);
    assert_eq!((&found[0].thread_id, found[0].user_id.as_deref()), (&thread, Some("default")));
    assert_eq!(Json::Object(found[0].metadata.clone()), json!({"source": "tui"}));
    assert_eq!(found[0].display_name.as_deref(), Some("hello"));

    enter(&mut state, "/new");
    session.follow(state.thread.as_deref());
    done(&mut session, &mut state, Effect::Say("another".into())).await;
    assert_ne!(state.thread.as_ref(), Some(&thread));
    done(&mut session, &mut state, Effect::Switch("hello".into())).await;
    assert_eq!((state.thread.as_ref(), state.entries.len()), (Some(&thread), 4));
    done(&mut session, &mut state, Effect::Switch("nothing".into())).await;
    assert!(notice(&state).contains("'nothing'"));
    assert_eq!(state.thread.as_ref(), Some(&thread));
    for (effect, told) in [
        (Effect::Goal(Goal::Show), "no goal"),
        (Effect::Goal(Goal::Set("the top".into())), "the goal is: the top"),
        (Effect::Goal(Goal::Clear), "no goal"),
        (Effect::Tools, "read_file"),
        (Effect::Model(None), "m  m"),
        (Effect::Model(Some("x".into())), "'x'"),
    ] {
        done(&mut session, &mut state, effect.clone()).await;
        assert!(notice(&state).contains(told), "{effect:?}: {}", notice(&state));
    }
    session.close().await;
    assert_eq!(rows(&config).await.len(), 2);
}

#[tokio::test]
async fn the_tokens_of_delegations_are_hidden_from_the_turn_after_an_edit_on() {
    let (dir, config) = configured("full");
    let (mut session, mut state) = (session(&config).await, sized(60, 20));
    done(&mut session, &mut state, Effect::Say("hello".into())).await;
    assert!(!state.hides_tokens);
    let path = dir.path().join("config.yaml");
    let text = std::fs::read_to_string(&path).unwrap();
    let edited = text.replacen('{', "{\"token_usage\": {\"enabled\": false}, ", 1);
    std::fs::write(&path, edited).unwrap();
    done(&mut session, &mut state, Effect::Say("again".into())).await;
    assert!(state.hides_tokens);
    session.close().await;
}

#[tokio::test]
async fn a_refused_thread_is_not_entered() {
    let (dir, config) = configured("delta");
    let (mut first, mut state) = (session(&config).await, sized(60, 20));
    done(&mut first, &mut state, Effect::Say("hello".into())).await;
    first.close().await;
    let thread = state.thread.clone();
    std::fs::remove_file(dir.path().join("state/data/gateway.db")).unwrap();
    let path = dir.path().join("config.yaml");
    let text = std::fs::read_to_string(&path).unwrap().replace("\"delta\"", "\"full\"");
    std::fs::write(&path, text).unwrap();
    let mut session = session(&config).await;
    session.follow(thread.as_deref());
    let mut state = sized(60, 20);
    done(&mut session, &mut state, Effect::Say("more".into())).await;
    assert!(notice(&state).starts_with("Thread requires delta mode"), "{}", notice(&state));
    assert!(!state.running);
    done(&mut session, &mut state, Effect::Switch(thread.unwrap())).await;
    assert!(notice(&state).starts_with("Thread requires delta mode"), "{}", notice(&state));
    session.close().await;
    assert_eq!(rows(&config).await, []);
}

#[tokio::test]
async fn the_configuration_is_shown_without_credentials_mode_or_cadence() {
    let (_dir, config) = configured("delta");
    let (mut session, mut state) = (session(&config).await, sized(100, 20));
    done(&mut session, &mut state, Effect::Config).await;
    let shown = notice(&state).to_owned();
    assert!(shown.contains("sqlite") && shown.contains("models         m"), "{shown}");
    for hidden in ["hunter2", "postgres", "redis", "delta", "api_key"] {
        assert!(!shown.contains(hidden), "{hidden}: {shown}");
    }
    session.close().await;
}
