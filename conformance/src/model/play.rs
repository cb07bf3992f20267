//! Runs a program on a saver and on the model, and compares the two after each operation.

use std::collections::BTreeMap;
use std::sync::Arc;

use threadkeep::Result;
use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple, TaskWrites};
use threadkeep::id::{ChannelName, Namespace, ThreadId};
use threadkeep::saver::{CheckpointSelector, ListQuery, Load, Revision, Rewrite, Saver};
use threadkeep::value::ChannelValue;

use super::naive::{Naive, Refusal, mask};
use super::program::{ChainId, How, Op};
use super::resolve::{CHANNELS, NAMESPACES, Resolved, Values, pick_back};
use crate::case::{Failure, Outcome, check, check_eq};
use crate::factory::Store;

/// Runs `program` in its own threads, and finally deletes them.
pub(super) async fn play(store: &Store, name: &str, program: &[Op]) -> Outcome {
    let mut world = World {
        store,
        handles: vec![store.open().await?],
        current: 0,
        threads: ["a", "b"].map(|thread| format!("{name}-{thread}").into()),
        lives: [0; 2],
        attempts: BTreeMap::new(),
        made: 0,
        model: Naive::default(),
        values: BTreeMap::new(),
        past: Vec::new(),
    };
    let clean_up = [false, true].map(|seen| Op::Delete { thread: u8::from(seen), seen });
    for (n, op) in program.iter().chain(&clean_up).enumerate() {
        let done = match world.run(op).await {
            Ok(()) => world.compare(n).await,
            failed => failed,
        };
        done.map_err(|failure: Failure| failure.retell(|what| format!("after operation {n}: {what}")))?;
    }
    Ok(())
}

/// The saver, the model, and the state that the next operation needs.
pub(super) struct World<'a> {
    store: &'a Store,
    handles: Vec<Arc<dyn Saver>>,
    current: usize,
    pub(super) threads: [ThreadId; 2],
    /// How often each thread was deleted. Checkpoint ids then start again; versions and tasks do not.
    pub(super) lives: [u64; 2],
    /// Commits resolved for a namespace of a thread since its deletion.
    pub(super) attempts: BTreeMap<(u8, u8), u16>,
    /// Elements and tasks created so far.
    pub(super) made: u64,
    pub(super) model: Naive,
    /// The values of each checkpoint's channels, even if only a sentinel is stored.
    pub(super) values: BTreeMap<CheckpointKey, Values>,
    past: Vec<Resolved>,
}

