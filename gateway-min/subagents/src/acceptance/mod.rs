//! Acceptance criteria of a delegation.

mod verdict;

pub use verdict::{AcceptanceVerdict, Family, Finding, Leaf};

/// The maximum number of criteria of a delegation.
pub const MAX_CRITERIA: usize = 20;
