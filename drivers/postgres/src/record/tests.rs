use proptest::prelude::*;
use threadkeep::id::Version;
use threadkeep_layout::{Manifest, NUMBER_LIMIT, decode_names, encode_names};

use super::*;

fn runs() -> impl Strategy<Value = Vec<Run>> {
    // Anywhere, or so near to each other that they meet and overlap.
    let run = prop_oneof![(0..NUMBER_LIMIT - 5000, 1..5000_u32), (0..60_u32, 1..12_u32)];
    prop::collection::vec(run.prop_map(|(start, len)| Run { start, len }), 0..5)
}

fn some_bytes() -> impl Strategy<Value = Bytes> {
    prop::collection::vec(any::<u8>(), 0..40).prop_map(Bytes::from)
}

fn form() -> impl Strategy<Value = Form> {
    prop_oneof![
        some_bytes().prop_map(Form::Plain),
        (0..NUMBER_LIMIT).prop_map(Form::Shared),
        prop::collection::vec(some_bytes(), 0..4).prop_map(Form::Tiny),
        (runs(), runs()).prop_map(|(chunks, tail)| Form::List(Manifest { chunks, tail })),
    ]
}

fn id() -> impl Strategy<Value = CheckpointId> {
    any::<[u8; 16]>().prop_map(CheckpointId::from_bytes)
}

fn entry() -> impl Strategy<Value = StoredChannel> {
    let version = (any::<u64>(), any::<u64>()).prop_map(|(counter, random)| Version { counter, random });
    let kept = prop_oneof![
        id().prop_map(Kept::Sentinel),
        form().prop_map(Kept::Value),
        form().prop_map(Kept::Snapshot)
    ];
    (version, kept).prop_map(|(version, kept)| StoredChannel { version, kept })
}

fn channel() -> impl Strategy<Value = ChannelName> {
    ".{0,9}".prop_map(ChannelName::from)
}

fn checkpoint() -> impl Strategy<Value = CheckpointRecord> {
    let counters =
        (any::<u64>(), any::<u64>()).prop_map(|(updates, supersteps)| Counters { updates, supersteps });
    let rest = prop_oneof![
        Just(Rest::Empty),
        some_bytes().prop_map(Rest::Inline),
        (0..NUMBER_LIMIT).prop_map(Rest::Shared),
    ];
    let head = (
        prop::option::of(id()),
        prop::sample::select(vec![Source::Input, Source::Loop, Source::Update, Source::Fork]),
        any::<i64>(),
        any::<bool>(),
    );
    let lists = (
        prop::collection::vec(".{0,9}".prop_map(NodeName::from), 0..4),
        prop::collection::vec(any::<[u8; 16]>().prop_map(TaskId::from_bytes), 0..4),
        prop::collection::vec((".{0,9}", id()), 0..3),
        prop::collection::btree_map(channel(), counters, 0..3),
    );
    let extra =
        (rest, prop::collection::vec((".{0,9}", runs()), 0..3)).prop_map(|(rest, maps)| Extra { rest, maps });
    let channels = prop::collection::btree_map(channel(), entry(), 0..6);
    (head, lists, extra, channels).prop_map(|(head, lists, extra, channels)| CheckpointRecord {
        parent: head.0,
        source: head.1,
        step: head.2,
        delta_marker: head.3,
        next: lists.0,
        applied: lists.1,
        parents: lists.2,
        counters: lists.3,
        extra,
        channels,
    })
}

fn task() -> impl Strategy<Value = TaskRecord> {
    let write = (channel(), any::<bool>(), form()).prop_map(|(channel, overwrite, value)| WriteRecord {
        channel,
        overwrite,
        value,
    });
    let node = ".{0,9}".prop_map(NodeName::from);
    (any::<[u8; 16]>(), node, any::<u32>(), prop::collection::vec(write, 0..5)).prop_map(
        |(task, node, index, writes)| TaskRecord { task: TaskId::from_bytes(task), node, index, writes },
    )
}

/// Decodes with the columns that the record has.
fn decode(record: &CheckpointRecord, bytes: &[u8]) -> Result<CheckpointRecord, Malformed> {
    let names: Vec<_> = record.names().into_iter().cloned().collect();
    CheckpointRecord::decode(bytes, record.parent, &names, record.extra_element())
}

