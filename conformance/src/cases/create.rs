//! [`threadkeep::saver::Saver::create_thread`].

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use serde_json::{Value as Json, json};
use threadkeep::checkpoint::{CheckpointTuple, Stored};
use threadkeep::id::ThreadId;
use threadkeep::saver::{Coming, LocalKey, Revision, Saver, ThreadImage};
use threadkeep::value::{ChannelValue, Codec, Encoded};
use threadkeep::{Error, Result};
use tokio::sync::Notify;
use tokio::task::yield_now;

use super::rewrite::image;
use crate::case::{Case, Failure, Outcome, case, check, check_eq};
use crate::factory::Store;
use crate::kit::{MESSAGES, Step, dump, head, id, key, plain, replayed, says, task, version, write};

pub(super) const CASES: &[Case] = &[
    case!(
        Deletion,
        a_thread_is_written_as_it_comes,
        "an imported thread would lack a branch, or mix up messages"
    ),
    case!(
        Deletion,
        a_thread_that_comes_is_seen_as_a_whole,
        "a reader would take a part of an imported thread for all of it"
    ),
    case!(
        Deletion,
        a_thread_that_stops_coming_is_not_there,
        "a file that ends too early would leave a part of a thread"
    ),
    case!(
        Deletion,
        a_thread_that_comes_is_not_held,
        "the import of a long thread would fill the memory",
        needs WritesAsItComes
    ),
    case!(Deletion, a_thread_that_comes_is_checked, "a wrong file would make a thread that cannot be read"),
    case!(
        Concurrency,
        one_of_two_threads_that_come_is_written,
        "an import would replace a thread, or two of them make a mixture"
    ),
];

/// Checkpoints of a chain, some of them a branch of an older one.
const LENGTH: u16 = 300;
/// Each of these is a branch, from a checkpoint that many before it.
const BRANCHES: [(u16, u16); 4] = [(50, 2), (120, 100), (200, 7), (299, 290)];

/// A thread of that many checkpoints in its root namespace, and one in another, as it would come from elsewhere.
pub(super) fn thread(name: &str, length: u16) -> Result<Vec<CheckpointTuple>> {
    let title = plain("a title that is long enough to be stored somewhere else")?;
    let mut all: Vec<CheckpointTuple> = Vec::new();
    let mut said: Vec<Vec<Json>> = Vec::new();
    for n in 1..=length {
        let back = BRANCHES.iter().find(|(at, _)| *at == n).map_or(1, |(_, back)| *back);
        let above = n.checked_sub(back + 1).map(usize::from);
        let mut step = match above {
            Some(above) => {
                let parent = all[above].key();
                all[above].writes.push(says(n, &format!("message {n}"))?);
                Step::after(&parent, n).applies(n)
            }
            None => Step::first(name, n),
        };
        let mut messages = above.map_or_else(Vec::new, |above| said[above].clone());
        messages.push(json!(format!("message {n}")));
        let whole = ChannelValue::from_json(&Json::Array(messages.clone()))?;
        step = step.store("title", version(1), Stored::Value(title.clone()));
        step = if above.is_none() || n % 40 == 0 {
            step.snapshot(MESSAGES, whole)
        } else {
            step.sentinel(MESSAGES)
        };
        all.push(step.meta("run_id", format!("r{n}").into()).tuple([]));
        said.push(messages);
    }
    if let Some(last) = all.last_mut() {
        last.writes.push(says(length + 1, "pending")?);
    }
    all.push(Step::first(name, 1).namespace("nested").value("inner", plain(7)?).tuple([]));
    Ok(all)
}

fn keyed(tuples: &[CheckpointTuple]) -> impl Iterator<Item = (LocalKey, CheckpointTuple)> {
    tuples.iter().map(|tuple| ((tuple.namespace.clone(), tuple.checkpoint.id), tuple.clone()))
}

/// What is to happen before a part of a thread comes.
pub(super) enum Then {
    Nothing,
    /// Before each part, these handles find nothing of it.
    Looks(Vec<Arc<dyn Saver>>),
    /// After this many checkpoints there is an error.
    Fails(usize),
    /// After this many nothing comes any more, which is said.
    Hangs(usize, Arc<Notify>),
    /// Before the first part, somebody else begins the thread.
    Begins(Arc<dyn Saver>),
}

