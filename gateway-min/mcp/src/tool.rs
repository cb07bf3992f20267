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
        let arguments: Map<String, Json> = args.as_object().cloned().unwrap_or_default();
        let result = self.server.call(&self.tool.name, arguments).await;
        let output = output(&result.map_err(|error| ToolError::Failed(error.to_string()))?);
        Ok(match output.status {
            // It may quote a key that the server was given.
            ToolStatus::Error => ToolOutput { content: self.server.hidden.from(&output.content), ..output },
            ToolStatus::Success => output,
        })
    }
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
    if result.content.is_empty()
        && let Some(structured) = &result.structured_content
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
