//! Plans look at each checkpoint a bounded number of times, however long the thread is.

use std::cell::Cell;

use serde_json::json;

use super::{Boundary, Keep, Prune, Reason, RetentionPolicy, plan_prune, plan_retention};
use crate::channel::{ChannelTable, Schema};
use crate::checkpoint::{ChannelEntry, Checkpoint, CheckpointTuple, Stored};
use crate::id::{CheckpointId, Namespace, ThreadId, Version};
use crate::metadata::{DURATION_NODE, Metadata, Source};
use crate::mode::ChannelMode;
use crate::saver::ThreadImage;
use crate::value::ChannelValue;

thread_local! {
    static VISITS: Cell<usize> = const { Cell::new(0) };
}

/// Counts a checkpoint that a plan looks at.
pub(super) fn visit() {
    VISITS.set(VISITS.get() + 1);
}

fn id(n: usize) -> CheckpointId {
    CheckpointId::from_bytes((n as u128 + 1).to_be_bytes())
}

/// A line of checkpoints of which the first stores a value and each other one changes; every second one notes durations.
fn thread(len: usize) -> ThreadImage {
    let mut image = ThreadImage::absent(&ThreadId::from("t"));
    let version = Version { counter: 1, random: 1 };
    for n in 0..len {
        let stored = match n {
            0 => Stored::Snapshot(ChannelValue::from_json(&json!([])).unwrap()),
            _ => Stored::Sentinel,
        };
        let channels = [("messages".into(), ChannelEntry { version, stored })].into();
        let mut metadata = Metadata::new(Source::Loop, 0);
        if n % 2 == 1 {
            metadata.extra.insert("writes".to_owned(), json!({ DURATION_NODE: {} }));
        }
        let tuple = CheckpointTuple {
            thread: image.thread.clone(),
            namespace: Namespace::root(),
            checkpoint: Checkpoint { id: id(n), channels, next: Vec::new(), applied: Vec::new() },
            parent: n.checked_sub(1).map(id),
            metadata,
            writes: Vec::new(),
        };
        image.checkpoints.insert((Namespace::root(), id(n)), tuple);
    }
    image
}

fn visits(len: usize, plan: impl Fn(&ThreadImage, &ChannelTable)) -> usize {
    let table = Schema::thread_state().compile(ChannelMode::Delta, 3).unwrap();
    let image = thread(len);
    VISITS.set(0);
    plan(&image, &table);
    VISITS.get()
}

fn is_linear(what: &str, plan: impl Fn(&ThreadImage, &ChannelTable)) {
    let (short, long) = (visits(100, &plan), visits(400, &plan));
    assert!(short >= 50, "{what}: only {short} visits are counted");
    assert!(long < short * 5, "{what}: {short} visits for 100 checkpoints, {long} for 400");
}

#[test]
fn a_plan_for_a_long_thread_is_not_quadratic() {
    for boundary in [Boundary::KeepSet, Boundary::FreshSnapshot] {
        is_linear(&format!("the newest half, {boundary:?}"), |image, table| {
            let keep = Keep::Last(image.checkpoints.len() / 2);
            let plan = plan_prune(image, &Prune { boundary, ..Prune::keeping(keep) }, table).unwrap();
            let all_stay = boundary == Boundary::KeepSet;
            assert_eq!(plan.rewrite.is_empty(), all_stay, "the first stores what the others change");
        });
    }
    let policy = RetentionPolicy { graft_duration_links: true, ..RetentionPolicy::default() };
    is_linear("grafting", |image, table| {
        let plan = plan_retention(image, &policy, table).unwrap();
        assert!(plan.rewrite.remove.len() >= image.checkpoints.len() / 2 - 2);
    });
}

/// Reports name the heads by this reason. With nothing kept there is none, and only its protection keeps the newest.
#[test]
fn a_protected_head_stays_as_the_head() {
    let table = Schema::thread_state().compile(ChannelMode::Delta, 3).unwrap();
    let image = thread(4);
    for (keep, reason) in [
        (Keep::Latest, Reason::Head),
        (Keep::Last(2), Reason::Head),
        (Keep::Since(0), Reason::Head),
        (Keep::Nothing, Reason::Protected),
    ] {
        let prune = Prune { protect: [id(3)].into(), ..Prune::keeping(keep) };
        let plan = plan_prune(&image, &prune, &table).unwrap();
        assert_eq!(plan.verdicts[0], ((Namespace::root(), id(3)), reason), "{keep:?}");
    }
}
