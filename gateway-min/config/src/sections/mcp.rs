//! `mcp_servers`: servers that speak the Model Context Protocol, whose tools agents may call. Read live.

use std::collections::BTreeMap;

use super::sandbox::check_variables;
use crate::node::Node;
use crate::secret::Secret;

/// One entry of `mcp_servers`. It has either a `command` or a `url`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct McpServer {
    /// The program of a server on standard input and output.
    pub command: Option<String>,
    /// Its arguments; none for a `url`.
    pub args: Vec<String>,
    /// Variables added to its environment; none for a `url`.
    pub env: BTreeMap<String, Secret>,
    /// The address of a server over streamable HTTP.
    pub url: Option<Secret>,
    /// Headers of each request to it; none for a `command`.
    pub headers: BTreeMap<String, Secret>,
    /// Whether it is used; default true.
    pub enabled: bool,
    /// Seconds one call may take; 1 to 86,400, default 60.
    pub timeout_seconds: u64,
    /// The group of its tools; see `tool_groups`.
    pub group: Option<String>,
    /// Which questions its tools are for, by the server's name of a tool.
    pub routing: BTreeMap<String, ToolRouting>,
}

/// What a tool is for: a deferred tool is loaded without a search if the question has one of these words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolRouting {
    /// The words, or phrases.
    pub keywords: Vec<String>,
    /// Which tool goes first if there are too many; higher is earlier, default 0.
    pub priority: i64,
}

const TRANSPORT: &str = "is not a setting: a server has either a `command`, for standard input and output, or a `url`, for streamable \
     HTTP; remove the key";

/// Settings for what the client of the protocol does not do, each with what to do instead.
const NOT_DONE: [(&str, &str); 9] = [
    ("oauth", "is not supported: put a token into `headers`, as {Authorization: $TOKEN}"),
    ("auth", "is not supported: put a token into `headers`, as {Authorization: $TOKEN}"),
    ("resources", "is not supported: agents have the tools of a server, not its resources; remove the key"),
    ("prompts", "is not supported: agents have the tools of a server, not its prompts; remove the key"),
    ("sampling", "is not supported: a server gets no answers of the gateway's models; remove the key"),
    ("elicitation", "is not supported: a server cannot ask the user; remove the key"),
    ("type", TRANSPORT),
    ("transport", TRANSPORT),
    ("roots", "is not supported: name the directories in the server's `args`, and remove the key"),
];

/// The word for a tool that is preferred for questions with its keywords.
const MODES: [(&str, ()); 1] = [("prefer", ())];

impl McpServer {
    pub(crate) fn read_all(root: &Node<'_>) -> BTreeMap<String, Self> {
        let section = root.section("mcp_servers");
        let mut servers = BTreeMap::new();
        for (name, node) in root.named("mcp_servers") {
            // Tools are called `mcp_<server>_<tool>`, so that the first part must end at an underscore.
            if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-') {
                section.problem(name, "is no name of a server: it may have letters, digits and hyphens");
            }
            servers.insert(name.to_owned(), Self::read(&node));
        }
        servers
    }

    fn read(node: &Node<'_>) -> Self {
        let (env, headers) = (node.variables("env"), node.variables("headers"));
        check_variables(&env, &node.section("env"));
        let (command, url) = (node.text("command"), node.secret("url"));
        if command.is_some() == url.is_some() {
            node.problem("command", "set either a command, for a server that is a program, or a url");
        }
        if command.as_ref().is_some_and(|command| command.trim().is_empty()) {
            node.problem("command", "must not be empty");
        }
        let args = node.texts("args").unwrap_or_default();
        // Who sets a key that is never sent believes that a server is protected by it.
        if url.is_none() && !headers.is_empty() {
            node.problem("headers", "is for a server with a `url`: a program gets its keys from `env`");
        }
        if command.is_none() && !env.is_empty() {
            node.problem("env", "is for a server with a `command`: put keys for a `url` into `headers`");
        }
        if command.is_none() && !args.is_empty() {
            node.problem("args", "is for a server with a `command`: remove the key");
        }
        let is_http =
            |url: &Secret| url.expose().starts_with("http://") || url.expose().starts_with("https://");
        if !url.as_ref().is_none_or(is_http) {
            node.problem("url", "must begin with http:// or https://");
        }
        for (key, why) in NOT_DONE {
            if node.has(key) {
                node.problem(key, why);
            }
        }
        let routing = node.named("routing").into_iter();
        Self {
            command,
            args,
            env,
            url,
            headers,
            enabled: node.bool("enabled", true),
            timeout_seconds: node.int("timeout_seconds", 60, 1..=86_400),
            group: node.text("group"),
            routing: routing.map(|(tool, node)| (tool.to_owned(), ToolRouting::read(&node))).collect(),
        }
    }
}

