//! Assembles chunks into the message that is stored, and into the dictionaries that clients receive meanwhile.

use std::collections::{BTreeMap, HashSet};

use super::arguments::{call_arguments, is_cut_off};
use super::message::{CALLS_EXTRA, ERROR_FALLBACK, ERROR_REASON, ERROR_TYPE, REASONING, TAKES_REASONING};
use super::{Fallback, ModelChunk, ToolCallChunk, Usage};
use crate::receipts::sha256;
use serde_json::{Map, Value, json};

/// Folds the chunks of one answer.
///
/// The dictionaries returned by [`push`](Self::push) concatenate to the message returned by [`finish`](Self::finish),
/// under one id. One exception: a fallback message has no tool calls, although chunks of some may have been sent before
/// the answer failed, because a truncated call must never run.
#[derive(Debug)]
pub struct ChunkAssembler {
    id: String,
    model_name: String,
    text: String,
    reasoning: String,
    takes_reasoning: bool,
    calls: BTreeMap<u64, PartialCall>,
    usage: Option<Usage>,
    finish_reason: Option<String>,
    completion_id: Option<String>,
    fallback: Option<Fallback>,
}

#[derive(Debug)]
struct PartialCall {
    id: String,
    name: Option<String>,
    args: String,
    extra: Option<Value>,
}

impl ChunkAssembler {
    /// An assembler for one answer of the model `model_name`, with the id `lc_run--` and this one.
    pub fn new(id: &str, model_name: impl Into<String>) -> Self {
        Self {
            id: format!("lc_run--{id}"),
            model_name: model_name.into(),
            text: String::new(),
            reasoning: String::new(),
            takes_reasoning: false,
            calls: BTreeMap::new(),
            usage: None,
            finish_reason: None,
            completion_id: None,
            fallback: None,
        }
    }

    /// Adds the next chunk and returns it as an `AIMessageChunk` dictionary.
    pub fn push(&mut self, chunk: &ModelChunk) -> Value {
        self.text.push_str(&chunk.text);
        self.reasoning.push_str(&chunk.reasoning);
        self.takes_reasoning |= chunk.takes_reasoning;
        self.usage = chunk.usage.or(self.usage);
        for (kept, new) in
            [(&mut self.finish_reason, &chunk.finish_reason), (&mut self.completion_id, &chunk.completion_id)]
        {
            if new.is_some() {
                kept.clone_from(new);
            }
        }
        if chunk.fallback.is_some() {
            self.fallback.clone_from(&chunk.fallback);
        }

        let (mut call_chunks, mut calls) = (Vec::new(), Vec::new());
        for piece in &chunk.tool_call_chunks {
            let piece = self.add_to_call(piece);
            // A call is announced once, by its first chunk; its arguments are known only at the end.
            if piece["name"].is_string() {
                calls.push(tool_call(&piece["name"], &json!({}), &piece["id"]));
            }
            call_chunks.push(piece);
        }
        // Concatenating dictionaries concatenates their strings, so values that describe the whole answer are sent
        // once, with its last chunk.
        json!({
            "type": "AIMessageChunk",
            "content": chunk.text,
            "tool_call_chunks": call_chunks,
            "tool_calls": calls,
            "invalid_tool_calls": [],
            "usage_metadata": chunk.usage.map(Usage::to_value),
            "response_metadata": if chunk.is_last() { self.response_metadata() } else { json!({}) },
            "additional_kwargs": self.additional_kwargs(&chunk.reasoning, chunk.is_last()),
            "name": null,
            "id": self.id,
            "chunk_position": if chunk.is_last() { json!("last") } else { Value::Null },
        })
    }

    /// Adds a piece to its call and returns the piece for clients: with the id and the name on the first chunk only,
    /// even if the provider repeats them.
    fn add_to_call(&mut self, piece: &ToolCallChunk) -> Value {
        let given_name = piece.name.as_ref().filter(|name| !name.is_empty());
        let (mut id, mut name) = (None, None);
        if !self.calls.contains_key(&piece.index) {
            id = Some(self.unused_call_id(piece));
        }
        let call = self.calls.entry(piece.index).or_insert_with(|| PartialCall {
            id: id.clone().unwrap_or_default(),
            name: None,
            args: String::new(),
            extra: None,
        });
        if call.name.is_none() {
            call.name = given_name.cloned();
            name = given_name;
        }
        call.args.push_str(&piece.args);
        if piece.extra.is_some() {
            call.extra.clone_from(&piece.extra);
        }
        json!({
            "type": "tool_call_chunk", "index": piece.index, "id": id, "name": name, "args": piece.args,
        })
    }

