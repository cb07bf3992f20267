//! Reducers for channels other than `messages`.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use serde_json::Value as Json;

use super::Reducer;
use crate::error::{Error, Result};
use crate::value::{ChannelValue, ElementHash, ListValue};

type FoldFn = dyn Fn(Json, Json) -> Result<Json> + Send + Sync;

/// A reducer built from a function on JSON values. It decodes and encodes the whole value on each write, so use it for
/// small values.
#[derive(Clone)]
pub struct Fold {
    empty: Option<Json>,
    fold: Arc<FoldFn>,
}

impl Fold {
    /// A reducer that starts with `empty` (`None`: a union type, which starts without a value) and folds with `fold`,
    /// which must be batching-invariant.
    pub fn new(
        empty: Option<Json>,
        fold: impl Fn(Json, Json) -> Result<Json> + Send + Sync + 'static,
    ) -> Self {
        Self { empty, fold: Arc::new(fold) }
    }
}

impl fmt::Debug for Fold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fold").field("empty", &self.empty).finish_non_exhaustive()
    }
}

impl Reducer for Fold {
    fn empty(&self) -> Option<ChannelValue> {
        self.empty.as_ref().and_then(|empty| ChannelValue::from_json(empty).ok())
    }

    fn reduce(&self, current: ChannelValue, write: &ChannelValue) -> Result<ChannelValue> {
        ChannelValue::from_json(&(self.fold)(current.to_json()?, write.to_json()?)?)
    }
}

/// A list without repetitions, in the order of first appearance. Null adds nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct OrderedUnion;

impl Reducer for OrderedUnion {
    fn empty(&self) -> Option<ChannelValue> {
        Some(ListValue::default().into())
    }

    fn reduce(&self, current: ChannelValue, write: &ChannelValue) -> Result<ChannelValue> {
        let mut list = match current {
            ChannelValue::List(list) => list,
            ChannelValue::Plain(_) => ListValue::default(),
        };
        match write {
            ChannelValue::List(more) => {
                let mut seen: HashSet<ElementHash> = list.iter().map(|element| *element.hash()).collect();
                for element in more.iter().filter(|element| seen.insert(*element.hash())) {
                    list.push(element.clone());
                }
            }
            plain if plain.is_null() => {}
            ChannelValue::Plain(_) => {
                return Err(Error::InvalidUpdate("this channel takes lists".to_owned()));
            }
        }
        Ok(list.into())
    }
}

/// An object to which writes add keys; an empty object clears it. Null adds nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct MergeMap;

impl Reducer for MergeMap {
    fn empty(&self) -> Option<ChannelValue> {
        ChannelValue::from_json(&Json::Object(serde_json::Map::new())).ok()
    }

    fn reduce(&self, current: ChannelValue, write: &ChannelValue) -> Result<ChannelValue> {
        match (current.to_json()?, write.to_json()?) {
            (_, Json::Null) => Ok(current),
            (_, Json::Object(more)) if more.is_empty() => Ok(write.clone()),
            (Json::Object(mut map), Json::Object(more)) => {
                map.extend(more);
                ChannelValue::from_json(&Json::Object(map))
            }
            (_, Json::Object(_)) => Ok(write.clone()),
            _ => Err(Error::InvalidUpdate("this channel takes objects".to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::value::COMPARED;

    fn fold(reducer: &dyn Reducer, writes: &[Json]) -> Json {
        let value = writes.iter().fold(reducer.empty().unwrap(), |value, write| {
            reducer.reduce(value, &ChannelValue::from_json(write).unwrap()).unwrap()
        });
        value.to_json().unwrap()
    }

    proptest! {
        #[test]
        fn an_ordered_union_is_each_element_once_in_order_of_appearance(
            writes in prop::collection::vec(prop::collection::vec(0..6_u8, 0..5), 0..6)
        ) {
            let mut model: Vec<u8> = Vec::new();
            for v in writes.iter().flatten() {
                if !model.contains(v) { model.push(*v); }
            }
            let writes: Vec<Json> = writes.iter().map(|w| json!(w)).collect();
            prop_assert_eq!(fold(&OrderedUnion, &writes), json!(model));
        }
    }

    #[test]
    fn a_union_of_long_lists_compares_no_element_with_each_other_one() {
        let list =
            |ids: std::ops::Range<u32>| ChannelValue::from_json(&json!(ids.collect::<Vec<_>>())).unwrap();
        let (current, write) = (list(0..1000), list(500..1500));
        let before = COMPARED.get();
        let union = OrderedUnion.reduce(current, &write).unwrap();
        let compared = COMPARED.get() - before;
        assert!(compared <= 2000, "{compared} comparisons");
        assert_eq!(union, list(0..1500));
    }

    #[test]
    fn a_merged_map_takes_keys_and_is_cleared_by_an_empty_one() {
        let writes = [json!({"a": 1}), json!(null), json!({"b": 2, "a": 3})];
        assert_eq!(fold(&MergeMap, &writes), json!({"a": 3, "b": 2}));
        assert_eq!(fold(&MergeMap, &[json!({"a": 1}), json!({}), json!({"c": 1})]), json!({"c": 1}));
    }

    #[test]
    fn a_write_of_the_wrong_type_is_an_invalid_update() {
        let text = ChannelValue::from_json(&json!("x")).unwrap();
        for reducer in [&OrderedUnion as &dyn Reducer, &MergeMap] {
            let error = reducer.reduce(reducer.empty().unwrap(), &text).unwrap_err();
            assert!(matches!(error, Error::InvalidUpdate(_)));
        }
    }
}
