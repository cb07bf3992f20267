//! How the checkpoints of this database are stored: what all processes that share it should agree on.
//!
//! The database keeps what its first process wrote, until an operator [changes it](Records::remember_form): a process
//! that differs finds that at each start, whichever processes have started since.

use crate::Records;
use crate::error::RecordsError;
use crate::query::{Sql, query};

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

fn remembered() -> Sql {
    query("SELECT name, value FROM store_settings WHERE name IN ($1, $2)").bind(MODE).bind(FREQUENCY)
}

/// What these rows remember; what they lack is as in `ours`.
fn form_of(rows: &[(String, String)], ours: &CheckpointForm) -> CheckpointForm {
    let of = |wanted: &str| rows.iter().find(|(name, _)| name == wanted).map(|(_, value)| value.as_str());
    CheckpointForm {
        mode: of(MODE).unwrap_or(&ours.mode).to_owned(),
        frequency: of(FREQUENCY).and_then(|value| value.parse().ok()).unwrap_or(ours.frequency),
    }
}

impl Records {
    /// Remembers the form that this process writes, if none is remembered. Returns the remembered one if it is another.
    ///
    /// # Errors
    /// [`RecordsError::Unavailable`], [`RecordsError::ReadOnly`], [`RecordsError::InDoubt`].
    pub async fn agree_on_form(&self, ours: &CheckpointForm) -> Result<Option<CheckpointForm>, RecordsError> {
        let mut rows: Vec<(String, String)> = self.db.fetch_all(remembered()).await?;
        if rows.len() < 2 {
            let ours = ours.clone();
            let agreed = self.db.write_everywhere(move |tx| {
                Box::pin(async move {
                    // Another process may be the first.
                    for (name, value) in [(MODE, ours.mode), (FREQUENCY, ours.frequency.to_string())] {
                        let sql = "INSERT INTO store_settings (name, value) VALUES ($1, $2) \
                                   ON CONFLICT (name) DO NOTHING";
                        tx.execute(query(sql).bind(name).bind(value)).await?;
                    }
                    tx.fetch_all::<(String, String)>(remembered()).await
                })
            });
            rows = agreed.await?;
        }
        Ok(Some(form_of(&rows, ours)).filter(|theirs| theirs != ours))
    }

    /// An operator has stored every thread in this mode, and may have said which frequency is that of the database from
    /// now on. Where nothing is remembered yet, that is left to the first process that starts.
    ///
    /// # Errors
    /// As [`Self::agree_on_form`].
    pub async fn remember_form(&self, mode: &str, frequency: Option<u64>) -> Result<(), RecordsError> {
        let change = |name: &str, value: String| {
            query("UPDATE store_settings SET value = $2 WHERE name = $1").bind(name).bind(value)
        };
        let mut changes = vec![change(MODE, mode.to_owned())];
        changes.extend(frequency.map(|frequency| change(FREQUENCY, frequency.to_string())));
        let changed = self.db.write_everywhere(move |tx| {
            Box::pin(async move {
                for sql in changes {
                    tx.execute(sql).await?;
                }
                Ok(())
            })
        });
        changed.await
    }
}
