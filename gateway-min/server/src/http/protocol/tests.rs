use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;
use serde_json::{Value, json};
use threadkeep::id::Clock;

use super::event::{Data, Place, Said, Speaker};
use super::filter::Filter;
use super::translate::Translator;
use crate::http::extract::read;
use crate::streams::bridge::{BridgeOptions, Event, EventId, StreamBridge};

const ALL: [&str; 9] =
    ["values", "updates", "messages", "tools", "lifecycle", "input", "checkpoints", "tasks", "custom"];

fn filter(body: Value) -> Filter {
    let Value::Object(body) = body else { panic!("no object") };
    read(body, vec!["body".into()]).unwrap()
}

/// The frames of a run, the first of which has this number.
fn frames(first: u64, frames: &[(&str, Value)]) -> Vec<Event> {
    let frame = |((name, data), seq): (&(&str, Value), u64)| Event {
        id: EventId { unix_ms: 1_800_000_000_000, seq },
        name: (*name).into(),
        data: Bytes::from(data.to_string()),
    };
    frames.iter().zip(first..).map(frame).collect()
}

/// What a stream of all channels says of these frames.
fn said(translator: &mut Translator, frames: &[Event]) -> Vec<Said> {
    frames.iter().flat_map(|frame| translator.frame(frame)).collect()
}

fn translator() -> Translator {
    Translator::new("r", Arc::new(filter(json!({ "channels": ALL }))))
}

/// Events as the method, the place and the data.
fn shown(said: &[Said]) -> Vec<(&str, String, Value)> {
    let data = |said: &Said| match &said.data {
        Data::Json(data) => data.clone(),
        Data::Text(text) => serde_json::from_slice(text).unwrap(),
    };
    said.iter().map(|said| (said.method, said.namespace.join("/"), data(said))).collect()
}

fn chunk(id: &str, content: &str, more: Value) -> (&'static str, Value) {
    let mut message = json!({"type": "AIMessageChunk", "id": id, "content": content});
    message.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    ("messages", json!([message, {"langgraph_node": "model", "ls_provider": "scripted", "run_id": "r"}]))
}

fn last(id: &str) -> (&'static str, Value) {
    let usage = json!({"input_tokens": 3});
    chunk(
        id,
        "",
        json!({
            "chunk_position": "last", "usage_metadata": usage, "response_metadata": {"finish_reason": "stop"},
        }),
    )
}

fn checkpoint(id: &str) -> (&'static str, Value) {
    let at = |id: &str| json!({"configurable": {"checkpoint_id": id}});
    let metadata = json!({"step": 1, "source": "loop"});
    (
        "checkpoints",
        json!({"config": at(id), "parent_config": at("before"), "metadata": metadata, "values": {}}),
    )
}

#[test]
fn a_message_is_blocks_that_begin_grow_and_end() {
    let call =
        |args: &str| json!({"tool_call_chunks": [{"index": 0, "id": "c", "name": "ls", "args": args}]});
    let frames = frames(
        0,
        &[
            ("metadata", json!({"run_id": "r"})),
            chunk("m", "", json!({"additional_kwargs": {"reasoning_content": "hm"}})),
            chunk("m", "Hel", json!({})),
            chunk("m", "lo", json!({})),
            chunk("m", "", call("{")),
            chunk("m", "", call("}")),
            last("m"),
        ],
    );
    let mut translator = translator();
    let said = said(&mut translator, &frames);
    assert!(said.iter().all(|said| said.method == "lifecycle" || said.node.as_deref() == Some("model")));
    let block = |event: &str, index: u64, name: &str, value: Value| {
        ("messages", String::new(), json!({"event": event, "index": index, name: value}))
    };
    let call = |args: &str| json!({"type": "block-delta", "fields": {"type": "tool_call_chunk", "id": "c", "name": "ls", "args": args}});
    let metadata = json!({"provider": "scripted", "run_id": "r"});
    assert_eq!(
        shown(&said),
        [
            ("lifecycle", String::new(), json!({"event": "running", "graph_name": "lead_agent"})),
            (
                "messages",
                String::new(),
                json!({"event": "message-start", "role": "ai", "id": "m", "metadata": metadata})
            ),
            block("content-block-start", 0, "content", json!({"type": "reasoning", "reasoning": ""})),
            block("content-block-delta", 0, "delta", json!({"type": "reasoning-delta", "reasoning": "hm"})),
            block("content-block-finish", 0, "content", json!({"type": "reasoning", "reasoning": "hm"})),
            block("content-block-start", 1, "content", json!({"type": "text", "text": ""})),
            block("content-block-delta", 1, "delta", json!({"type": "text-delta", "text": "Hel"})),
            block("content-block-delta", 1, "delta", json!({"type": "text-delta", "text": "lo"})),
            block("content-block-finish", 1, "content", json!({"type": "text", "text": "Hello"})),
            block(
                "content-block-start",
                2,
                "content",
                json!({"type": "tool_call_chunk", "id": "c", "name": "ls", "args": "", "index": 0})
            ),
            block("content-block-delta", 2, "delta", call("{")),
            block("content-block-delta", 2, "delta", call("{}")),
            block(
                "content-block-finish",
                2,
                "content",
                json!({"type": "tool_call", "id": "c", "name": "ls", "args": {}})
            ),
            (
                "messages",
                String::new(),
                json!({"event": "message-finish", "usage": {"input_tokens": 3}, "reason": "stop"})
            ),
        ]
    );
    in_order(&said);
}

