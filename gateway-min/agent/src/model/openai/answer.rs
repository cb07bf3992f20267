//! Converts the events of a streamed completion to chunks.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;

use serde::de::IgnoredAny;
use serde_json::Value;

use super::super::message::{REASONING, block_text};
use super::super::{ModelChunk, ModelErrorKind, ToolCallChunk, Usage};
use super::failure::Failure;
use super::returned::EXTRA_CONTENT;

/// The event that ends a stream.
const DONE: &str = "[DONE]";
/// The finish reasons of answers that the provider could not complete.
const FAILED: [&str; 2] = ["error", "insufficient_system_resource"];

/// Parses the events of one answer.
///
/// The finish reason and the usage come in separate events, in no fixed order, so they are kept until the end and
/// returned together in the last chunk.
#[derive(Debug, Default)]
pub(super) struct AnswerParser {
    finish_reason: Option<String>,
    usage: Option<Usage>,
    completion_id: Option<String>,
    /// Index and id of the last call, for servers that omit the index.
    current_call: Option<(u64, String)>,
    /// The newest call of each index that the server gave.
    calls: BTreeMap<u64, Placed>,
    /// The indices of all these calls, also of those that are not the newest.
    taken: BTreeSet<u64>,
}

/// Where a call is in the answer.
#[derive(Debug)]
struct Placed {
    index: u64,
    id: String,
    /// Whether its first piece was all of it.
    is_whole: bool,
}

impl AnswerParser {
    /// Parses the data of the next event; `None` if there is nothing to pass on.
    pub(super) fn read(&mut self, data: &str) -> Result<Option<ModelChunk>, Failure> {
        if data.trim().is_empty() {
            return Ok(None);
        }
        if data.trim() == DONE {
            let reason = self.finish_reason.take().unwrap_or_else(|| "stop".to_owned());
            return Ok(Some(self.last_chunk(reason)));
        }
        let event: Value = serde_json::from_str(data)
            .ok()
            .filter(Value::is_object)
            .ok_or_else(|| Failure::new(ModelErrorKind::Protocol, format!("not a JSON object: {data}")))?;
        let choice = &event["choices"][0];
        if let Some(error) = [&event["error"], &choice["error"]].into_iter().find(|error| !error.is_null()) {
            return Err(Failure::from_event(error));
        }
        if let Some(id) = event["id"].as_str().filter(|id| !id.is_empty()) {
            self.completion_id = Some(id.to_owned());
        }
        self.usage = usage(&event["usage"]).or(self.usage);
        if let Some(reason) = choice["finish_reason"].as_str().filter(|reason| !reason.is_empty()) {
            if FAILED.contains(&reason) {
                let detail = format!("the provider ended the answer with the finish reason `{reason}`");
                return Err(Failure::new(ModelErrorKind::Server, detail));
            }
            self.finish_reason = Some(reason.to_owned());
        }
        let delta = &choice["delta"];
        if holds_arguments(delta)
            && let Err(error) = threadkeep::json::from_str::<IgnoredAny>(data)
        {
            return Err(Failure::new(ModelErrorKind::Protocol, format!("arguments of a tool call: {error}")));
        }
        let chunk = self.delta(delta);
        Ok((chunk != ModelChunk::default()).then_some(chunk))
    }

    /// The last chunk, if the answer is complete although the stream ended without `[DONE]`.
    pub(super) fn end(&mut self) -> Option<ModelChunk> {
        self.finish_reason.take().map(|reason| self.last_chunk(reason))
    }

    fn last_chunk(&mut self, finish_reason: String) -> ModelChunk {
        ModelChunk {
            finish_reason: Some(finish_reason),
            usage: self.usage,
            completion_id: mem::take(&mut self.completion_id),
            ..ModelChunk::default()
        }
    }

    fn delta(&mut self, delta: &Value) -> ModelChunk {
        let mut text = visible_text(&delta["content"]);
        text.push_str(delta["refusal"].as_str().unwrap_or_default());
        let taken_back = delta[REASONING].as_str().filter(|reasoning| !reasoning.is_empty());
        let reasoning = taken_back.or_else(|| delta["reasoning"].as_str());
        let calls = delta["tool_calls"].as_array().map_or(&[][..], Vec::as_slice);
        ModelChunk {
            text,
            reasoning: reasoning.unwrap_or_default().to_owned(),
            takes_reasoning: taken_back.is_some(),
            tool_call_chunks: calls.iter().map(|call| self.tool_call(call)).collect(),
            ..ModelChunk::default()
        }
    }