impl World<'_> {
    fn saver(&self) -> &dyn Saver {
        &*self.handles[self.current]
    }

    async fn run(&mut self, op: &Op) -> Outcome {
        match op {
            Op::Commit(commit) => {
                let resolved = self.resolve(commit)?;
                if let Some(parent) = &resolved.parent {
                    for row in &resolved.early {
                        self.put(parent, row).await?;
                    }
                }
                self.past.push(resolved.clone());
                self.commit(resolved).await
            }
            Op::Put { place, back, again, task, writes } => {
                match self.resolve_put(*place, *back, *again, *task, writes)? {
                    Some((at, row)) => self.put(&at, &row).await,
                    None => Ok(()),
                }
            }
            Op::Repeat(back) => match pick_back(&self.past, *back).cloned() {
                Some(resolved) => self.commit(resolved).await,
                None => Ok(()),
            },
            Op::Delete { thread, seen } => {
                let n = usize::from(*thread);
                let thread = self.threads[n].clone();
                self.lives[n] += 1;
                self.attempts.retain(|(of, _), _| usize::from(*of) != n);
                self.values.retain(|key, _| key.thread != thread);
                self.model.delete_thread(&thread);
                if !seen {
                    return Ok(self.saver().delete_thread(&thread).await?);
                }
                let revision = self.saver().revision(&thread).await?;
                Ok(self.saver().delete_seen(&thread, &revision).await?)
            }
            Op::Rewrite { place, back, how, stale } => self.rewrite(*place, *back, *how, *stale).await,
            Op::Copy { thread } => self.copy(*thread).await,
            Op::SwitchHandle => {
                if self.handles.len() == 1 {
                    self.handles.push(self.store.open().await?);
                }
                self.current = 1 - self.current;
                Ok(())
            }
            Op::Reopen => {
                self.handles.clear();
                self.handles.push(self.store.open().await?);
                self.current = 0;
                Ok(())
            }
        }
    }

    async fn put(&mut self, at: &CheckpointKey, row: &TaskWrites) -> Outcome {
        let got = self.saver().put_writes(at, row).await;
        agree(&got, &self.model.put_writes(at, row), "put_writes")
    }

    async fn commit(&mut self, resolved: Resolved) -> Outcome {
        let Resolved { step, mut values, .. } = resolved;
        let got = self.saver().commit(step.clone()).await;
        let key = step.key();
        let known = self.model.get(&key).is_some();
        let expected = self.model.commit(&step);
        agree(&got, &expected, "commit")?;
        if let Ok(got) = got {
            check_eq!(got, key, "the key that commit returned");
        }
        if expected.is_ok() && !known {
            // As in the engine: what is stored completely is held from now on, and edits are relative to it.
            for (name, entry) in &step.checkpoint.channels {
                if let (Some(_), Some(ChannelValue::List(list))) =
                    (entry.stored.value(), values.get_mut(name))
                {
                    list.rebase(entry.version);
                }
            }
            self.values.insert(key, values);
        }
        Ok(())
    }

    async fn rewrite(&mut self, place: ChainId, back: u8, how: How, stale: bool) -> Outcome {
        let Some(plan) = self.resolve_rewrite(place, back, how) else { return Ok(()) };
        let source = self.saver().read_thread(&self.threads[usize::from(place.thread)]).await?;
        let image = self.saver().read_thread(&plan.thread).await?;
        check_eq!(source.checkpoints.is_empty(), false, "whether a thread that is there is absent");
        let revision = if stale { Revision::new(*b"of nobody") } else { image.revision };
        let remove = plan.remove.iter().map(|key| (key.namespace.clone(), key.id)).collect();
        let rewrite = Rewrite { remove, put: plan.put.clone() };
        let got = self.saver().rewrite_thread(&plan.thread, &revision, rewrite).await;
        let expected =
            if stale { Err(vec![Refusal::Stale]) } else { self.model.rewrite(&plan.remove, &plan.put) };
        agree(&got, &expected, "rewrite_thread")?;
        if expected.is_ok() {
            self.accept_rewrite(place, plan);
        }
        Ok(())
    }

    async fn copy(&mut self, from: u8) -> Outcome {
        let [source, target] = [from, 1 - from].map(|n| self.threads[usize::from(n)].clone());
        let got = self.saver().copy_thread(&source, &target).await;
        let copy = self.copied(from);
        let expected = if !copy.is_empty() && !self.model.thread(&target).is_empty() {
            Err(vec![Refusal::Stale])
        } else {
            self.model.rewrite(&[], &copy)
        };
        agree(&got, &expected, "copy_thread")?;
        if expected.is_ok() {
            check_eq!(got, Ok(copy.len()), "how many checkpoints were copied");
            self.accept_copy(from, &copy);
        }
        Ok(())
    }

    /// Fails unless every read returns the same on both sides. `n` varies the queries.
    async fn compare(&self, n: usize) -> Outcome {
        let mut there = self.saver().threads(None, usize::MAX).await?;
        there.retain(|thread| self.threads.contains(thread));
        let mut expected: Vec<_> = self.threads.clone().into();
        expected.retain(|thread| !self.model.thread(thread).is_empty());
        check_eq!(there, expected, "the threads");
        for thread in &self.threads {
            let image = self.saver().read_thread(thread).await?;
            let read: Vec<&CheckpointTuple> = image.checkpoints.values().collect();
            check_eq!(read, self.model.thread(thread), "the thread read whole");
            check_eq!(image.revision == Revision::absent(), read.is_empty(), "whether it is absent");
            check_eq!(self.saver().summary(thread).await?, self.model.summary(thread), "its summary");
            let everywhere = ListQuery { namespace: None, ..ListQuery::new(thread) };
            let expected = self.model.list(&everywhere);
            let mut got = self.saver().list(&everywhere).await?;
            let falling = got.windows(2).all(|pair| pair[0].checkpoint.id >= pair[1].checkpoint.id);
            check!(falling, "the list of all namespaces is not newest first");
            got.sort_by(|a, b| (b.checkpoint.id, &a.namespace).cmp(&(a.checkpoint.id, &b.namespace)));
            check_eq!(got, expected, "the list of all namespaces");
            for namespace in NAMESPACES.map(Namespace::new) {
                self.compare_lists(thread, &namespace, n).await?;
            }
            for tuple in &expected {
                self.compare_reads(tuple, n).await?;
            }
        }
        Ok(())
    }

    async fn compare_lists(&self, thread: &ThreadId, namespace: &Namespace, n: usize) -> Outcome {
        let head = CheckpointSelector { namespace: namespace.clone(), ..CheckpointSelector::head(thread) };
        let got = self.saver().get(&head).await?;
        check_eq!(got.as_ref(), self.model.head(thread, namespace), "the head of namespace {namespace:?}");

        let chain = self.model.chain(thread, namespace);
        let before = chain.get(n % (chain.len() + 1)).map(|tuple| tuple.checkpoint.id);
        let whole = ListQuery { namespace: Some(namespace.clone()), ..ListQuery::new(thread) };
        let mut filtered = whole.clone();
        filtered.filter.insert("third".into(), (n % 3).into());
        for mut query in [
            ListQuery { before, load: only(n), ..whole.clone() },
            ListQuery { limit: Some(n % 4), ..whole },
            ListQuery { before, limit: Some(2), ..filtered.clone() },
            filtered,
        ] {
            let mut expected = self.model.list(&query);
            check_eq!(self.saver().list(&query).await?, expected, "{query:?}");
            query.load = Load::None;
            for tuple in &mut expected {
                mask(tuple, &query.load);
            }
            check_eq!(self.saver().list(&query).await?, expected, "{query:?}");
        }
        Ok(())
    }

    async fn compare_reads(&self, expected: &CheckpointTuple, n: usize) -> Outcome {
        let key = expected.key();
        let at = CheckpointSelector::at(&key);
        let mut expected = expected.clone();
        check_eq!(self.saver().get(&at).await?.as_ref(), Some(&expected), "get {key:?}");
        for load in [only(n), Load::None] {
            mask(&mut expected, &load);
            let at = at.clone().loading(load);
            check_eq!(self.saver().get(&at).await?.as_ref(), Some(&expected), "get {at:?}");
        }

        let channels = CHANNELS.into_iter().chain(["never"]).map(ChannelName::from).collect();
        let chain = self.model.chain(&key.thread, &key.namespace);
        let oldest = chain.first().map(|tuple| tuple.checkpoint.id);
        for reach in [None, expected.parent, oldest] {
            let got = self.saver().delta_history(&key, &channels, reach).await?;
            let expected = self.model.history(&key, &channels, reach);
            check_eq!(Some(got), expected, "the history of {key:?} with reach {reach:?}");
        }
        Ok(())
    }
}

/// Loads one of the channels.
fn only(n: usize) -> Load {
    Load::Only([ChannelName::from(CHANNELS[n % CHANNELS.len()])].into())
}

/// Fails unless the saver did what the contract requires: succeeded, or refused for one of these reasons.
fn agree<T: std::fmt::Debug>(got: &Result<T>, expected: &Result<(), Vec<Refusal>>, call: &str) -> Outcome {
    let same = match (got, expected) {
        (Ok(_), Ok(())) => true,
        (Err(error), Err(refusals)) => refusals.iter().any(|refusal| refusal.is(error)),
        _ => false,
    };
    check!(same, "{call} returned {got:?}; the contract says {expected:?}");
    Ok(())
}
