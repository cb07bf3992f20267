//! The demo model and the built-in tools together, as an agent uses them.

// Helpers outside a test function are not covered by `allow-unwrap-in-tests`.
#![allow(clippy::unwrap_used)]

use futures::StreamExt;
use serde_json::{Value, json};
use threadkeep_agent::model::{
    ChunkAssembler, ModelKind, ModelRequest, ModelSettings, RetryingModel, build, message,
};
use threadkeep_agent::tools::{ToolContext, ToolSettings, Toolbox, dangling};

/// A conversation with the demo model in its own directory.
struct Conversation {
    model: RetryingModel,
    toolbox: Toolbox,
    context: ToolContext,
    messages: Vec<Value>,
    _directory: tempfile::TempDir,
}

impl Conversation {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let settings = ModelSettings::new("demo", ModelKind::Scripted, "demo");
        Self {
            model: RetryingModel::new(build(settings).unwrap()),
            toolbox: Toolbox::builtin(&ToolSettings::default()),
            context: ToolContext::new("t1", "r1", directory.path().join("threads/t1")),
            messages: Vec::new(),
            _directory: directory,
        }
    }

    /// Calls the model once.
    async fn answer(&mut self) -> Value {
        let request = ModelRequest {
            messages: dangling::repaired(&self.messages),
            tools: self.toolbox.specs(),
            caller: "lead_agent".into(),
            ..ModelRequest::default()
        };
        let mut assembler = ChunkAssembler::new("id", self.model.name());
        let mut chunks = self.model.stream(request);
        while let Some(chunk) = chunks.next().await {
            assembler.push(&chunk);
        }
        let answer = assembler.finish();
        assert_eq!(message::fallback_reason(&answer), None);
        self.messages.push(answer.clone());
        answer
    }

    /// Calls the model until it makes no more tool calls, and returns its last text.
    async fn say(&mut self, text: &str) -> String {
        self.messages.push(message::human(text));
        loop {
            let answer = self.answer().await;
            let calls = message::tool_calls(&answer);
            if calls.is_empty() {
                return message::text(&answer);
            }
            for call in calls {
                self.messages.push(self.toolbox.run(&self.context, call).await.unwrap().message);
            }
        }
    }
}

#[tokio::test]
async fn the_demo_writes_lists_and_reads_a_file_in_the_threads_directory() {
    let mut conversation = Conversation::new();
    let words = "Please write a file for me";
    let said = conversation.say(words).await;
    assert!(said.contains("Wrote 27 bytes to notes/demo.txt"), "{said}");
    let written = std::fs::read_to_string(conversation.context.root.join("notes/demo.txt")).unwrap();
    assert_eq!(written, format!("{words}\n"));

    let said = conversation.say("list my files").await;
    assert!(said.ends_with("notes/\nnotes/demo.txt"), "{said}");
    let said = conversation.say("now read the file").await;
    assert!(said.contains(words), "{said}");
}

#[tokio::test]
async fn an_interrupted_call_does_not_keep_the_conversation_from_going_on() {
    let mut conversation = Conversation::new();
    conversation.messages.push(message::human("write a file"));
    let answer = conversation.answer().await;
    assert_eq!(message::tool_calls(&answer).len(), 1);
    // The tool never ran, and the next request says so to the model.
    let said = message::text(&conversation.answer().await);
    assert!(said.contains(dangling::INTERRUPTED), "{said}");
}

/// Bug 22: a provider refuses a request with a call that has no result, wherever an answer keeps the call.
#[test]
fn an_answer_whose_calls_were_stripped_keeps_none_of_them_in_its_content() {
    let call = json!({"id": "c1", "name": "task", "args": {}});
    let block = |kind: &str| json!({"type": kind, "id": "c1", "name": "task"});
    let answer = json!({
        "type": "ai", "id": "m", "tool_calls": [call], "invalid_tool_calls": [],
        "content": [{"type": "text", "text": "I delegate."}, block("tool_use"), block("tool_call"),
                    block("function_call"), block("input_json_delta")],
        "additional_kwargs": {"tool_calls": [{"id": "c1"}], "function_call": {"name": "task"}},
        "response_metadata": {"finish_reason": "tool_calls"},
    });
    let stripped = message::strip_tool_calls(&answer, "[limit]");
    assert_eq!(stripped["content"].as_array().map(Vec::len), Some(2), "the text and the notice");
    assert!(!stripped.to_string().contains("c1") && !stripped.to_string().contains("task"), "{stripped}");
    assert_eq!(stripped["response_metadata"]["finish_reason"], "stop");
}