    /// The index of the call of a piece with the index `given`. Some servers give all calls of an answer the same one:
    /// a piece with a name and another id begins a call, and so does a whole call after a whole one.
    fn place(&mut self, given: u64, id: Option<&str>, function: &Value) -> u64 {
        let known = self.calls.get(&given);
        let begins = known.is_none_or(|known| match id {
            Some(id) => is_named(function) && !known.id.is_empty() && id != known.id,
            None => known.is_whole && is_whole_call(function),
        });
        if let (Some(known), false) = (known, begins) {
            return known.index;
        }
        let last = self.taken.last().copied().filter(|_| self.taken.contains(&given));
        let index = last.map_or(given, |last| last.saturating_add(1));
        self.taken.insert(index);
        let is_whole = is_whole_call(function);
        self.calls.insert(given, Placed { index, id: id.unwrap_or_default().to_owned(), is_whole });
        index
    }

    fn place_without_index(&self, id: Option<&str>, function: &Value) -> u64 {
        match (&self.current_call, id) {
            (None, _) => 0,
            (Some((index, current)), Some(id)) if id != current => index.saturating_add(1),
            (Some((index, _)), None) if function["name"].is_string() => index.saturating_add(1),
            (Some((index, _)), _) => *index,
        }
    }

    fn tool_call(&mut self, piece: &Value) -> ToolCallChunk {
        let id = piece["id"].as_str().filter(|id| !id.is_empty());
        let function = &piece["function"];
        let index = match piece["index"].as_u64() {
            Some(given) => self.place(given, id, function),
            None => self.place_without_index(id, function),
        };
        match (&mut self.current_call, id) {
            (Some((current, _)), None) if *current == index => {}
            (call, id) => *call = Some((index, id.unwrap_or_default().to_owned())),
        }
        ToolCallChunk {
            index,
            id: id.map(str::to_owned),
            name: function["name"].as_str().map(str::to_owned),
            args: match &function["arguments"] {
                Value::String(text) => text.clone(),
                Value::Null => String::new(),
                // Some servers send the arguments as an object instead of a string.
                value => value.to_string(),
            },
            extra: piece.get(EXTRA_CONTENT).filter(|extra| !extra.is_null()).cloned(),
        }
    }
}

/// Whether this is a call with a name and complete arguments.
fn is_whole_call(function: &Value) -> bool {
    let is_object =
        |text: &str| text.trim_start().starts_with('{') && serde_json::from_str::<IgnoredAny>(text).is_ok();
    is_named(function)
        && (function["arguments"].is_object() || function["arguments"].as_str().is_some_and(is_object))
}

fn is_named(function: &Value) -> bool {
    function["name"].as_str().is_some_and(|name| !name.is_empty())
}

/// Whether arguments of tool calls are sent as objects: their numbers are those of the event. Strings are parsed later.
fn holds_arguments(delta: &Value) -> bool {
    let calls = delta["tool_calls"].as_array().map_or(&[][..], Vec::as_slice);
    calls.iter().any(|call| call["function"]["arguments"].is_object())
}

fn visible_text(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(blocks) => blocks.iter().filter_map(block_text).collect(),
        _ => String::new(),
    }
}

fn usage(usage: &Value) -> Option<Usage> {
    let input_tokens = usage["prompt_tokens"].as_u64()?;
    let output_tokens = usage["completion_tokens"].as_u64().unwrap_or_default();
    Some(Usage {
        input_tokens,
        output_tokens,
        total_tokens: usage["total_tokens"].as_u64().unwrap_or(input_tokens.saturating_add(output_tokens)),
        cache_read: usage["prompt_tokens_details"]["cached_tokens"].as_u64(),
        reasoning: usage["completion_tokens_details"]["reasoning_tokens"].as_u64(),
    })
}

