//! `ask_clarification`: a question to the user, which ends the run.

use async_trait::async_trait;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Tool, ToolContext, ToolError, ToolOutput, ToolSpec, parse};

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
                          cannot go on without information only the user has, not to ask for approval of \
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

#[cfg(test)]
mod tests {
    use super::*;

    async fn ask(args: Value) -> Result<ToolOutput, ToolError> {
        let context = ToolContext {
            thread_id: String::new(),
            run_id: String::new(),
            tool_call_id: String::new(),
            root: "/nonexistent".into(),
        };
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
