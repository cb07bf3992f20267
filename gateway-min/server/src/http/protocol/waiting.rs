//! What a thread waits for: the questions of its last run.

use serde_json::{Value, json};
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::state::StateSnapshot;
use threadkeep_agent::tools::{question_args, questions};

/// A question to the user.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Asked {
    /// What an answer names it by.
    pub(super) id: String,
    /// The question.
    pub(super) payload: Value,
}

/// The questions that are open in this state: those of interrupted tasks, and those of the tool that asks.
///
/// # Errors
/// [`threadkeep::Error::Corrupt`] if stored bytes do not decode.
pub(super) fn asked(state: &StateSnapshot) -> threadkeep::Result<Vec<Asked>> {
    let interrupts = state.tasks().into_iter().flat_map(|task| task.interrupts);
    let of_tasks = interrupts.filter_map(|interrupt| {
        Some(Asked { id: interrupt["id"].as_str()?.to_owned(), payload: interrupt["value"].clone() })
    });
    let mut asked: Vec<Asked> = of_tasks.collect();
    if state.next.is_empty() {
        let messages = state.json(MESSAGES_CHANNEL)?.unwrap_or_default();
        asked.extend(of_tool(messages.as_array().map_or(&[], Vec::as_slice)));
    }
    Ok(asked)
}

fn of_tool(messages: &[Value]) -> Vec<Asked> {
    let asked = questions(messages).into_iter().filter_map(|(call, message)| {
        let args = question_args(call);
        let mut payload = json!({ "question": args["question"], "tool_call_id": message["tool_call_id"] });
        if let Some(options) = args.get("options").filter(|options| options.is_array()) {
            payload["options"] = options.clone();
        }
        Some(Asked { id: message["id"].as_str()?.to_owned(), payload })
    });
    asked.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_a_model_wrote_as_a_text_are_those_that_the_tool_read() {
        let args = json!({"question": "Which colour?", "options": "[\"red\", \"blue\"]"});
        let messages = [
            json!({"type": "ai", "id": "a", "content": "", "tool_calls": [
                {"name": "ask_clarification", "id": "c", "args": args},
            ]}),
            json!({"type": "tool", "id": "q", "name": "ask_clarification", "tool_call_id": "c", "content": "?"}),
        ];
        assert_eq!(of_tool(&messages)[0].payload["options"], json!(["red", "blue"]));
    }

    #[test]
    fn a_question_has_its_text_its_options_and_the_id_of_its_message() {
        let mut messages = vec![
            json!({"type": "human", "id": "h", "content": "paint it"}),
            json!({"type": "ai", "id": "a", "content": "", "tool_calls": [
                {"name": "ask_clarification", "id": "c", "args": {"question": "Which colour?", "options": ["red"]}},
                {"name": "ask_clarification", "id": "d", "args": {"question": "When?"}},
            ]}),
        ];
        for (id, call) in [("q", "c"), ("r", "d")] {
            let name = "ask_clarification";
            messages
                .push(json!({"type": "tool", "id": id, "name": name, "tool_call_id": call, "content": "?"}));
        }
        let first = json!({"question": "Which colour?", "options": ["red"], "tool_call_id": "c"});
        let second = json!({"question": "When?", "tool_call_id": "d"});
        let expected = [("q", first), ("r", second)].map(|(id, payload)| Asked { id: id.into(), payload });
        assert_eq!(of_tool(&messages), expected);
        messages.push(json!({"type": "human", "id": "i", "content": "blue"}));
        assert_eq!(of_tool(&messages), []);
    }
}
