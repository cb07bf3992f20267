//! The operations of random programs. Every number in an operation is taken modulo the current count, so that a program
//! stays meaningful when operations are removed.

use proptest::prelude::*;
use proptest::sample::select;

/// One call, or a few that belong together.
#[derive(Debug, Clone)]
pub(super) enum Op {
    /// Runs a superstep: puts the early writes, then commits.
    Commit(Commit),
    /// Puts the writes of a task under a checkpoint, `back` before the head: a new task, or an existing one.
    Put { place: ChainId, back: u8, again: Option<u8>, task: u8, writes: Vec<Written> },
    /// Repeats a commit, or an attempted one, this many commits earlier.
    Repeat(u8),
    /// Deletes a thread, by its name or by its revision.
    Delete { thread: u8, seen: bool },
    /// Reads a whole thread, and rewrites it around the checkpoint `back` before the head.
    Rewrite { place: ChainId, back: u8, how: How, stale: bool },
    /// Copies a thread to the other one, which may be there already.
    Copy { thread: u8 },
    /// Continues with the other of two handles.
    SwitchHandle,
    /// Drops both handles and opens the store again.
    Reopen,
}

/// What happens to a checkpoint and its thread.
#[derive(Debug, Clone, Copy)]
pub(super) enum How {
    /// It is removed, which is refused if it has children.
    Remove,
    /// It becomes a root that stores every value; all but its descendants are removed.
    Root,
    /// The rows under it that no child applied are removed.
    DropPending,
    /// The whole thread is put under the other thread's id, if that is free.
    Copy,
}

/// A namespace of a thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChainId {
    pub(super) thread: u8,
    pub(super) namespace: u8,
}

#[derive(Debug, Clone)]
pub(super) struct Commit {
    pub(super) place: ChainId,
    /// How many checkpoints before the head the parent is; an empty namespace gets its first checkpoint.
    pub(super) back: u8,
    pub(super) tasks: Vec<Task>,
    /// Also applies a task that is already stored under the parent.
    pub(super) reapply: Option<u8>,
    pub(super) order: Order,
    /// What happens to each channel.
    pub(super) channels: [Change; 3],
    pub(super) flaw: Option<Flaw>,
}

#[derive(Debug, Clone)]
pub(super) struct Task {
    /// The beginning of its id.
    pub(super) id: u8,
    pub(super) when: When,
    pub(super) applied: bool,
    pub(super) writes: Vec<Written>,
}

/// When the writes of a task are stored.
#[derive(Debug, Clone, Copy)]
pub(super) enum When {
    BeforeTheCommit,
    WithTheCommit,
    Both,
}

/// In which order a commit applies its tasks.
#[derive(Debug, Clone, Copy)]
pub(super) enum Order {
    AsStored,
    Backwards,
    ById,
}

/// A write of a task.
#[derive(Debug, Clone, Copy)]
pub(super) struct Written {
    pub(super) to: Target,
    pub(super) value: Small,
    pub(super) overwrite: bool,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Target {
    Channel(u8),
    Error,
    Resume,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Small {
    Null,
    Empty,
    Text(u8),
    List(u8),
    Long(u8),
    /// The channel's list, made from a base.
    Current,
}

/// What a step stores for a channel.
#[derive(Debug, Clone, Copy)]
pub(super) enum Change {
    /// Holds what the parent has, if anything.
    Hold,
    /// Did not write the channel, but stores it in this form at the parent's version.
    Again(Kind),
    /// Wrote the channel.
    Write(Edit, Kind),
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
    Value,
    Snapshot,
    Sentinel,
}

/// How the channel's list changes; any other value first becomes an empty list.
#[derive(Debug, Clone, Copy)]
pub(super) enum Edit {
    Append(u8),
    Replace(u8),
    Remove(u8),
    Restart(u8),
    Null,
    Text(u8),
    /// Appends to the list as if it came from another store.
    FromElsewhere(u8),
    /// Every n-th of the same elements; the first channel's step also has a map of these in its metadata.
    Every(u8),
}

/// A flaw in a commit.
#[derive(Debug, Clone, Copy)]
pub(super) enum Flaw {
    StaleHead,
    UnknownParent,
    UnknownTask,
    HoldsNothing,
    HoldsAnotherVersion,
    CountsFromNothing,
    CountsFewer,
    OldId,
}

/// Programs of up to 32 operations, some of which follow on [`alike`].
pub(super) fn programs() -> impl Strategy<Value = Vec<Op>> {
    let first = prop::option::weighted(0.25, Just(alike()));
    let more = prop::collection::vec(op(), 1..=32);
    (first, more).prop_map(|(first, more)| first.into_iter().flatten().chain(more).collect())
}

/// The first values of a thread are a list and a map, whose elements may be stored under the same numbers; then each loses
/// the same elements, so that what remains may be described by the same bytes.
fn alike() -> Vec<Op> {
    let step = |every| {
        let list = Change::Write(Edit::Every(every), Kind::Value);
        Op::Commit(Commit {
            place: ChainId { thread: 0, namespace: 0 },
            back: 0,
            tasks: Vec::new(),
            reapply: None,
            order: Order::AsStored,
            channels: [list, Change::Hold, Change::Hold],
            flaw: None,
        })
    };
    vec![step(1), step(2)]
}

/// One operation.
pub(super) fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        14 => commit().prop_map(Op::Commit),
        4 => put(),
        1 => back().prop_map(Op::Repeat),
        1 => (0..2_u8, any::<bool>()).prop_map(|(thread, seen)| Op::Delete { thread, seen }),
        2 => rewrite(),
        1 => (0..2_u8).prop_map(|thread| Op::Copy { thread }),
        1 => Just(Op::SwitchHandle),
        1 => Just(Op::Reopen),
    ]
}

