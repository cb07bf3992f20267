//! The messages of the Agent Client Protocol, version 1, as far as a client without a file system and a terminal needs
//! them (<https://agentclientprotocol.com>).
//!
//! Written here and not taken from the protocol's own crates, because these change how all of this program's JSON objects
//! are ordered (`serde_json/preserve_order`), also those that are stored and hashed; see `docs/decisions.md`.

use std::borrow::Cow;
use std::path::Path;

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value as Json, json};

/// The version of the protocol.
pub(crate) const VERSION: u64 = 1;

/// The protocol's code for a session that needs [`sign_in`] first.
pub(crate) const AUTH_REQUIRED: i64 = -32_000;
/// JSON-RPC's code for a method that does not exist.
pub(crate) const METHOD_NOT_FOUND: i64 = -32_601;
/// JSON-RPC's code for parameters that do not fit.
pub(crate) const INVALID_PARAMS: i64 = -32_602;

/// A line of the agent. What is not needed is not taken apart.
#[derive(Debug, Deserialize)]
pub(crate) struct Incoming<'a> {
    #[serde(borrow, default)]
    pub(crate) id: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(crate) method: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    pub(crate) params: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(crate) result: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(crate) error: Option<&'a RawValue>,
}

/// The answer to `initialize`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Initialized {
    pub(crate) protocol_version: Option<u64>,
    pub(crate) agent_capabilities: Capabilities,
    /// The ways to sign in.
    pub(crate) auth_methods: Json,
}

/// What the agent can do.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Capabilities {
    pub(crate) mcp_capabilities: McpCapabilities,
}

/// Which MCP servers the agent can use, besides those on standard input and output.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct McpCapabilities {
    pub(crate) http: bool,
}

/// The answer to `session/new`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SessionCreated {
    pub(crate) session_id: String,
}

/// The answer to `session/prompt`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Prompted {
    pub(crate) stop_reason: String,
}

/// An error of the agent.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct RpcError {
    pub(crate) code: i64,
    pub(crate) message: String,
    data: Json,
}

impl RpcError {
    /// What it says, with the details that some agents give.
    pub(crate) fn text(&self) -> String {
        let details = match &self.data {
            Json::Null => None,
            Json::String(text) => Some(text.clone()),
            data => Some(data["details"].as_str().map_or_else(|| data.to_string(), str::to_owned)),
        };
        match details {
            Some(details) if details != self.message => format!("{} ({details})", self.message),
            _ => self.message.clone(),
        }
    }
}

#[derive(Deserialize)]
struct SessionUpdate<'a> {
    #[serde(borrow)]
    update: Update<'a>,
}

#[derive(Deserialize)]
struct Update<'a> {
    #[serde(rename = "sessionUpdate", borrow)]
    kind: Cow<'a, str>,
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Content<'a> {
    #[serde(rename = "type", borrow)]
    kind: Cow<'a, str>,
    #[serde(borrow, default)]
    text: Cow<'a, str>,
}

#[derive(Deserialize)]
struct PermissionRequest<'a> {
    #[serde(borrow)]
    options: Vec<PermissionOption<'a>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PermissionOption<'a> {
    #[serde(borrow)]
    option_id: Cow<'a, str>,
    #[serde(borrow)]
    kind: Cow<'a, str>,
}

pub(crate) fn initialize() -> Json {
    json!({
        "protocolVersion": VERSION,
        "clientCapabilities": {"fs": {"readTextFile": false, "writeTextFile": false}, "terminal": false},
        "clientInfo": {"name": "threadkeep", "version": env!("CARGO_PKG_VERSION")},
    })
}

/// The way to sign in that needs only variables that the agent has, and so no user. It lists them, or has the name of
/// its one variable, as `openai-api-key`.
pub(crate) fn sign_in(methods: &Json, is_set: impl Fn(&str) -> bool) -> Option<&str> {
    let is_ready = |method: &Json, id: &str| {
        let listed = method["vars"].as_array().into_iter().flatten();
        let needed = listed.filter(|variable| variable["optional"] != true);
        let needed: Vec<&str> = needed.filter_map(|variable| variable["name"].as_str()).collect();
        if needed.is_empty() {
            is_set(&id.to_uppercase().replace('-', "_"))
        } else {
            needed.into_iter().all(&is_set)
        }
    };
    let mut ids = methods.as_array()?.iter().filter_map(|method| Some((method, method["id"].as_str()?)));
    ids.find(|(method, id)| is_ready(method, id)).map(|(_, id)| id)
}

pub(crate) fn authenticate(method: &str) -> Json {
    json!({ "methodId": method })
}

/// `model` is a hint. It goes where agents that know no hint must ignore it.
pub(crate) fn new_session(directory: &Path, servers: &[Json], model: Option<&str>) -> Json {
    let mut params = json!({"cwd": directory, "mcpServers": servers});
    if let Some(model) = model {
        params["_meta"] = json!({"model": model});
    }
    params
}

pub(crate) fn prompt(session: &str, text: &str) -> Json {
    json!({"sessionId": session, "prompt": [{"type": "text", "text": text}]})
}

