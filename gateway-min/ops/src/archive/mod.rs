#![doc = include_str!("../export.md")]

#[cfg(test)]
mod fixture;
mod format;
mod known;
mod lines;
mod links;
mod read;
#[cfg(test)]
mod tests;
mod values;
mod write;

pub use format::{FORMAT, Record, Source, VERSION};
pub use links::{Links, places};
pub use read::{Archive, MAX_PLACES, Reader, read, read_within};
pub use write::{Writer, Written, write};

/// Why a file cannot be imported or written. Lines count from 1.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArchiveError {
    /// It cannot be read or written.
    #[error("line {line}: {cause}")]
    Io {
        /// The line at which it failed.
        line: u64,
        /// The operating system's error.
        cause: std::io::Error,
    },
    /// The file is not an exported thread.
    #[error("it is not an exported thread: line 1 is not a header of format '{FORMAT}' ({reason})")]
    NotOurs {
        /// What was found instead.
        reason: String,
    },
    /// A newer version of this program wrote it.
    #[error("it has format version {found}, but this program reads version {VERSION}; upgrade threadkeep")]
    NewerVersion {
        /// Its version.
        found: u64,
    },
    /// A line does not follow the format.
    #[error("line {line}: {reason}")]
    Line {
        /// The line.
        line: u64,
        /// What is wrong with it.
        reason: String,
    },
    /// It ends without an `end` line.
    #[error(
        "it ends after line {lines} without an 'end' line: the file is truncated; export the thread again"
    )]
    Truncated {
        /// The number of complete lines.
        lines: u64,
    },
    /// It was changed after it was written.
    #[error(
        "line {line}: the preceding lines do not match the hash in 'end': the file was changed; export the thread again"
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
