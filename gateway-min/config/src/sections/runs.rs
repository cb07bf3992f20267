//! Sections about runs: their events, their streams, and who owns them.

use super::LONGEST_SECONDS;
use crate::node::Node;
use crate::secret::Secret;

/// Where run events are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunEventsBackend {
    /// This process's memory; lost when it ends.
    Memory,
    /// The gateway's database.
    Db,
    /// Files with one JSON document per line.
    Jsonl,
}

/// `run_events`, read once at start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunEvents {
    /// Where they are stored; default memory.
    pub backend: RunEventsBackend,
    /// The maximum content stored of an event of the category `trace`, in bytes; default 10240. Other events are stored
    /// whole.
    pub max_trace_content: usize,
    /// Whether token usage is counted per run; default true.
    pub track_token_usage: bool,
}

impl Default for RunEvents {
    fn default() -> Self {
        Self { backend: RunEventsBackend::Memory, max_trace_content: 10_240, track_token_usage: true }
    }
}

impl RunEvents {
    pub(crate) fn read(root: &Node<'_>) -> Self {
        let (node, default) = (root.section("run_events"), Self::default());
        let backends = [
            ("memory", RunEventsBackend::Memory),
            ("db", RunEventsBackend::Db),
            ("jsonl", RunEventsBackend::Jsonl),
        ];
        Self {
            backend: node.choice("backend", &backends, default.backend),
            max_trace_content: node.int("max_trace_content", default.max_trace_content, 1..),
            track_token_usage: node.bool("track_token_usage", default.track_token_usage),
        }
    }
}

/// What carries the frames of a stream to its subscribers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamBridgeType {
    /// This process's memory.
    Memory,
    /// A Redis server, for several processes.
    Redis,
}

/// `stream_bridge`, read once at start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamBridge {
    /// What carries the frames; default memory.
    pub kind: StreamBridgeType,
    /// The Redis server.
    pub redis_url: Option<Secret>,
    /// How many frames of a run are kept for subscribers that reconnect; at least 1, default 256.
    pub queue_maxsize: usize,
    /// How many bytes of a run's frames are kept, besides the newest frame; at least 1, default 8 MiB.
    pub queue_max_bytes: usize,
    /// How many bytes of all runs' frames are kept, besides the newest frame of each; at least 1, default 256 MiB.
    pub total_max_bytes: usize,
    /// The maximum connections to the Redis server; at least 1.
    pub max_connections: Option<u32>,
    /// Lifetime of a stream in Redis, in seconds; at least 1, default 86400.
    pub stream_ttl_seconds: u64,
    /// Seconds until the stream of a recovered run is removed; default 60.
    pub recovered_stream_cleanup_delay_seconds: u64,
}

impl Default for StreamBridge {
    fn default() -> Self {
        Self {
            kind: StreamBridgeType::Memory,
            redis_url: None,
            queue_maxsize: 256,
            queue_max_bytes: 8 << 20,
            total_max_bytes: 256 << 20,
            max_connections: None,
            stream_ttl_seconds: 86_400,
            recovered_stream_cleanup_delay_seconds: 60,
        }
    }
}

impl StreamBridge {
    pub(crate) fn read(root: &Node<'_>) -> Self {
        let (node, default) = (root.section("stream_bridge"), Self::default());
        let kinds = [("memory", StreamBridgeType::Memory), ("redis", StreamBridgeType::Redis)];
        Self {
            kind: node.choice("type", &kinds, default.kind),
            redis_url: node.secret("redis_url"),
            queue_maxsize: node.int("queue_maxsize", default.queue_maxsize, 1..),
            queue_max_bytes: node.int("queue_max_bytes", default.queue_max_bytes, 1..),
            total_max_bytes: node.int("total_max_bytes", default.total_max_bytes, 1..),
            max_connections: node.opt_int("max_connections", 1..),
            stream_ttl_seconds: node.int("stream_ttl_seconds", default.stream_ttl_seconds, 1..),
            recovered_stream_cleanup_delay_seconds: node.int(
                "recovered_stream_cleanup_delay_seconds",
                default.recovered_stream_cleanup_delay_seconds,
                0..,
            ),
        }
    }
}

/// `run_ownership`, read once at start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunOwnership {
    /// Seconds for which a process owns a run without a heartbeat; 1 to a hundred years, default 30.
    pub lease_seconds: u64,
    /// Seconds after the lease before another process takes over; at most a hundred years, default 10.
    pub grace_seconds: u64,
    /// Whether processes renew leases on their rows, which several processes on one database need; by default with the
    /// backend `postgres` only.
    pub heartbeat_enabled: Option<bool>,
}

impl Default for RunOwnership {
    fn default() -> Self {
        Self { lease_seconds: 30, grace_seconds: 10, heartbeat_enabled: None }
    }
}

