//! The channel table: a schema compiled for a mode and a cadence. The mode is a property of the table, not of a saver.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::{Value as Json, json};

use super::{Behaviour, Fold, MESSAGES_CHANNEL, MergeMap, Messages, OrderedUnion, Reducer};
use crate::error::{Error, FREQUENCY_NOT_POSITIVE, Result};
use crate::id::ChannelName;
use crate::mode::ChannelMode;
use crate::value::ChannelValue;

/// The channels of a graph's state, whatever the mode.
#[derive(Debug, Clone, Default)]
pub struct Schema {
    channels: BTreeMap<ChannelName, Behaviour>,
}

impl Schema {
    /// A schema without channels.
    pub fn new() -> Self {
        Self::default()
    }

    /// The thread state of the service: `messages`, `goal`, `title`, sandbox state and the lead agent's channels
    /// (service reference, "Thread, checkpoint and run records").
    pub fn thread_state() -> Self {
        let last = |_: Json, new| Ok(new);
        let union = Arc::new(Fold::new(None, last));
        Self::new()
            .with(MESSAGES_CHANNEL, Behaviour::Accumulating(Arc::new(Messages)))
            .with("artifacts", Behaviour::Reducer(Arc::new(OrderedUnion)))
            .with("viewed_images", Behaviour::Reducer(Arc::new(MergeMap)))
            .with("goal", Behaviour::Reducer(union.clone()))
            .with("todos", Behaviour::Reducer(union.clone()))
            .with("sandbox", Behaviour::Reducer(union))
            .with("delegations", Behaviour::Reducer(Arc::new(keyed_tail(50, continued_delegation))))
            .with("skill_context", Behaviour::Reducer(Arc::new(keyed_tail(8, |_, new| Some(new)))))
            .with("promoted", Behaviour::Reducer(Arc::new(OrderedUnion)))
            .with("thread_data", Behaviour::LastValue)
            .with("title", Behaviour::LastValue)
            .with("uploaded_files", Behaviour::LastValue)
            .with("summary_text", Behaviour::LastValue)
            .with("background_tasks", Behaviour::LastValue)
    }

    /// The schema with one more channel, or with another behaviour for an existing one.
    pub fn with(mut self, name: impl Into<ChannelName>, behaviour: Behaviour) -> Self {
        self.channels.insert(name.into(), behaviour);
        self
    }

    /// Compiles the schema. `frequency` is the cadence of accumulating channels; it has no effect in full mode.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if `frequency` is 0.
    pub fn compile(self, mode: ChannelMode, frequency: u64) -> Result<ChannelTable> {
        if frequency == 0 {
            return Err(Error::InvalidInput(FREQUENCY_NOT_POSITIVE.to_owned()));
        }
        let delta = match mode {
            ChannelMode::Full => BTreeSet::new(),
            ChannelMode::Delta => {
                let accumulating =
                    self.channels.iter().filter(|(_, b)| matches!(b, Behaviour::Accumulating(_)));
                accumulating.map(|(name, _)| name.clone()).collect()
            }
        };
        Ok(ChannelTable { channels: self.channels, mode, frequency, delta })
    }
}

/// The entry of a delegation after an update of it: it keeps when it was created and by which run, and once it has ended
/// it does not go back to being in progress. `None` keeps it as it is.
fn continued_delegation(have: &Json, mut update: Json) -> Option<Json> {
    const IN_PROGRESS: &str = "in_progress";
    if update["status"] == IN_PROGRESS && have["status"] != IN_PROGRESS {
        return None;
    }
    if let Json::Object(update) = &mut update {
        for key in ["created_at", "run_id"] {
            match have.get(key) {
                Some(first) => update.insert(key.to_owned(), first.clone()),
                None => update.remove(key),
            };
        }
    }
    Some(update)
}

/// A list of objects in which each id occurs once, at its first place, and only the last `keep` objects stay. `merged`
/// makes the new object from the one there is and an update; `None` keeps the one there is.
fn keyed_tail(keep: usize, merged: impl Fn(&Json, Json) -> Option<Json> + Send + Sync + 'static) -> Fold {
    Fold::new(Some(json!([])), move |current: Json, write: Json| match (current, write) {
        (current, Json::Null) => Ok(current),
        (Json::Array(mut list), Json::Array(more)) => {
            for item in more {
                match list.iter_mut().find(|have| !item["id"].is_null() && have["id"] == item["id"]) {
                    Some(have) => {
                        if let Some(item) = merged(have, item) {
                            *have = item;
                        }
                    }
                    None => list.push(item),
                }
                if list.len() > keep {
                    list.remove(0);
                }
            }
            Ok(Json::Array(list))
        }
        _ => Err(Error::InvalidUpdate("this channel takes lists of objects".to_owned())),
    })
}

/// The channels of a graph, compiled for a mode and a cadence.
#[derive(Debug, Clone)]
pub struct ChannelTable {
    channels: BTreeMap<ChannelName, Behaviour>,
    mode: ChannelMode,
    frequency: u64,
    delta: BTreeSet<ChannelName>,
}

