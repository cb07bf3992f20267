//! A conversation on one of our savers: each superstep of the script is one commit of a [`StepWriter`].

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde_json::{Map, Value as Json, json};
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::checkpoint::Write;
use threadkeep::id::{CheckpointId, IdSource, NodeName, ThreadId};
use threadkeep::saver::{Flush, Saver};
use threadkeep::state::{StateAccessor, StateSnapshot};
use threadkeep::step::{Durability, StepWriter};
use threadkeep::value::{ChannelValue, Element};

use crate::case::{Case, Each, Mode};
use crate::meter;
use crate::raw::{self, Raw};
use crate::workload::{Emit, REACH, Script, Start, Step, Turn};

/// A thread that a script writes to.
pub struct Conversation {
    accessor: StateAccessor,
    thread: ThreadId,
    script: Box<dyn Script>,
    flush: Each,
    /// The writer of the last turn, for a turn that continues from it.
    run: Option<StepWriter>,
    /// The checkpoints at which the last turns began; the first entry belongs to turn `first`.
    starts: VecDeque<Option<CheckpointId>>,
    first: usize,
}

/// What a turn cost. Only the calls are timed, not building their arguments.
#[derive(Debug, Clone, Default)]
pub struct Spent {
    /// All calls of the turn.
    pub wall: Duration,
    /// CPU time of this process in them.
    pub cpu: Duration,
    /// Each superstep: its writes and its commit.
    pub steps: Vec<Duration>,
    /// The inserts of the same bytes into a raw store, if there was one.
    pub floor: Vec<Duration>,
    /// Bytes of the new messages as compact JSON.
    pub raw_bytes: u64,
    /// Checkpoints created.
    pub checkpoints: u64,
}

impl Conversation {
    /// Conversation number `index` of a case, on a thread that does not exist yet.
    ///
    /// # Errors
    /// [`threadkeep::Error::InvalidInput`] for a cadence of 0.
    pub fn new(case: &Case, index: usize, saver: Arc<dyn Saver>) -> Result<Self> {
        Ok(Self {
            accessor: accessor(case.mode, saver)?,
            thread: thread(index),
            script: case.workload.script(case.size, case.seed + index as u64),
            flush: case.flush,
            run: None,
            starts: VecDeque::new(),
            first: 0,
        })
    }

    /// The accessor that writes the thread. It caches the head.
    pub fn accessor(&self) -> &StateAccessor {
        &self.accessor
    }

    /// The thread.
    pub fn thread(&self) -> &ThreadId {
        &self.thread
    }

    /// Runs the next turn; `floor` receives the bytes of each superstep right after it.
    ///
    /// # Errors
    /// The saver's and the raw store's.
    pub async fn turn(&mut self, mut floor: Option<&mut Raw>) -> Result<Spent> {
        let turn = self.script.turn();
        let messages = turn.steps.iter().flat_map(|step| step.emit.messages());
        let mut spent = Spent {
            raw_bytes: messages.map(|message| message.to_string().len() as u64).sum(),
            checkpoints: turn.steps.len() as u64
                + u64::from(turn.note)
                + u64::from(self.is_created_by(&turn)),
            ..Spent::default()
        };
        let extra = if turn.note {
            Map::from_iter([("run_id".to_owned(), json!(format!("{:032x}", self.next_turn())))])
        } else {
            Map::new()
        };
        let clock = Clock::start();
        let mut run = self.open(&turn).await?;
        clock.stop(&mut spent);
        self.starts.push_back(run.state().map(|state| state.key.id));
        if self.starts.len() > REACH {
            self.starts.pop_front();
            self.first += 1;
        }
        for (number, step) in turn.steps.iter().enumerate() {
            let next = turn.steps.get(number + 1).map(|next| next.node.clone());
            let emit = step.emit.clone();
            let extra = extra.clone();
            // A duration note, if there is one, ends the turn and is flushed.
            let ends = next.is_none() && !turn.note;
            let waits = self.flush == Each::Turn && !ends;
            run.set_flush(if waits { Flush::WithNext } else { Flush::Now });
            let clock = Clock::start();
            superstep(&mut run, step, emit, next, extra).await?;
            let taken = clock.stop(&mut spent);
            spent.steps.push(taken);
            if let Some(raw) = floor.as_deref_mut() {
                let bytes = raw::bytes(step)?;
                let started = Instant::now();
                raw.insert(&bytes).await?;
                spent.floor.push(started.elapsed());
            }
        }
        if turn.note {
            let clock = Clock::start();
            let head = run.state().cloned().context("the turn left no state")?;
            self.accessor.annotate(&head, extra).await?;
            clock.stop(&mut spent);
        } // A note moves the head, so the writer cannot continue.
        self.run = (!turn.note).then_some(run);
        Ok(spent)
    }