impl RunOwnership {
    pub(crate) fn read(root: &Node<'_>) -> Self {
        let (node, default) = (root.section("run_ownership"), Self::default());
        let longest = u64::from(LONGEST_SECONDS);
        Self {
            lease_seconds: node.int("lease_seconds", default.lease_seconds, 1..=longest),
            grace_seconds: node.int("grace_seconds", default.grace_seconds, 0..=longest),
            heartbeat_enabled: node.opt_bool("heartbeat_enabled"),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::{assert_refused, read};
    use super::*;

    #[test]
    fn missing_and_null_sections_are_the_documented_defaults() {
        for tree in [json!({}), json!({"run_events": null, "stream_bridge": null, "run_ownership": null})] {
            let events = read(&tree, RunEvents::read).unwrap();
            assert_eq!(
                events,
                RunEvents {
                    backend: RunEventsBackend::Memory,
                    max_trace_content: 10_240,
                    track_token_usage: true
                }
            );
            let bridge = read(&tree, StreamBridge::read).unwrap();
            assert_eq!(
                bridge,
                StreamBridge {
                    kind: StreamBridgeType::Memory,
                    redis_url: None,
                    queue_maxsize: 256,
                    queue_max_bytes: 8_388_608,
                    total_max_bytes: 268_435_456,
                    max_connections: None,
                    stream_ttl_seconds: 86_400,
                    recovered_stream_cleanup_delay_seconds: 60,
                }
            );
            let ownership = read(&tree, RunOwnership::read).unwrap();
            assert_eq!(
                ownership,
                RunOwnership { lease_seconds: 30, grace_seconds: 10, heartbeat_enabled: None }
            );
        }
    }

    #[test]
    fn every_key_is_read() {
        let events = json!({"run_events": {
            "backend": "db", "max_trace_content": "99", "track_token_usage": false,
        }});
        assert_eq!(
            read(&events, RunEvents::read).unwrap(),
            RunEvents { backend: RunEventsBackend::Db, max_trace_content: 99, track_token_usage: false }
        );
        let jsonl = json!({"run_events": {"backend": "jsonl"}});
        assert_eq!(read(&jsonl, RunEvents::read).unwrap().backend, RunEventsBackend::Jsonl);
        let bridge = json!({"stream_bridge": {
            "type": "redis", "redis_url": "redis://r", "queue_maxsize": 5, "queue_max_bytes": 6,
            "total_max_bytes": "8", "max_connections": 4,
            "stream_ttl_seconds": 7, "recovered_stream_cleanup_delay_seconds": 0,
        }});
        assert_eq!(
            read(&bridge, StreamBridge::read).unwrap(),
            StreamBridge {
                kind: StreamBridgeType::Redis,
                redis_url: Some(Secret::new("redis://r")),
                queue_maxsize: 5,
                queue_max_bytes: 6,
                total_max_bytes: 8,
                max_connections: Some(4),
                stream_ttl_seconds: 7,
                recovered_stream_cleanup_delay_seconds: 0,
            }
        );
        let ownership =
            json!({"run_ownership": {"lease_seconds": 5, "grace_seconds": 0, "heartbeat_enabled": true}});
        assert_eq!(
            read(&ownership, RunOwnership::read).unwrap(),
            RunOwnership { lease_seconds: 5, grace_seconds: 0, heartbeat_enabled: Some(true) }
        );
    }

    #[test]
    fn values_outside_their_ranges_are_problems() {
        assert_refused(
            "run_events",
            &[
                (json!({"backend": "disk"}), "backend"),
                (json!({"max_trace_content": 0}), "max_trace_content"),
            ],
            RunEvents::read,
        );
        assert_refused(
            "stream_bridge",
            &[
                (json!({"type": "kafka"}), "type"),
                (json!({"queue_maxsize": 0}), "queue_maxsize"),
                (json!({"queue_max_bytes": 0}), "queue_max_bytes"),
                (json!({"total_max_bytes": -1}), "total_max_bytes"),
                (json!({"max_connections": 0}), "max_connections"),
                (json!({"stream_ttl_seconds": 0}), "stream_ttl_seconds"),
                (
                    json!({"recovered_stream_cleanup_delay_seconds": -1}),
                    "recovered_stream_cleanup_delay_seconds",
                ),
            ],
            StreamBridge::read,
        );
        assert_refused(
            "run_ownership",
            &[
                (json!({"lease_seconds": 0}), "lease_seconds"),
                (json!({"grace_seconds": -1}), "grace_seconds"),
            ],
            RunOwnership::read,
        );
    }

    #[test]
    fn a_lease_has_an_end_that_clocks_reach() {
        let longest = json!({"lease_seconds": 3_153_600_000_u64, "grace_seconds": 3_153_600_000_u64});
        let read = read(&json!({ "run_ownership": longest }), RunOwnership::read).unwrap();
        assert_eq!((read.lease_seconds, read.grace_seconds), (3_153_600_000, 3_153_600_000));
        for key in ["lease_seconds", "grace_seconds"] {
            let beyond = [json!({ key: 3_153_600_001_u64 }), json!({ key: u64::MAX })];
            assert_refused("run_ownership", &beyond.map(|section| (section, key)), RunOwnership::read);
        }
    }
}