/// The text of an update with a part of the agent's message; `None` for all other updates.
pub(crate) fn message_text(params: &RawValue) -> Option<String> {
    let SessionUpdate { update } = serde_json::from_str(params.get()).ok()?;
    if update.kind != "agent_message_chunk" {
        return None;
    }
    let content: Content<'_> = serde_json::from_str(update.content?.get()).ok()?;
    (content.kind == "text").then(|| content.text.into_owned())
}

/// The answer to a request for permission: with `approve` the option that allows it once, else the one that allows it
/// always, else none. `None` if it is no such request.
pub(crate) fn permission(params: Option<&RawValue>, approve: bool) -> Option<Json> {
    let PermissionRequest { options } = serde_json::from_str(params?.get()).ok()?;
    let offered = |kind: &str| options.iter().find(|option| option.kind == kind);
    let chosen = offered("allow_once").or_else(|| offered("allow_always")).filter(|_| approve);
    Some(match chosen {
        Some(option) => json!({"outcome": {"outcome": "selected", "optionId": option.option_id}}),
        None => json!({"outcome": {"outcome": "cancelled"}}),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(value: &Json) -> Box<RawValue> {
        RawValue::from_string(value.to_string()).unwrap()
    }

    /// Scenario 75: once is preferred over always, whatever their order; without either there is no permission.
    #[test]
    fn permission_is_given_once_before_always_and_only_if_it_is_configured() {
        let option = |id: &str, kind: &str| json!({"optionId": id, "name": id, "kind": kind});
        let once = option("o", "allow_once");
        let always = option("a", "allow_always");
        let no = option("n", "reject_once");
        let (selected, cancelled) = (
            |id: &str| json!({"outcome": {"outcome": "selected", "optionId": id}}),
            json!({"outcome": {"outcome": "cancelled"}}),
        );
        for (options, approved) in [
            (json!([no, always, once]), selected("o")),
            (json!([no, always]), selected("a")),
            (json!([no]), cancelled.clone()),
            (json!([]), cancelled.clone()),
        ] {
            let params = raw(&json!({"sessionId": "s", "toolCall": {"toolCallId": "t"}, "options": options}));
            assert_eq!(permission(Some(&params), true), Some(approved));
            assert_eq!(permission(Some(&params), false), Some(cancelled.clone()));
        }
        assert_eq!(permission(Some(&raw(&json!({"options": 1}))), true), None);
        assert_eq!(permission(None, true), None);
    }

    #[test]
    fn only_the_text_of_the_agents_message_counts() {
        let update = |kind: &str, content: Json| {
            message_text(&raw(
                &json!({"sessionId": "s", "update": {"sessionUpdate": kind, "content": content}}),
            ))
        };
        let text = json!({"type": "text", "text": "a \"quoted\"\n\u{e9}"});
        assert_eq!(update("agent_message_chunk", text.clone()).as_deref(), Some("a \"quoted\"\n\u{e9}"));
        for kind in ["agent_thought_chunk", "user_message_chunk", "tool_call", "anything"] {
            assert_eq!(update(kind, text.clone()), None);
        }
        assert_eq!(
            update("agent_message_chunk", json!({"type": "image", "data": "x", "mimeType": "y"})),
            None
        );
        assert_eq!(update("agent_message_chunk", json!([text])), None);
        assert_eq!(message_text(&raw(&json!({"update": {"sessionUpdate": "plan", "entries": []}}))), None);
        assert_eq!(message_text(&raw(&json!([]))), None);
    }

    #[test]
    fn only_a_way_to_sign_in_that_needs_no_user_is_chosen() {
        let is_set = |name: &str| ["OPENAI_API_KEY", "AZURE_KEY"].contains(&name);
        let method = |id: &str, vars: Json| json!({"id": id, "name": id, "type": "env_var", "vars": vars});
        let browser = json!({"id": "chatgpt", "name": "Log in"});
        let named = json!({"id": "openai-api-key", "name": "Key"});
        let listed =
            method("azure", json!([{"name": "AZURE_KEY"}, {"name": "AZURE_REGION", "optional": true}]));
        let lacking = method("vertex", json!([{"name": "AZURE_KEY"}, {"name": "VERTEX_KEY"}]));
        for (methods, chosen) in [
            (json!([browser, named]), Some("openai-api-key")),
            (json!([lacking, listed]), Some("azure")),
            (json!([browser, lacking, {"id": 1}, null]), None),
            (json!([]), None),
            (Json::Null, None),
        ] {
            assert_eq!(sign_in(&methods, is_set), chosen, "{methods}");
        }
    }

    #[test]
    fn an_error_says_its_details() {
        let text = |error: Json| serde_json::from_value::<RpcError>(error).unwrap().text();
        assert_eq!(text(json!({"code": -1, "message": "no"})), "no");
        assert_eq!(text(json!({"code": -1, "message": "no", "data": {"details": "why"}})), "no (why)");
        assert_eq!(text(json!({"code": -1, "message": "no", "data": {"x": 1}})), "no ({\"x\":1})");
    }

    #[test]
    fn the_model_is_a_hint_that_strict_agents_may_ignore() {
        assert_eq!(new_session(Path::new("/w"), &[], None), json!({"cwd": "/w", "mcpServers": []}));
        let hinted = new_session(Path::new("/w"), &[], Some("m"));
        assert_eq!(hinted, json!({"cwd": "/w", "mcpServers": [], "_meta": {"model": "m"}}));
    }
}
