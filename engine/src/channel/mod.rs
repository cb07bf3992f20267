//! Channels: how the writes of a superstep become the channel's next value.

mod messages;
mod reducers;
mod table;

use std::fmt::Debug;
use std::sync::Arc;

use serde_json::Value as Json;

pub use messages::{MESSAGES_CHANNEL, Messages, REMOVE_ALL_MESSAGES, normalize_message};
pub use reducers::{Fold, MergeMap, OrderedUnion};
pub use table::{ChannelTable, Schema};

use crate::checkpoint::Write;
use crate::error::{Error, Result, SECOND_OVERWRITE};
use crate::id::{ChannelName, IdSource};
use crate::value::ChannelValue;

/// Folds writes into an accumulating value.
///
/// **Law** (batching invariance): folding writes in order, in any grouping, gives the same value. Replay relies on
/// nothing else.
pub trait Reducer: Send + Sync + Debug {
    /// The empty container with which the channel starts; `None` for a union type, which starts without a value.
    fn empty(&self) -> Option<ChannelValue>;

    /// Folds one write into the current value.
    ///
    /// # Errors
    /// [`Error::InvalidUpdate`] if the write does not fit the value.
    fn reduce(&self, current: ChannelValue, write: &ChannelValue) -> Result<ChannelValue>;

    /// Folds several writes in order, as [`Self::reduce`] does one after the other. For a reducer that goes through the
    /// whole value for each write: a superstep may have many, and the value may be long.
    ///
    /// # Errors
    /// As there.
    fn reduce_all(&self, current: ChannelValue, writes: &[&ChannelValue]) -> Result<ChannelValue> {
        writes.iter().try_fold(current, |value, write| self.reduce(value, write))
    }

    /// Completes a write before it is first stored, for example with ids, which a replay must not generate again.
    ///
    /// # Errors
    /// [`Error::InvalidUpdate`] if the write can never be folded.
    fn prepare(&self, write: Json, ids: &IdSource) -> Result<Json> {
        let _ = ids;
        Ok(write)
    }
}

/// How a channel treats writes.
#[derive(Debug, Clone)]
pub enum Behaviour {
    /// Keeps the one value that a superstep writes.
    LastValue,
    /// Folds writes, and every checkpoint refers to the complete value (binary-operator aggregate).
    Reducer(Arc<dyn Reducer>),
    /// Folds writes; in delta mode stored as sentinels, writes and snapshots.
    Accumulating(Arc<dyn Reducer>),
}

impl Behaviour {
    /// The reducer, if the channel has one.
    pub fn reducer(&self) -> Option<&dyn Reducer> {
        match self {
            Self::LastValue => None,
            Self::Reducer(reducer) | Self::Accumulating(reducer) => Some(&**reducer),
        }
    }

