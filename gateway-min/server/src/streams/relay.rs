//! Follows a run of another process, through the database.
//!
//! The process that works on the run is asked for its frames ([`super::mirror`]), which are published here under their
//! own ids, also of a run that has ended, as long as it keeps them. If there are none, because the process is gone or
//! keeps them no longer, the run's result is shown instead: the state in which it ended as a `values` frame, a failure
//! as an `error` frame, and the end. A client that comes after the end, when none are left, gets no state.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use threadkeep::Error;
use threadkeep::saver::Load;
use tokio::time::Instant;

use super::Streams;
use super::bridge::Publisher;
use super::mirror::{decode, decode_lost};
use super::verdict::{DELETED, failure};
use threadkeep_records::{CancelAction, RECOVERY_STOP_REASON, RecordsError, RunRow};

/// How often the database is polled for the state of a run, unless its process says that there is something to read.
const POLL: Duration = Duration::from_millis(250);
/// The shortest time between two looks where it cannot say so, as behind a pooler.
const SHORTEST_POLL: Duration = Duration::from_millis(20);
/// How many looks at a run whose row has ended count before its last frames are given up: they have two seconds.
const LAST_LOOKS: u32 = 8;
/// Batches of frames read at once.
const BATCHES: u32 = 32;

/// Publishes another process's stream of a run until it has ended. Waits while the database is unavailable.
pub(super) async fn relay(streams: Arc<Streams>, run: RunRow, publisher: Publisher) {
    let runs = streams.records.runs();
    let abandoned = publisher.abandoned();
    let (mut asked, mut cancelled) = (false, false);
    let mut next_seq = 0;
    let mut last_looks: Option<LastLooks> = None;
    // When something new was found last.
    let mut newest = Instant::now();
    // Before the frames are requested, so that none are missed.
    let mut changes = streams.records.changes();
    loop {
        if abandoned.is_cancelled() && !cancelled {
            cancelled = runs.request_cancel(&run.run_id, CancelAction::Interrupt).await.is_ok();
        }
        asked = asked || runs.follow(&run.run_id).await.is_ok();
        let known = (next_seq, last_looks.is_some());
        let seen = look(&streams, &run.run_id, &mut next_seq, &publisher).await;
        // One that fails is not asked more often.
        let only_polled = seen.is_ok() && changes.are_missed();
        match seen {
            Ok(Seen::AtWork) => {}
            Ok(Seen::All) => return publisher.end(),
            Ok(Seen::Ended(row)) => {
                let looks = last_looks.get_or_insert_default();
                if is_dead(&row) || looks.are_over() {
                    // It had ended when the client came, and nothing is forwarded, or nobody forwards the rest.
                    if run.status.is_active() || (next_seq > 0 && !is_dead(&row)) {
                        show_state(&streams, &row, next_seq == 0, &publisher).await;
                    }
                    return streams.end_as(&row, &publisher).await;
                }
            }
            Err(error) => tracing::warn!(run_id = run.run_id, %error, "cannot read a run of another process"),
        }
        if known != (next_seq, last_looks.is_some()) {
            newest = Instant::now();
        }
        let pause = if only_polled { pause_after(newest.elapsed()) } else { POLL };
        let _changed = tokio::time::timeout(pause, changes.of(&run.run_id)).await;
        if let Some(looks) = &mut last_looks {
            looks.another();
        }
    }
}

/// The time until the next look at a run of which nothing new was found for so long, if only looks find it: a frame is
/// late by at most an eighth of the pause before it, or by [`SHORTEST_POLL`], and never by more than [`POLL`]. A run
/// that waits for its model for minutes is asked about no more often than where messages arrive.
fn pause_after(quiet: Duration) -> Duration {
    (quiet / 8).clamp(SHORTEST_POLL, POLL)
}

/// The looks at a run since its row was seen to have ended. One in each [`POLL`] counts, however often its process says
/// that there is something to read; and only looks do, because while a machine stands still, its processes send nothing.
struct LastLooks {
    counted: u32,
    at: Instant,
}

impl Default for LastLooks {
    fn default() -> Self {
        Self { counted: 0, at: Instant::now() }
    }
}