fn rewrite() -> impl Strategy<Value = Op> {
    let how = prop_oneof![3 => Just(How::Remove), 2 => Just(How::Root), 1 => Just(How::DropPending), 1 => Just(How::Copy)];
    (place(), back(), how, prop::bool::weighted(0.1)).prop_map(|(place, back, how, stale)| Op::Rewrite {
        place,
        back,
        how,
        stale,
    })
}

fn put() -> impl Strategy<Value = Op> {
    let writes = prop::collection::vec(written(), 0..3);
    (place(), back(), prop::option::of(any::<u8>()), any::<u8>(), writes)
        .prop_map(|(place, back, again, task, writes)| Op::Put { place, back, again, task, writes })
}

fn place() -> impl Strategy<Value = ChainId> {
    let some = prop_oneof![8 => Just((0, 0)), 1 => Just((0, 1)), 1 => Just((1, 0)), 1 => Just((1, 1))];
    some.prop_map(|(thread, namespace)| ChainId { thread, namespace })
}

fn back() -> impl Strategy<Value = u8> {
    prop_oneof![3 => Just(0), 2 => 1..8_u8]
}

fn commit() -> impl Strategy<Value = Commit> {
    let tasks = prop::collection::vec(task(), 0..4);
    let reapply = prop::option::weighted(0.2, any::<u8>());
    let order = select(vec![Order::AsStored, Order::Backwards, Order::ById]);
    let flaw = prop::option::weighted(
        0.15,
        select(vec![
            Flaw::StaleHead,
            Flaw::UnknownParent,
            Flaw::UnknownTask,
            Flaw::HoldsNothing,
            Flaw::HoldsAnotherVersion,
            Flaw::CountsFromNothing,
            Flaw::CountsFewer,
            Flaw::OldId,
        ]),
    );
    let channels = [change(), change(), change()];
    (place(), back(), tasks, reapply, order, channels, flaw).prop_map(
        |(place, back, tasks, reapply, order, channels, flaw)| Commit {
            place,
            back,
            tasks,
            reapply,
            order,
            channels,
            flaw,
        },
    )
}

fn task() -> impl Strategy<Value = Task> {
    let when = select(vec![When::WithTheCommit, When::BeforeTheCommit, When::Both]);
    (any::<u8>(), when, prop::bool::weighted(0.8), prop::collection::vec(written(), 0..4))
        .prop_map(|(id, when, applied, writes)| Task { id, when, applied, writes })
}

fn written() -> impl Strategy<Value = Written> {
    let to = prop_oneof![6 => (0..3_u8).prop_map(Target::Channel), 1 => Just(Target::Error), 1 => Just(Target::Resume)];
    let value = prop_oneof![
        2 => any::<u8>().prop_map(Small::List),
        1 => any::<u8>().prop_map(Small::Text),
        1 => any::<u8>().prop_map(Small::Long),
        1 => Just(Small::Null),
        1 => Just(Small::Empty),
        1 => Just(Small::Current),
    ];
    (to, value, prop::bool::weighted(0.2)).prop_map(|(to, value, overwrite)| Written { to, value, overwrite })
}

fn change() -> impl Strategy<Value = Change> {
    let kind = || select(vec![Kind::Sentinel, Kind::Value, Kind::Snapshot]);
    let edit = prop_oneof![
        4 => (0..6_u8).prop_map(Edit::Append),
        2 => any::<u8>().prop_map(Edit::Replace),
        2 => any::<u8>().prop_map(Edit::Remove),
        1 => (0..6_u8).prop_map(Edit::Restart),
        1 => Just(Edit::Null),
        1 => any::<u8>().prop_map(Edit::Text),
        1 => any::<u8>().prop_map(Edit::FromElsewhere),
        1 => (1..4_u8).prop_map(Edit::Every),
    ];
    prop_oneof![
        3 => Just(Change::Hold),
        1 => kind().prop_map(Change::Again),
        4 => (edit, kind()).prop_map(|(edit, kind)| Change::Write(edit, kind)),
    ]
}