#[cfg(test)]
// JSON literals are passed by value.
#[allow(clippy::needless_pass_by_value)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(events: &[Value]) -> Vec<ModelChunk> {
        let mut parser = AnswerParser::default();
        events.iter().filter_map(|event| parser.read(&event.to_string()).unwrap()).collect()
    }

    fn delta(delta: Value) -> Value {
        json!({"choices": [{"delta": delta}]})
    }

    fn calls(deltas: &[Value]) -> Vec<(u64, Option<String>, String)> {
        let events: Vec<Value> = deltas.iter().map(|call| delta(json!({"tool_calls": [call]}))).collect();
        read(&events)
            .into_iter()
            .flat_map(|chunk| chunk.tool_call_chunks)
            .map(|call| (call.index, call.name, call.args))
            .collect()
    }

    #[test]
    fn only_events_with_content_make_chunks() {
        let chunks = read(&[
            delta(json!({"role": "assistant", "content": ""})),
            delta(json!({"content": "Hi"})),
            delta(json!({"content": null, "reasoning_content": "hm"})),
            delta(json!({"content": [{"type": "text", "text": "!"}], "reasoning": "so"})),
            delta(json!({"refusal": "No."})),
            json!({"choices": []}),
            json!({"type": "ping"}),
        ]);
        let texts: Vec<_> = chunks.iter().map(|c| (c.text.as_str(), c.reasoning.as_str())).collect();
        assert_eq!(texts, [("Hi", ""), ("", "hm"), ("!", "so"), ("No.", "")]);
    }

    #[test]
    fn the_end_brings_reason_usage_and_id_together_in_any_order() {
        let reason = json!({"id": "c-1", "choices": [{"delta": {}, "finish_reason": "length"}]});
        let cost = json!({"choices": [], "usage": {
            "prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 8},
            "completion_tokens_details": {"reasoning_tokens": 3},
        }});
        let expected = ModelChunk {
            finish_reason: Some("length".into()),
            completion_id: Some("c-1".into()),
            usage: Some(Usage {
                input_tokens: 10,
                output_tokens: 4,
                total_tokens: 15,
                cache_read: Some(8),
                reasoning: Some(3),
            }),
            ..ModelChunk::default()
        };
        for events in [[&reason, &cost], [&cost, &reason]] {
            let mut parser = AnswerParser::default();
            for event in events {
                assert_eq!(parser.read(&event.to_string()).unwrap(), None);
            }
            assert_eq!(parser.read("[DONE]").unwrap(), Some(expected.clone()));
        }
    }

    #[test]
    fn an_end_without_done_counts_only_after_a_finish_reason() {
        let mut parser = AnswerParser::default();
        parser.read(&delta(json!({"content": "Hi"})).to_string()).unwrap();
        assert_eq!(parser.end(), None);
        parser.read(&json!({"choices": [{"finish_reason": "stop"}]}).to_string()).unwrap();
        assert_eq!(parser.end().unwrap().finish_reason.as_deref(), Some("stop"));
    }

    #[test]
    fn call_pieces_go_by_their_index() {
        assert_eq!(
            calls(&[
                json!({"index": 0, "id": "a", "function": {"name": "ls", "arguments": ""}}),
                json!({"index": 1, "id": "b", "function": {"name": "glob", "arguments": "{"}}),
                json!({"index": 0, "function": {"arguments": "{}"}}),
                json!({"index": 1, "function": {"arguments": "}"}}),
            ]),
            [
                (0, Some("ls".into()), String::new()),
                (1, Some("glob".into()), "{".into()),
                (0, None, "{}".into()),
                (1, None, "}".into()),
            ]
        );
    }

    #[test]
    fn without_an_index_a_new_id_or_a_name_without_id_starts_a_new_call() {
        assert_eq!(
            calls(&[
                json!({"id": "a", "function": {"name": "ls", "arguments": {"path": "x"}}}),
                json!({"id": "b", "function": {"name": "ls", "arguments": "{"}}),
                json!({"id": "b", "function": {"arguments": "}"}}),
                json!({"function": {"arguments": " "}}),
                json!({"id": "", "function": {"name": "glob", "arguments": "{}"}}),
            ]),
            [
                (0, Some("ls".into()), "{\"path\":\"x\"}".into()),
                (1, Some("ls".into()), "{".into()),
                (1, None, "}".into()),
                (1, None, " ".into()),
                (2, Some("glob".into()), "{}".into()),
            ]
        );
    }

    #[test]
    fn calls_that_all_have_the_same_index_are_different_calls() {
        let call = |id: &str, name: Option<&str>, arguments: &str| json!({"index": 0, "id": id, "function": {"name": name, "arguments": arguments}});
        let whole = |index: u64, args: &str| (index, Some("ls".to_owned()), args.to_owned());
        for ids in [["a", "b", "c"], ["", "", ""]] {
            let pieces = ["{}", "{\"n\": 1}", "{}"];
            let given: Vec<Value> =
                ids.iter().zip(pieces).map(|(id, arguments)| call(id, Some("ls"), arguments)).collect();
            assert_eq!(calls(&given), [whole(0, "{}"), whole(1, "{\"n\": 1}"), whole(2, "{}")], "{ids:?}");
        }
        let mixed = [
            call("a", Some("ls"), ""),
            call("", None, "{}"),
            call("b", Some("ls"), "{"),
            call("", Some(""), "}"),
            json!({"index": 1, "id": "c", "function": {"name": "ls", "arguments": "{}"}}),
        ];
        let indices: Vec<u64> = calls(&mixed).into_iter().map(|(index, ..)| index).collect();
        assert_eq!(indices, [0, 0, 1, 1, 2]);
        // Servers that repeat the name, or give each piece an id of its own.
        let repeating = [call("a", Some("ls"), "{"), call("a", Some("ls"), "{}"), call("", Some("ls"), "}")];
        let changing = [call("a", Some("ls"), ""), call("b", None, "{"), call("c", Some(""), "}")];
        for pieces in [repeating, changing] {
            assert!(calls(&pieces).iter().all(|(index, ..)| *index == 0), "{pieces:?}");
        }
    }

    #[test]
    fn an_answer_that_its_provider_could_not_complete_is_a_failure() {
        let ended = |reason: &str| json!({"choices": [{"delta": {}, "finish_reason": reason}]});
        let coded =
            json!({"choices": [{"error": {"code": 502, "message": "lost"}, "finish_reason": "error"}]});
        for (event, words) in [
            (ended("error"), "finish reason `error`"),
            (ended("insufficient_system_resource"), "`insufficient_system_resource`"),
            (coded, "lost"),
        ] {
            let failure = AnswerParser::default().read(&event.to_string()).unwrap_err();
            let error = failure.into_error("m", "h", None);
            assert_eq!(error.kind, ModelErrorKind::Server);
            assert!(error.detail.contains(words), "{error}");
        }
    }

    #[test]
    fn events_without_data_say_nothing() {
        for data in ["", " "] {
            assert_eq!(AnswerParser::default().read(data).unwrap(), None);
        }
    }

    #[test]
    fn an_integer_that_would_be_rounded_fails_in_arguments_and_nowhere_else() {
        let event = |arguments: &str| {
            format!(
                r#"{{"seed": 18446744073709552000, "choices": [{{"delta": {{"tool_calls":
                   [{{"id": "a", "function": {{"name": "ls", "arguments": {arguments}}}}}]}}}}]}}"#
            )
        };
        let read = |arguments: &str| AnswerParser::default().read(&event(arguments));
        let chunk = read(r#""{\"id\": 18446744073709551616}""#).unwrap().unwrap();
        assert_eq!(chunk.tool_call_chunks[0].args, r#"{"id": 18446744073709551616}"#, "parsed at the end");
        let error = read(r#"{"id": 18446744073709551616}"#).unwrap_err().into_error("m", "h", None);
        assert_eq!(error.kind, ModelErrorKind::Protocol);
        assert!(error.to_string().contains("is out of range"), "{error}");
    }

    #[test]
    fn data_that_is_no_object_and_errors_are_failures() {
        let kind =
            |data: &str| AnswerParser::default().read(data).unwrap_err().into_error("m", "h", None).kind;
        for data in ["{\"choices\": [", "[1]", "\"text\"", "oops"] {
            assert_eq!(kind(data), ModelErrorKind::Protocol, "{data}");
        }
        assert_eq!(kind(r#"{"error": {"code": 429, "message": "slow"}}"#), ModelErrorKind::RateLimited);
        assert_eq!(AnswerParser::default().read(r#"{"error": null, "choices": []}"#).unwrap(), None);
    }
}
