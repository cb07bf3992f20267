//! Random programs against a model that keeps whole copies: commits with forks, held values and edited lists, task
//! writes, deletions, a second handle on the file, and reopenings.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use serde_json::{Value as Json, json};
use tempfile::TempDir;
use threadkeep::checkpoint::{
    ChannelEntry, Checkpoint, CheckpointKey, CheckpointTuple, ERROR_CHANNEL, Stored, TaskWrites, Write,
};
use threadkeep::id::{
    ChannelName, CheckpointId, IdSource, Namespace, SystemClock, TaskId, ThreadId, Version,
};
use threadkeep::metadata::{Counters, Metadata, Source};
use threadkeep::saver::fallback;
use threadkeep::saver::{CheckpointSelector, Flush, ListQuery, Load, Saver, StepCommit};
use threadkeep::value::{ChannelValue, Element, ListValue};
use threadkeep_sqlite::{Options, SqliteSaver, Synchronous};

/// The bytes that decide one step of a program.
struct Choices<'a>(std::slice::Iter<'a, u8>);

impl Choices<'_> {
    fn below(&mut self, bound: usize) -> usize {
        self.0.next().map_or(0, |byte| usize::from(*byte)) % bound
    }
}

struct World {
    dir: TempDir,
    savers: Vec<SqliteSaver>,
    ids: IdSource,
    thread: ThreadId,
    model: BTreeMap<(Namespace, CheckpointId), CheckpointTuple>,
    version: Option<Version>,
    fresh: usize,
}

