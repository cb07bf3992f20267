use proptest::prelude::*;
use threadkeep_layout::{NUMBER_LIMIT, Run};

use super::*;

const OWN: Ordinal = 1_000_000;

fn runs() -> impl Strategy<Value = Vec<Run>> {
    let run = (0..NUMBER_LIMIT - 5000, 1..5000_u32).prop_map(|(start, len)| Run { start, len });
    prop::collection::vec(run, 0..5)
}

fn manifest() -> impl Strategy<Value = Manifest> {
    (runs(), runs()).prop_map(|(chunks, tail)| Manifest { chunks, tail })
}

fn some_bytes() -> impl Strategy<Value = Bytes> {
    prop::collection::vec(any::<u8>(), 0..40).prop_map(Bytes::from)
}

fn form() -> impl Strategy<Value = Form> {
    prop_oneof![
        some_bytes().prop_map(Form::Plain),
        (0..NUMBER_LIMIT).prop_map(Form::Shared),
        prop::collection::vec(some_bytes(), 0..4).prop_map(Form::Tiny),
        manifest().prop_map(Form::List),
    ]
}

fn entry() -> impl Strategy<Value = StoredChannel> {
    let version = (any::<u64>(), 0..3_u64).prop_map(|(counter, random)| Version { counter, random });
    let kept =
        prop_oneof![Just(Kept::Sentinel(())), form().prop_map(Kept::Value), form().prop_map(Kept::Snapshot),];
    // A small choice of versions, so that some repeat.
    let version = prop_oneof![Just(Version { counter: 7, random: 7 }), version];
    prop_oneof![
        (1..OWN).prop_map(StoredChannel::At),
        (version, kept).prop_map(|(v, k)| StoredChannel::Own(v, k))
    ]
}

fn checkpoint() -> impl Strategy<Value = CheckpointRecord> {
    let id = any::<[u8; 16]>().prop_map(CheckpointId::from_bytes);
    let counters =
        (any::<u64>(), any::<u64>()).prop_map(|(updates, supersteps)| Counters { updates, supersteps });
    let rest = prop_oneof![
        Just(Rest::Empty),
        some_bytes().prop_map(Rest::Inline),
        (0..NUMBER_LIMIT).prop_map(Rest::Shared),
    ];
    let head = (
        prop::option::of(1..OWN),
        prop::sample::select(vec![Source::Input, Source::Loop, Source::Update, Source::Fork]),
        any::<i64>(),
        any::<bool>(),
    );
    let lists = (
        prop::collection::vec(any::<u32>(), 0..4),
        prop::collection::vec(any::<u32>(), 0..4),
        prop::collection::vec((".{0,9}", id), 0..3),
        prop::collection::vec((any::<u32>(), counters), 0..3),
    );
    let extra = (rest, prop::collection::vec((".{0,9}", manifest()), 0..3))
        .prop_map(|(rest, maps)| Extra { rest, maps });
    let channels = prop::collection::vec((any::<u32>(), entry()), 0..6);
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
    let write = (any::<u32>(), any::<bool>(), form()).prop_map(|(channel, overwrite, value)| WriteRecord {
        channel,
        overwrite,
        value,
    });
    (any::<[u8; 16]>(), any::<u32>(), any::<u32>(), prop::collection::vec(write, 0..5)).prop_map(
        |(task, node, index, writes)| TaskRecord { task: TaskId::from_bytes(task), node, index, writes },
    )
}

proptest! {
    #[test]
    fn a_checkpoint_survives_and_no_prefix_of_it_decodes(record in checkpoint()) {
        let bytes = record.encode(OWN);
        prop_assert_eq!(CheckpointRecord::decode(OWN, &bytes), Ok(record));
        for len in 0..bytes.len() {
            prop_assert!(CheckpointRecord::decode(OWN, &bytes[..len]).is_err());
        }
    }

    #[test]
    fn tasks_survive_and_no_prefix_of_them_decodes(tasks in prop::collection::vec(task(), 0..4)) {
        let bytes = encode_tasks(&tasks);
        prop_assert_eq!(decode_tasks(&bytes), Ok(tasks));
        for len in 0..bytes.len() {
            prop_assert!(decode_tasks(&bytes[..len]).is_err());
        }
    }

    #[test]
    fn a_floor_survives(floor in any::<u32>()) {
        prop_assert_eq!(decode_floor(&encode_floor(floor)), Ok(floor));
    }

    #[test]
    fn arbitrary_bytes_never_panic(mut bytes in prop::collection::vec(any::<u8>(), 1..200), own in any::<u32>()) {
        for first in [bytes[0], first_byte(0)] {
            bytes[0] = first;
            let _ = CheckpointRecord::decode(own, &bytes);
            let _ = decode_tasks(&bytes);
            let _ = decode_floor(&bytes);
        }
    }

    /// Even damage that the checksum would have caught must not cause a panic.
    #[test]
    fn a_damaged_record_never_panics(record in checkpoint(), task in task(), at in any::<usize>(), to in any::<u8>()) {
        let mut bytes = record.encode(OWN);
        let len = bytes.len();
        bytes[at % len] = to;
        let _ = CheckpointRecord::decode(OWN, &bytes);
        let mut bytes = encode_tasks(&[task]);
        let len = bytes.len();
        bytes[at % len] = to;
        let _ = decode_tasks(&bytes);
    }
}

#[test]
fn forged_lengths_do_not_reserve_memory() {
    let mut bytes = vec![first_byte(0), 0, 0, 0];
    put_uint(&mut bytes, u64::MAX);
    assert_eq!(CheckpointRecord::decode(5, &bytes), Err(Malformed("a count is larger than the row")));
}

#[test]
fn an_ordinary_step_takes_few_bytes() {
    let version = Version { counter: 2000, random: u64::MAX };
    let manifest = Manifest { chunks: vec![], tail: vec![Run { start: 0, len: 2000 }] };
    let record = CheckpointRecord {
        parent: Some(1999),
        source: Source::Loop,
        step: 1998,
        delta_marker: false,
        next: vec![1],
        applied: vec![0],
        parents: vec![],
        counters: vec![],
        extra: Extra { rest: Rest::Shared(9), maps: vec![] },
        channels: vec![
            (1, StoredChannel::Own(version, Kept::Value(Form::List(manifest)))),
            (2, StoredChannel::At(7)),
        ],
    };
    assert_eq!(record.encode(2000).len(), 29);
}
