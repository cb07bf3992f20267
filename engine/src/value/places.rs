//! Where in a list the elements with ids are.
//!
//! The index shares its nodes with those of earlier versions of the list, and adding an id copies some of them. So the last
//! few elements are not in it: they are compared one by one, and added together.

use std::sync::Arc;

use imbl::{HashMap, OrdSet, Vector};

use super::list::Element;
use super::numbers::Numbers;
use super::visited;

/// Up to this many removals are kept whatever the length of the list.
const FEW: usize = 64;
/// Up to this many elements are not in the index.
const RECENT: usize = 8;

/// An index of a list's elements by id. It outlives removals, so a list is not visited again after each of them.
#[derive(Clone, Default)]
pub(super) struct Places {
    /// The number of the first element with an id.
    first: HashMap<Arc<str>, usize>,
    /// The other elements with an id that several have.
    others: OrdSet<(Arc<str>, usize)>,
    numbers: Numbers,
    /// How many elements were added. Those after them are looked at when an id is not found.
    added: usize,
}

impl Places {
    /// Of these elements, in order.
    pub(super) fn of(elements: &Vector<Element>) -> Self {
        visited(elements.len());
        let mut places = Self::default();
        places.add(elements);
        places
    }

    /// An element was appended to these.
    pub(super) fn grown(&mut self, elements: &Vector<Element>) {
        if elements.len() - self.added > RECENT {
            self.add(elements);
        }
    }

    /// Adds those of these elements that are missing.
    fn add(&mut self, elements: &Vector<Element>) {
        for (index, element) in elements.focus().narrow(self.added..).into_iter().enumerate() {
            self.push(self.added + index, element);
        }
        self.added = elements.len();
    }

    /// Adds the element at `index`, which comes after all others.
    fn push(&mut self, index: usize, element: &Element) {
        let Some(id) = element.id() else { return };
        let number = self.numbers.at(index);
        let first = *self.first.entry(id.clone()).or_insert(number);
        if first != number {
            self.others.insert((id.clone(), number));
        }
    }

    /// The index of the first of these elements with this id.
    pub(super) fn position(&self, id: &str, elements: &Vector<Element>) -> Option<usize> {
        if let Some(&number) = self.first.get(id) {
            return Some(self.numbers.index(number));
        }
        // A few, whatever the length of the list: not counted as visited.
        let (mut recent, mut at) = (elements.focus(), self.added);
        while at < elements.len() {
            let (place, chunk) = recent.chunk_at(at);
            let found = chunk[at - place.start..]
                .iter()
                .position(|element| element.id().is_some_and(|own| **own == *id));
            if let Some(offset) = found {
                return Some(at + offset);
            }
            at = place.end;
        }
        None
    }

    /// Forgets the element at `index` of these, which stays in the list for now.
    pub(super) fn forget(&mut self, index: usize, elements: &Vector<Element>) {
        self.add(elements);
        let Some(id) = elements.get(index).and_then(Element::id) else { return };
        let this = (id.clone(), self.numbers.at(index));
        if self.first.get(id) != Some(&this.1) {
            self.others.remove(&this);
            return;
        }
        let next = self.others.get_next(&this).filter(|(other, _)| other == id).cloned();
        if let Some(next) = next {
            self.others.remove(&next);
            self.first.insert(next.0, next.1);
        } else {
            self.first.remove(id);
        }
    }

    /// The places once the forgotten elements at these indices, in ascending order, are removed and `left` elements
    /// remain. `None` after many removals: each costs more the more came before it, so it is cheaper to visit the
    /// elements again.
    pub(super) fn without(mut self, indices: &[usize], left: usize) -> Option<Self> {
        if self.numbers.removed() + indices.len() > FEW + left / 8 {
            return None;
        }
        self.numbers.remove(indices);
        // They were added before they were forgotten.
        self.added -= indices.len();
        Some(self)
    }
}
