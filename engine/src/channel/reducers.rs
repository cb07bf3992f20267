//! Reducers for channels other than `messages`.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use serde_json::Value as Json;

use super::Reducer;
use crate::error::{Error, Result};
use crate::value::{ChannelValue, ElementHash, ListValue, visited};

type FoldFn = dyn Fn(Json, Json) -> Result<Json> + Send + Sync;

/// A reducer built from a function on JSON values. It decodes and encodes the whole value in each superstep that writes
/// to it, so use it for small values.
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
        self.reduce_all(current, &[write])
    }

    fn reduce_all(&self, current: ChannelValue, writes: &[&ChannelValue]) -> Result<ChannelValue> {
        let mut value = current.to_json()?;
        for write in writes {
            value = (self.fold)(value, write.to_json()?)?;
        }
        ChannelValue::from_json(&value)
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
        self.reduce_all(current, &[write])
    }

    fn reduce_all(&self, current: ChannelValue, writes: &[&ChannelValue]) -> Result<ChannelValue> {
        let mut list = match current {
            ChannelValue::List(list) => list,
            ChannelValue::Plain(_) => ListValue::default(),
        };
        let mut seen = None;
        for write in writes {
            match write {
                ChannelValue::List(more) => {
                    let seen = seen.get_or_insert_with(|| hashes(&list));
                    for element in more.iter().filter(|element| seen.insert(*element.hash())) {
                        list.push(element.clone());
                    }
                }
                plain if plain.is_null() => {}
                ChannelValue::Plain(_) => {
                    return Err(Error::InvalidUpdate("this channel takes lists".to_owned()));
                }
            }
        }
        Ok(list.into())
    }
}

/// The hashes of the elements.
fn hashes(list: &ListValue) -> HashSet<ElementHash> {
    visited(list.len());
    list.iter().map(|element| *element.hash()).collect()
}

/// An object to which writes add keys; an empty object clears it. Null adds nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct MergeMap;

impl Reducer for MergeMap {
    fn empty(&self) -> Option<ChannelValue> {
        ChannelValue::from_json(&Json::Object(serde_json::Map::new())).ok()
    }

    fn reduce(&self, current: ChannelValue, write: &ChannelValue) -> Result<ChannelValue> {
        self.reduce_all(current, &[write])
    }

    fn reduce_all(&self, current: ChannelValue, writes: &[&ChannelValue]) -> Result<ChannelValue> {
        let (mut map, mut is_changed) = (current.to_json()?, false);
        for write in writes {
            match write.to_json()? {
                Json::Null => {}
                Json::Object(more) => {
                    is_changed = true;
                    match &mut map {
                        Json::Object(map) if !more.is_empty() => map.extend(more),
                        other => *other = Json::Object(more),
                    }
                }
                _ => return Err(Error::InvalidUpdate("this channel takes objects".to_owned())),
            }
        }
        if is_changed { ChannelValue::from_json(&map) } else { Ok(current) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::channel::Behaviour;
    use crate::checkpoint::Write;
    use crate::value::{COMPARED, VISITED};

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

    /// A superstep of a new thread may have hundreds of thousands.
    #[test]
    fn the_writes_of_a_superstep_go_through_a_list_once() {
        const LEN: usize = 1000;
        let list =
            |ids: std::ops::Range<usize>| ChannelValue::from_json(&json!(ids.collect::<Vec<_>>())).unwrap();
        let one = |id: usize| ChannelValue::from_json(&json!([id])).unwrap();
        let write = |id| Write { channel: "c".into(), value: one(id), overwrite: false };
        let writes: Vec<Write> = (LEN / 2..LEN * 2).map(write).collect();
        let writes: Vec<&Write> = writes.iter().collect();
        let channel = Behaviour::Reducer(Arc::new(OrderedUnion));
        let before = VISITED.get();
        let union = channel.apply(&"c".into(), Some(list(0..LEN)), &writes).unwrap();
        assert_eq!(VISITED.get() - before, LEN);
        assert_eq!(union, Some(list(0..LEN * 2)));
    }

    #[test]
    fn writes_folded_together_are_those_folded_one_by_one() {
        let last = Fold::new(None, |_, new| Ok(new));
        let writes = [
            vec![json!({"a": 1}), json!({"b": 2, "a": 3})],
            vec![json!({"a": 1}), json!({}), json!(null), json!({"c": [1.5]})],
            vec![json!({"a": 1}), json!({})],
            vec![json!(null), json!(null)],
            vec![],
        ];
        for reducer in [&MergeMap as &dyn Reducer, &last] {
            for writes in &writes {
                let writes: Vec<_> = writes.iter().map(|w| ChannelValue::from_json(w).unwrap()).collect();
                let current = ChannelValue::from_json(&json!({"z": 1})).unwrap();
                let together = reducer.reduce_all(current.clone(), &writes.iter().collect::<Vec<_>>());
                let one_by_one = writes.iter().try_fold(current, |value, write| reducer.reduce(value, write));
                assert_eq!(together, one_by_one, "{reducer:?} {writes:?}");
            }
        }
        let (map, text) = (MergeMap.empty().unwrap(), ChannelValue::from_json(&json!("x")).unwrap());
        assert!(matches!(MergeMap.reduce_all(map, &[&text, &text]), Err(Error::InvalidUpdate(_))));
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