    /// The provider's id for a call, or one from its place if it gave none or reused one within this answer: a result must
    /// match one call.
    fn unused_call_id(&self, piece: &ToolCallChunk) -> String {
        let used: HashSet<&str> = self.calls.values().map(|call| call.id.as_str()).collect();
        match piece.id.as_deref() {
            Some(id) if !id.is_empty() && !used.contains(id) => id.to_owned(),
            _ => format!("call_{}", &sha256(&format!("{}\n{}", self.id, piece.index))[..32]),
        }
    }

    /// The whole answer as a serialised assistant message.
    ///
    /// A call whose arguments are not a JSON object, or are nested too deeply, is in `invalid_tool_calls`, with its raw
    /// arguments. So is the last call of an answer that was cut off before the arguments: it would run without any.
    pub fn finish(self) -> Value {
        let additional_kwargs = self.additional_kwargs(&self.reasoning, true);
        let (mut calls, mut invalid) = (Vec::new(), Vec::new());
        if self.fallback.is_none() {
            let cut_off = self.cut_off_call();
            for (index, call) in &self.calls {
                match call_arguments(call.name.as_deref(), &call.args, cut_off == Some(*index)) {
                    Ok(args) => calls.push(tool_call(&json!(call.name), &args, &json!(call.id))),
                    Err(error) => invalid.push(json!({
                        "type": "invalid_tool_call", "name": call.name, "args": call.args, "id": call.id,
                        "error": error,
                    })),
                }
            }
        }
        json!({
            "type": "ai",
            "content": self.text,
            "tool_calls": calls,
            "invalid_tool_calls": invalid,
            "usage_metadata": self.usage.map(Usage::to_value),
            "response_metadata": self.response_metadata(),
            "additional_kwargs": additional_kwargs,
            "name": null,
            "id": self.id,
        })
    }

    /// The call at which the provider ended the answer, if it did so before the end.
    fn cut_off_call(&self) -> Option<u64> {
        self.calls.keys().next_back().copied().filter(|_| is_cut_off(self.finish_reason.as_deref()))
    }

    fn response_metadata(&self) -> Value {
        let mut metadata = Map::new();
        metadata.insert("model_name".to_owned(), self.model_name.clone().into());
        metadata.insert("finish_reason".to_owned(), json!(self.finish_reason));
        if let Some(id) = &self.completion_id {
            metadata.insert("id".to_owned(), id.clone().into());
        }
        Value::Object(metadata)
    }

    /// This reasoning and, in the last chunk and the message, what describes the whole answer.
    fn additional_kwargs(&self, reasoning: &str, is_last: bool) -> Value {
        let mut kwargs = Map::new();
        if !reasoning.is_empty() {
            kwargs.insert(REASONING.to_owned(), reasoning.into());
        }
        if !is_last {
            return Value::Object(kwargs);
        }
        if self.takes_reasoning {
            kwargs.insert(TAKES_REASONING.to_owned(), true.into());
        }
        if let Some(fallback) = &self.fallback {
            kwargs.insert(ERROR_FALLBACK.to_owned(), true.into());
            kwargs.insert(ERROR_TYPE.to_owned(), fallback.error_type.clone().into());
            kwargs.insert(ERROR_REASON.to_owned(), fallback.reason.clone().into());
            return Value::Object(kwargs);
        }
        let extra = |call: &PartialCall| Some((call.id.clone(), call.extra.clone()?));
        let extra: Map<String, Value> = self.calls.values().filter_map(extra).collect();
        if !extra.is_empty() {
            kwargs.insert(CALLS_EXTRA.to_owned(), extra.into());
        }
        Value::Object(kwargs)
    }
}

fn tool_call(name: &Value, args: &Value, id: &Value) -> Value {
    json!({"type": "tool_call", "name": name, "args": args, "id": id})
}

#[cfg(test)]
mod tests {
    use super::super::arguments::CUT_OFF;
    use super::*;
    use proptest::prelude::*;

    fn text(text: &str) -> ModelChunk {
        ModelChunk { text: text.into(), ..ModelChunk::default() }
    }

    fn call(index: u64, id: Option<&str>, name: Option<&str>, args: &str) -> ModelChunk {
        let (id, name) = (id.map(Into::into), name.map(Into::into));
        let piece = ToolCallChunk { index, id, name, args: args.into(), extra: None };
        ModelChunk { tool_call_chunks: vec![piece], ..ModelChunk::default() }
    }

    fn last(reason: &str) -> ModelChunk {
        ModelChunk { finish_reason: Some(reason.into()), ..ModelChunk::default() }
    }