impl ToolRouting {
    fn read(node: &Node<'_>) -> Self {
        node.choice("mode", &MODES, ());
        let keywords = node.texts("keywords").unwrap_or_default();
        if keywords.iter().all(|word| word.trim().is_empty()) {
            node.problem("keywords", "is required: a list of words");
        }
        Self { keywords, priority: node.opt_int("priority", ..).unwrap_or(0) }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::{assert_refused, read};
    use super::*;

    #[test]
    fn servers_are_read_and_their_secrets_are_hidden() {
        let tree = json!({"mcp_servers": {
            "files": {"command": "server", "args": ["/data"], "env": {"KEY": "sk-1"}},
            "web-2": {
                "url": "https://mcp.example/sk-2", "headers": {"Authorization": "Bearer sk-3"}, "enabled": false,
                "timeout_seconds": 5, "group": "web",
                "routing": {"find": {"mode": "prefer", "keywords": ["weather"], "priority": -2}},
            },
        }});
        let servers = read(&tree, McpServer::read_all).unwrap();
        assert!(!format!("{servers:?}").contains("sk-"));
        let files = McpServer {
            command: Some("server".into()),
            args: vec!["/data".into()],
            env: [("KEY".into(), Secret::new("sk-1"))].into(),
            url: None,
            headers: BTreeMap::new(),
            enabled: true,
            timeout_seconds: 60,
            group: None,
            routing: BTreeMap::new(),
        };
        let web = McpServer {
            command: None,
            args: vec![],
            env: BTreeMap::new(),
            url: Some(Secret::new("https://mcp.example/sk-2")),
            headers: [("Authorization".into(), Secret::new("Bearer sk-3"))].into(),
            enabled: false,
            timeout_seconds: 5,
            group: Some("web".into()),
            routing: [("find".into(), ToolRouting { keywords: vec!["weather".into()], priority: -2 })].into(),
        };
        assert_eq!(servers, [("files".to_owned(), files), ("web-2".to_owned(), web)].into());
        assert!(read(&json!({}), McpServer::read_all).unwrap().is_empty());
    }

    /// What the client of the protocol does not do has no setting, and says so, whatever the value.
    #[test]
    fn what_is_not_done_of_the_protocol_is_refused_by_name() {
        for (key, why) in NOT_DONE {
            let tree = json!({"mcp_servers": {"a": {"url": "https://x", key: null}}});
            let error = read(&tree, McpServer::read_all).unwrap_err();
            assert!(error.contains(&format!("\n  mcp_servers.a.{key}: {why}")), "{error}");
            assert!(
                why.starts_with("is not ") && (why.contains("remove the key") || why.contains("headers"))
            );
        }
    }

    #[test]
    fn servers_that_cannot_be_used_are_problems() {
        let server = |extra: serde_json::Value| {
            let mut server = json!({"command": "c"});
            server.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            json!({ "a": server })
        };
        assert_refused(
            "mcp_servers",
            &[
                (json!({"a": {}}), "a.command"),
                (json!({"a": {"command": "c", "url": "http://x"}}), "a.command"),
                (json!({"a": {"url": "ftp://x"}}), "a.url"),
                (json!({"a": {"command": " "}}), "a.command"),
                (server(json!({"headers": {"A": "b"}})), "a.headers"),
                (json!({"a": {"url": "http://x", "env": {"A": "b"}}}), "a.env"),
                (json!({"a": {"url": "http://x", "args": ["a"]}}), "a.args"),
                (json!({"a_b": {"command": "c"}}), "a_b"),
                (server(json!({"timeout_seconds": 0})), "a.timeout_seconds"),
                (server(json!({"env": {"A=B": "c"}})), "a.env.A=B"),
                (server(json!({"routing": {"t": {"keywords": []}}})), "a.routing.t.keywords"),
                (
                    server(json!({"routing": {"t": {"keywords": ["x"], "mode": "always"}}})),
                    "a.routing.t.mode",
                ),
            ],
            McpServer::read_all,
        );
    }
}
