//! The named plans: what `make bench` and `make bench-peers` run.

use super::Matrix;
use crate::case::{Backend, Case, Each, Mode};
use crate::workload::Workload;

/// A named list of matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Plan {
    /// Every question in short form: under five minutes on two cores.
    Short,
    /// The same operations on our savers, LangGraph's and raw stores, alternating. Needs --python.
    Peers,
    /// The targets at full size: 2,000 turns, in all modes. About a quarter of an hour.
    Targets,
}

const MODES: [Mode; 4] = [Mode::Full, Mode::Delta(1), Mode::Delta(10), Mode::Delta(1000)];

impl Plan {
    /// The cases, in the order in which they run.
    pub fn cases(self) -> Vec<Case> {
        let base = Matrix::default();
        let of = |workload, backends: &[Backend], modes: &[Mode], turns| Matrix {
            workloads: vec![workload],
            backends: backends.to_vec(),
            modes: modes.to_vec(),
            turns: vec![turns],
            ..base.clone()
        };
        let ours = [Backend::Memory, Backend::Sqlite, Backend::SqlitePlain, Backend::Postgres];
        let both = [Mode::Full, Mode::Delta(10)];
        let matrices = match self {
            Self::Short => vec![
                of(
                    Workload::Plain,
                    &[ours.as_slice(), &[Backend::RawSqlite, Backend::RawPostgres]].concat(),
                    &both,
                    400,
                ),
                of(Workload::Agent, &ours, &both, 200),
                of(Workload::Lead, &[Backend::Sqlite, Backend::Postgres], &both, 60),
                Matrix {
                    paired: true,
                    ..of(Workload::Lean, &[Backend::Sqlite, Backend::Postgres], &both, 300)
                },
                Matrix {
                    threads: vec![64],
                    writers: vec![1, 8, 64],
                    ..of(Workload::Lean, &[Backend::Sqlite, Backend::Postgres], &both, 20)
                },
            ],
            Self::Peers => {
                let stores = [
                    Backend::Sqlite,
                    Backend::LanggraphSqlite,
                    Backend::LanggraphAsync,
                    Backend::RawSqlite,
                    Backend::Postgres,
                    Backend::LanggraphPostgres,
                    Backend::RawPostgres,
                ];
                vec![
                    Matrix {
                        sizes: vec![128, 2048],
                        flushes: vec![Each::Step, Each::Turn],
                        ..of(Workload::Lean, &stores, &both, 500)
                    },
                    Matrix {
                        threads: vec![64],
                        writers: vec![8],
                        flushes: vec![Each::Step, Each::Turn],
                        ..of(Workload::Lean, &stores, &both, 20)
                    },
                ]
            }
            Self::Targets => vec![
                of(
                    Workload::Plain,
                    &[ours.as_slice(), &[Backend::RawSqlite, Backend::RawPostgres]].concat(),
                    &MODES,
                    2_000,
                ),
                of(Workload::Agent, &ours, &both, 2_000),
                Matrix {
                    turns: vec![500, 2_000],
                    sizes: vec![128, 2048],
                    ..of(Workload::Lead, &[Backend::Sqlite], &[Mode::Full, Mode::Delta(1000)], 0)
                },
                Matrix {
                    paired: true,
                    ..of(Workload::Lean, &[Backend::Sqlite, Backend::Postgres], &both, 2_000)
                },
                Matrix {
                    threads: vec![10_000],
                    writers: vec![8],
                    ..of(Workload::Lean, &[Backend::Sqlite], &both, 2)
                },
                of(Workload::Plain, &[Backend::Sqlite], &[Mode::Full], 21_000),
            ],
        };
        let cap_s = if self == Self::Targets { 600 } else { 60 };
        matrices.into_iter().flat_map(|matrix| Matrix { cap_s, ..matrix }.cases()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Kind;

    #[test]
    fn each_plan_has_its_stores() {
        let of = |plan: Plan, kind| plan.cases().iter().any(|case| case.backend.kind() == kind);
        for plan in [Plan::Short, Plan::Targets, Plan::Peers] {
            assert!(of(plan, Kind::Ours) && of(plan, Kind::Raw), "{plan:?}");
            assert_eq!(of(plan, Kind::Peer), plan == Plan::Peers, "{plan:?}");
        }
    }
}
