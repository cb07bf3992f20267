//! The events of a turn, and how they are derived from the agent's frames.

use std::collections::HashMap;

use serde::Serialize;
use serde_json::{Map, Value as Json};
use threadkeep_agent::MODEL_NODE;
use threadkeep_agent::model::message;

/// An event of a turn. As JSON it is `{"type": ..., "data": ...}`.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", content = "data", rename_all = "kebab-case")]
pub enum Event {
    /// The thread's values after a superstep.
    Values(Values),
    /// A part of the conversation, as it is produced.
    MessagesTuple(Message),
    /// Custom output of a tool or node.
    Custom(Json),
    /// The turn has ended; nothing follows.
    End(End),
}

/// The values of a thread.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Values {
    /// Null until the thread has a title.
    pub title: Option<String>,
    /// The conversation, serialised as by the gateway.
    pub messages: Vec<Json>,
    /// What was produced for the user.
    pub artifacts: Vec<Json>,
}

impl Values {
    pub(super) fn of(mut channels: Map<String, Json>) -> Self {
        let mut list = |channel: &str| match channels.remove(channel) {
            Some(Json::Array(list)) => list,
            _ => Vec::new(),
        };
        let (messages, artifacts) = (list("messages"), list("artifacts"));
        let title = channels.get("title").and_then(Json::as_str).map(str::to_owned);
        Self { title, messages, artifacts }
    }
}

/// A part of the conversation.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum Message {
    /// Part of an answer: either more of its text, or its tool calls. The texts with one id add up to the answer's
    /// text.
    Ai {
        /// More of its text; empty if it calls tools.
        content: String,
        /// The id of the answer.
        id: String,
        /// Its tool calls.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        tool_calls: Vec<ToolCall>,
    },
    /// The result of a tool.
    Tool {
        /// The result.
        content: String,
        /// The tool.
        name: String,
        /// The id of the call.
        tool_call_id: String,
        /// The id of the message.
        id: String,
    },
}

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ToolCall {
    /// The tool.
    pub name: String,
    /// Its arguments; the model's raw text if that is not a JSON object, in which case the call is refused.
    pub args: Json,
    /// The id to which the result refers.
    pub id: String,
}

/// The end of a turn.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct End {
    /// The usage of the turn.
    pub usage: Usage,
}

/// Tokens of all model calls of a turn.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Tokens of the requests.
    pub input_tokens: i64,
    /// Tokens of the answers.
    pub output_tokens: i64,
    /// Both.
    pub total_tokens: i64,
}

/// Converts the frames of one turn to events.
#[derive(Debug, Default)]
pub(super) struct Translator {
    /// The text shown so far of each answer, by its id.
    shown: HashMap<String, String>,
}

impl Translator {
    /// The events for a frame, in order.
    pub(super) fn written(&mut self, node: &str, update: &Json) -> Vec<Event> {
        let answers = update["messages"].as_array().filter(|_| node == MODEL_NODE);
        answers.into_iter().flatten().flat_map(|answer| self.answered(answer)).collect()
    }

    /// A chunk of an answer, or the result of a tool.
    pub(super) fn message(&mut self, message: &Json) -> Option<Event> {
        match message::kind(message) {
            "AIMessageChunk" => {
                let text = message::text(message);
                self.more(text_of(message, "id"), text)
            }
            "tool" => Some(Event::MessagesTuple(Message::Tool {
                content: message::text(message),
                name: text_of(message, "name"),
                tool_call_id: text_of(message, "tool_call_id"),
                id: text_of(message, "id"),
            })),
            _ => None,
        }
    }

    /// A complete answer: the part of its text that was not streamed, and its calls.
    fn answered(&mut self, answer: &Json) -> Vec<Event> {
        let id = text_of(answer, "id");
        let shown = self.shown.get(&id).map_or("", String::as_str);
        let rest = message::text(answer).strip_prefix(shown).unwrap_or_default().to_owned();
        let more = self.more(id.clone(), rest);
        let calls = message::tool_calls(answer).iter().chain(message::invalid_tool_calls(answer));
        let tool_calls: Vec<ToolCall> = calls.map(tool_call).collect();
        let called = (!tool_calls.is_empty())
            .then(|| Event::MessagesTuple(Message::Ai { content: String::new(), id, tool_calls }));
        more.into_iter().chain(called).collect()
    }

