//! Random threads survive export and import in both modes; a modified file is refused.

use std::sync::Arc;

use bytes::Bytes;
use proptest::prelude::*;
use serde_json::{Map, Value as Json, json};
use threadkeep::channel::Schema;
use threadkeep::checkpoint::{ChannelEntry, Checkpoint, CheckpointTuple, Stored};
use threadkeep::id::{ChannelName, CheckpointId, IdSource, Namespace, ThreadId, Version};
use threadkeep::metadata::{DURATION_NODE, Metadata, Source as MadeBy};
use threadkeep::mode::ChannelMode;
use threadkeep::saver::{Revision, Rewrite, Saver, ThreadImage};
use threadkeep::state::StateAccessor;
use threadkeep::step::{Durability, StepWriter};
use threadkeep::value::{ChannelValue, Codec, Element, Encoded, ListValue};
use threadkeep_memory::MemorySaver;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;

use super::format::{entries_of, hex};
use super::{Archive, ArchiveError, MAX_PLACES, Reader, Record, Source, Writer, read, read_within, write};

#[derive(Debug, Clone)]
enum Op {
    /// A superstep from the head or an older checkpoint.
    Step { nested: bool, at: Option<usize>, value: Json, repeated: bool },
    /// A duration note with a map of this many entries.
    Annotate(u16),
    /// A task whose row stays pending.
    Abandon(Json),
}

fn any_json() -> impl Strategy<Value = Json> {
    let leaf = prop_oneof![
        Just(Json::Null),
        any::<bool>().prop_map(Json::from),
        any::<i64>().prop_map(Json::from),
        any::<u64>().prop_map(Json::from),
        any::<f64>().prop_filter("finite", |number| number.is_finite()).prop_map(Json::from),
        ".{0,90}".prop_map(Json::from),
    ];
    leaf.prop_recursive(3, 24, 5, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Json::from),
            prop::collection::btree_map(".{0,6}", inner, 0..5)
                .prop_map(|map| Json::Object(map.into_iter().collect())),
        ]
    })
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (prop::bool::weighted(0.2), prop::option::weighted(0.2, any::<usize>()), any_json(), any::<bool>())
            .prop_map(|(nested, at, value, repeated)| Op::Step { nested, at, value, repeated }),
        1 => (0..60_u16).prop_map(Op::Annotate),
        1 => any_json().prop_map(Op::Abandon),
    ]
}

async fn thread(ops: &[Op], mode: ChannelMode) -> ThreadImage {
    let saver: Arc<dyn Saver> = Arc::new(MemorySaver::default());
    let table = Arc::new(Schema::thread_state().compile(mode, 3).unwrap());
    let accessor = StateAccessor::new(saver.clone(), table, Arc::new(IdSource::default()));
    let id = ThreadId::from("t");
    accessor.create(&id, Map::new()).await.unwrap();
    let mut ids: Vec<CheckpointId> = Vec::new();
    for (number, op) in ops.iter().enumerate() {
        match op {
            Op::Step { nested, at, value, repeated } => {
                let accessor =
                    accessor.clone().in_namespace(if *nested { "inner|1".into() } else { Namespace::root() });
                let at = at.filter(|_| !nested && !ids.is_empty()).map(|at| ids[at % ids.len()]);
                let mut writer = StepWriter::open(&accessor, &id, at).await.unwrap();
                let message = if *repeated { 0 } else { number };
                let messages =
                    json!([{"type": "ai", "id": format!("m{message}"), "content": value.to_string()}]);
                let writes = vec![
                    writer.write("messages", messages, false).unwrap(),
                    writer.write("thread_data", value.clone(), false).unwrap(),
                ];
                let task = writer.start_task(&"model".into(), 0);
                writer.finish_task(task, writes, Durability::WithCommit).await.unwrap();
                let extra = Map::from_iter([("free".to_owned(), value.clone())]);
                let state = writer.commit(MadeBy::Loop, vec!["next".into()], extra).await.unwrap();
                if !nested {
                    ids.push(state.key.id);
                }
            }
            Op::Annotate(entries) => {
                let head = accessor.get(&id, None).await.unwrap().unwrap();
                let map: Map<String, Json> =
                    (0..*entries).map(|n| (format!("run-{n}"), json!(n / 7))).collect();
                let extra = json!({"run_durations": map, "writes": {DURATION_NODE: {"run_ids": []}}});
                ids.push(accessor.annotate(&head, extra.as_object().unwrap().clone()).await.unwrap().key.id);
            }
            Op::Abandon(value) => {
                let mut writer = StepWriter::open(&accessor, &id, None).await.unwrap();
                let writes = vec![writer.write("thread_data", value.clone(), true).unwrap()];
                let task = writer.start_task(&"lost".into(), 1);
                writer.finish_task(task, writes, Durability::Now).await.unwrap();
            }
        }
    }
    saver.read_thread(&id).await.unwrap()
}

