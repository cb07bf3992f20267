#![doc = include_str!("../export.md")]

mod format;
#[cfg(any(test, feature = "fuzzing"))]
mod fuzzing;
mod read;
#[cfg(test)]
mod tests;
mod write;

pub use format::{FORMAT, Record, Source, VERSION};
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use fuzzing::fuzz;
pub use read::{Archive, read};
pub use write::{Written, write};

/// Why a file cannot be imported, or written. Lines count from 1.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArchiveError {
    /// It cannot be read or written.
    #[error("line {line}: {cause}")]
    Io {
        /// The line at which it failed.
        line: u64,
        /// What the system says.
        cause: std::io::Error,
    },
    /// It is another kind of file.
    #[error("it is no exported thread: line 1 is not a header of format '{FORMAT}' ({reason})")]
    NotOurs {
        /// What was found instead.
        reason: String,
    },
    /// It was written by a newer version of this program.
    #[error("it has version {found} of the format, this program reads version {VERSION}; upgrade threadkeep")]
    NewerVersion {
        /// Its version.
        found: u64,
    },
    /// A line is not as the format says.
    #[error("line {line}: {reason}")]
    Line {
        /// The line.
        line: u64,
        /// What is wrong with it.
        reason: String,
    },
    /// It ends before its `end` line.
    #[error("it ends after line {lines}, before its 'end' line: it was cut off; export the thread again")]
    Truncated {
        /// The complete lines that are there.
        lines: u64,
    },
    /// It was changed after it was written.
    #[error(
        "line {line}: the lines before do not have the hash in 'end': the file was changed; export the thread again"
    )]
    Altered {
        /// The line of `end`.
        line: u64,
    },
    /// A value of the thread cannot be written.
    #[error("checkpoint {checkpoint}: {cause}")]
    Value {
        /// The checkpoint.
        checkpoint: threadkeep::id::CheckpointId,
        /// Why.
        cause: threadkeep::Error,
    },
}