proptest! {
    #[test]
    fn a_checkpoint_survives_and_no_prefix_of_it_decodes(record in checkpoint()) {
        let bytes = record.encode();
        for len in 0..bytes.len() {
            prop_assert!(decode(&record, &bytes[..len]).is_err());
        }
        prop_assert_eq!(decode(&record, &bytes), Ok(record));
    }

    #[test]
    fn names_survive(record in checkpoint()) {
        let names: Vec<_> = record.names().into_iter().collect();
        let decoded = decode_names(&encode_names(names.iter().copied())).unwrap();
        prop_assert_eq!(decoded.iter().collect::<Vec<_>>(), names);
    }

    #[test]
    fn tasks_survive_and_no_prefix_of_them_decodes(tasks in prop::collection::vec(task(), 0..4)) {
        let bytes = encode_tasks(&tasks);
        for len in 0..bytes.len() {
            prop_assert!(decode_tasks(&bytes[..len]).is_err());
        }
        prop_assert_eq!(decode_tasks(&bytes), Ok(tasks));
    }

    #[test]
    fn the_body_of_a_thread_survives(
        next in any::<[u32; 3]>(), past in prop::option::of((any::<i64>(), prop::collection::vec(any::<u32>(), 0..17))),
    ) {
        let body = ThreadBody { next, past };
        prop_assert_eq!(ThreadBody::decode(&body.encode()), Ok(body));
    }

    #[test]
    fn arbitrary_bytes_never_panic(mut bytes in prop::collection::vec(any::<u8>(), 1..200), names in 0..5_usize) {
        let names = vec![ChannelName::from("c"); names];
        for first in [bytes[0], first_byte(0)] {
            bytes[0] = first;
            let _ = CheckpointRecord::decode(&bytes, None, &names, None);
            let _ = decode_tasks(&bytes);
            let _ = ThreadBody::decode(&bytes);
            let _ = decode_names(&bytes);
        }
    }

    /// Even damage that the checksum would have caught must not cause a panic.
    #[test]
    fn a_damaged_record_never_panics(record in checkpoint(), task in task(), at in any::<usize>(), to in any::<u8>()) {
        let mut bytes = record.encode();
        let len = bytes.len();
        bytes[at % len] = to;
        let _ = decode(&record, &bytes);
        let mut bytes = encode_tasks(&[task]);
        let len = bytes.len();
        bytes[at % len] = to;
        let _ = decode_tasks(&bytes);
    }

    /// A row lists every structure element that is needed to decode it.
    #[test]
    fn needs_cover_every_chunk_and_entry(record in checkpoint(), tasks in prop::collection::vec(task(), 0..3)) {
        let needs = needs(&record, &tasks);
        let covered = |bounds: [i64; 2]| needs.chunks(2).any(|pair| pair[0] <= bounds[0] && bounds[1] <= pair[1]);
        let forms = record.forms().chain(tasks.iter().flat_map(|task| &task.writes).map(|write| &write.value));
        for form in forms {
            if let Form::List(manifest) = form {
                prop_assert!(manifest.chunks.iter().all(|run| covered(Space::Structure.bounds(*run))));
            }
        }
        for run in record.extra.maps.iter().flat_map(|(_, runs)| runs) {
            prop_assert!(covered(Space::Entries.bounds(*run)));
        }
        prop_assert!(needs.chunks(2).all(|pair| pair[0] <= pair[1]));
        prop_assert!(needs.chunks(2).zip(needs.chunks(2).skip(1)).all(|(one, next)| one[1] + 1 < next[0]));
    }
}

/// A gateway's notes have two objects, each with an entry for each turn of the thread.
#[test]
fn what_objects_that_grow_together_need_does_not_grow() {
    let runs = |first: u32| (0..1000).map(|turn| Run { start: first + 2 * turn, len: 1 }).collect();
    let maps = vec![("durations".to_owned(), runs(7)), ("messages".to_owned(), runs(8))];
    let record = CheckpointRecord {
        parent: None,
        source: Source::Loop,
        step: 1,
        delta_marker: false,
        next: Vec::new(),
        applied: Vec::new(),
        parents: Vec::new(),
        counters: BTreeMap::new(),
        extra: Extra { rest: Rest::Empty, maps },
        channels: BTreeMap::new(),
    };
    assert_eq!(needs(&record, &[]), Space::Entries.bounds(Run { start: 7, len: 2000 }));
}

#[test]
fn forged_lengths_do_not_reserve_memory() {
    let mut bytes = vec![first_byte(0), 0, 0];
    put_uint(&mut bytes, u64::MAX);
    let decoded = CheckpointRecord::decode(&bytes, None, &[], None);
    assert_eq!(decoded, Err(Malformed("a count is larger than the row")));
}

/// The sentinel's kind is a known one: a row of a later version of the format must not pass for a damaged one.
#[test]
fn an_entry_with_an_unknown_flag_is_refused_for_its_flag() {
    let version = Version { counter: 1, random: 2 };
    let sentinel = StoredChannel { version, kept: Kept::Sentinel(CheckpointId::from_bytes([1; 16])) };
    let record = CheckpointRecord {
        parent: None,
        source: Source::Loop,
        step: 1,
        delta_marker: true,
        next: Vec::new(),
        applied: Vec::new(),
        parents: Vec::new(),
        counters: BTreeMap::new(),
        extra: Extra::default(),
        channels: [("messages".into(), sentinel)].into(),
    };
    let mut bytes = record.encode();
    // After the byte of the entry are the counter, the random number and the checkpoint.
    let at = bytes.len() - 1 - 8 - 16 - 1;
    bytes[at] |= 1 << 6;
    assert_eq!(decode(&record, &bytes), Err(Malformed("unknown flags")));
}

#[test]
fn an_ordinary_step_takes_few_bytes() {
    let version = Version { counter: 2000, random: u64::MAX };
    let manifest = Manifest { chunks: vec![], tail: vec![Run { start: 0, len: 2000 }] };
    let list = StoredChannel { version, kept: Kept::Value(Form::List(manifest)) };
    let record = CheckpointRecord {
        parent: Some(CheckpointId::from_bytes([1; 16])),
        source: Source::Loop,
        step: 1998,
        delta_marker: false,
        next: vec!["model".into()],
        applied: vec![TaskId::from_bytes([2; 16])],
        parents: vec![],
        counters: BTreeMap::new(),
        extra: Extra { rest: Rest::Shared(9), maps: vec![] },
        channels: [("messages".into(), list)].into(),
    };
    assert_eq!(record.encode().len(), 44);
}
