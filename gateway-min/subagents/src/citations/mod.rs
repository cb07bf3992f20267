//! Citations of receipts in a subagent's report, checked against the receipts that it saw.
//!
//! A verdict is advisory: it says which cited calls ran and succeeded, not whether what the report claims is correct,
//! and it never changes a status.

mod claims;
pub mod harvest;
mod parse;
mod verdict;

pub use parse::{Citation, cited};
pub use verdict::{CitationVerdict, FailedCitation};

#[cfg(test)]
mod tests;
