//! What a case is, and how it reports failures.

use std::fmt;
use std::panic::Location;
use std::pin::Pin;

use crate::factory::Store;

/// What a case is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Reading and writing checkpoints, values and metadata.
    Core,
    /// The paths from which delta channels are replayed.
    Delta,
    /// Deleting, copying and changing what is stored.
    Deletion,
    /// Several writers, several handles, dropped calls.
    Concurrency,
    /// What survives closing and reopening the store.
    Durability,
}

impl Level {
    /// Every level, in reading order.
    pub const ALL: [Self; 5] = [Self::Core, Self::Delta, Self::Deletion, Self::Concurrency, Self::Durability];
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Core => "core",
            Self::Delta => "delta",
            Self::Deletion => "deletion",
            Self::Concurrency => "concurrency",
            Self::Durability => "durability",
        })
    }
}

/// Something that not every saver or factory offers. Without it, a case that needs it is reported as "not claimed".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Claim {
    /// [`threadkeep::saver::Capabilities::durable`].
    Durable,
    /// The factory supports [`crate::Damage::LoseCheckpoint`].
    LoseCheckpoint,
    /// The factory supports [`crate::Damage::LoseWrites`].
    LoseWrites,
    /// The factory supports [`crate::Damage::LoseParentLink`].
    LoseParentLink,
    /// A child process can open a store by its [`crate::Factory::address`], and be killed.
    Killable,
    /// [`threadkeep::saver::Capabilities::shared_elements`], and the factory measures [`crate::Factory::stored_bytes`].
    SharedElements,
    /// The factory measures [`crate::Factory::stored_bytes`].
    StoredBytes,
    /// The factory supports [`crate::Damage::ChangeByte`].
    ChangeByte,
    /// The saver writes a thread that comes in parts as they come, and does not hold it.
    WritesAsItComes,
    /// The factory can make one operation of a store on its medium fail: [`crate::Factory::open_failing`].
    FailOperations,
}

impl fmt::Display for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Durable => "durable",
            Self::LoseCheckpoint => "lose a checkpoint",
            Self::LoseWrites => "lose writes",
            Self::LoseParentLink => "lose a parent link",
            Self::Killable => "killable",
            Self::SharedElements => "shared elements",
            Self::StoredBytes => "stored bytes",
            Self::ChangeByte => "change a byte",
            Self::WritesAsItComes => "writes as it comes",
            Self::FailOperations => "fail operations",
        })
    }
}

/// One thing that every saver must do.
#[derive(Clone)]
pub struct Case {
    /// Its name. The bullets in the documentation of [`threadkeep::saver::Saver`] are names of cases.
    pub name: &'static str,
    /// What it is about.
    pub level: Level,
    /// What would go wrong for a user if the saver did not do it.
    pub why: &'static str,
    /// What must be claimed for the case to run.
    pub needs: Option<Claim>,
    pub(crate) run: fn(Store) -> Pin<Box<dyn Future<Output = Outcome> + Send>>,
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Case").field("name", &self.name).field("level", &self.level).finish_non_exhaustive()
    }
}

/// The outcome of a case.
pub(crate) type Outcome = Result<(), Failure>;

/// What a saver did wrong, and the line of the suite that detected it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure(String);

impl Failure {
    #[track_caller]
    pub(crate) fn new(what: impl fmt::Display) -> Self {
        let at = Location::caller();
        Self(format!("{what}\n    seen at {}:{}", at.file(), at.line()))
    }

    /// The same failure, with more context.
    pub(crate) fn retell(self, tell: impl FnOnce(String) -> String) -> Self {
        Self(tell(self.0))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// An unexpected error: `?` in a case.
impl<E: std::error::Error> From<E> for Failure {
    #[track_caller]
    fn from(error: E) -> Self {
        Self::new(format_args!("unexpected error: {error}"))
    }
}

/// Defines a case whose name is that of its function.
macro_rules! case {
    ($level:ident, $run:ident, $why:literal) => {
        $crate::case::case!($level, $run, $why, None)
    };
    ($level:ident, $run:ident, $why:literal, needs $claim:ident) => {
        $crate::case::case!($level, $run, $why, Some($crate::case::Claim::$claim))
    };
    ($level:ident, $run:ident, $why:literal, $needs:expr) => {
        $crate::case::Case {
            name: stringify!($run),
            level: $crate::case::Level::$level,
            why: $why,
            needs: $needs,
            run: |store| Box::pin($run(store)),
        }
    };
}

/// Fails the case unless the condition holds.
macro_rules! check {
    ($condition:expr, $($what:tt)+) => {
        if !$condition {
            return Err($crate::case::Failure::new(format_args!($($what)+)));
        }
    };
}

/// Fails the case unless both are equal: what the saver returned, what it should have returned, and what was compared.
/// The failure shows the first place at which they differ.
macro_rules! check_eq {
    ($got:expr, $expected:expr, $($what:tt)+) => {
        match (&$got, &$expected) {
            (got, expected) => $crate::case::check!(
                *got == *expected,
                "{}{}",
                format_args!($($what)+),
                $crate::difference::difference(got, expected)
            ),
        }
    };
}

pub(crate) use {case, check, check_eq};
