//! Any sequence of commits, forks, prunes, rollbacks and deletions by two processes: what a process reads that remembers
//! earlier reads is what one reads that remembers nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::json;
use threadkeep::Error;
use threadkeep::checkpoint::{Checkpoint, CheckpointKey};
use threadkeep::id::{CheckpointId, IdSource, Namespace, ThreadId};
use threadkeep::metadata::{Entries, Metadata, Source};
use threadkeep::saver::{CheckpointSelector, Flush, Load, Rewrite, Saver, StepCommit};
use threadkeep_postgres::PostgresSaver;

use crate::common::{database, open};

const MAP: &str = "run_durations";
const NAMESPACES: [&str; 2] = ["", "inner"];

/// What happens to the thread; the first number is the process that does it.
#[derive(Debug, Clone)]
enum Act {
    /// A commit with a map of the parent's entries and these changes. The parent is the head, or any checkpoint.
    Commit {
        by: usize,
        ns: usize,
        fork: Option<Index>,
        changes: Vec<Change>,
    },
    /// The newest checkpoints are removed, of all namespaces.
    RollBack {
        by: usize,
        count: usize,
    },
    /// The oldest one is removed, and its children begin the thread.
    Prune {
        by: usize,
    },
    Delete {
        by: usize,
    },
    /// Everybody reads this checkpoint.
    Read(Index),
}

#[derive(Debug, Clone)]
enum Change {
    Add(u8, u8),
    Remove(u8),
    /// So many, each of its own.
    AddMany(u8),
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let change = prop_oneof![
        4 => (any::<u8>(), 0..3_u8).prop_map(|(key, value)| Change::Add(key, value)),
        1 => any::<u8>().prop_map(Change::Remove),
        2 => (60..120_u8).prop_map(Change::AddMany),
    ];
    prop::collection::vec(change, 0..4)
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        12 => (0..2_usize, 0..NAMESPACES.len(), prop::option::weighted(0.3, any::<Index>()), changes())
            .prop_map(|(by, ns, fork, changes)| Act::Commit { by, ns, fork, changes }),
        2 => (0..2_usize, 1..4_usize).prop_map(|(by, count)| Act::RollBack { by, count }),
        2 => (0..2_usize).prop_map(|by| Act::Prune { by }),
        1 => (0..2_usize).prop_map(|by| Act::Delete { by }),
        8 => any::<Index>().prop_map(Act::Read),
    ];
    prop::collection::vec(act, 1..40)
}

/// The thread as it should be: the map of each checkpoint, and its parent.
struct Model {
    thread: ThreadId,
    ids: IdSource,
    checkpoints: BTreeMap<(Namespace, CheckpointId), (Entries, Option<CheckpointId>)>,
    added: usize,
}

impl Model {
    fn head(&self, namespace: &Namespace) -> Option<CheckpointId> {
        let of = self.checkpoints.keys().filter(|(of, _)| of == namespace);
        of.map(|(_, id)| *id).max()
    }

    fn commit(&mut self, namespace: &Namespace, fork: Option<Index>, changes: &[Change]) -> StepCommit {
        let head = self.head(namespace);
        let of: Vec<CheckpointId> =
            self.checkpoints.keys().filter(|(of, _)| of == namespace).map(|(_, id)| *id).collect();
        let parent = fork.filter(|_| !of.is_empty()).map(|fork| *fork.get(&of)).or(head);
        let mut map =
            parent.map(|parent| self.checkpoints[&(namespace.clone(), parent)].0.clone()).unwrap_or_default();
        for change in changes {
            match change {
                Change::Add(key, value) => map.insert((format!("key {key}").into(), Arc::new(json!(value)))),
                Change::Remove(key) => map.remove(&format!("key {key}")),
                Change::AddMany(count) => {
                    for _ in 0..*count {
                        self.added += 1;
                        map.insert((format!("run {}", self.added).into(), Arc::new(json!("took 3 s"))));
                    }
                }
            }
        }
        let id = self.ids.checkpoint_after(head);
        self.checkpoints.insert((namespace.clone(), id), (map.clone(), parent));
        let mut metadata = Metadata::new(Source::Loop, 1);
        metadata.extra.insert_object(MAP, map);
        StepCommit {
            thread: self.thread.clone(),
            namespace: namespace.clone(),
            parent,
            expected_head: head,
            checkpoint: Checkpoint { id, channels: BTreeMap::new(), next: Vec::new(), applied: Vec::new() },
            metadata,
            writes: Vec::new(),
            pending: Vec::new(),
            flush: if self.added.is_multiple_of(3) { Flush::WithNext } else { Flush::Now },
        }
    }

