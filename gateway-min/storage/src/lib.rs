#![doc = include_str!("../README.md")]

mod cache;
mod checkpoints;
mod directory;
mod error;
mod existing;
mod form;
mod postgres;
mod records;
mod stores;

use threadkeep::mode::ChannelMode;
use threadkeep_config::{CheckpointChannelMode, Config};

pub use cache::{history_cache, memory_cache};
pub use checkpoints::{CHECKPOINT_FILE, Checkpoints};
pub use directory::{GATEWAY_LOCK, is_served};
pub use error::OpenError;
pub use existing::{BackedUp, Existing};
pub use form::form_difference;
pub use records::{existing_records_beside, is_shared, open_records, open_records_beside};
pub use stores::{OpenSaver, Stores};
/// Operations that only a database in one file has, and its size.
pub use threadkeep_sqlite::{FileSize, SqliteSaver};

/// The configured channel mode.
pub fn channel_mode(config: &Config) -> ChannelMode {
    match config.database.checkpoint_channel_mode {
        CheckpointChannelMode::Full => ChannelMode::Full,
        CheckpointChannelMode::Delta => ChannelMode::Delta,
    }
}