/// A thread that comes in parts of this size.
pub(super) struct Parts {
    tuples: Vec<CheckpointTuple>,
    size: usize,
    came: usize,
    then: Then,
}

impl Parts {
    pub(super) fn of(tuples: &[CheckpointTuple], size: usize, then: Then) -> Self {
        Self { tuples: tuples.to_vec(), size, came: 0, then }
    }
}

#[async_trait]
impl Coming for Parts {
    async fn rewind(&mut self) -> Result<()> {
        self.came = 0;
        Ok(())
    }

    async fn next(&mut self) -> Result<Vec<CheckpointTuple>> {
        yield_now().await;
        match &self.then {
            Then::Fails(after) if self.came >= *after => {
                return Err(Error::InvalidInput("the file is truncated".to_owned()));
            }
            Then::Hangs(after, hangs) if self.came >= *after => {
                hangs.notify_one();
                std::future::pending::<()>().await;
            }
            // It is not begun twice.
            Then::Begins(other) if self.came == 0 && head(&**other, "t").await?.is_none() => {
                Step::first("t", 1).value("title", plain("another thread")?).commit(&**other).await?;
            }
            Then::Looks(handles) => {
                for handle in handles {
                    if let Some(what) = seen(&**handle).await? {
                        return Err(Error::InvalidInput(format!("after {} checkpoints {what}", self.came)));
                    }
                }
            }
            _ => {}
        }
        let to = (self.came + self.size).min(self.tuples.len());
        let part = self.tuples[self.came..to].to_vec();
        self.came = to;
        Ok(part)
    }
}

/// What a reader finds of thread `t`, if anything.
async fn seen(saver: &dyn Saver) -> Result<Option<&'static str>> {
    Ok(if head(saver, "t").await?.is_some() {
        Some("the head is there")
    } else if !dump(saver, "t").await?.is_empty() {
        Some("checkpoints are listed")
    } else if image(saver, "t").await? != ThreadImage::absent(&"t".into()) {
        Some("the thread is read")
    } else if !saver.threads(None, 10).await?.is_empty() {
        Some("a thread is listed")
    } else {
        None
    })
}

async fn absent(saver: &dyn Saver, when: &str) -> Outcome {
    match seen(saver).await? {
        Some(what) => Err(Failure::new(format_args!("{when}, {what}"))),
        None => Ok(()),
    }
}

async fn a_thread_is_written_as_it_comes(store: Store) -> Outcome {
    let saver = store.open().await?;
    for (size, length) in [(1, 60), (64, LENGTH), (1_000, LENGTH), (1, 1)] {
        let name = format!("{length} by {size}");
        let tuples = thread(&name, length)?;
        let mut parts = Parts::of(&tuples, size, Then::Nothing);
        saver.create_thread(&name.as_str().into(), &mut parts).await?;
        let image = image(&*saver, &name).await?;
        check_eq!(image.checkpoints, keyed(&tuples).collect(), "the thread that came {name}");
        check!(image.revision != Revision::absent(), "it has the revision of none");
        let last = key(&name, id(length));
        let now = head(&*saver, &name).await?.map(|tuple| tuple.key());
        check_eq!(now, Some(last.clone()), "its head");
        let step = Step::after(&last, length + 1).held("title", 1).sentinel(MESSAGES).applies(length + 1);
        let next = step.runs(says(length + 2, "more")?).commit(&*saver).await?;
        let said = replayed(&*saver, &next).await?;
        let texts = said.as_array().map_or(&[][..], |texts| &texts[..]);
        let end = texts.len().saturating_sub(2);
        check_eq!(&texts[end..], &[json!("pending"), json!("more")][..], "its last messages");
    }
    let mut none = Parts::of(&[], 1, Then::Nothing);
    saver.create_thread(&"none".into(), &mut none).await?;
    check_eq!(head(&*saver, "none").await?, None, "a thread without checkpoints");
    Ok(())
}

