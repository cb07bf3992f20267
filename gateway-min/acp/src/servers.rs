//! The MCP servers of a configuration, as the Agent Client Protocol describes them to an agent.

use std::collections::BTreeMap;

use serde_json::{Value as Json, json};
use threadkeep_config::{AcpAgent, Config, Hidden, McpServer, Secret};
use threadkeep_processes::Program;

/// Those that are in use: enabled, and of a group whose tools agents have. A program that is not installed is left out.
pub(crate) fn used(config: &Config) -> Vec<Json> {
    let servers = config.mcp_servers.iter();
    described(servers.filter(|(_, server)| config.has_tool_group(server.group.as_deref())))
}

fn described<'a>(servers: impl Iterator<Item = (&'a String, &'a McpServer)>) -> Vec<Json> {
    let enabled = servers.filter(|(_, server)| server.enabled);
    enabled.filter_map(|(name, server)| description(name, server)).collect()
}

fn description(name: &str, server: &McpServer) -> Option<Json> {
    let pairs = |values: &BTreeMap<String, Secret>| -> Vec<Json> {
        values.iter().map(|(name, value)| json!({"name": name, "value": value.expose()})).collect()
    };
    if let Some(url) = &server.url {
        let headers = pairs(&server.headers);
        return Some(json!({"type": "http", "name": name, "url": url.expose(), "headers": headers}));
    }
    let program = Program {
        command: server.command.clone()?,
        args: server.args.clone(),
        env: server.env.clone(),
        directory: ".".into(),
    };
    // The protocol wants an absolute path.
    let command = program.resolved().ok()?;
    Some(json!({"name": name, "command": command, "args": program.args, "env": pairs(&program.env)}))
}

/// What an error of the agent must not contain: its variables, and the secrets of these servers, which it gets.
pub(crate) fn hidden(agent: &AcpAgent, servers: &[Json]) -> Hidden {
    servers.iter().fold(Hidden::of_variables(&agent.env), |hidden, server| {
        let values = |key: &str| {
            let pairs = server[key].as_array().into_iter().flatten();
            pairs.filter_map(|pair| pair["value"].as_str()).collect::<Vec<_>>()
        };
        let hidden = hidden.with_values(values("env")).with_headers(values("headers"));
        match server["url"].as_str() {
            Some(url) => hidden.with_url(url),
            None => hidden,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_in_use_are_described_and_programs_have_absolute_paths() {
        let server = McpServer {
            command: Some("sh".into()),
            args: vec!["-c".into()],
            env: [("KEY".into(), Secret::new("sk-1"))].into(),
            url: None,
            headers: BTreeMap::new(),
            enabled: true,
            timeout_seconds: 60,
            group: None,
            routing: BTreeMap::new(),
        };
        let missing = McpServer { command: Some("no-such-server".into()), ..server.clone() };
        let off = McpServer { enabled: false, ..server.clone() };
        let web = McpServer {
            command: None,
            url: Some(Secret::new("https://mcp.example/")),
            headers: [("Authorization".into(), Secret::new("Bearer sk-2"))].into(),
            ..server.clone()
        };
        let named = [("files", server), ("missing", missing), ("off", off), ("web", web)];
        let named: BTreeMap<String, McpServer> = named.map(|(name, server)| (name.to_owned(), server)).into();
        let found = described(named.iter());
        let command = found[0]["command"].clone();
        assert!(command.as_str().is_some_and(|command| command.starts_with('/')), "{command}");
        assert_eq!(
            found,
            [
                json!({"name": "files", "command": command, "args": ["-c"], "env": [{"name": "KEY", "value": "sk-1"}]}),
                json!({
                    "type": "http", "name": "web", "url": "https://mcp.example/",
                    "headers": [{"name": "Authorization", "value": "Bearer sk-2"}],
                }),
            ]
        );
    }
}
