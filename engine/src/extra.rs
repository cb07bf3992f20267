//! The entries of metadata that the engine does not know, shared between the checkpoints that have them.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, OnceLock};

use serde_json::{Map, Value as Json};

/// One entry of a large object: its key and its value.
pub type Entry = Arc<(String, Json)>;

/// The entries of a checkpoint's metadata beyond the well-known ones, as one JSON object.
///
/// It reads and changes like a [`Map`]. Clones share it. Notes carry maps along that grow by an entry a run: a saver that
/// stores these by entry makes the metadata with [`Self::sharing`], so that the checkpoints of a long thread hold each
/// entry once. Only who looks into such a map makes it whole; [`Self::get`] of another key does not.
#[derive(Clone, Default)]
pub struct Extra(Arc<Inner>);

#[derive(Clone, Default)]
struct Inner {
    /// Everything but `large`.
    rest: Map<String, Json>,
    large: Vec<(String, Vec<Entry>)>,
    whole: OnceLock<Map<String, Json>>,
}

impl Extra {
    /// The entries of `rest`, and under these keys objects with these entries.
    pub fn sharing(rest: Map<String, Json>, large: Vec<(String, Vec<Entry>)>) -> Self {
        Self(Arc::new(Inner { rest, large, whole: OnceLock::new() }))
    }

    /// The value under a key.
    pub fn get(&self, key: &str) -> Option<&Json> {
        let is_large = self.0.large.iter().any(|(large, _)| large == key);
        if is_large { self.whole().get(key) } else { self.0.rest.get(key) }
    }

    /// A copy of all entries.
    pub fn to_map(&self) -> Map<String, Json> {
        self.0.whole.get().cloned().unwrap_or_else(|| self.0.make())
    }

    fn whole(&self) -> &Map<String, Json> {
        if self.0.large.is_empty() { &self.0.rest } else { self.0.whole.get_or_init(|| self.0.make()) }
    }
}

impl Inner {
    fn make(&self) -> Map<String, Json> {
        let mut map = self.rest.clone();
        for (key, entries) in &self.large {
            let entries = entries.iter().map(|entry| (entry.0.clone(), entry.1.clone()));
            map.insert(key.clone(), Json::Object(entries.collect()));
        }
        map
    }
}

impl Deref for Extra {
    type Target = Map<String, Json>;

    fn deref(&self) -> &Map<String, Json> {
        self.whole()
    }
}

impl DerefMut for Extra {
    fn deref_mut(&mut self) -> &mut Map<String, Json> {
        if !self.0.large.is_empty() {
            *self = self.to_map().into();
        }
        &mut Arc::make_mut(&mut self.0).rest
    }
}

impl From<Map<String, Json>> for Extra {
    fn from(rest: Map<String, Json>) -> Self {
        Self::sharing(rest, Vec::new())
    }
}

impl PartialEq for Extra {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || **self == **other
    }
}

impl fmt::Debug for Extra {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_map().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(json: Json) -> Map<String, Json> {
        serde_json::from_value(json).unwrap()
    }

    fn entries(numbers: std::ops::Range<usize>) -> Vec<Entry> {
        numbers.map(|n| Arc::new((format!("run {n}"), json!(n)))).collect()
    }

    #[test]
    fn shared_entries_read_and_compare_like_the_object_that_they_are_of() {
        let plain = object(json!({"a": 1, "runs": {"run 0": 0, "run 1": 1}}));
        let shared = Extra::sharing(object(json!({"a": 1})), vec![("runs".into(), entries(0..2))]);
        assert_eq!(shared.get("a"), Some(&json!(1)));
        assert!(shared.0.whole.get().is_none(), "nobody looked into the map");
        assert_eq!(shared.to_map(), plain);
        assert!(shared.0.whole.get().is_none(), "a copy does not stay");
        assert_eq!(shared, Extra::from(plain.clone()));
        assert_eq!(shared.get("runs"), Some(&json!({"run 0": 0, "run 1": 1})));
        assert_eq!((shared.get("b"), shared.len(), format!("{shared:?}")), (None, 2, format!("{plain:?}")));
        assert_ne!(shared, Extra::sharing(object(json!({"a": 1})), vec![("runs".into(), entries(0..1))]));
    }

    #[test]
    fn a_change_is_of_one_checkpoint_only() {
        let shared = Extra::sharing(Map::new(), vec![("runs".into(), entries(0..2))]);
        let mut changed = shared.clone();
        changed.insert("a".to_owned(), json!(1));
        assert_eq!(*changed, object(json!({"a": 1, "runs": {"run 0": 0, "run 1": 1}})));
        changed.remove("runs");
        assert_eq!(changed.get("runs"), None);
        assert_eq!(*shared, object(json!({"runs": {"run 0": 0, "run 1": 1}})));
    }
}
