//! Forwards the stream of a run to other processes, through the database, while one of them follows it.
//!
//! The frames keep their ids, so that a client can reconnect to another process. Batches begin at least [`PAUSE`] apart
//! and contain what arrived meanwhile, so a fast stream costs no more statements than a slow one. The end, a full
//! batch, and a frame after a longer pause are written at once. A run that no other process follows writes nothing.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::{FutureExt as _, StreamExt as _};
use serde_json::{Value as Json, json};
use tokio::time::{Instant, timeout_at};

use super::Streams;
use super::bridge::{Event, EventId, Frame, Subscription};
use threadkeep_records::{FrameBatch, RecordsError, until_available};

/// How long after the beginning of a batch the next one is written, unless that is full or the last one.
const PAUSE: Duration = Duration::from_millis(20);
/// A batch is written when it has this many bytes.
const BATCH_BYTES: usize = 1 << 20;

/// Forwards what a run of this process streams, from the oldest kept frame to its end; removes it when the time for
/// clients to reconnect is over.
pub(super) async fn mirror(streams: Arc<Streams>, thread_id: String, run_id: String, stream: Subscription) {
    if let Err(error) = hand_on(&streams, &thread_id, &run_id, stream).await {
        tracing::warn!(run_id, %error, "the stream of a run is no longer forwarded to other processes");
    }
    let keep = streams.bridge.cleanup_delay();
    let records = streams.records.clone();
    drop(streams);
    // Not background work: a stopping gateway does not wait for it, and other processes remove what remains.
    tokio::spawn(async move {
        tokio::time::sleep(keep).await;
        if let Err(error) = records.runs().forget_frames(&thread_id, &run_id).await {
            tracing::debug!(run_id, %error, "frames of an ended run remain and are removed later");
        }
    });
}

async fn hand_on(
    streams: &Streams,
    thread_id: &str,
    run_id: &str,
    mut stream: Subscription,
) -> Result<(), RecordsError> {
    let mut batch = FrameBatch { first_seq: 0, next_seq: 0, frames: Vec::new(), ends: false };
    let mut forwarded = Forwarded::default();
    let mut not_before = Instant::now();
    loop {
        let filled = fill(&mut batch, &mut stream, &mut forwarded, not_before).await;
        if filled == Filled::Gap {
            stream = stream.again();
        }
        if !batch.frames.is_empty() || batch.ends {
            not_before = Instant::now() + PAUSE;
            let keep_from = forwarded.keep_from(streams.bridge.capacity(), batch.first_seq);
            // Meanwhile the run may publish more than is kept: also a gap.
            until_available(|| streams.records.runs().append_frames(thread_id, run_id, &batch, keep_from))
                .await?;
        }
        if batch.ends || filled == Filled::Left {
            return Ok(());
        }
        batch = FrameBatch { first_seq: batch.next_seq, frames: Vec::new(), ..batch };
    }
}

/// How the stream goes on after a batch.
#[derive(Debug, PartialEq, Eq)]
enum Filled {
    /// With the next frame.
    Whole,
    /// Not at all: frames are lost, and it has to be joined again.
    Gap,
    /// Not here: the run ends in another process, or its end is not known, and nothing of that is forwarded.
    Left,
}