    #[test]
    fn arguments_with_an_integer_that_would_be_rounded_are_invalid_and_say_why() {
        let args = r#"{"id": 12345678901234567890123}"#;
        let (_, message) = assemble(&[call(0, Some("c"), Some("t"), args), last("tool_calls")]);
        assert_eq!(message["tool_calls"], json!([]));
        let invalid = &message["invalid_tool_calls"][0];
        assert_eq!(invalid["args"], args, "as the model wrote them");
        let error = invalid["error"].as_str().unwrap();
        assert!(error.contains("integer 12345678901234567890123 is out of range"), "{error}");
    }

    fn assemble(chunks: &[ModelChunk]) -> (Vec<Value>, Value) {
        let mut assembler = ChunkAssembler::new("id", "gpt-x");
        let rendered = chunks.iter().map(|chunk| assembler.push(chunk)).collect();
        (rendered, assembler.finish())
    }

    #[test]
    fn a_text_answer_has_the_serialised_shape() {
        let usage = Usage {
            input_tokens: 3,
            output_tokens: 2,
            total_tokens: 5,
            cache_read: Some(1),
            reasoning: None,
        };
        let end = ModelChunk {
            usage: Some(usage),
            completion_id: Some("chatcmpl-1".into()),
            reasoning: "hm".into(),
            ..last("stop")
        };
        let (rendered, message) = assemble(&[text("Hel"), text("lo"), end]);
        let usage = json!({
            "input_tokens": 3, "output_tokens": 2, "total_tokens": 5,
            "input_token_details": {"cache_read": 1}, "output_token_details": {},
        });
        let id = message["id"].clone();
        assert_eq!(id, "lc_run--id");
        assert_eq!(
            rendered[0],
            json!({
                "type": "AIMessageChunk", "content": "Hel", "tool_call_chunks": [], "tool_calls": [],
                "invalid_tool_calls": [], "usage_metadata": null, "response_metadata": {},
                "additional_kwargs": {}, "name": null, "id": id, "chunk_position": null,
            })
        );
        assert_eq!(rendered[2]["chunk_position"], "last");
        assert_eq!(rendered[2]["usage_metadata"], usage);
        assert_eq!(
            message,
            json!({
                "type": "ai", "content": "Hello", "tool_calls": [], "invalid_tool_calls": [],
                "usage_metadata": usage, "name": null, "id": id,
                "response_metadata": {"model_name": "gpt-x", "finish_reason": "stop", "id": "chatcmpl-1"},
                "additional_kwargs": {"reasoning_content": "hm"},
            })
        );
    }