impl ChannelTable {
    /// The mode that the table was compiled for.
    pub fn mode(&self) -> ChannelMode {
        self.mode
    }

    /// The cadence of delta channels.
    pub fn frequency(&self) -> u64 {
        self.frequency
    }

    /// The channels that are stored as deltas: in full mode, none.
    pub fn delta_channels(&self) -> &BTreeSet<ChannelName> {
        &self.delta
    }

    /// The names of all channels.
    pub fn names(&self) -> impl Iterator<Item = &ChannelName> {
        self.channels.keys()
    }

    /// How the channel treats writes; `None` if the schema does not contain it.
    pub fn behaviour(&self, channel: &ChannelName) -> Option<&Behaviour> {
        self.channels.get(channel)
    }

    /// A channel by its text: its name, shared, and how it treats writes.
    pub(crate) fn named(&self, channel: &str) -> Option<(&ChannelName, &Behaviour)> {
        self.channels.get_key_value(channel)
    }

    /// The initial value of a channel, if it has one.
    pub fn initial(&self, channel: &ChannelName) -> Option<ChannelValue> {
        self.behaviour(channel).and_then(Behaviour::reducer).and_then(Reducer::empty)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_accumulating_channels_are_deltas_and_only_in_delta_mode() {
        let delta = Schema::thread_state().compile(ChannelMode::Delta, 10).unwrap();
        assert_eq!(delta.delta_channels().iter().map(ChannelName::as_str).collect::<Vec<_>>(), ["messages"]);
        assert!(Schema::thread_state().compile(ChannelMode::Full, 10).unwrap().delta_channels().is_empty());
        assert_eq!(
            Schema::new().compile(ChannelMode::Delta, 0).unwrap_err().to_string(),
            "snapshot frequency must be positive"
        );
    }

    #[test]
    fn the_thread_state_has_the_channels_of_the_service_and_can_be_extended() {
        let table = Schema::thread_state()
            .with("notes", Behaviour::Accumulating(Arc::new(OrderedUnion)))
            .compile(ChannelMode::Delta, 1)
            .unwrap();
        let names: Vec<_> = table.names().map(ChannelName::as_str).collect();
        assert_eq!(
            names,
            [
                "artifacts",
                "background_tasks",
                "delegations",
                "goal",
                "messages",
                "notes",
                "promoted",
                "sandbox",
                "skill_context",
                "summary_text",
                "thread_data",
                "title",
                "todos",
                "uploaded_files",
                "viewed_images"
            ]
        );
        assert_eq!(table.delta_channels().len(), 2);
        assert_eq!(table.initial(&"goal".into()), None);
        assert_eq!(table.initial(&"messages".into()).unwrap().to_json().unwrap(), json!([]));
    }

    #[test]
    fn delegations_keep_one_place_per_id_and_the_last_fifty() {
        let table = Schema::thread_state().compile(ChannelMode::Full, 1).unwrap();
        let reducer = table.behaviour(&"delegations".into()).unwrap().reducer().unwrap();
        let write = |v: Json| ChannelValue::from_json(&v).unwrap();
        let items: Vec<Json> = (0..60).map(|i| json!({"id": i, "status": "in_progress"})).collect();
        let value = reducer.reduce(reducer.empty().unwrap(), &write(json!(items))).unwrap();
        let value = reducer.reduce(value, &write(json!([{"id": 30, "status": "completed"}]))).unwrap();
        let list = value.to_json().unwrap();
        assert_eq!(list.as_array().unwrap().len(), 50);
        assert_eq!(list[0]["id"], 10);
        assert_eq!(list[20], json!({"id": 30, "status": "completed"}));
    }

    #[test]
    fn a_delegation_keeps_its_beginning_and_never_goes_back_to_being_in_progress() {
        let table = Schema::thread_state().compile(ChannelMode::Full, 1).unwrap();
        let reducer = table.behaviour(&"delegations".into()).unwrap().reducer().unwrap();
        let write = |v: Json| ChannelValue::from_json(&v).unwrap();
        let fold = |writes: &[Json]| {
            let start = reducer.empty().unwrap();
            let all =
                writes.iter().try_fold(start, |value, item| reducer.reduce(value, &write(json!([item]))));
            all.unwrap().to_json().unwrap()
        };
        let begun = json!({"id": "a", "status": "in_progress", "created_at": 1, "run_id": "r"});
        let done = json!({"id": "a", "status": "completed", "created_at": 2, "run_id": "later", "result_brief": "x"});
        let kept =
            json!({"id": "a", "status": "completed", "created_at": 1, "run_id": "r", "result_brief": "x"});
        assert_eq!(fold(&[begun.clone(), done.clone()]), json!([kept]));
        assert_eq!(fold(&[begun.clone(), done.clone(), begun]), json!([kept]));
        // An entry without a run does not get one.
        let without = json!({"id": "a", "status": "in_progress"});
        assert_eq!(fold(&[without, done]), json!([{"id": "a", "status": "completed", "result_brief": "x"}]));
    }
}