/// Waits for a frame, and moves into the batch what comes before this time, at most until the end of the stream.
async fn fill(
    batch: &mut FrameBatch,
    stream: &mut Subscription,
    forwarded: &mut Forwarded,
    not_before: Instant,
) -> Filled {
    let (mut next, mut bytes) = (stream.next().await, 0);
    while let Some(frame) = next.take() {
        match frame {
            Frame::Event(event) if stream.left_at().is_some_and(|left| left <= event.id.seq) => {
                return Filled::Left;
            }
            Frame::Event(event) => {
                if batch.frames.is_empty() {
                    batch.first_seq = event.id.seq;
                }
                batch.next_seq = event.id.seq + 1;
                bytes += event.data.len();
                forwarded.add(&event);
                batch.frames.push(encode(&event));
            }
            Frame::Heartbeat => {}
            // The database is slower than the run: clients see the loss as a gap.
            Frame::Gap(_) => return Filled::Gap,
            Frame::End if stream.left_at().is_some() => return Filled::Left,
            Frame::End => {
                batch.ends = true;
                // An ended run is emptied when there is no room: that is a gap in other processes too.
                if let Some(newest) = stream.latest().filter(|newest| newest.seq >= batch.next_seq) {
                    batch.next_seq = newest.seq + 1;
                    batch.frames.push(encode_lost(newest));
                }
                return Filled::Whole;
            }
        }
        if bytes < BATCH_BYTES {
            next = if Instant::now() < not_before {
                timeout_at(not_before, stream.next()).await.ok().flatten()
            } else {
                stream.next().now_or_never().flatten()
            };
        }
    }
    Filled::Whole
}

/// The forwarded frames that the database still has: as many as a buffer keeps, in frames and in bytes.
#[derive(Default)]
struct Forwarded {
    frames: VecDeque<(u64, usize)>,
    bytes: usize,
}

impl Forwarded {
    fn add(&mut self, event: &Event) {
        self.frames.push_back((event.id.seq, event.data.len()));
        self.bytes += event.data.len();
    }

    /// The oldest frame to keep, at most `newest`, where the batch that is being written begins.
    fn keep_from(&mut self, (max_frames, max_bytes): (usize, usize), newest: u64) -> u64 {
        while let Some(&(seq, bytes)) = self.frames.front()
            && seq < newest
            && (self.frames.len() > max_frames || self.bytes > max_bytes)
        {
            self.frames.pop_front();
            self.bytes -= bytes;
        }
        self.frames.front().map_or(newest, |(seq, _)| *seq)
    }
}

fn encode(event: &Event) -> Json {
    // Keep the data's exact bytes.
    let data = String::from_utf8_lossy(&event.data);
    json!([event.id.unix_ms, event.id.seq, &*event.name, data])
}

/// The event of a frame written by [`encode`]; `None` for anything else.
pub(super) fn decode(frame: &Json) -> Option<Event> {
    let (unix_ms, seq) = (frame[0].as_u64()?, frame[1].as_u64()?);
    let data = Bytes::from(frame[3].as_str()?.to_owned());
    Some(Event { id: EventId { unix_ms, seq }, name: frame[2].as_str()?.into(), data })
}

/// That all events up to this one, the newest, are lost.
fn encode_lost(newest: EventId) -> Json {
    json!([newest.unix_ms, newest.seq])
}

