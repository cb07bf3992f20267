//! What libraries of the client log.

/// Whether libraries of the client log under this target: they log addresses, headers, and what tools are called with.
pub fn is_of_client(target: &str) -> bool {
    ["rmcp", "reqwest", "hyper_util::client"].iter().any(|library| {
        target.strip_prefix(library).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

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
