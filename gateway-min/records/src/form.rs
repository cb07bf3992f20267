//! How the checkpoints of this database are stored: what all processes that share it should agree on.

use crate::Records;
use crate::error::RecordsError;
use crate::query::query;

/// The form in which checkpoints are written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointForm {
    /// The mode of the channels: `full` or `delta`.
    pub mode: String,
    /// Updates between two snapshots, in delta mode.
    pub frequency: u64,
}

const MODE: &str = "checkpoint_channel_mode";
const FREQUENCY: &str = "snapshot_frequency";

impl Records {
    /// Remembers the form that this process writes. Returns the one that was remembered, if it is another: the mode then
    /// stays until the threads are [converted](Self::converted); the frequency is this process's from now on.
    pub async fn agree_on_form(&self, ours: &CheckpointForm) -> Result<Option<CheckpointForm>, RecordsError> {
        let ours = ours.clone();
        let agreed = self.db.write_everywhere(move |tx| {
            Box::pin(async move {
                let sql = "SELECT name, value FROM store_settings WHERE name IN ($1, $2)";
                let found: Vec<(String, String)> =
                    tx.fetch_all(query(sql).bind(MODE).bind(FREQUENCY)).await?;
                let of = |wanted: &str| {
                    found.iter().find(|(name, _)| name == wanted).map(|(_, value)| value.clone())
                };
                let theirs = CheckpointForm {
                    mode: of(MODE).unwrap_or_else(|| ours.mode.clone()),
                    frequency: of(FREQUENCY).and_then(|value| value.parse().ok()).unwrap_or(ours.frequency),
                };
                if found.len() == 2 && theirs == ours {
                    return Ok(None);
                }
                for (name, value) in [(MODE, theirs.mode.clone()), (FREQUENCY, ours.frequency.to_string())] {
                    let sql = "INSERT INTO store_settings (name, value) VALUES ($1, $2) \
                               ON CONFLICT (name) DO UPDATE SET value = excluded.value";
                    tx.execute(query(sql).bind(name).bind(value)).await?;
                }
                Ok(Some(theirs).filter(|theirs| *theirs != ours))
            })
        });
        agreed.await
    }

    /// Every thread is stored in this mode now.
    pub async fn converted(&self, mode: &str) -> Result<(), RecordsError> {
        let sql = query("UPDATE store_settings SET value = $2 WHERE name = $1").bind(MODE).bind(mode);
        self.db.write_everywhere(move |tx| Box::pin(tx.execute(sql))).await.map(drop)
    }
}