/// The newest event in what [`encode_lost`] has written; `None` for anything else.
pub(super) fn decode_lost(frame: &Json) -> Option<EventId> {
    let [unix_ms, seq] = frame.as_array()?.as_slice() else { return None };
    Some(EventId { unix_ms: unix_ms.as_u64()?, seq: seq.as_u64()? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::streams::bridge::{BridgeOptions, StreamBridge};

    /// Within the pause after another batch, as a fast run publishes them.
    #[tokio::test(start_paused = true)]
    async fn frames_wait_for_the_next_batch_and_the_end_of_a_run_does_not() {
        let gap = Duration::from_millis(5);
        for (ends, late) in [(false, false), (true, false), (false, true), (true, true)] {
            let bridge = StreamBridge::new(BridgeOptions::default());
            let publisher = bridge.open("r");
            let mut stream = bridge.hand_on("r").unwrap();
            let mut batch = FrameBatch { first_seq: 0, next_seq: 0, frames: Vec::new(), ends: false };
            let mut forwarded = Forwarded::default();
            let began = Instant::now();
            let not_before = if late { began } else { began + PAUSE };
            publisher.publish("values", &json!({}));
            let publish = async {
                tokio::time::sleep(gap).await;
                publisher.publish("values", &json!({}));
                if ends {
                    publisher.end();
                }
            };
            let filling = async {
                let filled = fill(&mut batch, &mut stream, &mut forwarded, not_before).await;
                (filled, began.elapsed())
            };
            let ((filled, took), ()) = tokio::join!(filling, publish);
            assert_eq!(filled, Filled::Whole);
            // What comes after the pause goes at once, and does not wait for more.
            let expected = if late { (1, 1) } else { (2, 2) };
            assert_eq!((batch.frames.len(), batch.next_seq), expected, "{ends} {late}");
            assert_eq!(batch.ends, ends && !late, "{ends} {late}");
            match (ends, late) {
                (_, true) => assert!(took < gap, "{took:?}"),
                (true, false) => assert!((gap..PAUSE).contains(&took), "{took:?}"),
                (false, false) => assert!(took >= PAUSE, "{took:?}"),
            }
        }
    }

    fn event(seq: u64, bytes: usize) -> Event {
        Event { id: EventId { unix_ms: 1, seq }, name: "values".into(), data: vec![b'x'; bytes].into() }
    }

    #[test]
    fn the_database_keeps_as_many_frames_and_bytes_as_a_buffer() {
        let mut forwarded = Forwarded::default();
        for seq in 0..6 {
            forwarded.add(&event(seq, 10));
        }
        assert_eq!(forwarded.keep_from((8, 1000), 5), 0);
        assert_eq!(forwarded.keep_from((4, 1000), 5), 2, "in frames");
        assert_eq!(forwarded.keep_from((8, 25), 5), 4, "in bytes");
        forwarded.add(&event(6, 100));
        forwarded.add(&event(7, 100));
        assert_eq!(forwarded.keep_from((8, 25), 6), 6, "the batch that is being written is complete");
        assert_eq!(forwarded.keep_from((8, 25), 8), 8);
        assert_eq!(forwarded.bytes, 0);
    }

    #[test]
    fn a_frame_is_read_as_it_was_written() {
        let data = "{\"text\":\"z\u{fc}rich\\u0000 \\\"\u{1f980}\\\"\",\"n\":1.10}";
        let event = Event {
            id: EventId { unix_ms: 7, seq: 3 },
            name: "messages|task:1".into(),
            data: Bytes::from(data),
        };
        assert_eq!(decode_lost(&encode(&event)), None);
        let lost = encode_lost(event.id);
        assert_eq!((decode(&lost), decode_lost(&lost)), (None, Some(event.id)));
        assert_eq!(decode(&encode(&event)), Some(event));
        for other in [json!(null), json!([]), json!([1, 2, "values", null]), json!([-1, 2, "values", ""])] {
            assert_eq!(decode(&other), None, "{other}");
        }
    }

    /// Why it failed, if it did before, is of the run; that it ends elsewhere is of this process alone.
    #[tokio::test]
    async fn the_end_of_a_run_that_ends_elsewhere_is_not_forwarded() {
        for (failed, reads_first) in [(false, false), (false, true), (true, false), (true, true)] {
            let bridge = StreamBridge::new(BridgeOptions::default());
            let publisher = bridge.open("r");
            let mut stream = bridge.hand_on("r").unwrap();
            let mut batch = FrameBatch { first_seq: 0, next_seq: 0, frames: Vec::new(), ends: false };
            let mut forwarded = Forwarded::default();
            publisher.publish("values", &json!({}));
            if failed {
                publisher.fail(&json!("boom"));
            }
            let frames = 1 + usize::from(failed);
            if reads_first {
                let filled = fill(&mut batch, &mut stream, &mut forwarded, Instant::now()).await;
                assert_eq!((filled, batch.frames.len()), (Filled::Whole, frames));
            }
            publisher.leave(&json!("left"));
            let filled = fill(&mut batch, &mut stream, &mut forwarded, Instant::now()).await;
            assert_eq!((filled, batch.frames.len(), batch.ends), (Filled::Left, frames, false), "{failed}");
        }
    }
}
