//! The metadata entries that the engine does not know, shared between the checkpoints that have them.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, OnceLock};

use imbl::OrdMap;
use imbl::ordmap::DiffItem;
use serde_json::{Map, Value as Json};

/// One entry of a large object: its key and its value.
pub type Entry = (Arc<str>, Arc<Json>);

/// An object with at least this many entries is *large*: adding an entry to it must not cost its whole size.
const LARGE_OBJECT: usize = 8;

/// The entries of an object, in key order. Clones share them: adding one to thousands costs as much as to ten, and so
/// does finding what was added.
#[derive(Clone, Default, PartialEq)]
pub struct Entries(OrdMap<Arc<str>, Arc<Json>>);

impl Entries {
    /// The number of entries.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The value under a key.
    pub fn get(&self, key: &str) -> Option<&Json> {
        self.0.get(key).map(|value| &**value)
    }

    /// Adds an entry, replacing one with the same key.
    pub fn insert(&mut self, (key, value): Entry) {
        self.0.insert(key, value);
    }

    /// Removes an entry.
    pub fn remove(&mut self, key: &str) {
        self.0.remove(key);
    }

    /// The entries in the order of their keys.
    pub fn iter(&self) -> impl Iterator<Item = (&Arc<str>, &Arc<Json>)> {
        self.0.iter()
    }

    /// The entries that `base` does not have; `None` if an entry of `base` was changed or removed since. Compares only
    /// what the two do not share.
    pub fn added_to<'a>(&'a self, base: &'a Self) -> Option<Vec<(&'a Arc<str>, &'a Arc<Json>)>> {
        let added = base.0.diff(&self.0).map(|change| match change {
            DiffItem::Add(key, value) => Some((key, value)),
            DiffItem::Update { .. } | DiffItem::Remove(..) => None,
        });
        added.collect()
    }

    fn to_json(&self) -> Json {
        Json::Object(self.iter().map(|(key, value)| (key.to_string(), Json::clone(value))).collect())
    }
}

impl FromIterator<Entry> for Entries {
    fn from_iter<I: IntoIterator<Item = Entry>>(entries: I) -> Self {
        Self(entries.into_iter().collect())
    }
}

impl From<Map<String, Json>> for Entries {
    fn from(map: Map<String, Json>) -> Self {
        map.into_iter().map(|(key, value)| (key.into(), Arc::new(value))).collect()
    }
}

impl fmt::Debug for Entries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

/// The entries of a checkpoint's metadata beyond the well-known ones, as one JSON object.
///
/// It reads and changes like a [`Map`]. Clones share it. Notes carry objects along that grow by an entry per run:
/// [`Self::object`] and [`Self::insert_object`] take such an object out and put it back with more, and a saver that
/// stores it by entry builds the metadata with [`Self::sharing`], so that the checkpoints of a long thread hold each
/// entry once. Only reading such an object as JSON builds it as a whole; [`Self::get`] of another key does not.
#[derive(Clone, Default)]
pub struct Extra(Arc<Inner>);

#[derive(Clone, Default)]
struct Inner {
    /// Everything but `large`.
    rest: Map<String, Json>,
    /// In the order of their keys.
    large: Vec<(String, Entries)>,
    whole: OnceLock<Map<String, Json>>,
}

impl Extra {
    /// The entries of `rest`, and under these keys objects with these entries.
    pub fn sharing(rest: Map<String, Json>, mut large: Vec<(String, Entries)>) -> Self {
        large.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        Self(Arc::new(Inner { rest, large, whole: OnceLock::new() }))
    }

    /// The value under a key.
    pub fn get(&self, key: &str) -> Option<&Json> {
        let is_large = self.0.large.iter().any(|(large, _)| large == key);
        if is_large { self.whole().get(key) } else { self.0.rest.get(key) }
    }

    /// The object under a key, if it is an object. A large one is shared.
    pub fn object(&self, key: &str) -> Option<Entries> {
        let large = self.0.large.iter().find(|(large, _)| large == key).map(|(_, entries)| entries.clone());
        large.or_else(|| self.0.rest.get(key)?.as_object().cloned().map(Entries::from))
    }

    /// Puts a value under a key.
    pub fn insert(&mut self, key: String, value: Json) {
        let inner = self.change();
        inner.large.retain(|(large, _)| *large != key);
        inner.rest.insert(key, value);
    }

    /// Puts an object under a key, shared.
    pub fn insert_object(&mut self, key: &str, entries: Entries) {
        let inner = self.change();
        inner.rest.remove(key);
        match inner.large.binary_search_by(|(large, _)| large.as_str().cmp(key)) {
            Ok(at) => inner.large[at].1 = entries,
            Err(at) => inner.large.insert(at, (key.to_owned(), entries)),
        }
    }