    /// Applies the writes of one superstep to a channel, in live order. `current` is `None` if the channel was never
    /// written. An entry without a value ([`ChannelValue::absent`]) is folded as if it never was.
    ///
    /// A replace-style write ([`Write::overwrite`]) wins the superstep: all other writes are dropped, before and after
    /// it. Its null means the empty container. On a union-typed channel without a value it stores the plain value
    /// (service reference, "Other rules" 1).
    ///
    /// # Errors
    /// [`Error::InvalidUpdate`] for two plain values of a last-value channel, for a second replace-style write, and
    /// from the reducer.
    pub fn apply(
        &self,
        channel: &ChannelName,
        current: Option<ChannelValue>,
        writes: &[&Write],
    ) -> Result<Option<ChannelValue>> {
        let Some((first, rest)) = writes.split_first() else { return Ok(current) };
        let Some(reducer) = self.reducer() else {
            return if rest.is_empty() {
                Ok(Some(first.value.clone()))
            } else {
                Err(Error::InvalidUpdate(format!(
                    "channel {channel} keeps one value and got {} in one superstep; give it a reducer to combine them",
                    writes.len()
                )))
            };
        };
        let mut overwrites = writes.iter().filter(|w| w.overwrite);
        if let Some(overwrite) = overwrites.next() {
            if overwrites.next().is_some() {
                return Err(Error::InvalidUpdate(SECOND_OVERWRITE.to_owned()));
            }
            let empty = if overwrite.value.is_null() { reducer.empty() } else { None };
            return Ok(Some(empty.unwrap_or_else(|| overwrite.value.clone())));
        }
        let (value, writes) = match current.filter(|value| !value.is_absent()).or_else(|| reducer.empty()) {
            Some(value) => (value, writes),
            None => (first.value.clone(), rest),
        };
        if writes.is_empty() {
            return Ok(Some(value));
        }
        let writes: Vec<_> = writes.iter().map(|write| &write.value).collect();
        reducer.reduce_all(value, &writes).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn write(value: Json, overwrite: bool) -> Write {
        Write { channel: "c".into(), value: ChannelValue::from_json(&value).unwrap(), overwrite }
    }

    fn apply(behaviour: &Behaviour, current: Option<Json>, writes: &[Write]) -> Result<Option<Json>> {
        let current = current.map(|v| ChannelValue::from_json(&v).unwrap());
        let writes: Vec<_> = writes.iter().collect();
        behaviour.apply(&"c".into(), current, &writes)?.map(|v| v.to_json()).transpose()
    }

    fn concat() -> Arc<dyn Reducer> {
        Arc::new(Fold::new(Some(json!([])), |a, b| match (a, b) {
            (Json::Array(mut a), Json::Array(b)) => {
                a.extend(b);
                Ok(Json::Array(a))
            }
            _ => Err(Error::InvalidUpdate("not lists".into())),
        }))
    }

    fn union() -> Arc<dyn Reducer> {
        Arc::new(Fold::new(None, |a, b| Ok(json!([a, b]))))
    }

    #[test]
    fn a_last_value_channel_takes_one_value_a_superstep() {
        let channel = Behaviour::LastValue;
        assert_eq!(apply(&channel, Some(json!(1)), &[]).unwrap(), Some(json!(1)));
        assert_eq!(apply(&channel, Some(json!(1)), &[write(json!(2), false)]).unwrap(), Some(json!(2)));
        let error = apply(&channel, None, &[write(json!(2), false), write(json!(3), false)]).unwrap_err();
        assert!(error.to_string().contains("channel c keeps one value and got 2"));
    }

    #[test]
    fn an_overwrite_wins_the_superstep_wherever_it_stands() {
        for channel in [Behaviour::Reducer(concat()), Behaviour::Accumulating(concat())] {
            let (plain, replace) = (write(json!(["p"]), false), write(json!(["r"]), true));
            for order in [vec![plain.clone(), replace.clone()], vec![replace.clone(), plain.clone()]] {
                assert_eq!(apply(&channel, Some(json!(["old"])), &order).unwrap(), Some(json!(["r"])));
                assert_eq!(apply(&channel, None, &order).unwrap(), Some(json!(["r"])));
            }
        }
    }

    #[test]
    fn a_second_overwrite_in_a_superstep_is_an_invalid_update() {
        for channel in
            [Behaviour::Reducer(concat()), Behaviour::Reducer(union()), Behaviour::Accumulating(concat())]
        {
            let twice = [write(json!([1]), true), write(json!([2]), true)];
            assert_eq!(
                apply(&channel, None, &twice).unwrap_err(),
                Error::InvalidUpdate("Can receive only one Overwrite value per super-step.".into())
            );
        }
    }

    #[test]
    fn an_overwrite_with_null_is_the_empty_container() {
        let null = [write(Json::Null, true)];
        assert_eq!(
            apply(&Behaviour::Accumulating(concat()), Some(json!([1])), &null).unwrap(),
            Some(json!([]))
        );
        assert_eq!(apply(&Behaviour::Reducer(union()), Some(json!(1)), &null).unwrap(), Some(Json::Null));
    }

    #[test]
    fn an_overwrite_into_a_never_written_union_channel_stores_the_plain_value() {
        let channel = Behaviour::Reducer(union());
        let replace = write(json!({"objective": "x"}), true);
        let later = write(json!("ignored"), false);
        assert_eq!(apply(&channel, None, &[replace, later]).unwrap(), Some(json!({"objective": "x"})));
        assert_eq!(apply(&channel, None, &[write(json!(1), false)]).unwrap(), Some(json!(1)));
        assert_eq!(
            apply(&channel, None, &[write(json!(1), false), write(json!(2), false)]).unwrap(),
            Some(json!([1, 2]))
        );
    }

    #[test]
    fn a_channel_with_a_version_and_no_value_is_folded_as_one_that_was_never_written() {
        let absent = || Some(ChannelValue::absent());
        for reducer in [concat(), union()] {
            let channel = Behaviour::Accumulating(reducer);
            let writes = [write(json!([1]), false), write(json!([2]), false)];
            let writes: Vec<_> = writes.iter().collect();
            let folded = channel.apply(&"c".into(), absent(), &writes).unwrap();
            assert_eq!(folded, channel.apply(&"c".into(), None, &writes).unwrap());
            assert_eq!(channel.apply(&"c".into(), absent(), &[]).unwrap(), absent(), "nothing was written");
        }
    }

    #[test]
    fn a_written_channel_without_writes_keeps_its_value_and_a_never_written_one_stays_so() {
        let channel = Behaviour::Accumulating(concat());
        assert_eq!(apply(&channel, Some(json!([1])), &[]).unwrap(), Some(json!([1])));
        assert_eq!(apply(&channel, None, &[]).unwrap(), None);
    }
}