fn source() -> Source {
    Source { program: "threadkeep test".to_owned(), saver: "memory".to_owned() }
}

fn exported(image: &ThreadImage) -> Vec<u8> {
    let mut file = Vec::new();
    let record = Record {
        title: Some("a title".to_owned()),
        owner: None,
        assistant: Some("lead_agent".to_owned()),
        metadata: Map::from_iter([("pinned".to_owned(), json!(true))]),
    };
    let written = write(image, source(), Some(record), &mut file).unwrap();
    assert_eq!(written.bytes, file.len() as u64);
    assert_eq!(written.checkpoints, image.checkpoints.len() as u64);
    file
}

/// Imports an archive into an empty store and returns the thread there.
async fn imported(archive: Archive) -> ThreadImage {
    let saver = MemorySaver::default();
    let rewrite = Rewrite { put: archive.checkpoints, ..Rewrite::default() };
    saver.rewrite_thread(&archive.thread, &Revision::absent(), rewrite).await.unwrap();
    saver.read_thread(&archive.thread).await.unwrap()
}

fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn a_thread_survives_the_file(ops in prop::collection::vec(op(), 0..14), delta in any::<bool>()) {
        let mode = if delta { ChannelMode::Delta } else { ChannelMode::Full };
        run(async {
            let image = thread(&ops, mode).await;
            let file = exported(&image);
            let archive = read(&file[..]).unwrap();
            assert_eq!(archive.record.as_ref().unwrap().title.as_deref(), Some("a title"));
            let again = imported(archive).await;
            assert!(again.checkpoints == image.checkpoints, "the imported thread differs");
            assert!(exported(&again) == file, "the second file differs");
        });
    }

    #[test]
    fn a_file_with_a_changed_byte_is_refused(ops in prop::collection::vec(op(), 1..4), at in any::<prop::sample::Index>(), bit in 0..8) {
        let file = run(async { exported(&thread(&ops, ChannelMode::Delta).await) });
        let mut changed = file.clone();
        changed[at.index(file.len())] ^= 1_u8 << bit;
        prop_assert!(read(&changed[..]).is_err(), "{}", at.index(file.len()));
    }
}

fn steps(count: usize) -> Vec<Op> {
    let step = |n: usize| Op::Step {
        nested: false,
        at: None,
        value: json!({"n": n, "text": "x".repeat(80)}),
        repeated: false,
    };
    (0..count).map(step).collect()
}

#[test]
fn a_file_that_was_cut_off_anywhere_is_refused() {
    let file = run(async { exported(&thread(&steps(3), ChannelMode::Full).await) });
    for len in 0..file.len() {
        let error = read(&file[..len]).unwrap_err();
        let cut = matches!(error, ArchiveError::Truncated { .. } | ArchiveError::NotOurs { .. });
        assert!(cut, "{len}: {error}");
    }
}

