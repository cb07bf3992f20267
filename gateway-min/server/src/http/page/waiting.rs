//! What a thread waits for: answers to the agent's questions, or to go on where a run was stopped.

use serde_json::Value;
use threadkeep::state::StateSnapshot;
use threadkeep_agent::model::message::text;
use threadkeep_agent::tools::{question_args, questions};
use threadkeep_page::{Excerpt, Question, Waiting};

use super::conversation::pretty;

/// What a thread without an active run waits for, in this state with these messages.
pub(super) fn of(state: &StateSnapshot, messages: &[Value]) -> Option<Waiting> {
    if !state.next.is_empty() {
        let asked = state.tasks().into_iter().flat_map(|task| task.interrupts);
        return Some(Waiting::Continuation {
            asked: asked.map(|question| Excerpt::of(&pretty(&question))).collect(),
            next: state.next.iter().map(ToString::to_string).collect(),
        });
    }
    let asked: Vec<Question> = questions(messages)
        .into_iter()
        .map(|(call, message)| question(&question_args(call), message))
        .collect();
    (!asked.is_empty()).then_some(Waiting::Answers(asked))
}

fn question(arguments: &Value, message: &Value) -> Question {
    let options = arguments["options"].as_array().into_iter().flatten();
    let asked = arguments["question"].as_str().map_or_else(|| text(message), str::to_owned);
    Question {
        id: message["id"].as_str().unwrap_or_default().to_owned(),
        text: Excerpt::of(&asked),
        options: options.filter_map(|option| option.as_str().map(str::to_owned)).collect(),
    }
}
