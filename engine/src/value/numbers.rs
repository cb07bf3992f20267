//! Numbers that the elements of a list keep when elements before them are removed.

use std::sync::Arc;

/// The number of an element is the index that it would have if nothing had been removed. So a removal changes no number
/// but only this: which numbers are gone.
#[derive(Clone, Default)]
pub(super) struct Numbers {
    /// The numbers of removed elements, ascending; `None` if there are none.
    removed: Option<Arc<[usize]>>,
}

impl Numbers {
    fn gone(&self) -> &[usize] {
        self.removed.as_deref().unwrap_or_default()
    }

    /// The number of the element at `index`. At the length of the list: of the element that is appended next.
    pub(super) fn at(&self, index: usize) -> usize {
        // Before the nth removed number are as many elements as it is greater than n.
        let gone = self.gone();
        let (mut low, mut high) = (0, gone.len());
        while low < high {
            let middle = low + (high - low) / 2;
            if gone[middle] - middle <= index {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        index + low
    }

    /// The index of the element with this number, which is not removed.
    pub(super) fn index(&self, number: usize) -> usize {
        number - self.gone().partition_point(|&removed| removed < number)
    }

    /// Removes the elements at these indices, in ascending order, and returns their numbers.
    pub(super) fn remove(&mut self, indices: &[usize]) -> Vec<usize> {
        let numbers: Vec<usize> = indices.iter().map(|&index| self.at(index)).collect();
        let mut removed = [self.gone(), &numbers[..]].concat();
        #[allow(clippy::stable_sort_primitive, reason = "it merges runs that are in order, in linear time")]
        removed.sort();
        self.removed = Some(removed.into());
        numbers
    }

    /// How many are removed.
    pub(super) fn removed(&self) -> usize {
        self.gone().len()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;

    proptest! {
        #[test]
        fn an_element_keeps_its_number(
            len in 0..200_usize,
            steps in prop::collection::vec((prop::collection::vec(any::<Index>(), 0..20), 0..5_usize), 0..10),
        ) {
            let mut numbers = Numbers::default();
            let mut model: Vec<usize> = (0..len).collect();
            let mut next = len;
            for (picked, appended) in steps {
                let picked = picked.iter().filter(|_| !model.is_empty()).map(|index| index.index(model.len()));
                let indices: Vec<usize> = picked.collect::<BTreeSet<_>>().into_iter().collect();
                let expected: Vec<usize> = indices.iter().map(|&index| model[index]).collect();
                prop_assert_eq!(numbers.remove(&indices), expected.clone());
                model.retain(|number| !expected.contains(number));
                for _ in 0..appended {
                    prop_assert_eq!(numbers.at(model.len()), next);
                    model.push(next);
                    next += 1;
                }
                for (index, number) in model.iter().enumerate() {
                    prop_assert_eq!((numbers.at(index), numbers.index(*number)), (*number, index));
                }
                prop_assert_eq!(numbers.removed(), next - model.len());
            }
        }
    }
}