/// Its elements and lists are read again from earlier lines: by far more than the reader holds in tests.
#[test]
fn lists_that_are_not_held_are_made_again() {
    for mode in [ChannelMode::Full, ChannelMode::Delta] {
        let mut ops = steps(120);
        for at in [100, 80, 60, 40] {
            let step = Op::Step {
                nested: false,
                at: Some(at / 20),
                value: json!({"branch": at}),
                repeated: at == 60,
            };
            ops.insert(at, step);
        }
        run(async {
            let image = thread(&ops, mode).await;
            let file = exported(&image);
            let mut reader = Reader::begin(std::io::Cursor::new(&file), MAX_PLACES).unwrap();
            let mut checkpoints = Vec::new();
            while let Some(tuple) = reader.next_checkpoint().unwrap() {
                assert!(reader.held() <= 16 << 10, "{} bytes", reader.held());
                checkpoints.push(tuple);
            }
            assert!(
                reader.bytes() > file.len() as u64 || mode == ChannelMode::Delta,
                "nothing was read again"
            );
            let whole: Vec<_> = image.checkpoints.values().cloned().collect();
            assert!(checkpoints == whole, "the thread differs");
        });
    }
}

/// A small file cannot fill the memory with copies of its values, also not of those that are not held.
#[test]
fn values_that_are_read_again_are_shared_within_a_checkpoint() {
    let list = |runs: Json| json!({"list": runs});
    let long = |n: usize| json!({"id": format!("m{n}"), "content": "x".repeat(20_000)});
    let runs: Vec<_> = (0..40).map(|n| json!([n % 2, 1])).collect();
    let mut lines = vec![json!({"header": {"format": "threadkeep-thread", "version": 1, "thread": "t",
            "source": {"program": "x", "saver": "x"}}})];
    for n in 0..2 {
        let element = Element::from_json(&long(n)).unwrap();
        lines.push(json!({"element": {"of": "messages", "n": n, "hash": hex(element.hash()), "value": {"json": long(n)}}}));
    }
    let version = Version { counter: 1, random: 1 }.to_string();
    lines.push(json!({"checkpoint": {
        "id": IdSource::default().checkpoint_after(None).to_string(), "namespace": "", "parent": null,
        "metadata": {"source": "loop", "step": 1, "parents": {}, "delta_marker": false, "counters": {}, "extra": {}},
        "next": [], "applied": [],
        "channels": {"messages": {"version": version, "stored": "value", "value": list(json!(runs))}}, "tasks": [],
    }}));
    let text = lines.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n") + "\n";
    let mut reader = Reader::begin(std::io::Cursor::new(text), MAX_PLACES).unwrap();
    let tuple = reader.next_checkpoint().unwrap().unwrap();
    let value = tuple.checkpoint.channels["messages"].stored.value().unwrap();
    let places: std::collections::BTreeSet<_> =
        value.as_list().unwrap().iter().map(|element| element.bytes().as_ptr()).collect();
    assert_eq!((value.as_list().unwrap().len(), places.len()), (40, 2));
}

/// The file grows only by what a checkpoint adds, also in full mode, and so do maps that grow by an entry per run.
#[test]
fn a_long_thread_is_not_quadratic() {
    let size = |count: usize| {
        let mut ops = steps(count);
        for (number, at) in (0..count).rev().enumerate() {
            ops.insert(at, Op::Annotate(u16::try_from(20 + count - number).unwrap()));
        }
        run(async { exported(&thread(&ops, ChannelMode::Full).await) }).len()
    };
    let (short, long) = (size(40), size(160));
    assert!(long < short * 5, "{short} bytes for 40 steps, {long} for 160");
}

/// The bytes of an element, which are there as long as somebody holds it.
struct Held(Arc<[u8; 2]>);

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.0[..]
    }
}

