//! The elements that the rows of a thread refer to, and those that no row refers to any more.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use threadkeep::Result;
use threadkeep::id::ThreadId;
use threadkeep::value::Element;
use threadkeep_layout::{Form, Run, chunk_runs, push_run};

use crate::element::{SPACES, Space};
use crate::error::corrupt;
use crate::rows::{Node, Snapshot};
use crate::thread::ThreadState;

/// Runs of numbers. A list that grows is noted once per checkpoint, from the same beginning on: only what is new of it
/// costs anything.
#[derive(Default)]
struct Runs {
    /// The first number of each run, and the end of the longest one from there.
    ends: BTreeMap<u32, u32>,
}

impl Runs {
    /// Notes a run; returns the part of it that none from the same beginning had.
    fn note(&mut self, run: Run) -> Run {
        let end = self.ends.entry(run.start).or_insert(run.start);
        let known = *end;
        *end = known.max(run.end());
        Run { start: known, len: run.end().saturating_sub(known) }
    }

    /// All noted numbers, in order, as runs that do not overlap.
    fn union(&self) -> Vec<Run> {
        let mut union: Vec<Run> = Vec::new();
        for (&start, &end) in &self.ends {
            let covered = union.last().map_or(0, |last| last.end());
            let start = start.max(covered);
            push_run(&mut union, Run { start, len: end.saturating_sub(start) });
        }
        union
    }
}

/// The elements that rows refer to.
pub(crate) struct Used<'a> {
    thread: &'a ThreadId,
    snapshot: &'a Snapshot,
    drafted: HashMap<i64, &'a Element>,
    runs: [Runs; 3],
}

impl<'a> Used<'a> {
    pub(crate) fn new(thread: &'a ThreadId, snapshot: &'a Snapshot, drafted: &'a [(i64, Element)]) -> Self {
        let drafted = drafted.iter().map(|(seq, element)| (*seq, element)).collect();
        Self { thread, snapshot, drafted, runs: Default::default() }
    }

    /// Notes what a row refers to. `names` is the element with the names of its channels.
    pub(crate) fn note(&mut self, node: &Node, names: u32) -> Result<()> {
        self.add(Space::Structure, Run { start: names, len: 1 });
        if let Some(n) = node.record.extra_element() {
            self.add(Space::Structure, Run { start: n, len: 1 });
        }
        for run in node.record.extra.maps.iter().flat_map(|(_, runs)| runs) {
            self.add(Space::Entries, *run);
        }
        let writes = node.tasks.iter().flat_map(|task| &task.writes).map(|write| &write.value);
        for form in node.record.forms().chain(writes) {
            match form {
                Form::Plain(_) | Form::Tiny(_) => {}
                Form::Shared(n) => {
                    self.add(Space::Values, Run { start: *n, len: 1 });
                }
                Form::List(manifest) => {
                    for run in &manifest.tail {
                        self.add(Space::Values, *run);
                    }
                    for run in &manifest.chunks {
                        for n in self.add(Space::Structure, *run).numbers() {
                            self.chunk(n)?;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn chunk(&mut self, n: u32) -> Result<()> {
        let seq = Space::Structure.seq(n);
        let element = match self.drafted.get(&seq) {
            Some(element) => *element,
            None => self.snapshot.elements.get(Space::Structure, n)?,
        };
        let wrong = |reason| corrupt("element", self.thread, format_args!("seq {seq}"), reason);
        for run in chunk_runs(element.bytes()).map_err(wrong)? {
            self.add(Space::Values, run);
        }
        Ok(())
    }

    /// Notes a run; returns the part of it that is new.
    fn add(&mut self, space: Space, run: Run) -> Run {
        self.runs[space as usize].note(run)
    }

    /// First and last numbers of the runs of unreferenced elements.
    pub(crate) fn dead(&self, state: &ThreadState) -> Vec<[i64; 2]> {
        let mut all = Vec::new();
        for space in SPACES {
            let used = self.runs[space as usize].union();
            let stored: BTreeSet<u32> = state.index.stored(space).collect();
            all.extend(without(&stored, &used).into_iter().map(|run| space.bounds(run)));
        }
        all
    }
}

/// The numbers that none of these runs has. The runs are in order.
fn without(numbers: &BTreeSet<u32>, runs: &[Run]) -> Vec<Run> {
    let (mut rest, mut left) = (runs.iter().peekable(), Vec::new());
    for &n in numbers {
        while rest.next_if(|run| run.end() <= n).is_some() {}
        if rest.peek().is_none_or(|run| n < run.start) {
            push_run(&mut left, Run { start: n, len: 1 });
        }
    }
    left
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The checkpoints of a thread refer to a list that grows by one: all of it together is noted once, not with each.
    #[test]
    fn runs_from_one_beginning_are_noted_once() {
        let mut runs = Runs::default();
        let noted: Vec<Run> = (1..=1_000).map(|len| runs.note(Run { start: 5, len })).collect();
        assert_eq!(noted.iter().map(|run| run.len).sum::<u32>(), 1_000);
        assert_eq!(noted[999], Run { start: 1_004, len: 1 });
        assert_eq!(runs.note(Run { start: 5, len: 300 }).len, 0, "a part of what is noted");
        assert_eq!(runs.union(), [Run { start: 5, len: 1_000 }]);
    }

    proptest! {
        #[test]
        fn noted_runs_are_the_union_of_all(
            noted in prop::collection::vec((0..60_u32, 0..12_u32), 0..30),
            stored in prop::collection::btree_set(0..80_u32, 0..60),
        ) {
            let (mut runs, mut expected, mut new) = (Runs::default(), BTreeSet::new(), BTreeSet::new());
            for (start, len) in noted {
                let run = Run { start, len };
                new.extend(runs.note(run).numbers());
                expected.extend(run.numbers());
            }
            let union = runs.union();
            let numbers: Vec<u32> = union.iter().flat_map(|run| run.numbers()).collect();
            prop_assert_eq!(&numbers, &expected.iter().copied().collect::<Vec<_>>());
            prop_assert_eq!(new, expected.clone());
            let left: BTreeSet<u32> = without(&stored, &union).iter().flat_map(|run| run.numbers()).collect();
            prop_assert_eq!(left, stored.difference(&expected).copied().collect::<BTreeSet<_>>());
        }
    }
}
