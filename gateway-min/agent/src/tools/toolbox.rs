//! The tools of a run, and how a model's call becomes a tool message.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};
use threadkeep_config::ToolRouting;
use tracing::Instrument as _;

use super::bash::Bash;
use super::clarification::AskClarification;
use super::deferred::TOOL_SEARCH;
use super::files::{ReadFile, StrReplace, WriteFile};
use super::search::{Glob, Grep, Ls};
use super::{
    DEFAULT_OUTPUT_MAX_CHARS, Tool, ToolContext, ToolError, ToolOutput, ToolSettings, ToolSpec, ToolStatus,
    output, schema,
};
use crate::model::message::tool_result;
use crate::{AgentError, receipts, spans};

/// The tools of a run, by name, in the order they were added.
#[derive(Clone, Default)]
pub struct Toolbox {
    tools: Vec<(ToolSpec, Arc<dyn Tool>)>,
}

/// The result of a call.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolAnswer {
    /// The tool message for the conversation.
    pub message: Value,
    /// The files that the call wrote, relative to the thread's directory.
    pub written: Vec<String>,
    /// Values that are written to the state with the message, by channel.
    pub writes: Map<String, Value>,
    /// Whether the run ends here.
    pub ends_run: bool,
}

impl fmt::Debug for Toolbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.names()).finish()
    }
}

impl Toolbox {
    /// An empty toolbox.
    pub fn new() -> Self {
        Self::default()
    }

    /// The built-in tools: files, `ask_clarification` and, if `settings` allow it, `bash`.
    pub fn builtin(settings: &ToolSettings) -> Self {
        let mut toolbox = Self::new();
        if settings.allow_host_bash {
            toolbox.add(Arc::new(Bash::new(settings)));
        }
        toolbox.add(Arc::new(Ls::new(settings.ls_output_max_chars)));
        toolbox.add(Arc::new(Glob));
        toolbox.add(Arc::new(Grep));
        toolbox.add(Arc::new(ReadFile::new(settings.read_file_output_max_chars)));
        toolbox.add(Arc::new(WriteFile));
        toolbox.add(Arc::new(StrReplace));
        toolbox.add(Arc::new(AskClarification));
        toolbox
    }

    /// Adds `tool`, replacing one with the same name.
    pub fn add(&mut self, tool: Arc<dyn Tool>) {
        let spec = tool.spec();
        match self.tools.iter_mut().find(|(known, _)| known.name == spec.name) {
            Some(entry) => *entry = (spec, tool),
            None => self.tools.push((spec, tool)),
        }
    }

    /// Keeps only the tools for whose names `keep` returns true.
    pub fn retain(&mut self, mut keep: impl FnMut(&str) -> bool) {
        self.tools.retain(|(spec, _)| keep(&spec.name));
    }