    /// Removes these checkpoints, whose children begin the thread.
    async fn remove(&mut self, saver: &PostgresSaver, remove: BTreeSet<(Namespace, CheckpointId)>) {
        if remove.is_empty() {
            return;
        }
        let image = saver.read_thread(&self.thread).await.unwrap();
        let mut put = Vec::new();
        for (place, (_, parent)) in &mut self.checkpoints {
            let is_orphan = parent.is_some_and(|parent| remove.contains(&(place.0.clone(), parent)));
            if is_orphan && !remove.contains(place) {
                *parent = None;
                let mut tuple = image.checkpoints[place].clone();
                tuple.parent = None;
                put.push(tuple);
            }
        }
        self.checkpoints.retain(|place, _| !remove.contains(place));
        saver.rewrite_thread(&self.thread, &image.revision, Rewrite { remove, put }).await.unwrap();
    }

    async fn act(&mut self, savers: &[PostgresSaver; 2], act: &Act) {
        match act {
            Act::Commit { by, ns, fork, changes } => {
                let step = self.commit(&NAMESPACES[*ns].into(), *fork, changes);
                savers[*by].commit(step).await.unwrap();
            }
            Act::RollBack { by, count } => {
                let mut newest: Vec<_> = self.checkpoints.keys().cloned().collect();
                newest.sort_by_key(|(_, id)| std::cmp::Reverse(*id));
                newest.truncate(*count);
                self.remove(&savers[*by], newest.into_iter().collect()).await;
            }
            Act::Prune { by } => {
                let oldest = self.checkpoints.keys().min_by_key(|(_, id)| *id).cloned();
                self.remove(&savers[*by], oldest.into_iter().collect()).await;
            }
            Act::Delete { by } => {
                savers[*by].delete_thread(&self.thread).await.unwrap();
                self.checkpoints.clear();
            }
            Act::Read(_) => {}
        }
    }

    /// Everybody reads the heads, and by its id the chosen checkpoint and one that may have been removed.
    async fn check(&self, savers: [&PostgresSaver; 3], choice: Option<&Index>, gone: &CheckpointKey) {
        let places: Vec<_> = self.checkpoints.keys().collect();
        let chosen = choice.filter(|_| !places.is_empty()).map(|choice| *choice.get(&places));
        let heads = NAMESPACES.map(|namespace| {
            let namespace = Namespace::from(namespace);
            let id = self.head(&namespace);
            (
                CheckpointSelector { namespace: namespace.clone(), ..CheckpointSelector::head(&self.thread) },
                id.map(|id| (namespace, id)),
            )
        });
        let by_id = chosen.map(|place| {
            let (namespace, id) = place.clone();
            (
                CheckpointSelector::at(&CheckpointKey { thread: self.thread.clone(), namespace, id }),
                Some(place.clone()),
            )
        });
        let place = (gone.namespace.clone(), gone.id);
        let known = Some(place).filter(|place| self.checkpoints.contains_key(place));
        let gone = choice.map(|_| (CheckpointSelector::at(gone), known));
        for (at, expected) in heads.into_iter().chain(by_id).chain(gone) {
            let at = CheckpointSelector { load: Load::All, ..at };
            let expected = expected.map(|place| (place.1, &self.checkpoints[&place]));
            let mut all = Vec::new();
            for saver in savers {
                let found: Result<_, Error> = saver.get(&at).await;
                let found = found.unwrap_or_else(|error| panic!("{at:?}: {error}"));
                let seen = found.as_ref().map(|tuple| tuple.metadata.extra.object(MAP).unwrap_or_default());
                assert_eq!(found.as_ref().map(|tuple| tuple.checkpoint.id), expected.map(|(id, _)| id));
                assert_eq!(seen.as_ref(), expected.map(|(_, (map, _))| map), "{at:?}");
                all.push(found);
            }
            assert!(all.windows(2).all(|two| two[0] == two[1]), "{at:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn what_is_read_is_what_one_reads_that_remembers_nothing(acts in acts()) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(async {
            let database = database().await;
            let savers = [open(database.url()).await, open(database.url()).await];
            let mut model = Model {
                thread: "t".into(),
                ids: IdSource::default(),
                checkpoints: BTreeMap::new(),
                added: 0,
            };
            let root = Namespace::root();
            let first = model.commit(&root, None, &[Change::AddMany(100)]);
            let gone = savers[0].commit(first).await.unwrap();
            for act in &acts {
                model.act(&savers, act).await;
                let choice = match act {
                    Act::Read(choice) => Some(choice),
                    _ => None,
                };
                let fresh = open(database.url()).await;
                model.check([&savers[0], &savers[1], &fresh], choice, &gone).await;
            }
        });
    }
}
