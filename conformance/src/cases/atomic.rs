//! Each writing call is executed completely or not at all: when its caller is dropped, when an underlying operation
//! fails, and (in [`super::killed`]) when the process dies.

use std::sync::atomic::Ordering;

use threadkeep::checkpoint::{CheckpointTuple, Stored};
use threadkeep::id::ThreadId;
use threadkeep::saver::{ChannelHistory, Rewrite, Saver};
use threadkeep::value::ChannelValue;
use threadkeep::{Error, Result};
use tokio::task::yield_now;

use super::create::{self, Parts, Then};
use crate::case::{Case, Failure, Outcome, case, check, check_eq};
use crate::factory::Store;
use crate::kit::{
    MESSAGES, Step, dump, id, key, list, messages, not_found, path, plain, replayed, says, task, write,
};

pub(super) const CASES: &[Case] = &[
    case!(
        Concurrency,
        a_dropped_call_happens_whole_or_not_at_all,
        "a request that is cut off would leave half a step, or block the thread"
    ),
    case!(
        Durability,
        a_failed_operation_leaves_all_or_nothing,
        "a full disk or a lost connection would leave half a step",
        needs FailOperations
    ),
];

/// A call that changes a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Call {
    PutWrites,
    Commit,
    /// A commit of a checkpoint that takes the place of the head, with rows of its own.
    Replace,
    Rewrite,
    Delete,
    /// The deletion of a thread that has the revision that was seen.
    DeleteSeen,
    /// The creation of a thread that comes in parts.
    Create,
    /// The creation of a thread that is a copy of another one.
    Copy,
}

impl Call {
    pub(super) const ALL: [Self; 8] = [
        Self::PutWrites,
        Self::Commit,
        Self::Replace,
        Self::Rewrite,
        Self::Delete,
        Self::DeleteSeen,
        Self::Create,
        Self::Copy,
    ];

    pub(super) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|call| format!("{call:?}") == name)
    }

    /// Creates what the call is made on: a thread that contains a bit of everything, or nothing for one that creates it, or
    /// what it copies.
    pub(super) async fn prepare(self, saver: &dyn Saver, thread: &str) -> Result<()> {
        match self {
            Self::Create => Ok(()),
            Self::Copy => prepare(saver, &source_of(thread)).await,
            _ => prepare(saver, thread).await,
        }
    }

    /// Makes the call on a thread prepared by [`Self::prepare`]. It may be repeated.
    pub(super) async fn make(self, saver: &dyn Saver, thread: &str) -> Result<()> {
        let head = key(thread, id(LENGTH));
        match self {
            Self::PutWrites => {
                let said = |n: u16| Ok(write(MESSAGES, list([&n.to_string()])?));
                let writes = (0..20).map(said).collect::<Result<Vec<_>>>()?;
                saver.put_writes(&head, &task(100, writes)).await?;
            }
            Self::Commit => {
                let mut step = Step::after(&head, LENGTH + 1).held("title", 1).sentinel(MESSAGES);
                step = step.value("all", messages(0..300)?.into()).applies(90);
                for n in 100..110 {
                    step = step.runs(says(n, &format!("task {n} of the step"))?);
                }
                step.commit(saver).await?;
            }
            Self::Replace => {
                let mut step =
                    Step::after(&head, LENGTH + 1).held("title", 1).held("all", 1).sentinel(MESSAGES);
                step = step.runs(says(100, "between")?).begins_with(says(90, "pending")?);
                for n in 101..110 {
                    step = step.begins_with(says(n, &format!("task {n}, which has finished"))?);
                }
                step.commit(saver).await?;
            }
            Self::Rewrite => {
                // Only the head stays, with its whole list.
                let image = saver.read_thread(&head.thread).await?;
                let root = image.checkpoints.get(&(head.namespace.clone(), head.id)).cloned();
                let mut root = root.map_or_else(|| not_found(&head), Ok)?;
                if root.parent.take().is_none() {
                    return Ok(());
                }
                root.checkpoint.applied.clear();
                let whole = ChannelValue::from_json(&replayed(saver, &head).await?)?;
                let entry = root.checkpoint.channels.entry(MESSAGES.into());
                entry.and_modify(|entry| entry.stored = Stored::Snapshot(whole));
                let place = (head.namespace, head.id);
                let remove = image.checkpoints.into_keys().filter(|other| *other != place).collect();
                saver
                    .rewrite_thread(&head.thread, &image.revision, Rewrite { remove, put: vec![root] })
                    .await?;
            }
            Self::Delete => saver.delete_thread(&head.thread).await?,
            Self::DeleteSeen => {
                let revision = saver.revision(&head.thread).await?;
                saver.delete_seen(&head.thread, &revision).await?;
            }
            Self::Create => {
                let mut parts = Parts::of(&create::thread(thread, CREATED)?, 40, Then::Nothing);
                match saver.create_thread(&head.thread, &mut parts).await {
                    // By an earlier attempt.
                    Err(Error::Stale { .. }) if !dump(saver, thread).await?.is_empty() => {}
                    done => done?,
                }
            }
            Self::Copy => match saver.copy_thread(&source_of(thread).as_str().into(), &head.thread).await {
                // By an earlier attempt.
                Err(Error::Stale { .. }) if !dump(saver, thread).await?.is_empty() => {}
                copied => drop(copied?),
            },
        }
        Ok(())
    }
}

