//! Whether a gateway serves the stores of a directory.

use std::fs::{File, TryLockError};

use threadkeep_config::{Backend, Config};

/// The file in a directory of SQLite stores that a gateway keeps locked while it serves them.
pub const GATEWAY_LOCK: &str = "gateway.lock";

/// Whether a gateway serves the configured SQLite stores. Blocks briefly. It asks by locking the file for a moment, for
/// which a gateway that starts then waits, so ask only if something was found that a gateway has left or is at work on.
pub fn is_served(config: &Config) -> bool {
    if config.database.backend != Backend::Sqlite {
        return false;
    }
    let lock = File::open(config.database.sqlite_dir.join(GATEWAY_LOCK));
    lock.is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
}