    fn next_turn(&self) -> usize {
        self.first + self.starts.len()
    }

    /// Whether an empty checkpoint creates the thread before this turn, as the gateway does before a thread's first
    /// run.
    fn is_created_by(&self, turn: &Turn) -> bool {
        turn.note && self.next_turn() == 0
    }

    async fn open(&mut self, turn: &Turn) -> Result<StepWriter> {
        if self.is_created_by(turn) {
            self.accessor.create(&self.thread, Map::new()).await?;
        }
        let at = match (turn.start, self.run.take()) {
            (Start::Live, Some(run)) => return Ok(run),
            (Start::Live | Start::Head, _) => None,
            (Start::Turn(number), _) => {
                let place =
                    number.checked_sub(self.first).context("the script refers to a turn that is too old")?;
                *self.starts.get(place).context("the script refers to a later turn")?
            }
        };
        Ok(StepWriter::open(&self.accessor, &self.thread, at).await?)
    }
}

/// The thread of conversation number `index`.
pub fn thread(index: usize) -> ThreadId {
    ThreadId::new(format!("t{index}"))
}

/// An accessor with nothing cached.
///
/// # Errors
/// [`threadkeep::Error::InvalidInput`] for a cadence of 0.
pub fn accessor(mode: Mode, saver: Arc<dyn Saver>) -> Result<StateAccessor> {
    Ok(StateAccessor::new(saver, Arc::new(mode.table()?), Arc::new(IdSource::default())))
}

/// The messages of a state, decoded.
///
/// # Errors
/// [`threadkeep::Error::Corrupt`].
pub fn messages(state: &StateSnapshot) -> Result<Vec<Json>> {
    match state.json(MESSAGES_CHANNEL)? {
        Some(Json::Array(messages)) => Ok(messages),
        _ => Ok(Vec::new()),
    }
}

async fn superstep(
    run: &mut StepWriter,
    step: &Step,
    emit: Emit,
    next: Option<NodeName>,
    extra: Map<String, Json>,
) -> Result<()> {
    let writes = match emit {
        Emit::Nothing => Vec::new(),
        Emit::Messages(messages) => vec![run.write(MESSAGES_CHANNEL, Json::Array(messages), false)?],
        Emit::All(last) => vec![all(run, &last)?],
    };
    let task = run.start_task(&step.node, 0);
    run.finish_task(task, writes, Durability::WithCommit).await?;
    run.commit(step.source, next.into_iter().collect(), extra).await?;
    Ok(())
}

/// The live list again with a different last message. Its elements already carry their bytes, but the whole list is
/// written.
fn all(run: &StepWriter, last: &Json) -> Result<Write> {
    let live = run.state().and_then(|state| state.value(MESSAGES_CHANNEL)).and_then(ChannelValue::as_list);
    let mut list = live.context("the thread has no messages")?.clone();
    list.replace(list.len().saturating_sub(1), Element::from_json(last)?);
    Ok(Write { channel: MESSAGES_CHANNEL.into(), value: list.into(), overwrite: false })
}

/// Wall and CPU time of a series of calls.
struct Clock {
    wall: Instant,
    cpu: Duration,
}

impl Clock {
    fn start() -> Self {
        Self { cpu: meter::cpu(), wall: Instant::now() }
    }

