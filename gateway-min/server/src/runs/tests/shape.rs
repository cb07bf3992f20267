//! The checkpoints that runs of fixed scripts store, row by row; mode and cadence do not change what they contain.

use std::collections::HashMap;
use std::time::Duration;

use regex::Regex;
use serde_json::{Value as Json, json};
use threadkeep::checkpoint::{CheckpointTuple, TaskWrites};
use threadkeep::id::ThreadId;
use threadkeep::saver::{ListQuery, Load};
use threadkeep::state::StateSnapshot;

use super::{Gateway, On, SAVERS, ask, everywhere};

/// The word in a question, and the model's answer to it.
fn script() -> Json {
    let waits = "until [ -e flag ]; do sleep 0.01; done; echo slow";
    json!({"rules": [
        {"when": {"contains": ["one tool"]}, "answers": [
            {"text": "One.", "tool_calls": [{"name": "ls", "id": "a"}]}, {"text": "done"},
        ]},
        {"when": {"contains": ["two tools"]}, "answers": [
            {"text": "Two.", "tool_calls": [
                {"name": "bash", "id": "slow", "args": {"command": waits}},
                {"name": "write_file", "id": "fast", "args": {"path": "other", "content": "x"}},
            ]},
            {"text": "done"},
        ]},
        {"when": {"contains": ["bad tool"]}, "answers": [
            {"text": "Bad.", "tool_calls": [{"name": "read_file", "id": "a", "args": {"path": "missing"}}]},
            {"text": "done"},
        ]},
        {"when": {"contains": ["bad model"]}, "answers": [{"error": {"kind": "fatal", "message": "no"}}]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]})
}

impl Gateway {
    /// Every checkpoint of the thread, oldest first.
    async fn stored(&self) -> Vec<CheckpointTuple> {
        let query = ListQuery {
            thread: ThreadId::from("t"),
            namespace: None,
            before: None,
            limit: None,
            filter: serde_json::Map::new(),
            load: Load::All,
        };
        let mut tuples = self.app.threads.accessor().saver().list(&query).await.unwrap();
        tuples.reverse();
        tuples
    }

    /// Runs a turn. Its slow call ends only when the row of the fast one is stored.
    async fn turn(&self, question: &str) -> Vec<(String, Json)> {
        let flag = self.app.agents.thread_dir("t").join("flag");
        std::fs::remove_file(&flag).ok();
        let release = async {
            loop {
                let stored = self.stored().await;
                let rows = stored.last().map_or(&[][..], |head| &head.writes[..]);
                if matches!(rows, [row] if row.node.as_str() == "tools" && row.index == 1) {
                    std::fs::write(&flag, "").unwrap();
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::select! {
            (frames, _) = self.run(ask(question)) => frames,
            () = release => Vec::new(),
        }
    }
}

/// A checkpoint on one line: step, source, next nodes, the tasks whose writes created it, and the rows of the tasks
/// that ran from it.
fn line(tuple: &CheckpointTuple, made_by: &[TaskWrites]) -> String {
    let row = |row: &TaskWrites| {
        let channels: Vec<&str> = row.writes.iter().map(|write| write.channel.as_str()).collect();
        format!("{}#{}({})", row.node, row.index, channels.join("+"))
    };
    let applied = tuple.checkpoint.applied.iter().map(|task| {
        let row = made_by.iter().find(|row| row.task == *task).expect("a row of the parent");
        format!("{}#{}", row.node, row.index)
    });
    let applied: Vec<String> = applied.collect();
    let next: Vec<&str> = tuple.checkpoint.next.iter().map(threadkeep::id::NodeName::as_str).collect();
    let rows: Vec<String> = tuple.writes.iter().map(row).collect();
    let (step, source) = (tuple.metadata.step, json!(tuple.metadata.source));
    let source = source.as_str().unwrap();
    format!("{step} {source} next[{}] by[{}] rows[{}]", next.join(" "), applied.join(" "), rows.join(" "))
}

/// The lines of a thread, after checking that it is one unbroken chain with increasing ids.
fn shape(tuples: &[CheckpointTuple]) -> Vec<String> {
    assert_eq!(tuples[0].parent, None);
    for pair in tuples.windows(2) {
        assert_eq!(pair[1].parent, Some(pair[0].checkpoint.id), "the chain is broken");
        assert!(pair[1].checkpoint.id > pair[0].checkpoint.id, "ids do not increase");
        assert_eq!(pair[1].metadata.step, pair[0].metadata.step + 1);
    }
    let parents = std::iter::once([].as_slice()).chain(tuples.iter().map(|tuple| tuple.writes.as_slice()));
    tuples.iter().zip(parents).map(|(tuple, made_by)| line(tuple, made_by)).collect()
}

/// The checkpoints of two turns on a new thread: the lines of the first, then those of the second.
async fn turns(on: On, question: &str) -> [Vec<String>; 2] {
    let gateway = Gateway::start_on(on, &script()).await;
    gateway.turn(question).await;
    let first = gateway.stored().await.len();
    gateway.turn(question).await;
    let mut lines = shape(&gateway.stored().await);
    let second = lines.split_off(first);
    [lines, second]
}

/// The first turn of a thread has no parent for its input's row, and its last answer sets the title.
#[tokio::test]
async fn each_kind_of_turn_leaves_exactly_these_checkpoints_and_rows() {
    let no_tool = [
        vec![
            "-1 input next[model] by[] rows[model#0(messages+title)]",
            "0 loop next[] by[model#0] rows[]",
            "1 update next[] by[] rows[__input__#0(messages)]",
        ],
        vec![
            "2 input next[model] by[__input__#0] rows[model#0(messages)]",
            "3 loop next[] by[model#0] rows[]",
            "4 update next[] by[] rows[]",
        ],
    ];
    let one_tool = [
        vec![
            "-1 input next[model] by[] rows[model#0(messages)]",
            "0 loop next[tools] by[model#0] rows[tools#0(messages)]",
            "1 loop next[model] by[tools#0] rows[model#0(messages+title)]",
            "2 loop next[] by[model#0] rows[]",
            "3 update next[] by[] rows[__input__#0(messages)]",
        ],
        vec![
            "4 input next[model] by[__input__#0] rows[model#0(messages)]",
            "5 loop next[tools] by[model#0] rows[tools#0(messages)]",
            "6 loop next[model] by[tools#0] rows[model#0(messages)]",
            "7 loop next[] by[model#0] rows[]",
            "8 update next[] by[] rows[]",
        ],
    ];
    // The second call finishes first: its row is stored first, and applied second.
    let two_tools = [
        vec![
            "-1 input next[model] by[] rows[model#0(messages)]",
            "0 loop next[tools tools] by[model#0] rows[tools#1(messages) tools#0(messages)]",
            "1 loop next[model] by[tools#0 tools#1] rows[model#0(messages+title)]",
            "2 loop next[] by[model#0] rows[]",
            "3 update next[] by[] rows[__input__#0(messages)]",
        ],
        vec![
            "4 input next[model] by[__input__#0] rows[model#0(messages)]",
            "5 loop next[tools tools] by[model#0] rows[tools#1(messages) tools#0(messages)]",
            "6 loop next[model] by[tools#0 tools#1] rows[model#0(messages)]",
            "7 loop next[] by[model#0] rows[]",
            "8 update next[] by[] rows[]",
        ],
    ];
    // A failed run has no note.
    let bad_model = [
        vec![
            "-1 input next[model] by[] rows[model#0(messages+title)]",
            "0 loop next[] by[model#0] rows[__input__#0(messages)]",
        ],
        vec![
            "1 input next[model] by[__input__#0] rows[model#0(messages)]",
            "2 loop next[] by[model#0] rows[]",
        ],
    ];
    for (question, expected) in [
        ("hello", &no_tool),
        ("one tool", &one_tool),
        ("two tools", &two_tools),
        ("bad tool", &one_tool),
        ("bad model", &bad_model),
    ] {
        for on in everywhere() {
            assert_eq!(turns(on, question).await, *expected, "{question}, {on:?}");
        }
    }
}

/// The state at every checkpoint, oldest first, with each id replaced by its order of appearance.
fn states(history: &[StateSnapshot]) -> Vec<String> {
    let uuid = Regex::new("[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}").unwrap();
    let mut seen = HashMap::new();
    let state = |state: &StateSnapshot| {
        let values = Json::Object(state.values().unwrap()).to_string();
        let next: Vec<&str> = state.next.iter().map(threadkeep::id::NodeName::as_str).collect();
        let text = format!("{} {next:?} {values}", state.metadata.step);
        let masked = uuid.replace_all(&text, |found: &regex::Captures<'_>| {
            let next = seen.len();
            format!("<{}>", seen.entry(found[0].to_owned()).or_insert(next))
        });
        masked.into_owned()
    };
    history.iter().map(state).collect()
}

/// The contents of the messages of a state.
fn contents(values: &Json) -> Vec<String> {
    let messages = values["messages"].as_array().unwrap();
    messages.iter().map(|message| message["content"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn the_same_script_gives_the_same_state_at_every_checkpoint_in_each_mode_and_cadence() {
    let questions = ["hello", "two tools", "bad model", "one tool", "bad tool", "two tools", "bye"];
    let settings = [("full", 3), ("delta", 1), ("delta", 2), ("delta", 10), ("delta", 1000)];
    let mut expected: Option<Vec<String>> = None;
    for (saver, (mode, frequency)) in SAVERS.into_iter().flat_map(|saver| settings.map(|how| (saver, how))) {
        let gateway = Gateway::start_at((saver, mode), frequency, &script()).await;
        let mut live = Vec::new();
        for question in questions {
            let frames = gateway.turn(question).await;
            live.extend(frames.into_iter().filter(|(name, _)| name == "values").map(|(_, values)| values));
        }
        let mut history = gateway.history().await;
        history.reverse();

        // As during the run: every superstep shows its state.
        let steps = history.iter().filter(|state| !state.metadata.is_duration_only());
        let read: Vec<Json> = steps.map(|state| Json::Object(state.values().unwrap())).collect();
        assert_eq!(
            read.iter().map(contents).collect::<Vec<_>>(),
            live.iter().map(contents).collect::<Vec<_>>(),
            "{saver} {mode} {frequency}"
        );
        let results: Vec<&Json> = read.last().unwrap()["messages"].as_array().unwrap().iter().collect();
        let calls: Vec<&str> =
            results.iter().filter_map(|message| message["tool_call_id"].as_str()).collect();
        assert_eq!(calls, ["slow", "fast", "a", "a", "slow", "fast"], "in the order of the calls");

        // Reading one by one equals reading in one pass.
        for state in &history {
            let alone =
                gateway.app.threads.accessor().get(&state.key.thread, Some(state.key.id)).await.unwrap();
            assert_eq!(alone.unwrap().values().unwrap(), state.values().unwrap());
        }
        let snapshots = history.iter().filter(|state| state.metadata.counters.is_empty()).count();
        match (mode, frequency) {
            ("delta", 1) => assert_eq!(snapshots, history.len()),
            ("delta", _) => assert!(snapshots < history.len(), "sentinels are read, too"),
            _ => assert_eq!(snapshots, history.len()),
        }

        let states = states(&history);
        assert_eq!(&states, expected.get_or_insert(states.clone()), "{saver} {mode} {frequency}");
    }
}
