//! What a server offers, as a model may see it.

use rmcp::model::{ListToolsResult, Tool};
use serde_json::{Map, Value as Json};
use threadkeep_agent::model::ToolSpec;

use crate::schema::parameters;

/// The longest name of a tool that providers take.
const NAME_MAX: usize = 64;
/// How much of a hash is in a name.
const HASH_CHARS: usize = 8;
/// The longest description, in characters.
const DESCRIPTION_MAX: usize = 2_000;
/// The largest schema, in bytes.
const SCHEMA_MAX: usize = 32 * 1024;
/// What is used of a tool.
const USED: [&str; 4] = ["name", "title", "description", "inputSchema"];

/// A tool of a server.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Listed {
    /// The server's name of it.
    pub(crate) name: String,
    /// What the model sees.
    pub(crate) spec: ToolSpec,
}

/// The tools that can be offered. Those whose names are those of others, or with huge schemas, are left out with a
/// warning.
pub(crate) fn listed(server: &str, tools: Vec<Tool>) -> Vec<Listed> {
    let mut found: Vec<Listed> = Vec::new();
    for tool in tools {
        let name = model_name(server, &tool.name);
        let given = Json::Object(tool.input_schema.as_ref().clone()).to_string().len();
        let parameters = if given > SCHEMA_MAX { Json::Null } else { parameters(&tool.input_schema) };
        let size = given.max(parameters.to_string().len());
        if size > SCHEMA_MAX || found.iter().any(|known| known.spec.name == name) {
            let tool: String = tool.name.chars().take(100).collect();
            tracing::warn!(
                server,
                tool,
                size,
                "a tool is left out: models would have another by the same name, or its schema is too large"
            );
            continue;
        }
        let text = tool.description.or(tool.title.map(Into::into)).unwrap_or_default();
        let description = text.chars().take(DESCRIPTION_MAX).collect();
        found.push(Listed { name: tool.name.into_owned(), spec: ToolSpec { name, description, parameters } });
    }
    found
}

/// The name by which models call a tool. Providers take letters, digits, underscores and hyphens; the protocol allows
/// more. A name that is too long, or has letters of other alphabets, has a hash at its end, which differs from that of
/// the next one.
fn model_name(server: &str, tool: &str) -> String {
    let is_taken = |char: char| char.is_ascii_alphanumeric() || matches!(char, '_' | '-');
    let whole = format!("mcp_{server}_{tool}");
    let name: String = whole.chars().map(|char| if is_taken(char) { char } else { '_' }).collect();
    if name.len() <= NAME_MAX && whole.is_ascii() {
        return name;
    }
    let hash = blake3::hash(whole.as_bytes()).to_hex();
    let cut: String = name.chars().take(NAME_MAX - HASH_CHARS - 1).collect();
    format!("{cut}_{}", &hash[..HASH_CHARS])
}

/// The tools of an answer that lists malformed ones, which are left out with a warning. `None` if it is no list.
pub(crate) fn well_formed(server: &str, mut answer: Json) -> Option<ListToolsResult> {
    let Json::Array(tools) = answer.get_mut("tools")?.take() else { return None };
    let mut result = ListToolsResult::with_all_items(Vec::new());
    result.next_cursor = answer["nextCursor"].as_str().map(str::to_owned);
    for (place, tool) in tools.iter().enumerate() {
        if let Some(tool) = used(tool) {
            result.tools.push(tool);
        } else {
            let tool: String = tool["name"].as_str().unwrap_or_default().chars().take(100).collect();
            tracing::warn!(
                server,
                tool,
                place,
                "a tool is left out: its name, title, description or schema is not as the protocol demands"
            );
        }
    }
    Some(result)
}

