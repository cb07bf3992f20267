//! Many changes of a list by ids.

use super::list::{Element, ListValue};

/// A list that is changed. Elements are removed at the end, all at once: a removal moves those around it.
#[derive(Default)]
pub(crate) struct Edit {
    list: ListValue,
    /// The indices of the elements to remove, whose ids the list has forgotten.
    removed: Vec<usize>,
}

impl Edit {
    /// Begins to change a list.
    pub(crate) fn new(list: ListValue) -> Self {
        Self { list, removed: Vec::new() }
    }

    /// Appends an element.
    pub(crate) fn push(&mut self, element: Element) {
        self.list.push(element);
    }

    /// Replaces the first element with the id of this one by it; appends it if none has that id.
    pub(crate) fn put(&mut self, id: &str, element: Element) {
        match self.list.position(id) {
            Some(index) => self.list.replace(index, element),
            None => self.list.push(element),
        }
    }

    /// Removes the first element with this id. Returns whether there was one.
    pub(crate) fn remove(&mut self, id: &str) -> bool {
        let Some(index) = self.list.position(id) else { return false };
        self.list.forget(index);
        self.removed.push(index);
        true
    }

    /// The changed list.
    pub(crate) fn finish(mut self) -> ListValue {
        if !self.removed.is_empty() {
            self.removed.sort_unstable();
            self.list.remove_forgotten(&self.removed);
        }
        self.list
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use proptest::sample::Index;
    use serde_json::{Value as Json, json};

    use super::*;
    use crate::channel::{Messages, REMOVE_ALL_MESSAGES, Reducer};
    use crate::id::Version;
    use crate::value::{ChannelValue, Part, VISITED};

    /// A list as JSON: each element, and its index in the base if it is one of the base's.
    #[derive(Debug, Clone, Default)]
    struct Model {
        elements: Vec<(Json, Option<usize>)>,
        base: Option<Version>,
    }

    impl Model {
        fn place(&self, id: &Json) -> Option<usize> {
            self.elements.iter().position(|(element, _)| element.get("id") == Some(id))
        }

        /// What the messages channel does with a message.
        fn fold(&mut self, message: &Json) -> Result<(), String> {
            let id = &message["id"];
            match (message["type"] == "remove", self.place(id)) {
                (true, _) if id == REMOVE_ALL_MESSAGES => *self = Self::default(),
                (true, Some(at)) => drop(self.elements.remove(at)),
                (true, None) => {
                    return Err(format!(
                        "cannot remove message {}: no message of the thread has this id",
                        id.as_str().unwrap()
                    ));
                }
                (false, Some(at)) => self.replace(at, message),
                (false, None) => self.elements.push((message.clone(), None)),
            }
            Ok(())
        }

        fn replace(&mut self, at: usize, element: &Json) {
            if self.elements[at].0 != *element {
                self.elements[at] = (element.clone(), None);
            }
        }

        fn rebase(&mut self, base: Option<Version>) {
            self.base = base;
            for (at, (_, origin)) in self.elements.iter_mut().enumerate() {
                *origin = base.map(|_| at);
            }
        }

        fn parts(&self) -> Vec<Part> {
            let mut parts = Vec::new();
            for (_, origin) in &self.elements {
                match (parts.last_mut(), *origin) {
                    (Some(Part::Base { start, len }), Some(at)) if *start + *len == at => *len += 1,
                    (Some(Part::New { len }), None) => *len += 1,
                    (_, Some(start)) => parts.push(Part::Base { start, len: 1 }),
                    (_, None) => parts.push(Part::New { len: 1 }),
                }
            }
            parts
        }

        fn json(&self) -> Vec<Json> {
            self.elements.iter().map(|(element, _)| element.clone()).collect()
        }
    }

    fn message(id: usize, text: u8) -> Json {
        json!({"type": "human", "content": format!("t{text}"), "id": format!("m{id}")})
    }

    fn removal(id: usize) -> Json {
        json!({"type": "remove", "content": "", "id": format!("m{id}")})
    }

    fn list_of(elements: &[Json]) -> ListValue {
        elements.iter().map(|element| Element::from_json(element).unwrap()).collect()
    }

    fn reduced(list: &ListValue, write: &[Json]) -> crate::Result<ListValue> {
        let reduced = Messages.reduce(list.clone().into(), &list_of(write).into())?;
        Ok(reduced.as_list().unwrap().clone())
    }

    fn version(counter: u64) -> Version {
        Version { counter, random: 7 }
    }

    /// Ids of messages; few, so that most updates concern one that is in the list.
    const IDS: usize = 12;

    #[derive(Debug, Clone)]
    enum Op {
        Write(Vec<Json>),
        Push(usize, u8),
        Replace(Index, u8),
        Remove(Index),
        Rebase(u64),
        Detach,
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let item = prop_oneof![
            60 => (0..IDS, 0..4_u8).prop_map(|(id, text)| message(id, text)),
            30 => (0..IDS).prop_map(removal),
            1 => Just(json!({"type": "remove", "id": REMOVE_ALL_MESSAGES, "content": ""})),
        ];
        let op = prop_oneof![
            8 => prop::collection::vec(item, 0..8).prop_map(Op::Write),
            1 => (0..IDS, 0..4_u8).prop_map(|(id, text)| Op::Push(id, text)),
            1 => (any::<Index>(), 0..4_u8).prop_map(|(at, text)| Op::Replace(at, text)),
            2 => any::<Index>().prop_map(Op::Remove),
            2 => any::<u64>().prop_map(Op::Rebase),
            1 => Just(Op::Detach),
        ];
        prop::collection::vec(op, 0..60)
    }

    /// Messages of which some have the same ids, and an element without one.
    fn start() -> impl Strategy<Value = Vec<Json>> {
        let element = prop_oneof![
            9 => (0..IDS, 0..4_u8).prop_map(|(id, text)| message(id, text)),
            1 => any::<u8>().prop_map(|n| json!({"content": n})),
        ];
        prop::collection::vec(element, 0..20)
    }

    proptest! {
        /// Content, ids, what is shared with the base, and errors are those of the obvious implementation. Earlier
        /// versions stay as they are.
        #[test]
        fn updates_are_those_of_a_plain_list(start in start(), ops in ops()) {
            let mut list = list_of(&start);
            let mut model = Model { elements: start.into_iter().map(|e| (e, None)).collect(), base: None };
            let mut versions = Vec::new();
            for op in ops {
                versions.push((list.clone(), model.clone()));
                let len = model.elements.len();
                match op {
                    Op::Write(write) => {
                        let mut folded = model.clone();
                        let expected = write.iter().try_for_each(|message| folded.fold(message));
                        match reduced(&list, &write) {
                            Ok(updated) => {
                                prop_assert_eq!(expected, Ok(()));
                                (list, model) = (updated, folded);
                            }
                            Err(error) => prop_assert!(error.to_string().contains(&expected.unwrap_err())),
                        }
                    }
                    Op::Push(id, text) => {
                        list.push(Element::from_json(&message(id, text)).unwrap());
                        model.elements.push((message(id, text), None));
                    }
                    Op::Replace(at, text) if len > 0 => {
                        let at = at.index(len);
                        let mut element = model.elements[at].0.clone();
                        element["content"] = json!(format!("t{text}"));
                        list.replace(at, Element::from_json(&element).unwrap());
                        model.replace(at, &element);
                    }
                    Op::Remove(at) if len > 0 => {
                        list.remove(at.index(len));
                        model.elements.remove(at.index(len));
                    }
                    Op::Rebase(counter) => {
                        list.rebase(version(counter));
                        model.rebase(Some(version(counter)));
                    }
                    Op::Detach => {
                        list.detach();
                        model.rebase(None);
                    }
                    Op::Replace(..) | Op::Remove(_) => {}
                }
                prop_assert_eq!((list.parts(), list.base()), (model.parts(), model.base));
                // In a copy, so that the list itself is also changed before anything was looked up.
                let mut looked_up = list.clone();
                for id in (0..=IDS).map(|id| format!("m{id}")) {
                    prop_assert_eq!(looked_up.position(&id), model.place(&json!(id)));
                }
            }
            versions.push((list, model));
            for (list, model) in versions {
                let elements = model.json();
                prop_assert_eq!(list.bytes_len(), list_of(&elements).bytes_len());
                prop_assert_eq!(ChannelValue::from(list).to_json().unwrap(), json!(elements));
            }
        }
    }

    #[test]
    fn a_write_with_an_unknown_removal_fails_whatever_it_removes_before() {
        let list = list_of(&[message(1, 0), message(2, 0)]);
        for write in [
            vec![removal(3)],
            vec![removal(1), removal(1)],
            vec![removal(1), message(1, 1), removal(1), removal(2), removal(1)],
        ] {
            let error = reduced(&list, &write).unwrap_err().to_string();
            assert!(error.contains(&format!(
                "cannot remove message {}",
                write.last().unwrap()["id"].as_str().unwrap()
            )));
        }
        let again = reduced(&list, &[removal(1), message(1, 1), removal(1), message(1, 2)]).unwrap();
        assert_eq!(again, list_of(&[message(2, 0), message(1, 2)]));
    }

    /// Lists so long that few elements are removed one by one, and many by copying the others.
    #[test]
    fn few_and_many_elements_of_a_long_list_are_removed_alike() {
        const LEN: usize = 10_000;
        let every_seventh = || (1..LEN).step_by(7);
        let mut writes = vec![vec![4001, 8002]];
        writes.extend(every_seventh().map(|id| vec![id]).filter(|ids| ids[0] != 4001 && ids[0] != 8002));
        writes.push((0..LEN).rev().filter(|id| id % 2 == 0 && id % 7 != 1 && *id != 8002).collect());
        writes.push((0..LEN).filter(|id| id % 2 == 1 && id % 7 != 1 && *id != 4001).collect());
        let mut list = list_of(&(0..LEN).map(|id| message(id, 0)).collect::<Vec<_>>());
        list.rebase(version(1));
        let mut model: BTreeSet<usize> = (0..LEN).collect();
        for (number, removed) in writes.into_iter().enumerate() {
            list = reduced(&list, &removed.iter().map(|id| removal(*id)).collect::<Vec<_>>()).unwrap();
            for id in &removed {
                assert!(model.remove(id));
            }
            if removed.len() == 1 && number % 100 != 0 {
                continue;
            }
            let left: Vec<(Json, Option<usize>)> =
                model.iter().map(|id| (message(*id, 0), Some(*id))).collect();
            let expected = Model { elements: left, base: Some(version(1)) };
            assert_eq!(list, list_of(&expected.json()));
            assert_eq!(
                (list.parts(), list.bytes_len()),
                (expected.parts(), list_of(&expected.json()).bytes_len())
            );
            for (place, id) in model.iter().enumerate() {
                assert_eq!(list.position(&format!("m{id}")), Some(place));
            }
        }
        assert!(list.is_empty() && list.base().is_some());
    }

    /// How many elements the work visits.
    fn visited(work: impl FnOnce()) -> usize {
        let before = VISITED.get();
        work();
        VISITED.get() - before
    }

    #[test]
    fn an_update_visits_no_list_once_for_each_of_its_messages() {
        const LEN: usize = 2000;
        let mut list = list_of(&(0..LEN).map(|id| message(id, 0)).collect::<Vec<_>>());
        list.rebase(version(1));
        let replaced: Vec<Json> = (0..LEN).step_by(2).map(|id| message(id, 1)).collect();
        // Neither from the start nor from the end.
        let removed: Vec<Json> = (0..LEN).map(|n| removal(n * 7 % LEN)).collect();

        let whole = [&replaced[..], &removed, &replaced].concat();
        let once = visited(|| assert_eq!(reduced(&list, &whole).unwrap(), list_of(&replaced)));
        assert!((1..=4 * LEN).contains(&once), "{once} elements in one write");

        let one_by_one = visited(|| {
            let writes = replaced.iter().chain(&removed);
            let left =
                writes.fold(list.clone(), |list, write| reduced(&list, std::slice::from_ref(write)).unwrap());
            assert!(left.is_empty());
        });
        assert!((1..=10 * LEN).contains(&one_by_one), "{one_by_one} elements in a write for each message");

        let mut grown = reduced(&list, &[message(0, 1)]).unwrap();
        let common = visited(|| {
            for id in 0..10 {
                grown = reduced(&grown, &[message(LEN + id, 0), message(id, 2)]).unwrap();
            }
        });
        assert_eq!((common, grown.len()), (0, LEN + 10), "appending and replacing");
    }
}