impl LastLooks {
    fn another(&mut self) {
        if self.at.elapsed() >= POLL {
            *self = Self { counted: self.counted + 1, ..Self::default() };
        }
    }

    fn are_over(&self) -> bool {
        self.counted >= LAST_LOOKS
    }
}

/// Whether the process of an ended run is gone.
fn is_dead(row: &RunRow) -> bool {
    row.stop_reason.as_deref() == Some(RECOVERY_STOP_REASON)
}

/// The result of polling a run of another process.
enum Seen {
    AtWork,
    /// Its row has ended, but its last frames have not arrived.
    Ended(Box<RunRow>),
    /// There is nothing more to show.
    All,
}

/// Publishes new frames.
async fn look(
    streams: &Streams,
    run_id: &str,
    next_seq: &mut u64,
    publisher: &Publisher,
) -> Result<Seen, RecordsError> {
    // Read the row first: if the run has ended by then, its frames may be complete.
    let row = streams.records.runs().get(run_id).await?;
    loop {
        let batches = streams.records.runs().frames(run_id, *next_seq, BATCHES).await?;
        let found = batches.len();
        for batch in batches {
            for frame in &batch.frames {
                if let Some(event) = decode(frame).filter(|event| event.id.seq >= *next_seq) {
                    publisher.repeat(event);
                } else if let Some(newest) = decode_lost(frame) {
                    publisher.lose(newest);
                }
            }
            *next_seq = batch.next_seq.max(*next_seq);
            if batch.ends {
                return Ok(Seen::All);
            }
        }
        if found < BATCHES as usize {
            break;
        }
    }
    if *next_seq > 0 {
        publisher.caught_up();
    }
    Ok(match row {
        Some(row) if row.status.is_active() => Seen::AtWork,
        Some(row) => Seen::Ended(Box::new(row)),
        // Deleted, and the frames that were not read with it. A bare end would be that of a success.
        None => {
            publisher.fail(&failure(DELETED));
            Seen::All
        }
    })
}

/// Publishes the state that an ended run left, to clients that may have seen only part of it.
async fn show_state(streams: &Streams, row: &RunRow, from_the_start: bool, publisher: &Publisher) {
    if from_the_start {
        publisher.publish("metadata", &json!({"run_id": row.run_id, "thread_id": row.thread_id}));
    }
    let left = streams.threads.left_by(row, &Load::All).await;
    match left.and_then(|left| left.map(|left| streams.rendered.values(&left, &[])).transpose()) {
        Ok(Some(values)) => {
            publisher.publish_text("values", values.into());
        }
        Ok(None) => {}
        Err(error) => {
            tracing::debug!(run_id = row.run_id, %error, "cannot read the state that a run of another process left");
            // It is found once: the thread's next turn would not hear of it.
            if matches!(error, Error::HistoryLost { .. }) {
                publisher.fail(&json!({"message": error.to_string(), "name": error.class_name()}));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_that_is_only_polled_is_late_by_a_part_of_its_pauses() {
        for (quiet_ms, pause_ms) in [(0, 20), (160, 20), (400, 50), (1_000, 125), (2_000, 250), (60_000, 250)]
        {
            let pause = pause_after(Duration::from_millis(quiet_ms));
            assert_eq!(pause, Duration::from_millis(pause_ms), "after {quiet_ms} ms");
        }
        // So a pause of two seconds costs tens of looks, not a hundred.
        let (mut quiet, mut looks) = (Duration::ZERO, 0);
        while quiet < Duration::from_secs(2) {
            quiet += pause_after(quiet);
            looks += 1;
        }
        assert!((20..40).contains(&looks), "{looks}");
    }

    #[tokio::test(start_paused = true)]
    async fn last_frames_are_given_up_by_looks_also_if_there_seems_to_be_something_to_read_all_the_time() {
        for (pause_ms, enough) in [(10, 200), (250, 8), (10_000, 8)] {
            let mut looks = LastLooks::default();
            for look in 0..enough {
                assert!(!looks.are_over(), "{look} looks, each after {pause_ms} ms");
                tokio::time::advance(Duration::from_millis(pause_ms)).await;
                looks.another();
            }
            assert!(looks.are_over(), "{enough} looks, each after {pause_ms} ms");
        }
    }
}