    fn more(&mut self, id: String, text: String) -> Option<Event> {
        if text.is_empty() {
            return None;
        }
        self.shown.entry(id.clone()).or_default().push_str(&text);
        Some(Event::MessagesTuple(Message::Ai { content: text, id, tool_calls: Vec::new() }))
    }
}

fn tool_call(call: &Json) -> ToolCall {
    ToolCall { name: text_of(call, "name"), args: call["args"].clone(), id: text_of(call, "id") }
}

fn text_of(object: &Json, key: &str) -> String {
    object[key].as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn chunk(text: &str) -> Json {
        json!({"type": "AIMessageChunk", "content": text, "id": "a"})
    }

    fn rendered(events: impl IntoIterator<Item = Event>) -> Json {
        serde_json::to_value(events.into_iter().collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn texts_calls_and_results_have_the_form_of_the_service() {
        let mut translator = Translator::default();
        assert_eq!(
            rendered(translator.message(&chunk("Hel"))),
            json!([{"type": "messages-tuple", "data": {"type": "ai", "content": "Hel", "id": "a"}}])
        );
        assert_eq!(rendered(translator.message(&chunk(""))), json!([]), "nothing was said");
        let call = json!({"name": "ls", "args": {"path": "."}, "id": "c", "type": "tool_call"});
        let answer = json!({"messages": [{"type": "ai", "id": "a", "content": "Hel", "tool_calls": [call]}]});
        assert_eq!(
            rendered(translator.written("model", &answer)),
            json!([{"type": "messages-tuple", "data": {"type": "ai", "content": "", "id": "a",
                "tool_calls": [{"name": "ls", "args": {"path": "."}, "id": "c"}]}}])
        );
        let result = json!({"type": "tool", "content": "x", "name": "ls", "tool_call_id": "c", "id": "t",
            "status": "success", "artifact": null});
        assert_eq!(
            rendered(translator.message(&result)),
            json!([{"type": "messages-tuple",
                "data": {"type": "tool", "content": "x", "name": "ls", "tool_call_id": "c", "id": "t"}}])
        );
        let values = json!({"messages": [1], "goal": null});
        assert_eq!(
            rendered([Event::Values(Values::of(values.as_object().unwrap().clone()))]),
            json!([{"type": "values", "data": {"title": null, "messages": [1], "artifacts": []}}])
        );
        assert_eq!(
            rendered([Event::Custom(json!({"type": "task_started"}))]),
            json!([{"type": "custom", "data": {"type": "task_started"}}])
        );
        let end = Event::End(End::default());
        let usage = json!({"input_tokens": 0, "output_tokens": 0, "total_tokens": 0});
        assert_eq!(rendered([end]), json!([{"type": "end", "data": {"usage": usage}}]));
    }

    #[test]
    fn what_an_answer_says_beyond_what_was_streamed_is_shown_behind_it() {
        let mut translator = Translator::default();
        translator.message(&chunk("so far"));
        let capped = json!({"messages": [{"type": "ai", "id": "a", "content": "so far\n\n[capped]"}]});
        assert_eq!(
            rendered(translator.written("model", &capped)),
            json!([{"type": "messages-tuple", "data": {"type": "ai", "content": "\n\n[capped]", "id": "a"}}])
        );
        let summary = json!({"messages": [{"type": "ai", "id": "old", "content": "kept"}]});
        assert_eq!(rendered(translator.written("summarization", &summary)), json!([]), "it was said before");
    }

    #[test]
    fn a_call_that_cannot_be_read_is_shown_as_the_model_wrote_it() {
        let call = json!({"name": "ls", "args": "{\"pa", "id": "c", "error": "cut"});
        let answer =
            json!({"messages": [{"type": "ai", "id": "a", "content": "", "invalid_tool_calls": [call]}]});
        let events = rendered(Translator::default().written("model", &answer));
        assert_eq!(events[0]["data"]["tool_calls"], json!([{"name": "ls", "args": "{\"pa", "id": "c"}]));
    }
}
