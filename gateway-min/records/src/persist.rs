//! Writing while the database is briefly unavailable.

use std::iter::successors;
use std::time::Duration;

use backon::Retryable as _;

use crate::error::RecordsError;

/// The pause before each further attempt.
const RETRY_DELAYS: [Duration; 2] = [Duration::from_millis(100), Duration::from_millis(500)];

/// The longest pause between attempts that do not end.
const LONGEST_DELAY: Duration = Duration::from_secs(5);

/// Tries `write` up to three times while the database is unavailable, with pauses of 0.1 s and 0.5 s. It must be
/// idempotent.
///
/// # Errors
/// That of the last attempt, but [`RecordsError::InDoubt`] if an earlier one was in doubt and the last only found the
/// database unavailable.
pub async fn persistently<T, F>(write: impl FnMut() -> F) -> Result<T, RecordsError>
where
    F: Future<Output = Result<T, RecordsError>>,
{
    let mut in_doubt = false;
    let written = write
        .retry(RETRY_DELAYS.into_iter())
        .when(|error| {
            in_doubt |= matches!(error, RecordsError::InDoubt { .. });
            error.is_unavailable()
        })
        .notify(|error, delay| tracing::debug!(%error, ?delay, "writing again"))
        .await;
    written.map_err(|error| match error {
        RecordsError::Unavailable { cause } | RecordsError::ReadOnly { cause, .. } if in_doubt => {
            RecordsError::InDoubt { cause }
        }
        error => error,
    })
}

/// Tries `write` until the database is available, with pauses from 0.1 s to 5 s, or until it is closed, or accepts no write
/// until it is opened again. For a write on which others wait however long that takes; it must be idempotent.
///
/// # Errors
/// That of an attempt that failed for another reason, or found the database closed.
pub async fn until_available<T, F>(write: impl FnMut() -> F) -> Result<T, RecordsError>
where
    F: Future<Output = Result<T, RecordsError>>,
{
    let delays = successors(Some(Duration::from_millis(100)), |delay| Some((*delay * 2).min(LONGEST_DELAY)));
    write
        .retry(delays)
        .when(RecordsError::may_pass)
        .notify(|error, delay| tracing::debug!(%error, ?delay, "writing again"))
        .await
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::failure::DatabaseError;

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

    /// What an earlier attempt may have written is not called unwritten because the database is away since.
    #[tokio::test(start_paused = true)]
    async fn a_doubt_outlives_later_attempts_that_write_nothing() {
        let attempts = |last: fn() -> RecordsError| {
            let mut errors = vec![last(), unavailable(), in_doubt()];
            persistently(move || std::future::ready(Err::<(), _>(errors.pop().unwrap_or_else(unavailable))))
        };
        assert!(matches!(attempts(unavailable).await, Err(RecordsError::InDoubt { .. })));
        let gone = || RecordsError::run_not_found("r");
        assert!(matches!(attempts(gone).await, Err(RecordsError::NotFound { .. })), "that is an answer");
        let never = persistently(|| std::future::ready(Err::<(), _>(unavailable())));
        assert!(matches!(never.await, Err(RecordsError::Unavailable { .. })));
    }

    fn unavailable() -> RecordsError {
        RecordsError::Unavailable { cause: DatabaseError::Busy }
    }

    fn in_doubt() -> RecordsError {
        RecordsError::InDoubt { cause: DatabaseError::Busy }
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_that_others_wait_for_is_repeated_until_it_succeeds_or_the_database_is_closed() {
        let busy = || RecordsError::Unavailable { cause: DatabaseError::Busy };
        let closed = || RecordsError::Unavailable { cause: DatabaseError::Closed };
        for (last, expected) in [(Ok(()), true), (Err(closed()), false)] {
            let (start, mut made, mut last) = (Instant::now(), Vec::new(), Some(last));
            let written = until_available(|| {
                made.push(start.elapsed().as_millis());
                let result = if made.len() < 9 { Err(busy()) } else { last.take().unwrap() };
                std::future::ready(result)
            });
            assert_eq!(written.await.is_ok(), expected);
            assert_eq!(made, [0, 100, 300, 700, 1500, 3100, 6300, 11300, 16300]);
        }
    }
}
