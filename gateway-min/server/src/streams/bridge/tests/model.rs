//! Clients that read at their own pace and reconnect, against the numbers that they must see.

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum Act {
    Publish(u64),
    /// This client reads up to this many frames.
    Read(usize, u64),
    /// This client's connection breaks, and it reconnects with the id of the last event it saw.
    Reconnect(usize),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        (1..6_u64).prop_map(Act::Publish),
        (0..3_usize, 1..8_u64).prop_map(|(client, frames)| Act::Read(client, frames)),
        (0..3_usize).prop_map(Act::Reconnect),
    ]
}

/// A client that follows a run over broken connections.
struct Client {
    subscription: Subscription,
    /// How many events it has.
    seen: u64,
    last: Option<EventId>,
    gap: bool,
    ended: bool,
}

impl Client {
    fn new(bridge: &StreamBridge) -> Self {
        Self { subscription: bridge.subscribe("r", None), seen: 0, last: None, gap: false, ended: false }
    }

    fn reconnect(&mut self, bridge: &StreamBridge) {
        let last = self.last.map(|id| id.to_string());
        self.subscription = bridge.subscribe("r", last.as_deref());
    }

    /// Reads a frame and checks it against the number of published and kept events.
    fn read(&mut self, published: u64, size: u64) {
        let oldest = published.saturating_sub(size);
        match now(&mut self.subscription) {
            Some(Frame::Event(event)) => {
                assert!(!self.gap && !self.ended, "nothing follows a gap or an end");
                assert_eq!(event.id.seq, self.seen, "every event once, in order");
                assert_eq!(event.data, self.seen.to_string());
                self.seen += 1;
                self.last = Some(event.id);
            }
            Some(Frame::Gap(gap)) => {
                assert!(self.seen < oldest, "a gap only if an event is gone");
                let seqs = (gap.requested.map(|id| id.seq), gap.earliest.seq, gap.latest.seq);
                assert_eq!(seqs, (self.seen.checked_sub(1), oldest, published - 1));
                self.gap = true;
            }
            Some(Frame::End) => {
                assert_eq!(self.seen, published, "the end comes after the last event");
                self.ended = true;
            }
            Some(Frame::Heartbeat) => panic!("no time has passed"),
            None => assert!(
                self.gap || self.ended || self.seen == published,
                "waits although there are more events"
            ),
        }
    }
}

proptest! {
    /// In any schedule, a client that reconnects with its last id gets every event exactly once, or a gap.
    #[test]
    fn every_event_comes_once_or_there_is_a_gap(size in 1..12_u64, acts in prop::collection::vec(act(), 1..60)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let bridge = bridge(usize::try_from(size).unwrap());
            let run = bridge.open("r");
            let mut clients: Vec<_> = (0..3).map(|_| Client::new(&bridge)).collect();
            let mut published = 0;
            for act in acts {
                match act {
                    Act::Publish(count) => for _ in 0..count {
                        let id = run.publish("custom", &json!(published)).unwrap();
                        assert_eq!(id.seq, published);
                        published += 1;
                    },
                    Act::Read(client, frames) => for _ in 0..frames {
                        clients[client].read(published, size);
                    },
                    // A client without an event has no id to send: it would start at the oldest one that is kept.
                    Act::Reconnect(client) => if clients[client].last.is_some() && !clients[client].gap {
                        clients[client].reconnect(&bridge);
                    },
                }
            }
            run.end();
            for client in &mut clients {
                while !client.gap && !client.ended {
                    client.read(published, size);
                }
                assert!(over(&mut client.subscription));
            }
        });
    }
}
