//! Where in a list the elements with ids are.

use std::sync::Arc;

use imbl::{HashMap, OrdSet};

use super::list::Element;
use super::numbers::Numbers;
use super::visited;

/// Up to this many removals are kept whatever the length of the list.
const FEW: usize = 64;

/// An index of a list's elements by id. It outlives removals, so a list is not visited again after each of them.
#[derive(Clone, Default)]
pub(super) struct Places {
    /// The number of the first element with an id.
    first: HashMap<Arc<str>, usize>,
    /// The other elements with an id that several have.
    others: OrdSet<(Arc<str>, usize)>,
    numbers: Numbers,
}

impl Places {
    /// Of these elements, in order.
    pub(super) fn of<'e>(elements: impl ExactSizeIterator<Item = &'e Element>) -> Self {
        visited(elements.len());
        let mut places = Self::default();
        for (index, element) in elements.enumerate() {
            places.push(index, element);
        }
        places
    }

    /// Adds the element at `index`, which comes after all others.
    pub(super) fn push(&mut self, index: usize, element: &Element) {
        let Some(id) = element.id() else { return };
        let number = self.numbers.at(index);
        let first = *self.first.entry(id.clone()).or_insert(number);
        if first != number {
            self.others.insert((id.clone(), number));
        }
    }

    /// The index of the first element with this id.
    pub(super) fn position(&self, id: &str) -> Option<usize> {
        self.first.get(id).map(|&number| self.numbers.index(number))
    }

    /// Forgets the element at `index`, which stays in the list for now.
    pub(super) fn forget(&mut self, index: usize, element: &Element) {
        let Some(id) = element.id() else { return };
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
        Some(self)
    }
}