const CHANNELS: [&str; 4] = ["messages", "files", "title", "state"];

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let savers = (0..2).map(|_| open(&dir)).collect();
        Self {
            dir,
            savers,
            ids: IdSource::seeded(SystemClock, 11),
            thread: "t".into(),
            model: BTreeMap::new(),
            version: None,
            fresh: 0,
        }
    }

    fn number(&mut self) -> usize {
        self.fresh += 1;
        self.fresh
    }

    /// Mostly new elements, sometimes an earlier one; some tiny, some not.
    fn element(&mut self, choices: &mut Choices<'_>) -> Element {
        let number = if choices.below(5) == 0 { choices.below(10) } else { self.number() };
        let text = if choices.below(4) == 0 { String::new() } else { "some words of a message ".repeat(3) };
        Element::from_json(&json!({ "id": format!("m{number}"), "c": text })).unwrap()
    }

    fn edit(&mut self, mut list: ListValue, choices: &mut Choices<'_>) -> ListValue {
        for _ in 0..=choices.below(3) {
            let len = list.len();
            match choices.below(8) {
                0 if len > 0 => list.remove(choices.below(len)),
                1 | 2 if len > 0 => {
                    let at = len - 1 - choices.below(len.min(3));
                    let id = list.get(at).and_then(|e| e.id().cloned()).unwrap();
                    let number = self.number();
                    let new = json!({ "id": *id, "c": format!("{number} {}", "edited ".repeat(6)) });
                    list.replace(at, Element::from_json(&new).unwrap());
                }
                _ => list.push(self.element(choices)),
            }
        }
        list
    }

    fn plain(&mut self, choices: &mut Choices<'_>) -> ChannelValue {
        let number = self.number();
        let json = match choices.below(4) {
            0 => Json::Null,
            1 => json!(number),
            2 => json!("a title that is longer than what is kept inline"),
            _ => json!({ "a": number, "b": ["x".repeat(50)] }),
        };
        ChannelValue::from_json(&json).unwrap()
    }

    fn stored(&mut self, channel: &str, parent: Option<&Stored>, choices: &mut Choices<'_>) -> Stored {
        if parent.is_some() && choices.below(4) == 0 {
            return Stored::Sentinel;
        }
        let value = match channel {
            "messages" | "files" => {
                // Sometimes from another channel's list: its base then names a version that is not this channel's.
                let base = match parent.and_then(Stored::value) {
                    Some(ChannelValue::List(list)) if choices.below(6) > 0 => list.clone(),
                    _ => self.moved(channel, choices),
                };
                self.edit(base, choices).into()
            }
            _ => self.plain(choices),
        };
        if choices.below(3) == 0 { Stored::Snapshot(value) } else { Stored::Value(value) }
    }

    fn any_list(&mut self, choices: &mut Choices<'_>) -> ListValue {
        let lists: Vec<_> = self
            .model
            .values()
            .flat_map(|tuple| tuple.checkpoint.channels.values())
            .filter_map(|entry| entry.stored.value()?.as_list())
            .cloned()
            .collect();
        if lists.is_empty() || choices.below(2) == 0 {
            ListValue::default()
        } else {
            lists[choices.below(lists.len())].clone()
        }
    }

    /// A list to go on from in this channel. Where the channel has another list under the version that it is based on, it is
    /// detached, as [`ListValue::base`] asks: the channels of a commit share a version here.
    fn moved(&mut self, channel: &str, choices: &mut Choices<'_>) -> ListValue {
        let mut list = self.any_list(choices);
        let own = self.model.values().filter_map(|tuple| tuple.checkpoint.channels.get(channel));
        let mut at_base = own.filter(|entry| Some(entry.version) == list.base());
        if at_base.any(|entry| entry.stored.value().and_then(ChannelValue::as_list) != Some(&list)) {
            list.detach();
        }
        list
    }

    fn task(&mut self, choices: &mut Choices<'_>, task: TaskId) -> TaskWrites {
        let writes = (0..choices.below(3)).map(|_| {
            let channel = CHANNELS[choices.below(4)];
            let value = if choices.below(2) == 0 {
                self.edit(ListValue::default(), choices).into()
            } else {
                self.plain(choices)
            };
            Write { channel: channel.into(), value, overwrite: choices.below(5) == 0 }
        });
        let mut writes: Vec<_> = writes.collect();
        if choices.below(3) == 0 {
            let value = ChannelValue::from_json(&json!(format!("failed {}", self.number()))).unwrap();
            writes.push(Write { channel: ERROR_CHANNEL.into(), value, overwrite: false });
        }
        TaskWrites { task, node: "model".into(), index: u32::try_from(choices.below(3)).unwrap(), writes }
    }

    fn head(&self, namespace: &Namespace) -> Option<CheckpointId> {
        self.model.keys().filter(|(ns, _)| ns == namespace).map(|(_, id)| *id).max()
    }

    async fn commit(&mut self, choices: &mut Choices<'_>) {
        let namespace: Namespace = ["", "inner"][usize::from(choices.below(4) == 0)].into();
        let head = self.head(&namespace);
        let all: Vec<_> = self.model.keys().filter(|(ns, _)| *ns == namespace).map(|(_, id)| *id).collect();
        let parent = match head {
            Some(_) if choices.below(4) == 0 => Some(all[choices.below(all.len())]),
            head => head,
        };
        let parent_tuple = parent.and_then(|id| self.model.get(&(namespace.clone(), id)).cloned());
        let id = self.ids.checkpoint_after(head);
        let version = self.ids.version_after(self.version);
        self.version = Some(version);

        let (mut committed, mut expected) = (BTreeMap::new(), BTreeMap::new());
        for channel in CHANNELS {
            let name: ChannelName = channel.into();
            let held = parent_tuple.as_ref().and_then(|tuple| tuple.checkpoint.channels.get(&name)).cloned();
            match held {
                Some(held) if choices.below(2) == 0 => {
                    committed
                        .insert(name.clone(), ChannelEntry { version: held.version, stored: Stored::Held });
                    expected.insert(name, held);
                }
                None if choices.below(3) == 0 => {}
                held => {
                    let stored = self.stored(channel, held.as_ref().map(|held| &held.stored), choices);
                    committed.insert(name.clone(), ChannelEntry { version, stored: stored.clone() });
                    expected.insert(name, ChannelEntry { version, stored: rebased(stored, version) });
                }
            }
        }
        let mut writes = Vec::new();
        let mut applied = Vec::new();
        if let Some(tuple) = &parent_tuple {
            applied.extend(tuple.writes.iter().map(|task| task.task).take(choices.below(2)));
            for _ in 0..choices.below(3) {
                let task = self.ids.task();
                writes.push(self.task(choices, task));
                applied.push(task);
            }
        }
        // A checkpoint that takes its parent's place begins with the rows of that, any may begin with a new one.
        let mut pending = match &parent_tuple {
            Some(tuple) if choices.below(4) == 1 => tuple.writes.clone(),
            _ => Vec::new(),
        };
        if choices.below(4) == 1 {
            let task = self.ids.task();
            pending.push(self.task(choices, task));
        }
        let mut metadata = Metadata::new(Source::Loop, i64::try_from(self.fresh).unwrap());
        metadata.delta_marker = choices.below(2) == 0;
        let parents = parent_tuple.as_ref().map(|tuple| &tuple.metadata.counters);
        let held =
            committed.get(&ChannelName::from("messages")).is_some_and(|entry| entry.stored == Stored::Held);
        let counts = match parents {
            Some(parents) if held => parents.contains_key(&ChannelName::from("messages")),
            _ => choices.below(2) == 0,
        };
        if counts {
            metadata.counters.insert("messages".into(), Counters { updates: 1, supersteps: 200 });
        }
        if choices.below(2) == 0 {
            metadata.parents.insert(Namespace::root(), id);
        }
        let runs: serde_json::Map<_, _> =
            (0..choices.below(20)).map(|i| (format!("run-{i}"), json!(i))).collect();
        let extra = json!({ "run": choices.below(3), "run_durations": runs });
        metadata.extra = serde_json::from_value::<serde_json::Map<_, _>>(extra).unwrap().into();
        let checkpoint = Checkpoint { id, channels: committed, next: vec!["model".into()], applied };
        let step = StepCommit {
            thread: self.thread.clone(),
            namespace: namespace.clone(),
            parent,
            expected_head: head,
            checkpoint,
            metadata,
            writes: writes.clone(),
            pending: pending.clone(),
            flush: [Flush::Now, Flush::WithNext][usize::from(choices.below(3) == 0)],
        };
        let saver = &self.savers[usize::from(choices.below(5) == 0)];
        let key = saver.commit(step.clone()).await.unwrap();
        if choices.below(5) == 0 {
            assert_eq!(saver.commit(step.clone()).await.unwrap(), key, "a repeated commit changes nothing");
        }
        if let Some(parent) = parent {
            self.model.get_mut(&(namespace.clone(), parent)).unwrap().writes.extend(writes);
        }
        let tuple = CheckpointTuple {
            thread: step.thread,
            namespace: namespace.clone(),
            checkpoint: Checkpoint { channels: expected, ..step.checkpoint },
            parent,
            metadata: step.metadata,
            writes: pending,
        };
        self.model.insert((namespace, id), tuple);
    }

    async fn put_writes(&mut self, choices: &mut Choices<'_>) {
        if self.model.is_empty() {
            return;
        }
        let at = self.model.keys().nth(choices.below(self.model.len())).unwrap().clone();
        let known = self.model[&at].writes.clone();
        let task = match known.len() {
            1.. if choices.below(2) == 0 => known[choices.below(known.len())].task,
            _ => self.ids.task(),
        };
        let writes = self.task(choices, task);
        let key = CheckpointKey { thread: self.thread.clone(), namespace: at.0.clone(), id: at.1 };
        self.savers[usize::from(choices.below(5) == 0)].put_writes(&key, &writes).await.unwrap();
        // What a child has applied is final.
        let applied = self.model.values().any(|tuple| tuple.has_applied(&key, task));
        self.model.get_mut(&at).unwrap().put(&writes, || applied);
    }

    async fn step(&mut self, bytes: &[u8]) {
        let choices = &mut Choices(bytes.iter());
        match choices.below(16) {
            0 => {
                for saver in &self.savers {
                    saver.close().await;
                }
                self.savers = (0..2).map(|_| open(&self.dir)).collect();
            }
            1 if choices.below(8) == 0 => {
                self.savers[0].delete_thread(&self.thread).await.unwrap();
                self.model.clear();
            }
            2..5 => self.put_writes(choices).await,
            _ => self.commit(choices).await,
        }
    }

    async fn check(&self) {
        let mut expected: Vec<_> = self.model.values().cloned().collect();
        expected.sort_by_key(|tuple| std::cmp::Reverse(tuple.checkpoint.id));
        let query = ListQuery { namespace: None, ..ListQuery::new(&self.thread) };
        for saver in &self.savers {
            assert_eq!(saver.list(&query).await.unwrap(), expected);
        }
        let saver = &self.savers[0];
        for tuple in &expected {
            let got = saver.get(&CheckpointSelector::at(&tuple.key())).await.unwrap();
            assert_eq!(got.as_ref(), Some(tuple));
            let got =
                saver.get(&CheckpointSelector::at(&tuple.key()).loading(Load::None)).await.unwrap().unwrap();
            let versions = tuple.checkpoint.channels.iter().map(|(name, entry)| {
                (name.clone(), ChannelEntry { version: entry.version, stored: Stored::Held })
            });
            assert_eq!(got.checkpoint.channels, versions.collect());
        }
        let channels: BTreeSet<ChannelName> = CHANNELS.iter().map(|name| (*name).into()).collect();
        for (tuple, reach) in expected.iter().zip(expected.iter().rev().map(|tuple| tuple.checkpoint.id)) {
            let reach = (reach < tuple.checkpoint.id).then_some(reach);
            let (at, names) = (tuple.key(), &channels);
            let plain = fallback::delta_history(saver, &at, names, reach).await;
            let ours = saver.delta_history(&at, names, reach).await;
            match (plain, ours) {
                (Ok(plain), Ok(ours)) => assert_eq!(plain, ours),
                (plain, ours) => assert_eq!(plain.is_err(), ours.is_err()),
            }
        }
    }
}

fn open(dir: &TempDir) -> SqliteSaver {
    let options = Options { synchronous: Synchronous::Normal, readers: 1, ..Options::default() };
    SqliteSaver::open(dir.path().join("db"), &options).unwrap()
}

/// As the engine keeps a value that it has committed.
fn rebased(stored: Stored, version: Version) -> Stored {
    let rebase = |value| match value {
        ChannelValue::List(mut list) => {
            list.rebase(version);
            ChannelValue::List(list)
        }
        plain @ ChannelValue::Plain(_) => plain,
    };
    match stored {
        Stored::Value(value) => Stored::Value(rebase(value)),
        Stored::Snapshot(value) => Stored::Snapshot(rebase(value)),
        other => other,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn the_store_is_what_was_put_into_it(
        program in prop::collection::vec(prop::collection::vec(any::<u8>(), 60), 1..40),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let mut world = World::new();
            for (i, bytes) in program.iter().enumerate() {
                world.step(bytes).await;
                if i % 8 == 7 {
                    world.check().await;
                }
            }
            world.check().await;
        });
    }
}
