//! The settings of a run of the suite.

use std::time::Duration;

use proptest::test_runner::{Config, RngSeed};

/// Random choices, and how many. The defaults are fixed, so that a saver always gets the same verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// The seed of random programs, and of the moments at which processes are killed. Default: 1.
    pub seed: u64,
    /// The number of random programs. Default: 128.
    pub programs: u32,
    /// After this time a case counts as one that never ends, such as one whose saver waits for a lock that nobody releases.
    /// Default: ten minutes, which is enough on any busy machine.
    pub limit: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self { seed: 1, programs: 128, limit: Duration::from_mins(10) }
    }
}

impl Settings {
    /// The defaults, or what `PROPTEST_RNG_SEED`, `PROPTEST_CASES` and `THREADKEEP_CONFORMANCE_LIMIT` (in seconds) say.
    pub fn from_env() -> Self {
        fn number<T: std::str::FromStr>(name: &str) -> Option<T> {
            std::env::var(name).ok()?.parse().ok()
        }
        let default = Self::default();
        Self {
            seed: number("PROPTEST_RNG_SEED").unwrap_or(default.seed),
            programs: number("PROPTEST_CASES").unwrap_or(default.programs),
            limit: number("THREADKEEP_CONFORMANCE_LIMIT").map_or(default.limit, Duration::from_secs),
        }
    }

    pub(crate) fn proptest(self) -> Config {
        Config {
            cases: self.programs,
            rng_seed: RngSeed::Fixed(self.seed),
            failure_persistence: None,
            ..Config::default()
        }
    }
}
