//! A snapshot with changes that are not stored yet.

use std::cmp::Ordering;
use std::iter::Peekable;
use std::ops::{Bound, ControlFlow, Range};

use threadkeep::Result;

use crate::store::{Changes, Order, Snapshot, Visit};

/// What will be stored: what is stored below, with changes. Calls that are committed together each have one over that of
/// the call before them, so a call that fails is dropped alone.
pub(crate) struct Overlay<'a> {
    below: &'a dyn Snapshot,
    pub(crate) changes: Changes,
}

impl<'a> Overlay<'a> {
    pub(crate) fn new(below: &'a dyn Snapshot) -> Self {
        Self { below, changes: Changes::new() }
    }

    pub(crate) fn put(&mut self, key: Vec<u8>, value: Vec<u8>) {
        self.changes.insert(key, Some(value));
    }

    pub(crate) fn delete(&mut self, key: Vec<u8>) {
        self.changes.insert(key, None);
    }
}

impl Snapshot for Overlay<'_> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        match self.changes.get(key) {
            Some(changed) => Ok(changed.clone()),
            None => self.below.get(key),
        }
    }

    fn range(&self, keys: Range<&[u8]>, order: Order, visit: &mut Visit<'_>) -> Result<()> {
        if keys.start >= keys.end {
            return Ok(());
        }
        let changed = self.changes.range::<[u8], _>((Bound::Included(keys.start), Bound::Excluded(keys.end)));
        match order {
            Order::Ascending => self.merge(keys, order, changed.peekable(), visit),
            Order::Descending => self.merge(keys, order, changed.rev().peekable(), visit),
        }
    }
}

impl Overlay<'_> {
    fn merge<'c>(
        &self,
        keys: Range<&[u8]>,
        order: Order,
        mut changed: Peekable<impl Iterator<Item = (&'c Vec<u8>, &'c Option<Vec<u8>>)>>,
        visit: &mut Visit<'_>,
    ) -> Result<()> {
        let mut ended = false;
        self.below.range(keys, order, &mut |key, value| {
            while let Some((own, put)) = changed.peek().copied() {
                let place = match order {
                    Order::Ascending => own[..].cmp(key),
                    Order::Descending => key.cmp(&own[..]),
                };
                if place == Ordering::Greater {
                    break;
                }
                changed.next();
                if let Some(put) = put
                    && visit(own, put)?.is_break()
                {
                    ended = true;
                    return Ok(ControlFlow::Break(()));
                }
                if place == Ordering::Equal {
                    return Ok(ControlFlow::Continue(()));
                }
            }
            let flow = visit(key, value)?;
            ended = flow.is_break();
            Ok(flow)
        })?;
        for (own, put) in changed {
            if ended {
                break;
            }
            if let Some(put) = put {
                ended = visit(own, put)?.is_break();
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    struct Map(BTreeMap<Vec<u8>, Vec<u8>>);

    impl Snapshot for Map {
        fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
            Ok(self.0.get(key).cloned())
        }

        fn range(&self, keys: Range<&[u8]>, order: Order, visit: &mut Visit<'_>) -> Result<()> {
            let mut all: Vec<_> =
                self.0.range::<[u8], _>((Bound::Included(keys.start), Bound::Excluded(keys.end))).collect();
            if order == Order::Descending {
                all.reverse();
            }
            for (key, value) in all {
                if visit(key, value)?.is_break() {
                    break;
                }
            }
            Ok(())
        }
    }

    fn visited(
        rows: &dyn Snapshot,
        keys: Range<&[u8]>,
        order: Order,
        most: usize,
    ) -> Vec<(Vec<u8>, Vec<u8>)> {
        let mut all = Vec::new();
        rows.range(keys, order, &mut |key, value| {
            all.push((key.to_vec(), value.to_vec()));
            Ok(if all.len() >= most { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })
        .unwrap();
        all
    }

    proptest! {
        /// Two overlays on a map read as the map with their changes made in it.
        #[test]
        fn an_overlay_reads_as_if_its_changes_were_made(
            stored in prop::collection::btree_map(prop::collection::vec(0..4_u8, 0..3), any::<[u8; 1]>(), 0..12),
            changes in prop::collection::vec((prop::collection::vec(0..4_u8, 0..3), any::<Option<[u8; 1]>>()), 0..20),
            from in prop::collection::vec(0..5_u8, 0..3), to in prop::collection::vec(0..5_u8, 0..3), most in 1..8_usize,
        ) {
            let mut model = Map(stored.into_iter().map(|(key, value)| (key, value.to_vec())).collect());
            let below = Map(model.0.clone());
            let mut first = Overlay::new(&below);
            let half = changes.len() / 2;
            let mut make = |overlay: &mut Overlay<'_>, changes: &[(Vec<u8>, Option<[u8; 1]>)]| {
                for (key, value) in changes {
                    if let Some(value) = value {
                        overlay.put(key.clone(), value.to_vec());
                        model.0.insert(key.clone(), value.to_vec());
                    } else {
                        overlay.delete(key.clone());
                        model.0.remove(key);
                    }
                }
            };
            make(&mut first, &changes[..half]);
            let mut second = Overlay::new(&first);
            make(&mut second, &changes[half..]);
            for order in [Order::Ascending, Order::Descending] {
                let expected = if from < to { visited(&model, &from..&to, order, most) } else { Vec::new() };
                prop_assert_eq!(visited(&second, &from..&to, order, most), expected);
            }
            prop_assert_eq!(second.get(&from).unwrap(), model.get(&from).unwrap());
        }
    }
}
