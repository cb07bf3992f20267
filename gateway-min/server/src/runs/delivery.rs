//! The delivery receipt of a run: the `run.delivery` event.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde_json::{Value as Json, json};

use crate::store::StoreError;

/// The pauses before further attempts to write.
const RETRY_DELAYS: [Duration; 2] = [Duration::from_millis(100), Duration::from_millis(500)];

/// The files that a run wrote with its file tools. Files written by commands are only in the summary of changes.
#[derive(Debug, Default)]
pub(crate) struct Delivery {
    by_tool: BTreeMap<String, BTreeSet<String>>,
}

impl Delivery {
    /// Records what a call of `tool` wrote, as paths in the thread's directory.
    pub(crate) fn add(&mut self, tool: &str, written: &[String]) {
        if !written.is_empty() {
            self.by_tool.entry(tool.to_owned()).or_default().extend(written.iter().cloned());
        }
    }

    /// The content of the event: every path once, sorted, and the paths by tool. No tool of this gateway presents files
    /// to the user by itself, so `presented` is false.
    pub(crate) fn receipt(&self) -> Json {
        let paths: BTreeSet<&String> = self.by_tool.values().flatten().collect();
        json!({ "presented": false, "paths": paths, "by_tool": self.by_tool })
    }
}

/// Tries `write` up to three times while the database is unavailable, with pauses of 0.1 s and 0.5 s. It must be
/// idempotent.
///
/// # Errors
/// That of the last attempt.
pub(crate) async fn persistently<T, F>(mut write: impl FnMut() -> F) -> Result<T, StoreError>
where
    F: Future<Output = Result<T, StoreError>>,
{
    for delay in RETRY_DELAYS {
        match write().await {
            Err(error) if error.is_unavailable() => tracing::debug!(%error, ?delay, "writing again"),
            written => return written,
        }
        tokio::time::sleep(delay).await;
    }
    write().await
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[test]
    fn the_receipt_has_every_path_once_and_the_paths_by_tool() {
        let mut delivery = Delivery::default();
        assert_eq!(delivery.receipt(), json!({"presented": false, "paths": [], "by_tool": {}}));
        delivery.add("write_file", &["b".to_owned()]);
        delivery.add("write_file", &["a".to_owned()]);
        delivery.add("write_file", &["b".to_owned()]);
        delivery.add("str_replace", &["b".to_owned()]);
        delivery.add("ls", &[]);
        assert_eq!(
            delivery.receipt(),
            json!({
                "presented": false,
                "paths": ["a", "b"],
                "by_tool": {"str_replace": ["b"], "write_file": ["a", "b"]},
            })
        );
    }

    /// When each attempt was made, in milliseconds, and how it ended, if the first `failures` fail.
    async fn attempts(failures: usize) -> (Vec<u128>, bool) {
        let (start, mut made) = (Instant::now(), Vec::new());
        let result = persistently(|| {
            made.push(start.elapsed().as_millis());
            let unavailable = StoreError::Unavailable { cause: sqlx::Error::PoolClosed };
            std::future::ready(if made.len() > failures { Ok(()) } else { Err(unavailable) })
        });
        let written = result.await.is_ok();
        (made, written)
    }

    #[tokio::test(start_paused = true)]
    async fn a_receipt_is_tried_three_times_and_no_longer_than_it_has_to_be() {
        assert_eq!(attempts(0).await, (vec![0], true));
        assert_eq!(attempts(1).await, (vec![0, 100], true));
        assert_eq!(attempts(2).await, (vec![0, 100, 600], true));
        assert_eq!(attempts(3).await, (vec![0, 100, 600], false));
    }
}