/// As the stored message has them.
#[test]
fn calls_that_a_model_makes_in_turns_are_complete() {
    let piece = |index: u64, args: &str| {
        let id = args.starts_with('{').then(|| format!("c{index}"));
        json!({"index": index, "id": id, "name": id.as_ref().map(|_| "ls"), "args": args})
    };
    let calls = |pieces: &[Value]| chunk("m", "", json!({"tool_call_chunks": pieces}));
    let turns = [
        calls(&[piece(0, "{\"a\""), piece(1, "{\"b\"")]),
        calls(&[piece(0, ":1")]),
        calls(&[piece(1, ":2"), piece(0, "}")]),
        calls(&[piece(1, "}")]),
        last("m"),
    ];
    let said = said(&mut translator(), &frames(0, &turns));
    in_order(&said);
    // As a client puts them together: what begins or ends replaces what was there.
    let mut blocks: Vec<Value> = Vec::new();
    let mut open = None;
    for (_, _, data) in shown(&said) {
        let index = data["index"].as_u64().map(|index| usize::try_from(index).unwrap());
        match data["event"].as_str().unwrap() {
            "content-block-start" => {
                assert_eq!(open.replace(index.unwrap()), None, "one at a time");
                blocks.resize(blocks.len().max(index.unwrap() + 1), Value::Null);
                blocks[index.unwrap()] = data["content"].clone();
            }
            "content-block-delta" => {
                assert_eq!(open, index);
                blocks[index.unwrap()] = data["delta"]["fields"].clone();
            }
            "content-block-finish" => {
                assert_eq!(open.take(), index);
                blocks[index.unwrap()] = data["content"].clone();
            }
            _ => assert_eq!(index, None),
        }
    }
    let call = |id: &str, args: Value| json!({"type": "tool_call", "id": id, "name": "ls", "args": args});
    assert_eq!(blocks, [call("c0", json!({"a": 1})), call("c1", json!({"b": 2}))]);
}

/// Each event has a greater number than the one before, and a name of its own.
fn in_order(said: &[Said]) {
    for pair in said.windows(2) {
        assert!(pair[0].seq < pair[1].seq, "{pair:?}");
        assert_ne!(pair[0].id, pair[1].id);
    }
}

#[test]
fn a_message_whose_beginning_is_lost_is_said_when_it_is_complete() {
    let message = json!({"type": "ai", "id": "m", "content": "Hello"});
    let frames = frames(
        7,
        &[
            chunk("m", "lo", json!({})),
            last("m"),
            ("updates", json!({"model": {"messages": [message]}})),
            chunk("n", "more", json!({})),
        ],
    );
    let said = said(&mut translator(), &frames);
    let events: Vec<_> =
        shown(&said).into_iter().map(|(method, _, data)| (method, data["event"].clone())).collect();
    let expected = [
        ("lifecycle", json!("running")),
        ("messages", json!("message-start")),
        ("messages", json!("content-block-start")),
        ("messages", json!("content-block-finish")),
        ("messages", json!("message-finish")),
        ("updates", Value::Null),
        // Of this one nothing can be missing.
        ("messages", json!("message-start")),
        ("messages", json!("content-block-start")),
        ("messages", json!("content-block-delta")),
    ];
    assert_eq!(events, expected);
    assert_eq!(shown(&said)[3].2["content"], json!({"type": "text", "text": "Hello"}));
    in_order(&said);
}