async fn a_thread_that_comes_is_seen_as_a_whole(store: Store) -> Outcome {
    let saver = store.open().await?;
    let tuples = thread("t", LENGTH)?;
    let handles = vec![saver.clone(), store.open().await?];
    let mut parts = Parts::of(&tuples, 40, Then::Looks(handles));
    saver.create_thread(&"t".into(), &mut parts).await?;
    check_eq!(image(&*saver, "t").await?.checkpoints, keyed(&tuples).collect(), "the thread");
    Ok(())
}

async fn a_thread_that_stops_coming_is_not_there(store: Store) -> Outcome {
    let saver = store.open().await?;
    let (tuples, name) = (thread("t", LENGTH)?, ThreadId::from("t"));
    for after in [0, 40, usize::from(LENGTH), tuples.len()] {
        let mut parts = Parts::of(&tuples, 40, Then::Fails(after));
        match saver.create_thread(&name, &mut parts).await {
            Err(Error::InvalidInput(why)) if why.contains("truncated") => {}
            other => {
                return Err(Failure::new(format_args!("its own error was to be returned, not {other:?}")));
            }
        }
        absent(&*store.open().await?, &format!("after an error at {after}")).await?;
    }
    for after in [0, 40, 200] {
        let hangs = Arc::<Notify>::default();
        let mut parts = Parts::of(&tuples, 40, Then::Hangs(after, hangs.clone()));
        tokio::select! {
            done = saver.create_thread(&name, &mut parts) => {
                return Err(Failure::new(format_args!("it ended before its thread: {done:?}")));
            }
            () = hangs.notified() => {}
        }
        absent(&*store.open().await?, &format!("dropped at {after}")).await?;
    }
    saver.create_thread(&name, &mut Parts::of(&tuples, 40, Then::Nothing)).await?;
    check_eq!(
        image(&*saver, "t").await?.checkpoints,
        keyed(&tuples).collect(),
        "the thread that came at last"
    );
    Ok(())
}

/// Bytes that are there as long as somebody holds them.
struct Held {
    bytes: Vec<u8>,
    _alive: Arc<()>,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// A thread of which each checkpoint has a value and a write of its own.
struct Stream {
    length: u16,
    size: u16,
    came: u16,
    alive: Arc<()>,
    /// The most values that were held when more was asked for.
    most: usize,
}

impl Stream {
    fn value(&self, text: &str) -> Result<ChannelValue> {
        let encoded =
            plain(format!("{text}: a text that is long enough to be stored by itself; {text:>200}"))?;
        let held = Held { bytes: encoded.to_encoded().bytes.to_vec(), _alive: self.alive.clone() };
        let bytes = Bytes::from_owner(held);
        ChannelValue::from_encoded(Encoded { codec: Codec::MessagePack, bytes })
    }
}

#[async_trait]
impl Coming for Stream {
    async fn rewind(&mut self) -> Result<()> {
        self.came = 0;
        Ok(())
    }