    #[test]
    fn interleaved_calls_are_put_together_in_order_of_their_index() {
        let (rendered, message) = assemble(&[
            call(1, Some("b"), Some("ls"), ""),
            call(0, Some("a"), Some("read_file"), r#"{"pa"#),
            call(0, None, None, r#"th":"x"}"#),
            last("tool_calls"),
        ]);
        assert_eq!(
            message["tool_calls"],
            json!([
                {"type": "tool_call", "name": "read_file", "args": {"path": "x"}, "id": "a"},
                {"type": "tool_call", "name": "ls", "args": {}, "id": "b"},
            ])
        );
        assert_eq!(
            rendered[1]["tool_call_chunks"],
            json!([
                {"type": "tool_call_chunk", "index": 0, "id": "a", "name": "read_file", "args": "{\"pa"}
            ])
        );
        assert_eq!(
            rendered[1]["tool_calls"],
            json!([{"type": "tool_call", "name": "read_file", "args": {}, "id": "a"}])
        );
        assert_eq!(
            rendered[2]["tool_call_chunks"],
            json!([
                {"type": "tool_call_chunk", "index": 0, "id": null, "name": null, "args": "th\":\"x\"}"}
            ])
        );
        assert_eq!(rendered[2]["tool_calls"], json!([]));
    }

    #[test]
    fn arguments_that_are_no_object_make_an_invalid_call() {
        for args in ["{\"path\":", "[1]", "\"x\"", "nonsense"] {
            let (_, message) = assemble(&[call(0, Some("a"), Some("ls"), args), last("tool_calls")]);
            assert_eq!(message["tool_calls"], json!([]), "{args}");
            let invalid = &message["invalid_tool_calls"][0];
            assert_eq!((&invalid["args"], &invalid["id"]), (&json!(args), &json!("a")));
            assert!(invalid["error"].as_str().unwrap().contains("not a JSON object"), "{invalid}");
        }
        let (_, message) = assemble(&[call(0, Some("a"), None, "{}"), last("tool_calls")]);
        assert_eq!(message["invalid_tool_calls"][0]["error"], "the call names no tool");
    }

    #[test]
    fn the_call_at_which_an_answer_was_cut_off_does_not_run_without_its_arguments() {
        let calls = [call(0, Some("a"), Some("list"), ""), call(1, Some("b"), Some("remove"), " ")];
        let made = |reason: &str| {
            let (_, message) = assemble(&[calls[0].clone(), calls[1].clone(), last(reason)]);
            let ids = |key: &str| -> Vec<Value> {
                message[key].as_array().unwrap().iter().map(|call| call["id"].clone()).collect()
            };
            (ids("tool_calls"), ids("invalid_tool_calls"))
        };
        assert_eq!(made("tool_calls"), (vec![json!("a"), json!("b")], vec![]));
        for reason in ["length", "model_length", "max_tokens", "content_filter"] {
            assert_eq!(made(reason), (vec![json!("a")], vec![json!("b")]), "{reason}");
        }
        let whole = call(0, Some("a"), Some("list"), "{}");
        let (_, message) = assemble(&[whole, last("length")]);
        assert_eq!(message["invalid_tool_calls"], json!([]), "it has its arguments");
    }

    #[test]
    fn a_call_whose_arguments_were_cut_off_says_so() {
        let half = |index: u64| call(index, None, Some("write_file"), r#"{"path": "x", "content": "long"#);
        let (_, message) = assemble(&[half(0), half(1), last("length")]);
        let invalid = &message["invalid_tool_calls"];
        assert!(invalid[0]["error"].as_str().unwrap().contains("not a JSON object"), "{invalid}");
        assert_eq!(invalid[1]["error"], CUT_OFF);
    }

    /// Stored within a message, they could not be read again.
    #[test]
    fn arguments_that_are_nested_too_deeply_make_an_invalid_call() {
        for (levels, is_valid) in [(64, true), (65, false), (127, false)] {
            let lists = levels - 1;
            let args = format!("{{\"a\":{}{}}}", "[".repeat(lists), "]".repeat(lists));
            let (_, message) = assemble(&[call(0, Some("a"), Some("ls"), &args), last("tool_calls")]);
            let [calls, invalid] = ["tool_calls", "invalid_tool_calls"].map(|key| &message[key]);
            if is_valid {
                assert_eq!((calls[0]["args"].to_string(), invalid), (args, &json!([])), "{levels}");
            } else {
                assert_eq!((calls, &invalid[0]["args"]), (&json!([]), &json!(args)), "{levels}");
                let error = "the arguments are nested more than 64 levels deep";
                assert_eq!(invalid[0]["error"], error, "{levels}");
            }
        }
    }

    #[test]
    fn missing_empty_and_repeated_call_ids_are_replaced_and_repeats_of_one_call_are_dropped() {
        let (rendered, message) = assemble(&[
            call(0, Some("same"), Some("ls"), ""),
            call(0, Some("same"), Some("ls"), "{}"),
            call(1, Some("same"), Some("ls"), ""),
            call(2, None, Some("ls"), ""),
            call(3, Some(""), Some("ls"), ""),
            last("tool_calls"),
        ]);
        let ids: Vec<&str> = message["tool_calls"]
            .as_array()
            .unwrap()
            .iter()
            .map(|call| call["id"].as_str().unwrap())
            .collect();
        assert_eq!(ids[0], "same");
        assert_eq!(ids.iter().collect::<HashSet<_>>().len(), 4, "{ids:?}");
        assert!(ids[1..].iter().all(|id| id.starts_with("call_")), "{ids:?}");
        assert_eq!(rendered[1]["tool_call_chunks"][0]["id"], Value::Null);
        assert_eq!(rendered[1]["tool_call_chunks"][0]["name"], Value::Null);
        assert_eq!(rendered[3]["tool_call_chunks"][0]["id"], ids[2]);
    }

    #[test]
    fn a_fallback_is_marked_and_has_no_tool_calls() {
        let fallback = Fallback { error_type: "timeout".into(), reason: "too slow".into() };
        let end = ModelChunk { fallback: Some(fallback), text: "sorry".into(), ..last("error") };
        let (rendered, message) = assemble(&[call(0, Some("a"), Some("ls"), "{}"), end]);
        let marks = json!({
            "svc_error_fallback": true, "svc_error_type": "timeout", "svc_error_reason": "too slow",
        });
        assert_eq!(message["additional_kwargs"], marks);
        assert_eq!(rendered[1]["additional_kwargs"], marks);
        assert_eq!(message["tool_calls"], json!([]));
        assert_eq!(message["content"], "sorry");
    }

    #[test]
    fn what_a_provider_wants_back_is_in_the_last_chunk_and_the_message() {
        let signed = |index: u64| ToolCallChunk {
            index,
            id: Some(format!("c{index}")),
            name: Some("ls".into()),
            extra: (index == 0).then(|| json!({"google": {"thought_signature": "s"}})),
            ..ToolCallChunk::default()
        };
        let first = ModelChunk {
            reasoning: "hm".into(),
            takes_reasoning: true,
            tool_call_chunks: vec![signed(0), signed(1)],
            ..ModelChunk::default()
        };
        let (rendered, message) = assemble(&[first, last("tool_calls")]);
        let marks = json!({
            "svc_takes_reasoning": true,
            "svc_tool_calls_extra": {"c0": {"google": {"thought_signature": "s"}}},
        });
        assert_eq!(rendered[0]["additional_kwargs"], json!({"reasoning_content": "hm"}));
        assert_eq!(rendered[1]["additional_kwargs"], marks);
        let mut whole = marks;
        whole["reasoning_content"] = "hm".into();
        assert_eq!(message["additional_kwargs"], whole);
    }

    /// What a client assembles from the dictionaries: texts appended, call chunks merged by index.
    fn concatenate(rendered: &[Value]) -> (String, BTreeMap<u64, (String, String, String)>) {
        let mut content = String::new();
        let mut calls: BTreeMap<u64, (String, String, String)> = BTreeMap::new();
        for chunk in rendered {
            content.push_str(chunk["content"].as_str().unwrap());
            for piece in chunk["tool_call_chunks"].as_array().unwrap() {
                let call = calls.entry(piece["index"].as_u64().unwrap()).or_default();
                call.0.push_str(piece["id"].as_str().unwrap_or_default());
                call.1.push_str(piece["name"].as_str().unwrap_or_default());
                call.2.push_str(piece["args"].as_str().unwrap_or_default());
            }
        }
        (content, calls)
    }

    /// `text` in pieces with the given lengths.
    fn split(text: &str, sizes: &[usize]) -> Vec<String> {
        let mut rest: Vec<char> = text.chars().collect();
        let mut pieces = Vec::new();
        for size in sizes {
            let tail = rest.split_off((*size).min(rest.len()));
            pieces.push(rest.into_iter().collect());
            rest = tail;
        }
        pieces.push(rest.into_iter().collect());
        pieces
    }

    proptest! {
        #[test]
        fn chunks_concatenate_to_the_message_for_any_split(
            content in "\\PC{0,60}",
            arguments in prop::collection::vec("\\PC{0,30}", 0..4),
            sizes in prop::collection::vec(0usize..9, 0..12),
            seed in any::<u64>(),
        ) {
            // One queue of chunks for the text and one per call, interleaved arbitrarily.
            let mut queues: Vec<std::collections::VecDeque<ModelChunk>> =
                vec![split(&content, &sizes).iter().map(|piece| text(piece)).collect()];
            for (index, argument) in (0u64..).zip(&arguments) {
                let id = format!("id{index}");
                let args = json!({"value": argument}).to_string();
                queues.push(
                    split(&args, &sizes).iter().enumerate()
                        .map(|(n, piece)| {
                            let first = n == 0;
                            call(index, first.then_some(id.as_str()), first.then_some("tool"), piece)
                        })
                        .collect(),
                );
            }
            let (mut chunks, mut state) = (Vec::new(), seed);
            while queues.iter().any(|queue| !queue.is_empty()) {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let at = usize::try_from(state >> 33).unwrap() % queues.len();
                chunks.extend(queues[at].pop_front());
            }
            chunks.push(last("stop"));

            let (rendered, message) = assemble(&chunks);
            let (text, calls) = concatenate(&rendered);
            prop_assert_eq!(message["content"].as_str().unwrap(), &content);
            prop_assert_eq!(text, content);
            let expected: Vec<Value> = calls.values()
                .map(|(id, name, args)| tool_call(
                    &json!(name), &serde_json::from_str(args).unwrap(), &json!(id),
                ))
                .collect();
            prop_assert_eq!(&message["tool_calls"], &json!(expected));
            prop_assert_eq!(calls.len(), arguments.len());
            prop_assert!(rendered.iter().all(|chunk| chunk["id"] == message["id"]));
            let positions: Vec<&Value> = rendered.iter().map(|chunk| &chunk["chunk_position"]).collect();
            prop_assert!(positions[..positions.len() - 1].iter().all(|position| position.is_null()));
            prop_assert_eq!(positions[positions.len() - 1], "last");
        }
    }
}