    /// The reverse of [`Self::sharing`]: the large objects, in key order, and all other entries.
    pub fn split(&self) -> (Map<String, Json>, Vec<(String, Entries)>) {
        let mut rest = Map::new();
        let mut large = Vec::new();
        for (key, entries) in &self.0.large {
            if entries.len() >= LARGE_OBJECT {
                large.push((key.clone(), entries.clone()));
            } else {
                rest.insert(key.clone(), entries.to_json());
            }
        }
        for (key, value) in &self.0.rest {
            match value {
                Json::Object(object) if object.len() >= LARGE_OBJECT => {
                    large.push((key.clone(), object.clone().into()));
                }
                _ => {
                    rest.insert(key.clone(), value.clone());
                }
            }
        }
        large.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        (rest, large)
    }

    /// A copy of all entries.
    pub fn to_map(&self) -> Map<String, Json> {
        self.0.whole.get().cloned().unwrap_or_else(|| self.0.make())
    }

    fn whole(&self) -> &Map<String, Json> {
        if self.0.large.is_empty() { &self.0.rest } else { self.0.whole.get_or_init(|| self.0.make()) }
    }

    /// The unshared contents, to be changed.
    fn change(&mut self) -> &mut Inner {
        if Arc::get_mut(&mut self.0).is_none() {
            // Do not clone `whole`, which the change invalidates.
            let Inner { rest, large, .. } = &*self.0;
            self.0 = Arc::new(Inner { rest: rest.clone(), large: large.clone(), whole: OnceLock::new() });
        }
        let inner = Arc::make_mut(&mut self.0);
        inner.whole.take();
        inner
    }
}

impl Inner {
    fn make(&self) -> Map<String, Json> {
        let mut map = self.rest.clone();
        map.extend(self.large.iter().map(|(key, entries)| (key.clone(), entries.to_json())));
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
        let inner = self.change();
        for (key, entries) in std::mem::take(&mut inner.large) {
            inner.rest.insert(key, entries.to_json());
        }
        &mut inner.rest
    }
}

impl From<Map<String, Json>> for Extra {
    fn from(rest: Map<String, Json>) -> Self {
        Self::sharing(rest, Vec::new())
    }
}

impl PartialEq for Extra {
    fn eq(&self, other: &Self) -> bool {
        let alike = || self.0.rest == other.0.rest && self.0.large == other.0.large;
        Arc::ptr_eq(&self.0, &other.0) || alike() || **self == **other
    }
}

impl fmt::Debug for Extra {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_map().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn object(json: Json) -> Map<String, Json> {
        serde_json::from_value(json).unwrap()
    }

    fn entries(numbers: std::ops::Range<usize>) -> Entries {
        numbers.map(|n| (format!("run {n}").into(), Arc::new(json!(n)))).collect()
    }