    /// The tools' names.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tools.iter().map(|(spec, _)| spec.name.as_str())
    }

    /// The descriptions of the tools for the model.
    pub fn specs(&self) -> Vec<ToolSpec> {
        self.tools.iter().map(|(spec, _)| spec.clone()).collect()
    }

    /// The tools that can be deferred, with what they are for.
    pub(super) fn deferrable(&self) -> impl Iterator<Item = (ToolSpec, Option<ToolRouting>)> + '_ {
        let deferrable = self.tools.iter().filter(|(_, tool)| tool.is_deferrable());
        deferrable.map(|(spec, tool)| (spec.clone(), tool.routing().cloned()))
    }

    /// The tools of which those that can be deferred are among `loaded`.
    pub(crate) fn loaded(&self, loaded: &BTreeSet<String>) -> Self {
        let visible =
            self.tools.iter().filter(|(spec, tool)| !tool.is_deferrable() || loaded.contains(&spec.name));
        Self { tools: visible.cloned().collect() }
    }

    /// How long this call may go on after its run was cancelled; see [`Tool::stops_within`].
    pub(crate) fn stops_within(&self, call: &Value) -> Option<Duration> {
        self.tools.iter().find(|(spec, _)| call["name"] == *spec.name)?.1.stops_within()
    }

    /// Tells the tool of `call` that its result is stored.
    pub(crate) async fn stored(&self, context: &ToolContext, call: &Value) {
        if let Some((_, tool)) = self.tools.iter().find(|(spec, _)| call["name"] == *spec.name) {
            tool.stored(context).await;
        }
    }

    /// Runs `call`, an entry of an assistant message's `tool_calls` or `invalid_tool_calls`, and returns its result.
    ///
    /// An unknown tool, invalid arguments and a failing tool yield a message with status `error` that tells the model
    /// what to do instead. Output beyond the tool's limit is cut off.
    ///
    /// # Errors
    /// [`AgentError::Undelivered`] for [`ToolError::Undelivered`], [`AgentError::Unread`] for [`ToolError::Unread`].
    pub async fn run(&self, context: &ToolContext, call: &Value) -> Result<ToolAnswer, AgentError> {
        let name = call["name"].as_str().unwrap_or_default();
        let found = self.tools.iter().find(|(spec, _)| spec.name == name);
        let span = spans::tool_call(found.map(|(spec, _)| spec.name.as_str()));
        let tool_call_id = call["id"].as_str().unwrap_or_default().to_owned();
        let context = ToolContext { tool_call_id, message_id: context.ids.text(), ..context.clone() };
        let (result, max_chars) = match found {
            Some((spec, tool)) => {
                let attempt = attempt(spec, &**tool, &context, call).instrument(span.clone());
                (attempt.await, tool.output_max_chars())
            }
            None => (Err(self.unknown(name)), DEFAULT_OUTPUT_MAX_CHARS),
        };
        let output = match result {
            Ok(output) => output,
            Err(ToolError::Undelivered(error)) => return Err(AgentError::Undelivered(error)),
            Err(ToolError::Unread(error)) => return Err(AgentError::Unread(error)),
            Err(error) => {
                ToolOutput { status: ToolStatus::Error, ..ToolOutput::text(format!("Error: {error}")) }
            }
        };
        spans::tool_answered(&span, output.status);
        let mut message = tool_result(call, output.status, output::cut(output.content, max_chars));
        message["id"] = context.message_id.into();
        message["artifact"] = output.artifact;
        message["additional_kwargs"] = Value::Object(output.additional_kwargs);
        if context.receipts {
            receipts::stamp(&mut message, call, output.status, context.ids.now());
        }
        let ToolOutput { written, writes, ends_run, .. } = output;
        Ok(ToolAnswer { message, written, writes, ends_run })
    }

    fn unknown(&self, name: &str) -> ToolError {
        let available: Vec<&str> = self.names().collect();
        let further = if available.contains(&TOOL_SEARCH) {
            format!(". Load further tools with `{TOOL_SEARCH}` before you call them")
        } else {
            String::new()
        };
        ToolError::Arguments(format!(
            "there is no tool `{name}`. Available: {}{further}",
            available.join(", ")
        ))
    }
}