/// The thread of which this one is made a copy.
fn source_of(thread: &str) -> String {
    format!("what becomes {thread}")
}

/// The number of the head of a prepared thread.
const LENGTH: u16 = 8;
/// The checkpoints of a thread that is created: more than come in one part.
const CREATED: u16 = 45;

/// Creates a thread that contains a bit of everything.
async fn prepare(saver: &dyn Saver, thread: &str) -> Result<()> {
    let first = Step::first(thread, 1).value("title", plain("a title that is stored by itself, being long")?);
    let first = first.value("all", messages(0..40)?.into()).snapshot(MESSAGES, list(["seed"])?);
    let mut last = first.meta("run_id", "r1".into()).commit(saver).await?;
    for n in 2..=LENGTH {
        saver.put_writes(&last, &says(n, &format!("early {n}"))?).await?;
        let from = if n == 5 { key(thread, id(3)) } else { last.clone() };
        let mut step = Step::fork(&from, &last, n).held("title", 1).held("all", 1).sentinel(MESSAGES);
        if n != 5 {
            step = step.applies(n);
        }
        last = step.runs(says(50 + n, &format!("late {n}"))?).commit(saver).await?;
    }
    saver.put_writes(&last, &says(90, "pending")?).await?;
    Step::first(thread, 1).namespace("nested").value("n", plain(1)?).commit(saver).await?;
    Ok(())
}

/// A whole thread at one point in time, without its name.
async fn seen(saver: &dyn Saver, thread: &str) -> Result<Vec<CheckpointTuple>> {
    let image = saver.read_thread(&thread.into()).await?;
    let nameless = |tuple| CheckpointTuple { thread: ThreadId::from(""), ..tuple };
    Ok(image.checkpoints.into_values().map(nameless).collect())
}

/// The path to each checkpoint of a thread.
async fn paths(saver: &dyn Saver, thread: &str) -> Result<Vec<ChannelHistory>> {
    let mut paths = Vec::new();
    for tuple in dump(saver, thread).await? {
        paths.push(path(saver, &tuple.key(), None).await?);
    }
    Ok(paths)
}

/// A prepared thread before and after a call.
pub(super) struct Expected {
    call: Call,
    before: Vec<CheckpointTuple>,
    after: Vec<CheckpointTuple>,
    paths: Vec<ChannelHistory>,
}

impl Expected {
    /// Records it on a separate thread, without failures.
    pub(super) async fn of(call: Call, saver: &dyn Saver) -> Result<Self, Failure> {
        let thread = format!("{call:?} in peace");
        call.prepare(saver, &thread).await?;
        let before = seen(saver, &thread).await?;
        call.make(saver, &thread).await?;
        let after = seen(saver, &thread).await?;
        check!(before != after, "{call:?} changes nothing");
        Ok(Self { call, before, after, paths: paths(saver, &thread).await? })
    }

    /// Fails unless the thread is as before or as after the call, and repeating the call yields the latter. Returns
    /// whether the call had been executed.
    pub(super) async fn settle(&self, saver: &dyn Saver, thread: &str, when: &str) -> Result<bool, Failure> {
        let call = self.call;
        let now = seen(saver, thread).await?;
        let happened = now == self.after;
        check!(
            happened || now == self.before,
            "{when}, the thread is neither before nor after {call:?}: {now:?}"
        );
        match call.make(saver, thread).await {
            // An abandoned call may have completed meanwhile.
            Err(Error::Stale { .. }) => call.make(saver, thread).await?,
            other => other?,
        }
        check_eq!(seen(saver, thread).await?, self.after, "{when}, the thread after {call:?} was made again");
        check_eq!(paths(saver, thread).await?, self.paths, "{when}, the paths after {call:?} was made again");
        Ok(happened)
    }
}