    fn stop(self, spent: &mut Spent) -> Duration {
        let wall = self.wall.elapsed();
        spent.wall += wall;
        spent.cpu += meter::cpu().saturating_sub(self.cpu);
        wall
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Backend;
    use crate::store::Store;
    use crate::workload::{Workload, digest};

    fn case(workload: Workload, backend: Backend, mode: Mode, turns: usize) -> Case {
        let (size, seed) = (if workload.is_sized() { 128 } else { 0 }, 5);
        Case {
            workload,
            backend,
            mode,
            turns,
            size,
            threads: 1,
            writers: 1,
            seed,
            rep: 0,
            cap_s: 60,
            paired: false,
            flush: Each::Step,
        }
    }

    /// The digests of the head, read again from the store, and the raw bytes.
    async fn run(case: &Case) -> (String, u64) {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(case.backend, directory.path().join("c.db").to_str().unwrap()).await.unwrap();
        let mut conversation = Conversation::new(case, 0, store.saver.clone()).unwrap();
        let mut raw = 0;
        for _ in 0..case.turns {
            raw += conversation.turn(None).await.unwrap().raw_bytes;
        }
        let fresh = accessor(case.mode, store.saver.clone()).unwrap();
        let state = fresh.get(conversation.thread(), None).await.unwrap().unwrap();
        let found = digest(&messages(&state).unwrap());
        store.close().await;
        (found, raw)
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn every_mode_and_store_comes_to_the_state_of_the_model() {
        for workload in Workload::ALL {
            let turns = if workload == Workload::Agent { 90 } else { 25 };
            let expected = workload.expected(if workload.is_sized() { 128 } else { 0 }, 5, turns).digest();
            let mut raws = Vec::new();
            let delta = [1, 7, 1000].map(Mode::Delta);
            for (backend, modes) in [
                (Backend::Memory, &[&[Mode::Full], &delta[..]].concat()[..]),
                (Backend::SqliteNormal, &[Mode::Full, delta[1]]),
            ] {
                for &mode in modes {
                    let (found, raw) = run(&case(workload, backend, mode, turns)).await;
                    assert_eq!(found, expected, "{workload} {backend} {mode}");
                    raws.push(raw);
                }
            }
            raws.dedup();
            assert_eq!(raws.len(), 1, "every store is sent the same bytes");
        }
    }

    /// The size of the file after this number of turns, the bytes of its messages, and the number of checkpoints.
    async fn sizes(workload: Workload, backend: Backend, mode: Mode, turns: usize) -> (u64, u64, u64) {
        let case = case(workload, backend, mode, turns);
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("c.db");
        let store = Store::open(backend, path.to_str().unwrap()).await.unwrap();
        let mut conversation = Conversation::new(&case, 0, store.saver.clone()).unwrap();
        let (mut raw, mut checkpoints) = (0, 0);
        for _ in 0..turns {
            let spent = conversation.turn(None).await.unwrap();
            raw += spent.raw_bytes;
            checkpoints += spent.checkpoints;
        }
        store.close().await;
        (crate::store::file_bytes(path.to_str().unwrap()), raw, checkpoints)
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_long_thread_takes_half_of_its_messages_and_little_more_than_them_uncompressed() {
        for mode in [Mode::Full, Mode::Delta(10)] {
            let (packed, raw, _) = sizes(Workload::Plain, Backend::SqliteNormal, mode, 2_000).await;
            assert!(packed * 100 < raw * 50, "{mode}: {packed} bytes for {raw}");
            let (plain, raw, _) = sizes(Workload::Plain, Backend::SqlitePlain, mode, 2_000).await;
            assert!(plain * 100 < raw * 125, "{mode}: {plain} bytes for {raw}");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_checkpoint_takes_less_than_a_hundred_bytes_beside_its_messages() {
        for mode in [Mode::Full, Mode::Delta(10), Mode::Delta(1_000)] {
            let (bytes, raw, checkpoints) = sizes(Workload::Lead, Backend::SqlitePlain, mode, 500).await;
            assert!(bytes - raw < 100 * checkpoints, "{mode}: {bytes} bytes for {raw} in {checkpoints}");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_turn_costs_a_flush_for_each_superstep_or_one() {
        for (workload, flushes) in [(Workload::Lean, [3, 1]), (Workload::Plain, [3, 1])] {
            for (flush, expected) in [Each::Step, Each::Turn].into_iter().zip(flushes) {
                let case = Case { flush, ..case(workload, Backend::Sqlite, Mode::Full, 8) };
                let directory = tempfile::tempdir().unwrap();
                let path = directory.path().join("c.db");
                let store = Store::open(case.backend, path.to_str().unwrap()).await.unwrap();
                let mut conversation = Conversation::new(&case, 0, store.saver.clone()).unwrap();
                for turn in 0..case.turns {
                    let before = store.flushes().unwrap();
                    conversation.turn(None).await.unwrap();
                    let found = store.flushes().unwrap() - before;
                    // The first turn of `plain` creates the thread.
                    assert!(turn == 0 || found == expected, "{workload}, a flush each {flush:?}: {found}");
                }
            }
        }
    }

    #[tokio::test]
    async fn the_raw_store_is_given_the_new_messages_of_every_superstep() {
        let case = case(Workload::Plain, Backend::Memory, Mode::Full, 10);
        let directory = tempfile::tempdir().unwrap();
        let mut raw =
            Raw::open(Backend::RawSqlite, directory.path().join("raw.db").to_str().unwrap()).await.unwrap();
        let store = Store::open(case.backend, "").await.unwrap();
        let mut conversation = Conversation::new(&case, 0, store.saver.clone()).unwrap();
        for _ in 0..case.turns {
            let spent = conversation.turn(Some(&mut raw)).await.unwrap();
            assert_eq!((spent.steps.len(), spent.floor.len()), (2, 2));
        }
        let model = case.workload.expected(0, 5, 10);
        assert_eq!(digest(&raw.read().await.unwrap()), model.digest());
    }
}
