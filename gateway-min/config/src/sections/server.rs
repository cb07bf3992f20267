//! `server`: what a client may hold of the gateway.

use crate::node::Node;

/// `server`, read once at start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    /// The maximum number of connections; at least 1, default 4096.
    pub max_connections: usize,
    /// Seconds that a connection may wait for the whole head of its next request; at least 1, default 60.
    pub header_timeout_seconds: u64,
    /// Seconds that the body of a request may take; at least 1, default 120.
    pub body_timeout_seconds: u64,
}

impl Default for Server {
    fn default() -> Self {
        Self { max_connections: 4096, header_timeout_seconds: 60, body_timeout_seconds: 120 }
    }
}

impl Server {
    pub(crate) fn read(root: &Node<'_>) -> Self {
        let (node, default) = (root.section("server"), Self::default());
        Self {
            max_connections: node.int("max_connections", default.max_connections, 1..),
            // A day; more is as good as none.
            header_timeout_seconds: node.int(
                "header_timeout_seconds",
                default.header_timeout_seconds,
                1..=86_400,
            ),
            body_timeout_seconds: node.int("body_timeout_seconds", default.body_timeout_seconds, 1..=86_400),
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
        for tree in [json!({}), json!({"server": null})] {
            let server = read(&tree, Server::read).unwrap();
            assert_eq!((server.max_connections, server.header_timeout_seconds), (4096, 60));
            assert_eq!(server.body_timeout_seconds, 120);
        }
        let tree = json!({"server": {
            "max_connections": "7", "header_timeout_seconds": 8, "body_timeout_seconds": 9,
        }});
        assert_eq!(
            read(&tree, Server::read).unwrap(),
            Server { max_connections: 7, header_timeout_seconds: 8, body_timeout_seconds: 9 }
        );
    }

    #[test]
    fn no_limit_is_refused() {
        assert_refused(
            "server",
            &[
                (json!({"max_connections": 0}), "max_connections"),
                (json!({"header_timeout_seconds": 0}), "header_timeout_seconds"),
                (json!({"body_timeout_seconds": 100_000}), "body_timeout_seconds"),
            ],
            Server::read,
        );
    }
}