/// Each list here has an element of its own, as if each checkpoint was read with another page.
#[test]
fn a_writer_holds_the_lists_of_the_latest_checkpoints_only() {
    const CHECKPOINTS: u64 = 1_000;
    let (bytes, ids, thread) = (Arc::new([0xa1, b'x']), IdSource::default(), ThreadId::from("t"));
    let mut writer = Writer::begin(&thread, source(), None, std::io::sink()).unwrap();
    let mut parent = None;
    for number in 0..CHECKPOINTS {
        let id = ids.checkpoint_after(parent);
        let element = Element::from_bytes(Bytes::from_owner(Held(bytes.clone())));
        let list: ListValue = [element].into_iter().collect();
        let version = Version { counter: number, random: number };
        let entry = ChannelEntry { version, stored: Stored::Value(list.into()) };
        let channels = [("messages".into(), entry)].into();
        let checkpoint = Checkpoint { id, channels, next: Vec::new(), applied: Vec::new() };
        let tuple = CheckpointTuple {
            thread: thread.clone(),
            namespace: Namespace::root(),
            checkpoint,
            parent,
            metadata: Metadata::new(MadeBy::Loop, 1),
            writes: Vec::new(),
        };
        writer.checkpoint(&tuple).unwrap();
        parent = Some(id);
    }
    let held = Arc::strong_count(&bytes) - 1;
    assert!(held <= 200, "{held} lists");
    assert_eq!(writer.end().unwrap().checkpoints, CHECKPOINTS);
}

#[test]
fn values_that_json_does_not_give_back_keep_their_bytes() {
    let mut image = run(thread(&steps(2), ChannelMode::Full));
    let raw: Vec<(&str, Vec<u8>)> = vec![
        ("bin", vec![0xc4, 2, 0xff, 0x00]),
        ("ext", vec![0xd4, 5, 9]),
        ("f32", vec![0xca, 0x3f, 0x80, 0, 0]),
        ("wide", vec![0xcf, 0, 0, 0, 0, 0, 0, 0, 1]),
        ("nan", vec![0xcb, 0x7f, 0xf8, 0, 0, 0, 0, 0, 0]),
        ("twice", vec![0x82, 0xa1, b'a', 1, 0xa1, b'a', 2]),
        ("long", [vec![0xc5, 0, 200], vec![7; 200]].concat()),
        ("deep", [[0x81, 0xa1, b'a'].repeat(110), vec![1]].concat()),
    ];
    let (_, tuple) = image.checkpoints.iter_mut().next_back().unwrap();
    let entry = tuple.checkpoint.channels["thread_data"].clone();
    for (name, bytes) in &raw {
        let encoded = Encoded { codec: Codec::MessagePack, bytes: bytes.clone().into() };
        let mut entry = entry.clone();
        entry.stored = Stored::Value(ChannelValue::Plain(encoded));
        tuple.checkpoint.channels.insert((*name).into(), entry.clone());
        let list = [Element::from_bytes(bytes.clone().into())].into_iter().collect();
        entry.stored = Stored::Value(ChannelValue::List(list));
        tuple.checkpoint.channels.insert(format!("list of {name}").into(), entry);
    }
    let deep = (0..100).fold(json!(1), |inner, _| json!({ "a": inner }));
    tuple.metadata.extra.insert("deep".to_owned(), deep);
    let deep_list = (0..100).fold(json!(1), |inner, _| json!([inner]));
    tuple.metadata.extra.insert("deep list".to_owned(), deep_list);
    let archive = read(&exported(&image)[..]).unwrap();
    let tuples: Vec<CheckpointTuple> = image.checkpoints.values().cloned().collect();
    assert!(archive.checkpoints == tuples);
}

/// A client may send metadata that is nested deeper than a line of JSON may be.
#[test]
fn deep_metadata_of_the_record_comes_back() {
    let image = run(thread(&steps(1), ChannelMode::Full));
    let with = |metadata: &Json| {
        let metadata = metadata.as_object().unwrap().clone();
        let record = Record { title: Some("x".to_owned()), owner: None, assistant: None, metadata };
        let mut file = Vec::new();
        write(&image, source(), Some(record), &mut file).unwrap();
        file
    };
    let deep = |depth: usize| (0..depth).fold(json!(1), |inner, _| json!({ "a": inner }));
    for metadata in [json!({}), deep(64), deep(65), deep(126)] {
        let file = with(&metadata);
        assert_eq!(Json::Object(read(&file[..]).unwrap().record.unwrap().metadata), metadata);
        let header: Json = serde_json::from_slice(file.split(|byte| *byte == b'\n').next().unwrap()).unwrap();
        assert_eq!(
            header["header"].get("record_metadata").is_some(),
            metadata.pointer(&"/a".repeat(65)).is_some()
        );
    }
    let file = with(&deep(100));
    let no_object = BASE64.encode(Element::from_json(&json!([1])).unwrap().bytes());
    let cases: Vec<(Edit, &str)> = vec![
        (set("/header/record", Json::Null), "record_metadata without a record"),
        (set("/header/record/metadata", json!({"b": 1})), "record_metadata beside other metadata"),
        (set("/header/record_metadata", json!(no_object)), "record_metadata is no object"),
        (set("/header/record_metadata", json!("?")), "base64"),
    ];
    for (edit, says) in cases {
        let error = read(&edited(&file, 0, edit)[..]).unwrap_err();
        assert!(matches!(error, ArchiveError::Line { line: 1, .. }), "{error}");
        assert!(error.to_string().contains(says), "{error} does not say {says}");
    }
}