    async fn next(&mut self) -> Result<Vec<CheckpointTuple>> {
        self.most = self.most.max(Arc::strong_count(&self.alive) - 1);
        let mut part = Vec::new();
        for n in (self.came + 1..=self.length).take(self.size.into()) {
            let mut step = match n {
                1 => Step::first("t", n),
                _ => Step::after(&key("t", id(n - 1)), n).applies(n),
            };
            step = step.value("title", self.value(&format!("title {n}"))?);
            let write = write("title", self.value(&format!("write {n}"))?);
            part.push(step.tuple([task(n + 1, [write])]));
            self.came = n;
        }
        Ok(part)
    }
}

async fn a_thread_that_comes_is_not_held(store: Store) -> Outcome {
    const SIZE: u16 = 40;
    let saver = store.open().await?;
    for length in [200, 800] {
        let mut stream = Stream { length, size: SIZE, came: 0, alive: Arc::default(), most: 0 };
        saver.create_thread(&"t".into(), &mut stream).await?;
        let there = image(&*saver, "t").await?.checkpoints.len();
        check_eq!(there, usize::from(length), "its checkpoints");
        // Each checkpoint has two values, and two parts may be held.
        let most = 2 * 2 * usize::from(SIZE);
        check!(stream.most <= most, "of a thread of {length} checkpoints {} values were held", stream.most);
        saver.delete_thread(&"t".into()).await?;
    }
    Ok(())
}

async fn a_thread_that_comes_is_checked(store: Store) -> Outcome {
    type Wrong = fn(&mut Vec<CheckpointTuple>);
    let saver = store.open().await?;
    let wrong: [(&str, Wrong); 9] = [
        ("a parent is missing", |all| {
            all.remove(250);
        }),
        ("a parent that is far back is missing", |all| all[270].parent = Some(id(0))),
        ("the writes of a task are missing", |all| all[260].writes.clear()),
        ("a task has two rows", |all| {
            let row = all[270].writes[0].clone();
            all[270].writes.push(row);
        }),
        ("a parent is not older", |all| all[280].parent = Some(all[280].checkpoint.id)),
        ("the order is wrong", |all| all.swap(290, 291)),
        ("a checkpoint comes twice", |all| all.insert(295, all[294].clone())),
        ("it is of another thread", |all| all[285].thread = "u".into()),
        ("a value is not loaded", |all| {
            all[288]
                .checkpoint
                .channels
                .entry("title".into())
                .and_modify(|entry| entry.stored = Stored::Held);
        }),
    ];
    for (what, wrong) in wrong {
        for size in [40, 1_000] {
            let mut tuples = thread("t", LENGTH)?;
            wrong(&mut tuples);
            let mut parts = Parts::of(&tuples, size, Then::Nothing);
            match saver.create_thread(&"t".into(), &mut parts).await {
                Err(Error::InvalidInput(_)) => {}
                other => return Err(Failure::new(format_args!("{what}: {other:?}"))),
            }
            absent(&*saver, what).await?;
        }
    }
    let mut rootless = Step::first("t", 1).sentinel(MESSAGES).tuple([]);
    rootless.metadata.delta_marker = true;
    let refused = saver.create_thread(&"t".into(), &mut Parts::of(&[rootless], 1, Then::Nothing)).await;
    check!(matches!(refused, Err(Error::InvalidInput(_))), "a root that stores no value: {refused:?}");
    absent(&*saver, "a root that stores no value").await
}

async fn one_of_two_threads_that_come_is_written(store: Store) -> Outcome {
    let saver = store.open().await?;
    let (tuples, name) = (thread("t", LENGTH)?, ThreadId::from("t"));
    let first = Step::first("t", 1).value("title", plain("another thread")?);
    first.commit(&*saver).await?;
    let before = image(&*saver, "t").await?;
    for size in [40, 1_000] {
        let refused = saver.create_thread(&name, &mut Parts::of(&tuples, size, Then::Nothing)).await;
        check!(matches!(refused, Err(Error::Stale { .. })), "a thread that is there: {refused:?}");
        check_eq!(image(&*saver, "t").await?, before, "the thread that was there");
    }
    for size in [40, 1_000] {
        saver.delete_thread(&name).await?;
        let begins = Then::Begins(store.open().await?);
        let refused = saver.create_thread(&name, &mut Parts::of(&tuples, size, begins)).await;
        check!(matches!(refused, Err(Error::Stale { .. })), "a thread that began meanwhile: {refused:?}");
        let left = image(&*saver, "t").await?.checkpoints.len();
        check_eq!(left, 1, "the checkpoints of the thread that began meanwhile");
    }
    for round in 0..4 {
        saver.delete_thread(&name).await?;
        let other = store.open().await?;
        let shorter = thread("t", 200)?;
        let (mut parts, mut others) =
            (Parts::of(&tuples, 40, Then::Nothing), Parts::of(&shorter, 30, Then::Nothing));
        let (one, two) =
            tokio::join!(saver.create_thread(&name, &mut parts), other.create_thread(&name, &mut others));
        let winner = match (&one, &two) {
            (Ok(()), Err(Error::Stale { .. })) => &tuples,
            (Err(Error::Stale { .. }), Ok(())) => &shorter,
            other => {
                return Err(Failure::new(format_args!("one of two is written, in round {round}: {other:?}")));
            }
        };
        check_eq!(
            image(&*saver, "t").await?.checkpoints,
            keyed(winner).collect(),
            "the one that was written"
        );
    }
    Ok(())
}
