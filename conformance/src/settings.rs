//! The settings of a run of the suite.

use std::ffi::OsString;
use std::str::FromStr;
use std::time::Duration;

use proptest::test_runner::{Config, RngSeed};

use crate::factory::BoxError;

/// The environment variables of a seed, of the number of programs, and of a limit in seconds.
const VARIABLES: [&str; 3] = ["PROPTEST_RNG_SEED", "PROPTEST_CASES", "THREADKEEP_CONFORMANCE_LIMIT"];

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
    ///
    /// # Errors
    /// If one of them is not such a number.
    pub fn from_env() -> Result<Self, BoxError> {
        Self::of(VARIABLES.map(std::env::var_os))
    }

    /// What these values of [`VARIABLES`] say.
    fn of([seed, programs, limit]: [Option<OsString>; 3]) -> Result<Self, BoxError> {
        let default = Self::default();
        Ok(Self {
            seed: number(VARIABLES[0], seed, default.seed)?,
            programs: number(VARIABLES[1], programs, default.programs)?,
            limit: Duration::from_secs(number(VARIABLES[2], limit, default.limit.as_secs())?),
        })
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

/// The value of a variable; the default if it is empty or not set.
fn number<T: FromStr>(name: &str, value: Option<OsString>, default: T) -> Result<T, BoxError> {
    let Some(value) = value.filter(|value| !value.is_empty()) else { return Ok(default) };
    let number = value.to_str().and_then(|text| text.parse().ok());
    let shown = value.display();
    number.ok_or_else(|| format!("{name} is '{shown}', which is not a whole number in its range").into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_that_is_no_number_is_refused_by_its_name() {
        let of = |values: [&str; 3]| Settings::of(values.map(|value| Some(value.into())));
        let limit = Duration::from_mins(2);
        assert_eq!(of(["7", "16", "120"]).unwrap(), Settings { seed: 7, programs: 16, limit });
        assert_eq!(of(["", "", ""]).unwrap(), Settings::default());
        assert_eq!(Settings::of([None, None, None]).unwrap(), Settings::default());
        for (values, name) in [
            (["0x7", "16", "120"], "PROPTEST_RNG_SEED"),
            (["7", "5_000", "120"], "PROPTEST_CASES"),
            (["7", "5000000000", "120"], "PROPTEST_CASES"),
            (["7", "16", "2h"], "THREADKEEP_CONFORMANCE_LIMIT"),
        ] {
            let error = of(values).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{name} is ")), "{error}");
        }
    }
}