/// The file with one line changed, and with counts and hash updated to match.
fn edited(file: &[u8], line: usize, edit: impl Fn(&mut Json)) -> Vec<u8> {
    let text = String::from_utf8(file.to_vec()).unwrap();
    let mut lines: Vec<Json> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    edit(&mut lines[line]);
    let mut out = Vec::new();
    let mut hash = blake3::Hasher::new();
    for line in &mut lines {
        if line.get("end").is_some() {
            line["end"]["blake3"] = json!(hash.finalize().to_hex().as_str());
        }
        let text = format!("{line}\n");
        hash.update(text.as_bytes());
        out.extend(text.into_bytes());
    }
    out
}

/// A change of a line.
type Edit = Box<dyn Fn(&mut Json)>;

/// Sets these keys in a channel of a checkpoint line.
fn channel(name: &'static str, part: Json) -> Edit {
    Box::new(move |line| {
        let channel = line["checkpoint"]["channels"][name].as_object_mut().unwrap();
        channel.extend(part.as_object().unwrap().clone());
    })
}

/// A list of many times the same element: a small file that becomes a large thread.
fn bomb() -> Json {
    json!({"stored": "value", "value": {"list": vec![(0, 1); 20_000]}})
}

/// Sets the value at a JSON pointer.
fn set(path: &'static str, value: Json) -> Edit {
    Box::new(move |line| *line.pointer_mut(path).unwrap() = value.clone())
}

#[test]
fn what_a_file_may_become_has_a_limit_that_can_be_set() {
    let file = run(async { exported(&thread(&steps(3), ChannelMode::Full).await) });
    assert!(read_within(&file[..], 100).is_ok());
    let error = read_within(&file[..], 1).unwrap_err().to_string();
    assert!(error.contains("more than 1 elements in total") && error.contains("--max-elements"), "{error}");

    // Each checkpoint has its own copy of a map, so what counts is what is in it.
    let line = |kind: &str| {
        let text = std::str::from_utf8(&file).unwrap();
        text.lines().position(|line| line.starts_with(&format!("{{\"{kind}\""))).unwrap()
    };
    let zeros: Json = vec![0; 10_000].into();
    let entry = Element::from_json(&json!(["key", zeros])).unwrap();
    let element: Edit = Box::new(move |line| {
        line["element"] = json!({
            "of": entries_of("durations"), "n": 0, "hash": hex(entry.hash()),
            "value": {"msgpack": BASE64.encode(entry.bytes())},
        });
    });
    let mut large = edited(&file, line("element"), element);
    large = edited(&large, line("checkpoint"), |line| {
        line["checkpoint"]["metadata"]["extra"]["durations"] = json!({"map": [[0, 1]]});
    });
    let error = read_within(&large[..], 1000).unwrap_err().to_string();
    assert!(error.contains("more than 1000 elements in total"), "{error}");
}