    #[test]
    fn shared_entries_read_and_compare_like_the_object_that_they_are_of() {
        let plain = object(json!({"a": 1, "runs": {"run 0": 0, "run 1": 1}}));
        let shared = Extra::sharing(object(json!({"a": 1})), vec![("runs".into(), entries(0..2))]);
        assert_eq!(shared.get("a"), Some(&json!(1)));
        assert_eq!(
            (shared.object("runs"), shared.object("a"), shared.object("b")),
            (Some(entries(0..2)), None, None)
        );
        assert!(shared.0.whole.get().is_none(), "nothing has read the map");
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

    #[test]
    fn an_object_that_grows_is_copied_by_nobody() {
        let mut extra = Extra::sharing(Map::new(), vec![("runs".into(), entries(0..5000))]);
        extra.insert("a".to_owned(), json!(1));
        let before = extra.clone();
        let mut runs = extra.object("runs").unwrap();
        runs.insert(("run 5000".into(), Arc::new(json!(5000))));
        extra.insert_object("runs", runs);
        assert!(extra.0.whole.get().is_none() && before.0.whole.get().is_none());
        let ((_, old), (rest, new)) = (before.split(), extra.split());
        assert_eq!((new[0].1.len(), rest), (5001, object(json!({"a": 1}))));
        let added = new[0].1.added_to(&old[0].1).unwrap();
        assert_eq!(added.iter().map(|(key, _)| &***key).collect::<Vec<_>>(), ["run 5000"]);
    }

    #[test]
    fn what_is_large_is_told_apart_by_its_entries_alone() {
        let (few, many) = (entries(0..LARGE_OBJECT - 1), entries(0..LARGE_OBJECT));
        let shared = Extra::sharing(
            object(json!({"b": many.to_json(), "d": few.to_json(), "e": "text"})),
            vec![("a".into(), many.clone()), ("c".into(), few.clone())],
        );
        let (rest, large) = shared.split();
        assert_eq!(rest, object(json!({"c": few.to_json(), "d": few.to_json(), "e": "text"})));
        assert_eq!(large, [("a".to_owned(), many.clone()), ("b".to_owned(), many)]);
        let (again, plain) = (Extra::sharing(rest.clone(), large.clone()), Extra::from(shared.to_map()));
        assert_eq!((again.split(), plain.split()), ((rest.clone(), large.clone()), (rest, large)));
        assert_eq!((&again, &plain), (&shared, &shared));
    }

    #[derive(Debug, Clone)]
    enum Op {
        Extend(bool, Vec<(u8, u8)>),
        Insert(bool, u8),
        Remove(bool),
        Look(bool),
        Keep,
    }

    proptest! {
        /// Whatever is done to it, it equals a map to which the same was done, and earlier clones are unchanged.
        #[test]
        fn it_changes_like_a_map(ops in prop::collection::vec(prop_oneof![
            4 => (any::<bool>(), prop::collection::vec((any::<u8>(), any::<u8>()), 0..5)).prop_map(|(a, e)| Op::Extend(a, e)),
            1 => (any::<bool>(), any::<u8>()).prop_map(|(a, v)| Op::Insert(a, v)),
            1 => any::<bool>().prop_map(Op::Remove),
            2 => any::<bool>().prop_map(Op::Look),
            1 => Just(Op::Keep),
        ], 0..40)) {
            let (mut extra, mut model) = (Extra::default(), Map::new());
            let mut kept = Vec::new();
            let key = |a: &bool| if *a { "a" } else { "b" };
            for op in &ops {
                match op {
                    Op::Extend(a, more) => {
                        let mut object = extra.object(key(a)).unwrap_or_default();
                        let have = model.entry(key(a)).or_insert_with(|| json!({}));
                        if !have.is_object() {
                            *have = json!({});
                        }
                        for (k, v) in more {
                            object.insert((k.to_string().into(), Arc::new(json!(v))));
                            have.as_object_mut().unwrap().insert(k.to_string(), json!(v));
                        }
                        extra.insert_object(key(a), object);
                    }
                    Op::Insert(a, v) => {
                        extra.insert(key(a).to_owned(), json!(v));
                        model.insert(key(a).to_owned(), json!(v));
                    }
                    Op::Remove(a) => {
                        extra.remove(key(a));
                        model.remove(key(a));
                    }
                    Op::Look(a) => prop_assert_eq!(extra.get(key(a)), model.get(key(a))),
                    Op::Keep => kept.push((extra.clone(), model.clone())),
                }
                prop_assert_eq!(&extra.to_map(), &model);
                for key in ["a", "b"] {
                    let object = model.get(key).and_then(Json::as_object).cloned().map(Entries::from);
                    prop_assert_eq!(extra.object(key), object);
                }
                let (rest, large) = extra.split();
                prop_assert_eq!(Extra::sharing(rest, large), Extra::from(model.clone()));
            }
            for (extra, model) in kept {
                prop_assert_eq!(extra.to_map(), model);
            }
        }

        /// The reported additions are exact, and none are reported if anything else changed.
        #[test]
        fn additions_are_told(base in prop::collection::btree_map(any::<u8>(), any::<u8>(), 0..60),
                              more in prop::collection::vec((any::<u8>(), any::<u8>()), 0..20), shares in any::<bool>()) {
            let entry = |k: u8, v: u8| -> Entry { (k.to_string().into(), Arc::new(json!(v))) };
            let old: Entries = base.iter().map(|(k, v)| entry(*k, *v)).collect();
            let mut new = if shares { old.clone() } else { base.iter().map(|(k, v)| entry(*k, *v)).collect() };
            let mut model = base.clone();
            for (k, v) in more {
                new.insert(entry(k, v));
                model.insert(k, v);
            }
            let same = base.iter().all(|(k, v)| model[k] == *v);
            let expected: Option<Entries> = same.then(|| {
                model.iter().filter(|(k, _)| !base.contains_key(*k)).map(|(k, v)| entry(*k, *v)).collect()
            });
            let told = new.added_to(&old).map(|added| added.into_iter().map(|(k, v)| (k.clone(), v.clone())).collect());
            prop_assert_eq!(told, expected);
            if let Some(first) = base.keys().next() {
                new.remove(&first.to_string());
                prop_assert!(new.added_to(&old).is_none());
            }
        }
    }
}
