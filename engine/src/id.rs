//! Identifiers: threads, namespaces, channels, tasks, checkpoints, versions, and the source of new ones.

mod source;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

pub use source::{Clock, IdSource, SystemClock};

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Wraps a text; cloning it afterwards copies a pointer.
            pub fn new(text: impl Into<Arc<str>>) -> Self {
                Self(text.into())
            }

            /// The text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&*self.0, f)
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self::new(text)
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                Self::new(text)
            }
        }

        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
    };
}

text_id! {
    /// A conversation. Any string is a valid id; the gateway is stricter about the ids it accepts.
    ThreadId
}
text_id! {
    /// A chain of checkpoints within a thread. The root namespace is the empty string; a nested graph has its own.
    Namespace
}
text_id! {
    /// The name of a state channel, for example `messages`.
    ChannelName
}
text_id! {
    /// The name of a graph node, for example `model`.
    NodeName
}

impl Namespace {
    /// The namespace of the thread's own graph: the empty string.
    pub fn root() -> Self {
        Self::new("")
    }
}

impl Default for Namespace {
    fn default() -> Self {
        Self::root()
    }
}

macro_rules! uuid_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(Uuid);

        impl $name {
            /// The id made of these sixteen bytes.
            pub const fn from_bytes(bytes: [u8; 16]) -> Self {
                Self(Uuid::from_bytes(bytes))
            }

            /// The sixteen bytes of the id.
            pub const fn as_bytes(&self) -> &[u8; 16] {
                self.0.as_bytes()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }

        impl FromStr for $name {
            type Err = uuid::Error;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                text.parse().map(Self)
            }
        }
    };
}

uuid_id! {
    /// A checkpoint: a time-ordered UUID, of version 7, or of version 6 in a thread that LangGraph began. Byte order, text
    /// order and age order agree, and an id is strictly greater than its parent's and than every head it followed, even if
    /// clocks run backwards.
    CheckpointId
}
uuid_id! {
    /// One attempt at a task of a superstep. A second attempt has another id.
    TaskId
}

impl CheckpointId {
    /// Milliseconds since the Unix epoch, as the id carries them. LangGraph's ids are of version 6, which counts from the
    /// beginning of the Gregorian calendar; they sort by their time, too.
    pub fn unix_ms(&self) -> u64 {
        match self.0.get_timestamp() {
            Some(time) if self.0.get_version_num() == 6 => {
                let (seconds, nanoseconds) = time.to_unix();
                seconds * 1000 + u64::from(nanoseconds) / 1_000_000
            }
            _ => self.leading(),
        }
    }

    /// The first 48 bits, by which ids sort: the time, in an id of version 7.
    fn leading(&self) -> u64 {
        let mut bytes = [0_u8; 8];
        bytes[2..].copy_from_slice(&self.as_bytes()[..6]);
        u64::from_be_bytes(bytes)
    }

    /// The id's time, as ISO-8601 in UTC with microseconds: the checkpoint's `created_at`.
    pub fn created_at(&self) -> String {
        let ms = i64::try_from(self.unix_ms()).unwrap_or(i64::MAX);
        let time = chrono::DateTime::from_timestamp_millis(ms).unwrap_or(chrono::DateTime::UNIX_EPOCH);
        time.to_rfc3339_opts(chrono::SecondsFormat::Micros, false)
    }

    fn from_parts(unix_ms: u64, counter: u16, random: u64) -> Self {
        let mut bytes = [0_u8; 16];
        bytes[..6].copy_from_slice(&unix_ms.to_be_bytes()[2..]);
        bytes[6] = 0x70 | (counter >> 8) as u8 & 0x0f;
        bytes[7] = (counter & 0xff) as u8;
        bytes[8..].copy_from_slice(&random.to_be_bytes());
        bytes[8] = 0x80 | (bytes[8] & 0x3f);
        Self::from_bytes(bytes)
    }

    fn counter(&self) -> u16 {
        u16::from(self.as_bytes()[6] & 0x0f) << 8 | u16::from(self.as_bytes()[7])
    }

    /// The time of an id of version 6, in its own unit.
    fn ticks(&self) -> Option<u64> {
        (self.0.get_version_num() == 6).then(|| self.leading() << 12 | u64::from(self.counter()))
    }

    fn from_ticks(ticks: u64, random: u64) -> Self {
        let mut bytes = [0_u8; 16];
        bytes[..8].copy_from_slice(&((ticks & !0x0fff) << 4 | 0x6000 | ticks & 0x0fff).to_be_bytes());
        bytes[8..].copy_from_slice(&random.to_be_bytes());
        bytes[8] = 0x80 | (bytes[8] & 0x3f);
        Self::from_bytes(bytes)
    }
}

/// The version of a channel's value: a counter that grows along a lineage, and a random part, so that two children of
/// one parent never assign the same version to two values.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// One more than the greatest counter of the parent checkpoint.
    pub counter: u64,
    /// Drawn randomly for each write of a superstep to a channel.
    pub random: u64,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032}.{:016x}", self.counter, self.random)
    }
}

impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:x}", self.counter, self.random)
    }
}