/// A list of numbers may have few that differ. What was exported can be imported.
#[test]
fn the_limit_allows_lists_that_repeat_their_elements_as_well() {
    let file = run(async { exported(&thread(&steps(3), ChannelMode::Full).await) });
    let text = std::str::from_utf8(&file).unwrap();
    let checkpoint = text.lines().count() - 2;
    let large = edited(&file, checkpoint, channel("messages", bomb()));
    let error = read(&large[..]).unwrap_err().to_string();
    assert!(error.contains("repeats its") && error.contains("--max-elements allows more"), "{error}");
    let archive = read_within(&large[..], 2 * MAX_PLACES).unwrap();
    let last = &archive.checkpoints.last().unwrap().checkpoint;
    let Stored::Value(value) = &last.channels[&ChannelName::from("messages")].stored else { panic!() };
    assert_eq!(value.as_list().unwrap().len(), 20_000);
}

#[test]
fn each_thing_that_can_be_wrong_names_its_line() {
    let file = run(async { exported(&thread(&steps(3), ChannelMode::Delta).await) });
    assert!(read(&edited(&file, 0, |_| {})[..]).is_ok(), "an edit without changes is accepted");
    let text = String::from_utf8(file.clone()).unwrap();
    let line = |kind: &str| text.lines().position(|line| line.starts_with(&format!("{{\"{kind}\""))).unwrap();
    let last = text.lines().count() - 1;
    let (element, checkpoint) = (line("element"), last - 1);
    let nowhere = format!("{:032}.{:016x}", 9, 9);
    let cases: Vec<(usize, Edit, &str)> = vec![
        (element, set("/element/n", json!(7)), "where 0 is expected"),
        (element, set("/element/value", json!({"json": 1})), "does not match its hash"),
        (element, set("/element", json!({"more": 1})), "unknown field `more`"),
        (checkpoint, set("/checkpoint/id", json!("x")), "id 'x'"),
        (checkpoint, set("/checkpoint/id", json!("00000000-0000-7000-8000-000000000000")), "is out of order"),
        (checkpoint, channel("messages", json!({"version": "1.2"})), "version '1.2'"),
        (
            checkpoint,
            channel("messages", json!({"stored": "sentinel", "value": {"list": []}})),
            "a sentinel with a value",
        ),
        (
            checkpoint,
            channel("messages", json!({"stored": "value", "value": {"append": {"to": nowhere, "list": []}}})),
            "has no list of version",
        ),
        (checkpoint, channel("thread_data", json!({"value": {"element": 999}})), "are missing"),
        (
            checkpoint,
            channel("thread_data", json!({"value": {"list": [[0, 4_000_000_000_u32]]}})),
            "in total",
        ),
        (checkpoint, channel("messages", bomb()), "repeats its"),
        (checkpoint, channel("thread_data", json!({"value": {"json": [1]}})), "runs of elements"),
        (checkpoint, channel("thread_data", json!({"value": {"map": []}})), "only in metadata"),
        (checkpoint, channel("thread_data", json!({"value": null})), "has no value"),
        (last, set("/end/checkpoints", json!(1)), "the counts in 'end'"),
    ];
    for (at, edit, says) in cases {
        let error = read(&edited(&file, at, edit)[..]).unwrap_err();
        let number = at as u64 + 1;
        assert!(matches!(&error, ArchiveError::Line { line, .. } if *line == number), "{error}");
        assert!(error.to_string().contains(says), "{error} does not say {says}");
    }
    let newer = read(&edited(&file, 0, |line| line["header"]["version"] = json!(2))[..]).unwrap_err();
    assert!(matches!(newer, ArchiveError::NewerVersion { found: 2 }), "{newer}");
    let more = [&file[..], b"{}\n"].concat();
    assert!(read(&more[..]).unwrap_err().to_string().contains("after 'end'"));
    assert!(matches!(read(&b"hello\n"[..]).unwrap_err(), ArchiveError::NotOurs { .. }));
    let rounded = text.replacen("\"extra\":{\"", "\"extra\":{\"big\":{\"json\":18446744073709551616},\"", 1);
    let error = read(rounded.as_bytes()).unwrap_err().to_string();
    assert!(error.contains("integer 18446744073709551616 is out of range"), "{error}");
    let altered = text.replacen("\"step\":0", "\"step\":9", 1);
    assert!(matches!(read(altered.as_bytes()).unwrap_err(), ArchiveError::Altered { .. }));
}
