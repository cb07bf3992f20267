//! Which elements of a list are those of its base.

use std::sync::Arc;

use imbl::OrdMap;

use super::list::Part;
use super::numbers::Numbers;
use crate::id::Version;

/// The value that a list was made from, and what the list still has of it. No change looks at the elements that do not
/// change, or at all earlier changes.
///
/// It is cloned with every list, and most lists only grow: those need no memory of their own.
#[derive(Clone, Default)]
pub(super) enum Origin {
    /// There is no base.
    #[default]
    None,
    /// The list begins with this many elements of its base, which are the base's first ones.
    First(Version, usize),
    /// Elements before others of the base were replaced or removed.
    Cut(Arc<Cut>),
}

#[derive(Clone)]
pub(super) struct Cut {
    base: Version,
    /// The ends of the ranges of the base that the list has, by their starts; not empty. The number of an element of the
    /// base is its index in the base.
    kept: OrdMap<usize, usize>,
    numbers: Numbers,
}

impl Origin {
    /// Of a list of this length that is its base.
    pub(super) fn base(base: Version, len: usize) -> Self {
        Self::First(base, len)
    }

    /// The version of the base.
    pub(super) fn version(&self) -> Option<Version> {
        match self {
            Self::None => None,
            Self::First(base, _) => Some(*base),
            Self::Cut(cut) => Some(cut.base),
        }
    }

    /// The element at `index` is another one now.
    pub(super) fn replaced(&mut self, index: usize) {
        self.cut(index, |cut| cut.lose(cut.numbers.at(index)));
    }

    /// The elements at these indices, in ascending order, are removed.
    pub(super) fn removed(&mut self, indices: &[usize]) {
        let Some(first) = indices.first() else { return };
        self.cut(*first, |cut| {
            for number in cut.numbers.remove(indices) {
                cut.lose(number);
            }
        });
    }

    /// Changes what is kept, unless nothing is kept from `index` on.
    fn cut(&mut self, index: usize, change: impl FnOnce(&mut Cut)) {
        let cut = match self {
            Self::None => return,
            Self::First(_, len) if *len <= index => return,
            Self::First(base, len) => {
                let kept = OrdMap::unit(0, *len);
                *self = Self::Cut(Arc::new(Cut { base: *base, kept, numbers: Numbers::default() }));
                return self.cut(index, change);
            }
            Self::Cut(cut) => Arc::make_mut(cut),
        };
        change(cut);
        if cut.kept.is_empty() {
            *self = Self::First(cut.base, 0);
        }
    }

    /// The parts of the list, which has `len` elements.
    pub(super) fn parts(&self, len: usize) -> Vec<Part> {
        let mut parts = Vec::with_capacity(2);
        let mut at = 0;
        match self {
            Self::None | Self::First(_, 0) => {}
            Self::First(_, kept) => {
                parts.push(Part::Base { start: 0, len: *kept });
                at = *kept;
            }
            Self::Cut(cut) => {
                for (&start, &end) in &cut.kept {
                    let first = cut.numbers.index(start);
                    if first > at {
                        parts.push(Part::New { len: first - at });
                    }
                    parts.push(Part::Base { start, len: end - start });
                    at = first + (end - start);
                }
            }
        }
        if len > at {
            parts.push(Part::New { len: len - at });
        }
        parts
    }
}

impl Cut {
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
}