/// A tool by what is used of it. One without arguments often has no schema, or null for it.
fn used(tool: &Json) -> Option<Tool> {
    let mut tool = tool.as_object()?.clone();
    tool.retain(|key, value| USED.contains(&key.as_str()) && !value.is_null());
    tool.entry("inputSchema").or_insert_with(|| Map::new().into());
    serde_json::from_value(Json::Object(tool)).ok()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use serde_json::json;

    use super::*;

    fn tool(name: &str, schema: &Json) -> Tool {
        Tool::new(name.to_owned(), "d".repeat(3_000), Arc::new(schema.as_object().unwrap().clone()))
    }

    #[test]
    fn tools_have_names_of_their_own_and_bounded_descriptions() {
        let schema = json!({"type": "object", "properties": {"a": {"type": "string"}}});
        let tools = listed("files", vec![tool("read_file", &schema)]);
        assert_eq!(
            (tools[0].name.as_str(), tools[0].spec.name.as_str()),
            ("read_file", "mcp_files_read_file")
        );
        assert_eq!(tools[0].spec.parameters, schema);
        assert_eq!(tools[0].spec.description.len(), DESCRIPTION_MAX);
    }

    #[test]
    fn a_tool_without_arguments_has_properties_all_the_same() {
        let empty = json!({"type": "object", "properties": {}});
        for schema in [
            json!({"type": "object"}),
            json!({}),
            json!({"type": "object", "properties": null, "required": null}),
            empty.clone(),
        ] {
            assert_eq!(listed("s", vec![tool("now", &schema)])[0].spec.parameters, empty, "{schema}");
        }
    }

    /// The protocol allows dots in names, and an earlier draft of it slashes.
    #[test]
    fn dots_and_slashes_in_names_become_underscores() {
        let tools = ["issues.list", "issues/get", "issues_list"].map(|name| tool(name, &json!({})));
        let found = listed("s", tools.into());
        let names: Vec<_> = found.iter().map(|tool| (tool.name.as_str(), tool.spec.name.as_str())).collect();
        assert_eq!(names, [("issues.list", "mcp_s_issues_list"), ("issues/get", "mcp_s_issues_get")]);
    }

    #[test]
    fn names_that_no_model_takes_are_shortened_and_replaced() {
        let long = "get_drug_names_by_info_on_consulting_doctor_pharmacist_for_drug_interactions";
        let (first, second) = (format!("{long}_a"), format!("{long}_b"));
        let names =
            [&*first, &*second, "list files", "dateien_l\u{f6}schen", "\u{67e5}\u{8be2}", "\u{66f4}\u{65b0}"];
        let found = listed("s", names.map(|name| tool(name, &json!({}))).into());
        assert!(found.iter().map(|tool| &*tool.name).eq(names), "the server gets its own: {found:?}");
        let of_models: BTreeSet<&str> = found.iter().map(|tool| &*tool.spec.name).collect();
        assert_eq!(of_models.len(), names.len(), "{of_models:?}");
        for name in &of_models {
            let is_taken = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
            assert!(name.len() <= NAME_MAX && name.bytes().all(is_taken), "{name}");
        }
        assert!(of_models.contains("mcp_s_list_files"), "{of_models:?}");
        assert!(found[0].spec.name.starts_with("mcp_s_get_drug_names_by_info_"), "{of_models:?}");
        assert_eq!(listed("s", vec![tool(&second, &json!({}))])[0].spec.name, found[1].spec.name);
    }

    #[test]
    fn tools_that_no_model_takes_are_left_out() {
        let (small, huge) = (json!({}), json!({"description": "x".repeat(SCHEMA_MAX)}));
        let tools = vec![tool("good", &small), tool("good", &small), tool("", &huge), tool("huge", &huge)];
        let names: Vec<String> = listed("s", tools).into_iter().map(|tool| tool.name).collect();
        assert_eq!(names, ["good"]);
    }

    #[test]
    fn an_answer_that_lists_no_tools_is_none() {
        for answer in [json!("tools"), json!({"tools": {}}), json!({"tools": null}), json!({"items": []})] {
            assert_eq!(well_formed("s", answer.clone()), None, "{answer}");
        }
    }
}