#[test]
fn what_a_stopped_run_left_open_ends_with_it() {
    let frames = frames(0, &[chunk("m", "Hel", json!({})), ("values|tools:t", json!({}))]);
    let mut translator = translator();
    let mut events = said(&mut translator, &frames);
    let speaker = Speaker::of("r", frames[1].id);
    let ended = translator.end(&speaker);
    events.extend(ended.clone());
    in_order(&events);
    assert_eq!(
        shown(&ended),
        [
            ("values", "tools:t".to_owned(), json!({})),
            (
                "messages",
                String::new(),
                json!({"event": "content-block-finish", "index": 0, "content": {"type": "text", "text": "Hel"}})
            ),
            ("messages", String::new(), json!({"event": "message-finish"})),
            ("lifecycle", "tools:t".to_owned(), json!({"event": "interrupted"})),
        ]
    );
    let mut failing = self::translator();
    said(&mut failing, &frames);
    failing.failed = Some("gone".to_owned());
    assert_eq!(shown(&failing.end(&speaker))[1].2, json!({"event": "error", "message": "gone"}));
}

/// A run may have 64 subagents at a time.
#[test]
fn what_many_subagents_left_open_ends_under_names_of_its_own() {
    for count in [8, 9, 64] {
        let names: Vec<String> = (0..count).map(|n| format!("messages|tools:{n}")).collect();
        let talks = names.iter().map(|name| (name.as_str(), chunk("m", "Hel", json!({})).1));
        let mut translator = translator();
        said(&mut translator, &frames(0, &talks.collect::<Vec<_>>()));
        let ended = translator.end(&Speaker::of("r", EventId { unix_ms: 1_800_000_000_001, seq: 0 }));
        assert_eq!(ended.len(), 3 * count, "two of each message, and one of each agent");
        let ids: BTreeSet<&str> = ended.iter().map(|said| said.id.as_str()).collect();
        assert_eq!(ids.len(), ended.len(), "{count}");
        assert!(ended.is_sorted_by_key(|said| said.seq), "{count}");
        for (index, has) in ended.iter().enumerate() {
            let since = filter(json!({ "channels": ALL, "since": has.seq }));
            assert!(ended[index + 1..].iter().all(|said| since.admits(said)), "{count}: after {index}");
        }
    }
}

#[test]
fn a_checkpoint_comes_before_its_state_and_a_state_without_one_is_not_held_back() {
    let paired = frames(
        0,
        &[("values", json!({"n": 1})), checkpoint("c"), ("values", json!({"n": 2})), checkpoint("d")],
    );
    let events = said(&mut translator(), &paired);
    let envelope = |id: &str| json!({"id": id, "parent_id": "before", "step": 1, "source": "loop"});
    assert_eq!(
        shown(&events)[1..],
        [
            ("checkpoints", String::new(), envelope("c")),
            ("values", String::new(), json!({"n": 1})),
            ("checkpoints", String::new(), envelope("d")),
            ("values", String::new(), json!({"n": 2})),
        ]
    );
    in_order(&events);
    let alone =
        frames(0, &[("values", json!({"n": 1})), ("values", json!({"n": 2})), ("values", json!({"n": 3}))]);
    let mut translator = translator();
    let counts: Vec<_> = alone.iter().map(|frame| translator.frame(frame).len()).collect();
    assert_eq!(
        counts,
        [1, 2, 1],
        "the first waits for what is next, and shows that there are no checkpoints"
    );
}

