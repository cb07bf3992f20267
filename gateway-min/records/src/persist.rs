//! Writing while the database is briefly unavailable.

use std::time::Duration;

use backon::Retryable as _;

use crate::error::RecordsError;

/// The pause before each further attempt.
const RETRY_DELAYS: [Duration; 2] = [Duration::from_millis(100), Duration::from_millis(500)];

/// Tries `write` up to three times while the database is unavailable, with pauses of 0.1 s and 0.5 s. It must be
/// idempotent.
///
/// # Errors
/// That of the last attempt.
pub async fn persistently<T, F>(write: impl FnMut() -> F) -> Result<T, RecordsError>
where
    F: Future<Output = Result<T, RecordsError>>,
{
    write
        .retry(RETRY_DELAYS.into_iter())
        .when(RecordsError::is_unavailable)
        .notify(|error, delay| tracing::debug!(%error, ?delay, "writing again"))
        .await
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    /// When each attempt was made, in milliseconds, and how it ended, if the first `failures` fail.
    async fn attempts(failures: usize) -> (Vec<u128>, bool) {
        let (start, mut made) = (Instant::now(), Vec::new());
        let result = persistently(|| {
            made.push(start.elapsed().as_millis());
            let unavailable = RecordsError::Unavailable { cause: crate::DatabaseError::Closed };
            std::future::ready(if made.len() > failures { Ok(()) } else { Err(unavailable) })
        });
        let written = result.await.is_ok();
        (made, written)
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_is_tried_three_times_and_no_longer_than_it_has_to_be() {
        assert_eq!(attempts(0).await, (vec![0], true));
        assert_eq!(attempts(1).await, (vec![0, 100], true));
        assert_eq!(attempts(2).await, (vec![0, 100, 600], true));
        assert_eq!(attempts(3).await, (vec![0, 100, 600], false));
    }
}
