//! What no text about a server may contain: its address and its headers, which may hold keys.

use reqwest::Url;
use threadkeep_config::McpServer;

/// Replaces what is hidden.
const MASK: &str = "***";
/// Shorter pieces, as the path `/`, hide nothing and would make texts unreadable.
const PIECE_MIN: usize = 4;

/// The pieces of a server's address and headers, the longest first.
#[derive(Debug, Clone, Default)]
pub(crate) struct Hidden(Vec<String>);

impl Hidden {
    /// Those of this server; none of a program.
    pub(crate) fn of(server: &McpServer) -> Self {
        let mut pieces: Vec<String> = Vec::new();
        if let Some(url) = &server.url {
            let url = url.expose();
            // Libraries repeat it as configured, in its normal form, or in parts: a proxy's page names the path.
            pieces.push(url.to_owned());
            if let Ok(url) = Url::parse(url) {
                let query = url.query().unwrap_or_default();
                let host = url.host_str().unwrap_or_default();
                pieces.extend(
                    [url.as_str(), url.username(), url.password().unwrap_or_default(), host]
                        .map(str::to_owned),
                );
                pieces.extend(url.port().map(|port| format!("{host}:{port}")));
                pieces.extend([query, url.path()].map(str::to_owned));
                pieces.push(format!("{}?{query}", url.path()));
                pieces.extend(url.query_pairs().map(|(_, value)| value.into_owned()));
            }
        }
        for value in server.headers.values() {
            let value = value.expose();
            pieces.push(value.to_owned());
            // The key without its scheme, as in "Bearer <key>".
            pieces.extend(value.split_once(' ').map(|(_, key)| key.to_owned()));
        }
        pieces.retain(|piece| piece.len() >= PIECE_MIN);
        pieces.sort_by_key(|piece| std::cmp::Reverse(piece.len()));
        pieces.dedup();
        Self(pieces)
    }

    /// The text without them.
    pub(crate) fn from(&self, text: &str) -> String {
        self.0.iter().fold(text.to_owned(), |text, piece| text.replace(piece, MASK))
    }
}

/// Whether libraries of the client log under this target: they log addresses, headers, and what tools are called with.
pub fn is_of_client(target: &str) -> bool {
    ["rmcp", "reqwest", "hyper_util::client"].iter().any(|library| {
        target.strip_prefix(library).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use threadkeep_config::Secret;

    use super::*;

    #[test]
    fn no_part_of_an_address_or_a_header_is_left() {
        let server = McpServer {
            command: None,
            args: vec![],
            env: BTreeMap::new(),
            url: Some(Secret::new("https://user:pass@Tools.Example:8443/mcp/key-1?token=key-2&a=b")),
            headers: [("Authorization".to_owned(), Secret::new("Bearer key-3"))].into(),
            enabled: true,
            timeout_seconds: 60,
            group: None,
            routing: BTreeMap::new(),
        };
        let hidden = Hidden::of(&server);
        let said = [
            "for url (https://user:pass@tools.example:8443/mcp/key-1?token=key-2&a=b)",
            "Cannot POST /mcp/key-1",
            "no such token: key-2",
            "tools.example:8443 refused user with pass",
            "who is Bearer key-3, or key-3?",
        ];
        let shown = said.map(|text| hidden.from(text)).join("\n");
        for secret in ["key-", "user", "pass", "example", "8443"] {
            assert!(!shown.contains(secret), "{secret} in {shown}");
        }
        assert!(shown.contains("Cannot POST ***"), "{shown}");
        assert_eq!(
            Hidden::of(&McpServer { url: None, headers: BTreeMap::new(), ..server }).from("/mcp"),
            "/mcp"
        );
    }

    #[test]
    fn what_the_client_logs_is_known_by_its_target() {
        for target in
            ["rmcp", "rmcp::transport::worker", "reqwest::connect", "hyper_util::client::legacy::pool"]
        {
            assert!(is_of_client(target), "{target}");
        }
        for target in ["threadkeep_mcp::server", "rmcpx", "hyper_util::server", "hyper"] {
            assert!(!is_of_client(target), "{target}");
        }
    }
}
