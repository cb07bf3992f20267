//! The bodies of the gateway's fuzz targets: input from files and clients. Each accepts any bytes, must not panic, and
//! asserts invariants.
#![allow(clippy::expect_used, missing_docs, reason = "a fuzz target fails by panicking")]

use futures::{FutureExt as _, StreamExt as _};
use serde_json::json;

use crate::streams::bridge::{BridgeOptions, EventId, Frame, StreamBridge};

/// The `Last-Event-ID` with which a client resumes the stream of a run.
pub fn last_event_id(data: &[u8]) {
    const KEPT: u64 = 3;
    const PUBLISHED: u64 = 5;
    let Ok(text) = std::str::from_utf8(data) else { return };
    let id = EventId::parse(text);
    assert!(id.is_none_or(|id| id.to_string() == text), "an id is printed as it was read");

    let bridge = StreamBridge::new(BridgeOptions { queue_maxsize: 3, ..BridgeOptions::default() });
    let publisher = bridge.open("run");
    let ids: Vec<_> = (0..PUBLISHED).filter_map(|n| publisher.publish("custom", &json!(n))).collect();
    // A millisecond unknown to the fuzzer, so use the run's own ids, too.
    let own = ids.iter().find(|own| own.seq.to_string() == text).map(ToString::to_string);
    let mut stream = bridge.subscribe("run", Some(own.as_deref().unwrap_or(text)));
    publisher.end();
    let mut seqs = Vec::new();
    while let Some(Some(frame)) = stream.next().now_or_never() {
        match frame {
            Frame::Event(event) => seqs.push(event.id.seq),
            Frame::Gap(gap) => {
                assert!(seqs.is_empty(), "a gap comes first");
                assert!(gap.earliest.seq == PUBLISHED - KEPT && gap.latest.seq == PUBLISHED - 1);
                return;
            }
            Frame::Heartbeat | Frame::End => {}
        }
    }
    let expected: Vec<u64> =
        (0..PUBLISHED).skip(usize::try_from(PUBLISHED).unwrap_or(0) - seqs.len()).collect();
    assert_eq!(seqs, expected, "what is kept, up to the end");
}

#[cfg(test)]
mod tests {
    fn replay(target: &str, body: fn(&[u8])) {
        for input in threadkeep_testing::corpus(target).unwrap() {
            body(&input);
        }
    }

    #[test]
    fn the_corpus_of_event_ids_is_harmless() {
        replay("last_event_id", super::last_event_id);
    }
}
