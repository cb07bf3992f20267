//! What is remembered of a thread weighs what it takes.

use std::collections::BTreeMap;

use threadkeep::id::{CheckpointId, TaskId};
use threadkeep::metadata::Source;
use threadkeep_layout::Form;

use super::*;
use crate::record::{CheckpointRecord, Extra, TaskRecord, WriteRecord};

#[test]
fn a_thread_weighs_what_the_values_of_its_objects_take() {
    let mut state = ThreadState::absent();
    for (key, bytes) in [("a", 1_000), ("b", 500)] {
        let object = StoredObject { entries: Entries::default(), bytes, runs: Vec::new() };
        state.objects.put(key.to_owned(), object);
    }
    assert_eq!(state.weight(), 1_500);
    let mut object = state.objects.pop("b").unwrap();
    object.runs = vec![Run { start: 1, len: 1 }; 100];
    state.objects.put("b".to_owned(), object);
    assert_eq!(state.weight(), 1_500 + 100 * size_of::<Run>());
}

/// A graph that sends to thousands of tasks writes all of them onto one head.
#[test]
fn a_head_weighs_what_its_tasks_take() {
    let write = WriteRecord { channel: "messages".into(), overwrite: false, value: Form::Shared(1) };
    let task = TaskRecord {
        task: TaskId::from_bytes([1; 16]),
        node: "model".into(),
        index: 0,
        writes: vec![write; 1_000],
    };
    let maps = vec![("runs".to_owned(), vec![Run { start: 1, len: 1 }; 1_000])];
    let record = CheckpointRecord {
        parent: None,
        source: Source::Loop,
        step: 1,
        delta_marker: false,
        next: Vec::new(),
        applied: vec![TaskId::from_bytes([2; 16]); 1_000],
        parents: Vec::new(),
        counters: BTreeMap::new(),
        extra: Extra { maps, ..Extra::default() },
        channels: BTreeMap::new(),
    };
    let node = Node { id: CheckpointId::from_bytes([1; 16]), record, tasks: vec![task; 10] };
    let mut state = ThreadState::absent();
    state.heads.put("inner".into(), None);
    state.heads.put(Namespace::root(), Some(Arc::new(node)));
    let least = 10_000 * size_of::<WriteRecord>() + 1_000 * (size_of::<TaskId>() + size_of::<Run>());
    assert!(state.weight() >= least, "{} of {least} bytes", state.weight());
}