async fn a_dropped_call_happens_whole_or_not_at_all(store: Store) -> Outcome {
    let saver = store.open().await?;
    for call in Call::ALL {
        let expected = Expected::of(call, &*saver).await?;
        for patience in 0..20 {
            let thread = format!("{call:?} dropped after {patience}");
            call.prepare(&*saver, &thread).await?;
            // Abandoned after this many polls.
            tokio::select! {
                biased;
                outcome = call.make(&*saver, &thread) => outcome?,
                () = async { for _ in 0..patience { yield_now().await } } => {}
            }
            let when = format!("given up after {patience} polls");
            expected.settle(&*saver, &thread, &when).await?;
        }
    }
    Ok(())
}

async fn a_failed_operation_leaves_all_or_nothing(store: Store) -> Outcome {
    const MANY: u32 = 10_000;
    let saver = store.open().await?;
    for call in Call::ALL {
        let expected = Expected::of(call, &*saver).await?;
        let mut nth = 0;
        loop {
            let thread = format!("{call:?} without {nth}");
            call.prepare(&*saver, &thread).await?;
            let failing = store.open_failing(nth).await?;
            let outcome = call.make(&*failing.saver, &thread).await;
            if !failing.failed.load(Ordering::SeqCst) {
                outcome?;
                break;
            }
            drop(failing.saver);
            let when = format!("with operation {nth} failed ({outcome:?})");
            // What this handle remembers of the thread says nothing of what is stored.
            let reopened = store.open().await?;
            let happened = expected.settle(&*reopened, &thread, &when).await?;
            match outcome {
                Ok(()) => check!(happened, "{when}, {call:?} was acknowledged and did not happen"),
                Err(Error::Unavailable { .. }) => {
                    check!(!happened, "{when}, {call:?} happened, and said that nothing was written");
                }
                Err(Error::InDoubt { .. }) => {}
                Err(other) => return Err(Failure::new(format_args!("{when}, {call:?} gave {other:?}"))),
            }
            repeated(&store, &expected, nth).await?;
            nth += 1;
            check!(nth < MANY, "{call:?} has no end of operations");
        }
        check!(nth > 0, "no operation of {call:?} could be made to fail");
    }
    Ok(())
}

/// The same failure, after which the same handle is asked what is there, and to do it again: what it shows as done or
/// acknowledges is stored, and what it shows as not done is not, whatever it remembers of the first call.
async fn repeated(store: &Store, expected: &Expected, nth: u32) -> Outcome {
    let call = expected.call;
    let thread = format!("{call:?} again without {nth}");
    call.prepare(&*store.open().await?, &thread).await?;
    let failing = store.open_failing(nth).await?;
    let first = call.make(&*failing.saver, &thread).await;
    let shown = seen(&*failing.saver, &thread).await;
    let again = call.make(&*failing.saver, &thread).await;
    // Not what was shown before the repeat: a server may carry out the first call between the two.
    let later = seen(&*failing.saver, &thread).await;
    let when = format!("with operation {nth} failed ({first:?}) and repeated ({again:?})");
    if let Ok(shown) = &shown {
        let known = *shown == expected.before || *shown == expected.after;
        check!(known, "{when}, its handle shows a thread neither before nor after {call:?}: {shown:?}");
    }
    drop(failing.saver);
    let reopened = store.open().await?;
    let happened = expected.settle(&*reopened, &thread, &when).await?;
    match again {
        Ok(()) => check!(happened, "{when}, the repeat of {call:?} was acknowledged and did not happen"),
        // A handle may refuse to work on after a failure.
        Err(error @ (Error::Unavailable { .. } | Error::InDoubt { .. } | Error::Stale { .. })) => {
            let done = shown.is_ok_and(|shown| shown == expected.after);
            check!(happened || !done, "{when}, its handle showed {call:?} as done, and it did not happen");
            // A repeat in doubt may be what happened.
            let undone = later.is_ok_and(|later| later == expected.before) && !error.is_in_doubt();
            check!(!(happened && undone), "{when}, its handle showed {call:?} as not done, and it happened");
        }
        Err(other) => return Err(Failure::new(format_args!("{when}, {call:?} gave {other:?}"))),
    }
    Ok(())
}
