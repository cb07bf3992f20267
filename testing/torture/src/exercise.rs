//! The definition of an exercise, and its counts.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use futures::future::BoxFuture;

use crate::storage::Kind;

/// An exercise: one way of trying to lose or damage what was acknowledged.
#[derive(Clone, Copy)]
pub struct Exercise {
    /// Its name.
    pub name: &'static str,
    /// The saver it works on.
    pub saver: Kind,
    /// What it tries.
    pub about: About,
    /// Does one turn. An error is a finding.
    pub run: fn(Turn) -> BoxFuture<'static, anyhow::Result<()>>,
}

/// What an exercise tries.
#[derive(Clone, Copy)]
pub struct About {
    /// In one line.
    pub what: &'static str,
    /// What each run counts at least once. One that does not has tried nothing, and so found nothing.
    pub needs: &'static [&'static str],
}

impl Exercise {
    /// Its name with that of its saver.
    pub fn title(&self) -> String {
        format!("{}, {}", self.name, self.saver.name())
    }

    /// What a run with these counts did not do.
    pub fn untried(&self, tally: &Tally) -> Vec<&'static str> {
        let counts = tally.counts();
        let missing = |what: &&'static str| counts.get(*what).is_none_or(|count| *count == 0);
        self.about.needs.iter().copied().filter(missing).collect()
    }
}

/// One turn of an exercise.
#[derive(Clone)]
pub struct Turn {
    /// The source of all its random choices.
    pub seed: u64,
    /// How much it does; 1 for a short test.
    pub effort: u32,
    /// The saver.
    pub saver: Kind,
    /// The program that becomes a child process: this crate's binary.
    pub program: PathBuf,
    /// Counts what was tried.
    pub tally: Tally,
}

/// Why an exercise could not be tried: something that it needs is missing and cannot be installed. No finding.
#[derive(Debug)]
pub struct NotTried(pub String);

impl fmt::Display for NotTried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for NotTried {}

/// How often each thing was tried.
#[derive(Debug, Clone, Default)]
pub struct Tally(Arc<Mutex<BTreeMap<&'static str, u64>>>);

impl Tally {
    /// Counts `n` more.
    pub fn add(&self, what: &'static str, n: usize) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry(what).or_default() += n as u64;
    }

    /// The counts, by what was counted.
    pub fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