#[test]
fn a_call_is_shown_with_its_result_and_with_who_works_within_it() {
    let call = |id: &str, name: &str, args: Value| json!({"id": id, "name": name, "args": args, "type": "tool_call"});
    let result = |id: &str, status: &str| json!({"type": "tool", "tool_call_id": id, "status": status, "content": "so"});
    let frames = frames(
        0,
        &[
            (
                "tasks",
                json!({"id": "1", "name": "tools", "input": call("a", "task", json!({"subagent_type": "bash"}))}),
            ),
            ("tasks", json!({"id": "2", "name": "tools", "input": call("b", "ls", json!({}))})),
            ("custom|tools:1", json!({"type": "task_running", "n": 1})),
            ("tasks|tools:1", json!({"id": "3", "name": "model", "input": {"messages": []}})),
            (
                "tasks",
                json!({"id": "1", "name": "tools", "error": null, "result": {"messages": [result("a", "success")]}}),
            ),
            (
                "tasks",
                json!({"id": "2", "name": "tools", "error": null, "result": {"messages": [result("b", "error")]}}),
            ),
        ],
    );
    let said = said(&mut translator(), &frames);
    let others: Vec<_> = shown(&said).into_iter().filter(|(method, ..)| *method != "tasks").skip(1).collect();
    let within = |task: &str| format!("tools:{task}");
    let cause = json!({"type": "toolCall", "tool_call_id": "a"});
    assert_eq!(
        others,
        [
            (
                "tools",
                within("1"),
                json!({"event": "tool-started", "tool_call_id": "a", "tool_name": "task", "input": {"subagent_type": "bash"}})
            ),
            (
                "tools",
                within("2"),
                json!({"event": "tool-started", "tool_call_id": "b", "tool_name": "ls", "input": {}})
            ),
            ("lifecycle", within("1"), json!({"event": "started", "graph_name": "bash", "cause": cause})),
            (
                "custom",
                within("1"),
                json!({"name": "task_running", "payload": {"type": "task_running", "n": 1}})
            ),
            (
                "tools",
                within("1"),
                json!({"event": "tool-finished", "tool_call_id": "a", "output": result("a", "success")})
            ),
            ("lifecycle", within("1"), json!({"event": "completed"})),
            ("tools", within("2"), json!({"event": "tool-error", "tool_call_id": "b", "message": "so"})),
        ]
    );
    assert_eq!(said.iter().filter(|said| said.method == "tasks").count(), 5);
    in_order(&said);
}

#[test]
fn each_question_of_a_run_has_a_number_of_its_own_before_the_end() {
    let id = EventId { unix_ms: 1_800_000_000_000, seq: 31 };
    let speaker = Speaker::of("r", id);
    let asked = |count: u64| {
        let ask = |n: u64| speaker.ask(n, &format!("q{n}"), json!({}));
        let mut events = vec![speaker.say(1000, "messages", &[], Data::Json(json!({})))];
        events.extend((0..count).map(ask));
        events.push(speaker.end(json!({})));
        events
    };
    for count in [1, 2, 8] {
        in_order(&asked(count));
    }
    let nine = asked(9);
    let [.., eighth, ninth, end] = nine.as_slice() else { panic!("{nine:?}") };
    assert_eq!(eighth.seq, ninth.seq, "no more fit");
    assert_ne!(eighth.id, ninth.id);
    let since = |since: u64| filter(json!({ "channels": ALL, "since": since }));
    assert!(!since(eighth.seq).admits(eighth), "who has this number has the first event with it");
    assert!(since(ninth.seq).admits(ninth) && !since(end.seq).admits(ninth));
    let next = Speaker::of("s", EventId { unix_ms: id.unix_ms + 1, seq: 0 }).running(json!({}));
    in_order(&[ninth.clone(), end.clone(), next]);
}

#[test]
fn the_state_after_a_gap_lies_between_the_frames_and_its_checkpoint_comes_first() {
    let frames = frames(6, &[("custom|tools:1", json!({})), ("custom|tools:1", json!({}))]);
    let before = Speaker::of("r", frames[0].id);
    let speaker = Speaker::of("", frames[1].id);
    let mut events = vec![before.say(1000, "messages", &[], Data::Json(json!({})))];
    let state = |method| speaker.snapshot(method, "c", Data::Json(json!({})));
    events.extend(["checkpoints", "values"].map(state));
    events.extend(translator().frame(&frames[1]));
    let methods: Vec<_> = events.iter().map(|event| event.method).collect();
    assert_eq!(methods, ["messages", "checkpoints", "values", "lifecycle", "lifecycle", "custom"]);
    in_order(&events);
    let again = |since: u64| {
        let filter = filter(json!({ "channels": ["checkpoints", "values"], "since": since }));
        events.iter().filter(|event| filter.admits(event)).map(|event| event.method).collect::<Vec<_>>()
    };
    assert_eq!(again(events[0].seq), ["checkpoints", "values"]);
    assert_eq!(again(events[1].seq), ["checkpoints", "values"], "they belong together");
    assert_eq!(again(events[2].seq), [""; 0]);
}

