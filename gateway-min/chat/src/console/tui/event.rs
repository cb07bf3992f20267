//! Translates the events of a turn for the view.

use serde_json::{Value as Json, json};

use crate::client::{ClientError, Event, Message, Usage};
use crate::console::headless::failed_call;
use crate::console::text_of;

/// An event that the view shows.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum ViewEvent {
    RunStarted,
    /// More of the answer with this id.
    AssistantDelta {
        id: String,
        text: String,
    },
    ToolCall {
        id: String,
        name: String,
        args: Json,
    },
    /// The result of a call: the message.
    ToolResult {
        call: String,
        message: Json,
    },
    /// A `task_*` event of the delegation by this call.
    Task {
        call: String,
        event: Json,
    },
    Title(String),
    Usage(Usage),
    AssistantError(String),
    RunEnded,
}

/// The view events for an item of a turn's stream.
pub(super) fn of(item: &Result<Event, ClientError>) -> Vec<ViewEvent> {
    match item {
        Err(error) => vec![ViewEvent::AssistantError(text_of(error)), ViewEvent::RunEnded],
        Ok(Event::End(end)) => vec![ViewEvent::Usage(end.usage), ViewEvent::RunEnded],
        Ok(Event::Custom(event)) => {
            let call = event["task_id"].as_str().map(str::to_owned);
            call.map(|call| ViewEvent::Task { call, event: event.clone() }).into_iter().collect()
        }
        Ok(Event::Values(values)) => {
            let title = values.title.clone().map(ViewEvent::Title);
            title.into_iter().chain(failed_call(values).map(ViewEvent::AssistantError)).collect()
        }
        Ok(Event::MessagesTuple(Message::Tool { content, tool_call_id, .. })) => {
            let message = json!({"type": "tool", "content": content});
            vec![ViewEvent::ToolResult { call: tool_call_id.clone(), message }]
        }
        Ok(Event::MessagesTuple(Message::Ai { content, id, tool_calls })) => {
            let delta = ViewEvent::AssistantDelta { id: id.clone(), text: content.clone() };
            let calls = tool_calls.iter().map(|call| ViewEvent::ToolCall {
                id: call.id.clone(),
                name: call.name.clone(),
                args: call.args.clone(),
            });
            (!content.is_empty()).then_some(delta).into_iter().chain(calls).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::End;

    #[test]
    fn a_refused_thread_is_an_assistant_error_and_the_end_of_the_run() {
        let text =
            "Thread requires delta mode; materialize and convert its checkpoints before using full mode.";
        let shown = of(&Err(ClientError::Engine(threadkeep::Error::ModeMismatch)));
        assert_eq!(shown, [ViewEvent::AssistantError(text.to_owned()), ViewEvent::RunEnded]);
    }

    #[test]
    fn a_turn_that_ends_shows_what_it_cost() {
        let usage = Usage { input_tokens: 1, output_tokens: 2, total_tokens: 3 };
        assert_eq!(of(&Ok(Event::End(End { usage }))), [ViewEvent::Usage(usage), ViewEvent::RunEnded]);
    }
}
