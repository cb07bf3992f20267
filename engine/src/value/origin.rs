//! Which elements of a list are those of its base.

use imbl::OrdMap;

use super::list::Part;
use super::numbers::Numbers;

/// What a list still has of its base. No change looks at the elements that do not change, or at all earlier changes.
#[derive(Clone, Default)]
pub(super) struct Origin {
    /// The ends of the ranges of the base that the list has, by their starts. The number of an element of the base is
    /// its index in the base.
    kept: OrdMap<usize, usize>,
    /// Empty if nothing is kept.
    numbers: Numbers,
}

impl Origin {
    /// Of a list that is its base.
    pub(super) fn base(len: usize) -> Self {
        let kept = if len > 0 { OrdMap::unit(0, len) } else { OrdMap::new() };
        Self { kept, numbers: Numbers::default() }
    }

    /// The element at `index` is another one now.
    pub(super) fn replaced(&mut self, index: usize) {
        self.lose(self.numbers.at(index));
    }

    /// The elements at these indices, in ascending order, are removed.
    pub(super) fn removed(&mut self, indices: &[usize]) {
        if self.kept.is_empty() {
            return;
        }
        for number in self.numbers.remove(indices) {
            self.lose(number);
        }
        if self.kept.is_empty() {
            *self = Self::default();
        }
    }

    fn lose(&mut self, number: usize) {
        let before = self.kept.get_prev(&number).map(|(start, end)| (*start, *end));
        let Some((start, end)) = before.filter(|(_, end)| number < *end) else { return };
        if start < number {
            self.kept.insert(start, number);
        } else {
            self.kept.remove(&start);
        }
        if number + 1 < end {
            self.kept.insert(number + 1, end);
        }
    }

    /// The parts of the list, which has `len` elements.
    pub(super) fn parts(&self, len: usize) -> Vec<Part> {
        let mut parts = Vec::new();
        let mut at = 0;
        for (&start, &end) in &self.kept {
            let first = self.numbers.index(start);
            if first > at {
                parts.push(Part::New { len: first - at });
            }
            parts.push(Part::Base { start, len: end - start });
            at = first + (end - start);
        }
        if len > at {
            parts.push(Part::New { len: len - at });
        }
        parts
    }
}