async fn attempt(
    spec: &ToolSpec,
    tool: &dyn Tool,
    context: &ToolContext,
    call: &Value,
) -> Result<ToolOutput, ToolError> {
    if call["type"] == "invalid_tool_call" {
        let why = call["error"].as_str().unwrap_or("they could not be read");
        return Err(ToolError::Arguments(format!("the call was not executed: {why}. Repeat it")));
    }
    let args = schema::fitted(&spec.parameters, call["args"].clone());
    schema::check(&spec.parameters, &args).map_err(ToolError::Arguments)?;
    tool.call(context, args).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use async_trait::async_trait;
    use serde_json::json;

    /// Returns its arguments, as they request.
    struct Probe;

    #[async_trait]
    impl Tool for Probe {
        fn spec(&self) -> ToolSpec {
            ToolSpec {
                name: "probe".into(),
                description: "Probes".into(),
                parameters: json!({
                    "type": "object",
                    "required": ["say"],
                    "properties": {"say": {"type": "string"}},
                }),
            }
        }

        async fn call(&self, context: &ToolContext, args: Value) -> Result<ToolOutput, ToolError> {
            let say = args["say"].as_str().unwrap();
            if say == "fail" {
                return Err(ToolError::Failed("it failed".into()));
            }
            let mut output = ToolOutput::text(say);
            output.artifact = json!(context.tool_call_id);
            output.additional_kwargs.insert("thread".into(), json!(context.thread_id));
            output.ends_run = say == "end";
            Ok(output)
        }
    }

    fn context() -> ToolContext {
        ToolContext::new("t", "r", "/nonexistent")
    }

    async fn run(call: &Value) -> ToolAnswer {
        let mut toolbox = Toolbox::new();
        toolbox.add(Arc::new(Probe));
        toolbox.run(&context(), call).await.unwrap()
    }

    fn call(name: &str, args: &Value) -> Value {
        json!({"type": "tool_call", "name": name, "args": args, "id": "c1"})
    }

    #[tokio::test]
    async fn a_call_becomes_a_tool_message() {
        let answer = run(&call("probe", &json!({"say": "hello"}))).await;
        assert!(!answer.ends_run);
        let mut message = answer.message;
        assert!(!message["id"].take().as_str().unwrap().is_empty());
        assert_eq!(
            message,
            json!({
                "type": "tool", "content": "hello", "id": null, "name": "probe", "tool_call_id": "c1",
                "status": "success", "artifact": "c1", "additional_kwargs": {"thread": "t"},
                "response_metadata": {},
            })
        );
        assert!(run(&call("probe", &json!({"say": "end"}))).await.ends_run);
    }

    #[tokio::test]
    async fn whatever_goes_wrong_becomes_an_error_message() {
        let invalid = json!({
            "type": "invalid_tool_call", "name": "probe", "args": "{", "id": "c1",
            "error": "the arguments are not a JSON object: EOF",
        });
        let cases = [
            (call("prob", &json!({})), "Error: there is no tool `prob`. Available: probe"),
            (call("probe", &json!({})), "Error: argument `say` is missing"),
            (call("probe", &json!({"say": 1})), "Error: argument `say` must be string, not number"),
            (call("probe", &json!({"say": "fail"})), "Error: it failed"),
            (
                invalid,
                "Error: the call was not executed: the arguments are not a JSON object: EOF. Repeat it",
            ),
        ];
        for (call, error) in cases {
            let answer = run(&call).await;
            assert_eq!(answer.message["content"], error);
            assert_eq!(answer.message["status"], "error");
            assert_eq!(answer.message["tool_call_id"], "c1");
            assert!(!answer.ends_run);
        }
    }

    /// Returns its arguments.
    struct Echo;

    #[async_trait]
    impl Tool for Echo {
        fn spec(&self) -> ToolSpec {
            ToolSpec {
                name: "echo".into(),
                description: "Echoes".into(),
                parameters: json!({"type": "object", "properties": {"items": {"type": "array"}}}),
            }
        }

        async fn call(&self, _: &ToolContext, args: Value) -> Result<ToolOutput, ToolError> {
            Ok(ToolOutput::text(args.to_string()))
        }
    }

    #[tokio::test]
    async fn a_tool_gets_a_list_that_the_model_wrote_as_text_as_a_list() {
        let mut toolbox = Toolbox::new();
        toolbox.add(Arc::new(Echo));
        let answer = toolbox.run(&context(), &call("echo", &json!({"items": "[1, 2]"}))).await.unwrap();
        assert_eq!(answer.message["content"], "{\"items\":[1,2]}");
        let answer = toolbox.run(&context(), &call("echo", &json!({"items": "1, 2"}))).await.unwrap();
        assert_eq!(answer.message["content"], "Error: argument `items` must be array, not string");
    }

    #[tokio::test]
    async fn output_is_cut_at_the_limit() {
        let whole = "x".repeat(12_000);
        let answer = run(&call("probe", &json!({"say": whole}))).await;
        assert_eq!(answer.message["content"], whole);
        let answer = run(&call("probe", &json!({"say": "x".repeat(12_001)}))).await;
        let content = answer.message["content"].as_str().unwrap();
        assert_eq!(content.chars().count(), 12_000);
        assert!(content.ends_with("[output cut: it has 12001 characters, the limit is 12000]"), "{content}");
    }

    #[test]
    fn bash_is_there_only_where_it_is_allowed() {
        let names = |allow_host_bash| {
            let toolbox = Toolbox::builtin(&ToolSettings { allow_host_bash, ..ToolSettings::default() });
            toolbox.names().map(str::to_owned).collect::<Vec<_>>()
        };
        let without = ["ls", "glob", "grep", "read_file", "write_file", "str_replace", "ask_clarification"];
        assert_eq!(names(false), without);
        assert_eq!(names(true)[0], "bash");
        assert_eq!(names(true)[1..], without);
        assert!(!ToolSettings::default().allow_host_bash);
    }

    #[test]
    fn the_configuration_knows_every_built_in_tool() {
        let toolbox = Toolbox::builtin(&ToolSettings { allow_host_bash: true, ..ToolSettings::default() });
        assert_eq!(toolbox.names().collect::<Vec<_>>(), threadkeep_config::BUILTIN_TOOLS);
    }

    #[test]
    fn every_built_in_tool_describes_itself_with_an_object_schema() {
        let toolbox = Toolbox::builtin(&ToolSettings { allow_host_bash: true, ..ToolSettings::default() });
        for spec in toolbox.specs() {
            assert_eq!(spec.parameters["type"], "object", "{}", spec.name);
            assert!(!spec.description.is_empty(), "{}", spec.name);
            for name in spec.parameters["required"].as_array().into_iter().flatten() {
                assert!(spec.parameters["properties"].get(name.as_str().unwrap()).is_some(), "{spec:?}");
            }
            for (name, property) in spec.parameters["properties"].as_object().unwrap() {
                assert!(property["description"].is_string(), "{} {name}", spec.name);
            }
        }
    }

    #[test]
    fn tools_are_replaced_by_name_and_filtered() {
        let mut toolbox = Toolbox::builtin(&ToolSettings::default());
        let count = toolbox.names().count();
        toolbox.add(Arc::new(WriteFile));
        assert_eq!(toolbox.names().count(), count);
        toolbox.retain(|name| name.ends_with("_file"));
        assert_eq!(toolbox.names().collect::<Vec<_>>(), ["read_file", "write_file"]);
        assert_eq!(toolbox.specs().len(), 2);
    }
}
