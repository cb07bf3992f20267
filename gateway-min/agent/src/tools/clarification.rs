//! `ask_clarification`: a question to the user, which ends the run.

use async_trait::async_trait;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Tool, ToolContext, ToolError, ToolOutput, ToolSpec, parse, schema};
use crate::model::message::{kind, tool_calls};

/// The tool's name.
pub(crate) const ASK_CLARIFICATION: &str = "ask_clarification";

pub(super) struct AskClarification;

#[derive(Deserialize)]
struct Args {
    question: String,
    #[serde(default)]
    options: Option<Vec<String>>,
}

#[async_trait]
impl Tool for AskClarification {
    fn spec(&self) -> ToolSpec {
        ToolSpec {
            name: ASK_CLARIFICATION.to_owned(),
            description: "Asks the user a question and ends your work until they answer. Use it when you \
                          cannot continue without information that only the user has, not to ask for approval of \
                          obvious steps."
                .to_owned(),
            parameters: json!({
                "type": "object",
                "required": ["question"],
                "properties": {
                    "question": {"type": "string", "description": "The question."},
                    "options": {
                        "type": "array",
                        "items": {"type": "string"},
                        "description": "Answers to choose from, if there are only a few.",
                    },
                },
            }),
        }
    }

    async fn call(&self, _context: &ToolContext, args: Value) -> Result<ToolOutput, ToolError> {
        let Args { question, options } = parse(args)?;
        if question.trim().is_empty() {
            return Err(ToolError::Arguments("argument `question` is empty".to_owned()));
        }
        let options = options.unwrap_or_default();
        let lines = (1..).zip(&options).map(|(number, option)| format!("{number}. {option}"));
        let content = std::iter::once(question).chain(lines).collect::<Vec<_>>().join("\n");
        Ok(ToolOutput { ends_run: true, ..ToolOutput::text(content) })
    }
}

/// Whether this tool result is a question to the user.
pub(crate) fn is_question(result: &Value) -> bool {
    result["name"] == ASK_CLARIFICATION && result["status"] != "error"
}

/// Whether a conversation ends with a question to the user.
pub fn asks(messages: &[Value]) -> bool {
    !questions(messages).is_empty()
}

/// The questions to the user with which a conversation ends: the call of each, and its message.
pub fn questions(messages: &[Value]) -> Vec<(&Value, &Value)> {
    let Some(last) = messages.iter().rposition(|message| kind(message) != "tool") else { return Vec::new() };
    let calls = tool_calls(&messages[last]);
    let asked = messages[last + 1..].iter().filter(|result| is_question(result));
    let call_of = |result: &Value| calls.iter().find(|call| call["id"] == result["tool_call_id"]);
    asked.filter_map(|result| call_of(result).or(calls.first()).map(|call| (call, result))).collect()
}

/// The arguments of a question's call as the tool reads them: its options are a list, also if the model wrote a text.
pub fn question_args(call: &Value) -> Value {
    schema::fitted(&AskClarification.spec().parameters, call["args"].clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call() -> Value {
        json!({"type": "ai", "content": "", "tool_calls": [{"name": ASK_CLARIFICATION, "id": "c", "args": {}}]})
    }

    fn result(name: &str, status: &str) -> Value {
        json!({"type": "tool", "name": name, "status": status, "tool_call_id": "c", "content": "?"})
    }

    fn human() -> Value {
        json!({"type": "human", "content": "hi"})
    }

    #[test]
    fn a_conversation_asks_if_it_ends_with_an_unanswered_question() {
        let asked = result(ASK_CLARIFICATION, "success");
        assert!(asks(&[human(), call(), asked.clone()]));
        assert!(asks(&[human(), call(), asked.clone(), result("ls", "success")]), "beside another tool");
        assert!(!asks(&[]));
        assert!(!asks(&[human()]));
        assert!(!asks(&[human(), call()]), "the question was not asked yet");
        assert!(!asks(&[human(), call(), result(ASK_CLARIFICATION, "error")]));
        assert!(!asks(&[human(), call(), asked.clone(), human()]), "answered");
        assert!(!asks(&[human(), call(), result("ls", "success")]));
        assert!(!asks(&[human(), asked]), "nobody called the tool");
    }

    async fn ask(args: Value) -> Result<ToolOutput, ToolError> {
        let context = ToolContext::new("", "", "/nonexistent");
        AskClarification.call(&context, args).await
    }

    #[tokio::test]
    async fn the_question_is_the_content_and_the_run_ends() {
        let output = ask(json!({"question": "Which one?"})).await.unwrap();
        assert_eq!((output.content.as_str(), output.ends_run), ("Which one?", true));
        let output = ask(json!({"question": "Which?", "options": ["red", "blue"]})).await.unwrap();
        assert_eq!(output.content, "Which?\n1. red\n2. blue");
    }

    #[tokio::test]
    async fn an_empty_question_is_refused() {
        assert!(matches!(ask(json!({"question": " "})).await, Err(ToolError::Arguments(_))));
    }
}
