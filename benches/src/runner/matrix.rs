//! The product of all varied parameters.

use crate::case::{Backend, Case, Each, Kind, Mode};
use crate::workload::Workload;

/// Every valid combination is a case.
#[derive(Debug, Clone)]
pub struct Matrix {
    /// Workloads.
    pub workloads: Vec<Workload>,
    /// Stores.
    pub backends: Vec<Backend>,
    /// Channel modes.
    pub modes: Vec<Mode>,
    /// Turns per conversation.
    pub turns: Vec<usize>,
    /// Bytes of a message, where the workload has a size.
    pub sizes: Vec<usize>,
    /// Numbers of conversations.
    pub threads: Vec<usize>,
    /// Numbers of concurrent writers.
    pub writers: Vec<usize>,
    /// Repetitions of every case.
    pub reps: usize,
    /// The seed.
    pub seed: u64,
    /// [`Case::cap_s`].
    pub cap_s: u64,
    /// [`Case::paired`], for the stores that have a floor.
    pub paired: bool,
    /// What is flushed before it is acknowledged.
    pub flushes: Vec<Each>,
}

impl Default for Matrix {
    /// `lean` on SQLite in both modes, a hundred turns of 128 bytes.
    fn default() -> Self {
        Self {
            workloads: vec![Workload::Lean],
            backends: vec![Backend::Sqlite],
            modes: vec![Mode::Full, Mode::Delta(10)],
            turns: vec![100],
            sizes: vec![128],
            threads: vec![1],
            writers: vec![1],
            reps: 1,
            seed: 7,
            cap_s: 60,
            paired: false,
            flushes: vec![Each::Step],
        }
    }
}

impl Matrix {
    /// The cases, ordered so that stores alternate and machine noise affects all of them.
    pub fn cases(&self) -> Vec<Case> {
        let mut cases = Vec::new();
        for rep in 0..self.reps {
            for workload in &self.workloads {
                let sizes = if workload.is_sized() { &self.sizes[..] } else { &[0] };
                for (turns, size) in product(&self.turns, sizes) {
                    for (threads, writers) in product(&self.threads, &self.writers) {
                        let stores = product(&self.modes, &self.backends);
                        for ((mode, backend), flush) in product(&stores, &self.flushes) {
                            cases.push(Case {
                                workload: *workload,
                                backend,
                                mode,
                                turns,
                                size,
                                threads,
                                writers,
                                seed: self.seed,
                                rep,
                                cap_s: self.cap_s,
                                paired: self.paired && backend.floor().is_some(),
                                flush,
                            });
                        }
                    }
                }
            }
        }
        // A raw store has no channel modes.
        let first = self.modes.first();
        cases.retain(|case| {
            case.is_meaningful() && (case.backend.kind() != Kind::Raw || Some(&case.mode) == first)
        });
        cases
    }
}

fn product<A: Copy, B: Copy>(a: &[A], b: &[B]) -> Vec<(A, B)> {
    a.iter().flat_map(|a| b.iter().map(|b| (*a, *b))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stores_alternate_and_what_makes_no_sense_is_left_out() {
        let matrix = Matrix {
            workloads: vec![Workload::Lean, Workload::Plain],
            backends: vec![Backend::Sqlite, Backend::RawSqlite, Backend::LanggraphSqlite],
            sizes: vec![128, 2048],
            ..Matrix::default()
        };
        let cases = matrix.cases();
        let of = |workload| cases.iter().filter(move |case| case.workload == workload);
        let lean: Vec<_> = of(Workload::Lean).map(|case| (case.size, case.mode, case.backend)).collect();
        let expected = |size| {
            let delta = Mode::Delta(10);
            [
                (size, Mode::Full, Backend::Sqlite),
                (size, Mode::Full, Backend::RawSqlite),
                (size, Mode::Full, Backend::LanggraphSqlite),
                (size, delta, Backend::Sqlite),
                (size, delta, Backend::LanggraphSqlite),
            ]
        };
        assert_eq!(lean, [expected(128), expected(2048)].concat());
        let plain: Vec<_> = of(Workload::Plain).map(|case| (case.size, case.backend)).collect();
        assert_eq!(plain, [(0, Backend::Sqlite), (0, Backend::RawSqlite), (0, Backend::Sqlite)]);
    }

    #[test]
    fn no_case_has_more_writers_than_conversations() {
        let matrix = Matrix { threads: vec![1, 8], writers: vec![1, 8], ..Matrix::default() };
        let found: Vec<_> = matrix.cases().iter().map(|case| (case.threads, case.writers)).collect();
        assert_eq!(found, [(1, 1), (1, 1), (8, 1), (8, 1), (8, 8), (8, 8)]);
    }

    #[test]
    fn a_flush_a_turn_is_asked_of_our_flushing_savers_only() {
        let backends = vec![Backend::Memory, Backend::Sqlite, Backend::RawSqlite, Backend::LanggraphSqlite];
        let flushes = vec![Each::Step, Each::Turn];
        let cases = Matrix { backends, flushes, modes: vec![Mode::Full], ..Matrix::default() }.cases();
        let turns: Vec<_> = cases.iter().filter(|case| case.flush == Each::Turn).collect();
        assert_eq!((cases.len(), turns.len(), turns[0].backend), (5, 1, Backend::Sqlite));
    }

    #[test]
    fn pairs_are_made_where_there_is_a_floor() {
        let backends = vec![Backend::Memory, Backend::Sqlite, Backend::RawSqlite];
        let cases = Matrix { backends, paired: true, modes: vec![Mode::Full], ..Matrix::default() }.cases();
        let found: Vec<_> = cases.iter().map(|case| (case.backend, case.paired)).collect();
        assert_eq!(found, [(Backend::Memory, false), (Backend::Sqlite, true), (Backend::RawSqlite, false)]);
    }
}