/// An event of a channel at a place.
fn event(method: &'static str, namespace: &[&str], data: Value) -> Said {
    let namespace = namespace.iter().map(|segment| (*segment).to_owned()).collect();
    let data = Data::Json(data);
    Said { method, namespace, node: None, data, seq: 5, again: false, id: "r:5".to_owned(), unix_ms: 0 }
}

#[test]
fn a_filter_admits_by_channel_by_place_by_depth_and_by_what_the_client_has() {
    for (body, method, place, admitted) in [
        (json!({"channels": ["values"]}), "values", vec![], true),
        (json!({"channels": ["values"]}), "updates", vec![], false),
        (json!({"channels": ["input"]}), "input.requested", vec![], true),
        (json!({"channels": ["values"]}), "values", vec!["tools:1"], true),
        (json!({"channels": ["values"], "depth": 0}), "values", vec!["tools:1"], false),
        (json!({"channels": ["values"], "depth": 1}), "values", vec!["tools:1"], true),
        (json!({"channels": ["values"], "namespaces": []}), "values", vec!["tools:1"], true),
        (
            json!({"channels": ["values"], "namespaces": [[]], "depth": 1}),
            "values",
            vec!["tools:1", "tools:2"],
            false,
        ),
        (
            json!({"channels": ["values"], "namespaces": [["tools:1"]]}),
            "values",
            vec!["tools:1", "tools:2"],
            true,
        ),
        (json!({"channels": ["values"], "namespaces": [["tools:1"]]}), "values", vec!["tools:2"], false),
        (json!({"channels": ["values"], "namespaces": [["tools:1"]]}), "values", vec![], false),
        // A name without an id is any execution of the node.
        (
            json!({"channels": ["values"], "namespaces": [["tools"]], "depth": 0}),
            "values",
            vec!["tools:2"],
            true,
        ),
        (json!({"channels": ["values"], "namespaces": [["tool"]]}), "values", vec!["tools:2"], false),
        (json!({"channels": ["values"], "since": 4}), "values", vec![], true),
        (json!({"channels": ["values"], "since": 5}), "values", vec![], false),
    ] {
        let text = body.to_string();
        assert_eq!(
            filter(body).admits(&event(method, &place, json!({}))),
            admitted,
            "{text} {method} {place:?}"
        );
    }
    for (channel, name, admitted) in [
        ("custom", json!({}), true),
        ("custom", json!({"name": "a"}), true),
        ("custom:a", json!({"name": "a"}), true),
        ("custom:a", json!({"name": "b"}), false),
        ("custom:a", json!({}), false),
    ] {
        let filter = filter(json!({"channels": [channel]}));
        assert!(filter.wants("custom"));
        assert_eq!(filter.admits(&event("custom", &[], name.clone())), admitted, "{channel} {name}");
    }
}

#[test]
fn an_event_is_one_line_of_json_with_its_number_and_its_name() {
    let said = Said {
        data: Data::Text(Bytes::from_static(b"{\"n\":1}")),
        ..event("values", &["tools:1"], json!({}))
    };
    let text = said.at(Some("model")).encode().concat();
    let text = String::from_utf8(text).unwrap();
    let data = text.strip_prefix("event: values\ndata: ").unwrap().strip_suffix("\nid: r:5\n\n").unwrap();
    assert_eq!(
        serde_json::from_str::<Value>(data).unwrap(),
        json!({
            "type": "event", "method": "values", "seq": 5, "event_id": "r:5",
            "params": {"namespace": ["tools:1"], "timestamp": 0, "node": "model", "data": {"n": 1}},
        })
    );
}

/// A clock that stands.
struct Fixed;

impl Clock for Fixed {
    fn now_ms(&self) -> u64 {
        1_800_000_000_000
    }
}

#[test]
fn many_frames_at_once_keep_their_order() {
    let bridge = StreamBridge::with_clock(BridgeOptions::default(), Fixed);
    let publisher = bridge.open("r");
    let ids: Vec<_> = (0..200).filter_map(|n| publisher.publish("values", &json!(n))).collect();
    assert_eq!(ids.len(), 200);
    assert!(ids.windows(2).all(|pair| Place::of(pair[0]) < Place::of(pair[1])));
    assert!(ids.last().unwrap().unix_ms - ids[0].unix_ms < 10, "the clock is not far behind");
}
