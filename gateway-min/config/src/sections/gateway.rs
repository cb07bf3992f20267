//! `gateway`: what a client may hold of the gateway.

use crate::node::Node;

/// `gateway`, read once at start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gateway {
    /// The maximum number of connections; at least 1, default 4096.
    pub max_connections: usize,
    /// Seconds that a connection may wait for the whole head of its next request; at least 1, default 60.
    pub header_timeout_seconds: u64,
    /// Seconds that the body of a request may take; at least 1, default 120.
    pub body_timeout_seconds: u64,
    /// The bytes of messages in a response of the history, beyond its first entry, of requests in a list of runs, and of
    /// metadata in a search of threads; default 8 MiB.
    pub history_max_bytes: usize,
}

impl Default for Gateway {
    fn default() -> Self {
        Self {
            max_connections: 4096,
            header_timeout_seconds: 60,
            body_timeout_seconds: 120,
            history_max_bytes: 8 << 20,
        }
    }
}

impl Gateway {
    pub(crate) fn read(root: &Node<'_>) -> Self {
        let (node, default) = (root.section("gateway"), Self::default());
        Self {
            max_connections: node.int("max_connections", default.max_connections, 1..),
            // A day; more is as good as none.
            header_timeout_seconds: node.int(
                "header_timeout_seconds",
                default.header_timeout_seconds,
                1..=86_400,
            ),
            body_timeout_seconds: node.int("body_timeout_seconds", default.body_timeout_seconds, 1..=86_400),
            history_max_bytes: node.int("history_max_bytes", default.history_max_bytes, 0..),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::{assert_refused, read};
    use super::*;

    #[test]
    fn limits_have_defaults_and_are_read() {
        for tree in [json!({}), json!({"gateway": null})] {
            let gateway = read(&tree, Gateway::read).unwrap();
            assert_eq!((gateway.max_connections, gateway.header_timeout_seconds), (4096, 60));
            assert_eq!((gateway.body_timeout_seconds, gateway.history_max_bytes), (120, 8_388_608));
        }
        let tree = json!({"gateway": {
            "max_connections": "7", "header_timeout_seconds": 8, "body_timeout_seconds": 9,
            "history_max_bytes": 10,
        }});
        assert_eq!(
            read(&tree, Gateway::read).unwrap(),
            Gateway {
                max_connections: 7,
                header_timeout_seconds: 8,
                body_timeout_seconds: 9,
                history_max_bytes: 10
            }
        );
    }

    #[test]
    fn no_limit_is_refused() {
        assert_refused(
            "gateway",
            &[
                (json!({"max_connections": 0}), "max_connections"),
                (json!({"header_timeout_seconds": 0}), "header_timeout_seconds"),
                (json!({"body_timeout_seconds": 100_000}), "body_timeout_seconds"),
                (json!({"history_max_bytes": -1}), "history_max_bytes"),
            ],
            Gateway::read,
        );
    }
}
