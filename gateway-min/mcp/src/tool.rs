//! A tool of a server, as agents call it.

use std::fmt::Write as _;
use std::sync::Arc;

use async_trait::async_trait;
use rmcp::model::{CallToolResult, ContentBlock, ResourceContents};
use serde_json::{Map, Value as Json};
use threadkeep_agent::tools::{Tool, ToolContext, ToolError, ToolOutput, ToolSpec, ToolStatus};
use threadkeep_config::ToolRouting;

use crate::listed::Listed;
use crate::server::Server;

/// The longest result in a conversation, in characters.
const RESULT_MAX: usize = 50_000;

pub(crate) struct McpTool {
    server: Arc<Server>,
    tool: Listed,
}

impl McpTool {
    pub(crate) fn new(server: Arc<Server>, tool: Listed) -> Self {
        Self { server, tool }
    }
}

#[async_trait]
impl Tool for McpTool {
    fn spec(&self) -> ToolSpec {
        self.tool.spec.clone()
    }

    fn output_max_chars(&self) -> usize {
        RESULT_MAX
    }

    fn is_deferrable(&self) -> bool {
        true
    }

    fn group(&self) -> Option<&str> {
        self.server.config.group.as_deref()
    }

    fn routing(&self) -> Option<&ToolRouting> {
        self.server.config.routing.get(&self.tool.name)
    }

    async fn call(&self, _: &ToolContext, args: Json) -> Result<ToolOutput, ToolError> {
        let arguments = given(args, &self.tool.spec.parameters);
        let result = self.server.call(&self.tool.name, arguments).await;
        let output = output(&result.map_err(|error| ToolError::Failed(error.to_string()))?);
        Ok(match output.status {
            // It may quote a key that the server was given.
            ToolStatus::Error => ToolOutput { content: self.server.hidden.from(&output.content), ..output },
            ToolStatus::Success => output,
        })
    }
}

/// The arguments that the model gave. Many models write null for an optional one that they leave out, and most servers
/// refuse that, unless it is described as one that may be null.
fn given(args: Json, schema: &Json) -> Map<String, Json> {
    let Json::Object(mut args) = args else { return Map::new() };
    args.retain(|name, value| {
        let property = &schema["properties"][name.as_str()];
        let is_never_null = match &property["type"] {
            Json::String(kind) => kind != "null",
            Json::Array(kinds) => !kinds.iter().any(|kind| kind == "null"),
            _ => false,
        };
        !value.is_null() || !is_never_null || property["nullable"] == true
    });
    args
}

fn output(result: &CallToolResult) -> ToolOutput {
    let mut text = String::new();
    for block in &result.content {
        if !text.is_empty() {
            text.push('\n');
        }
        match block {
            ContentBlock::Text(content) => text.push_str(&content.text),
            ContentBlock::Resource(embedded) => match &embedded.resource {
                ResourceContents::TextResourceContents { text: content, .. } => text.push_str(content),
                ResourceContents::BlobResourceContents { uri, .. } => omitted(&mut text, "a file", uri),
                _ => omitted(&mut text, "a resource", "of an unknown kind"),
            },
            ContentBlock::ResourceLink(link) => omitted(&mut text, "a link to a resource", &link.uri),
            ContentBlock::Image(image) => omitted(&mut text, "an image", &image.mime_type),
            ContentBlock::Audio(audio) => omitted(&mut text, "a recording", &audio.mime_type),
            _ => omitted(&mut text, "content", "of an unknown kind"),
        }
        if text.len() > 4 * RESULT_MAX {
            // No character has more than four bytes: what follows would be cut off.
            break;
        }
    }
    if text.is_empty()
        && let Some(structured) = result.structured_content.as_ref().filter(|content| !content.is_null())
    {
        text = structured.to_string();
    }
    if text.is_empty() {
        "(no output)".clone_into(&mut text);
    }
    let failed = result.is_error == Some(true);
    let status = if failed { ToolStatus::Error } else { ToolStatus::Success };
    let text = if failed { format!("Error: {text}") } else { text };
    ToolOutput { status, ..ToolOutput::text(text) }
}

fn omitted(text: &mut String, what: &str, which: &str) {
    let which: String = which.chars().take(200).collect();
    // Writing to a string does not fail.
    let _ = write!(text, "[{what} was left out: {which}]");
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn null_for_an_argument_that_is_never_null_is_left_out() {
        let schema = json!({"properties": {
            "path": {"type": "string"}, "head": {"type": ["integer", "string"]}, "note": {"type": ["string", "null"]},
            "any": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "old": {"type": "string", "nullable": true},
        }});
        let args = json!({
            "path": "a", "head": null, "note": null, "any": null, "old": null, "more": null,
        });
        let kept = json!({"path": "a", "note": null, "any": null, "old": null, "more": null});
        assert_eq!(Json::Object(given(args, &schema)), kept);
        assert_eq!(given(Json::Null, &schema), Map::new());
    }

    #[test]
    fn structured_content_without_text_is_the_result() {
        let said = |result: Json| output(&serde_json::from_value(result).unwrap()).content;
        for content in [json!([]), json!([{"type": "text", "text": ""}])] {
            assert_eq!(said(json!({"content": content, "structuredContent": {"a": 1}})), r#"{"a":1}"#);
            assert_eq!(said(json!({"content": content, "structuredContent": null})), "(no output)");
        }
    }
}
