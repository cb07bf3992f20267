//! What a thread waits for, and the forms with which a person answers. The script sends them.

use maud::{Markup, html};

use crate::text::{Excerpt, prose, verbatim};

/// What a thread waits for.
#[derive(Debug, Clone)]
pub enum Waiting {
    /// The answers to questions of the agent. Each run ends with them, and the next message is the answer.
    Answers(Vec<Question>),
    /// To go on where a run was stopped.
    Continuation {
        /// The nodes to run next.
        next: Vec<String>,
        /// What interrupted tasks of another program ask, as JSON.
        asked: Vec<Excerpt>,
    },
}

/// A question of the agent.
#[derive(Debug, Clone)]
pub struct Question {
    /// The message that asks it.
    pub id: String,
    /// The question.
    pub text: Excerpt,
    /// Answers to choose from.
    pub options: Vec<String>,
}

impl Waiting {
    /// The questions with their form. `whole` is the address of a message's whole text, `state` that of the thread's state.
    pub(crate) fn shown(&self, whole: &impl Fn(&str) -> String, state: &str) -> Markup {
        match self {
            Self::Answers(questions) => answers(questions, whole),
            Self::Continuation { next, asked } => continuation(next, asked, state),
        }
    }
}

fn answers(questions: &[Question], whole: &impl Fn(&str) -> String) -> Markup {
    let key = questions.iter().map(|question| question.id.as_str()).collect::<Vec<_>>().join(" ");
    html! {
        form.panel.asks data-does="answer" data-key=(key) {
            h2.who { "The agent waits for your answer" }
            @for (number, question) in questions.iter().enumerate() {
                fieldset {
                    legend { (prose(&question.text, &whole(&question.id))) }
                    @for option in &question.options {
                        label.option { input type="radio" name={ "option-" (number) } value=(option); bdi { (option) } }
                    }
                    input type="text" name={ "answer-" (number) } dir="auto" autocomplete="off"
                        placeholder=(if question.options.is_empty() { "Your answer" } else { "Another answer" })
                        aria-label={ "Answer " (number + 1) };
                }
            }
            div.row {
                button { "Answer" }
                span.hint { "Or write a message below: it is the answer too." }
            }
        }
    }
}

fn continuation(next: &[String], asked: &[Excerpt], state: &str) -> Markup {
    // The script keeps a form that a person has begun to fill in: one with another question is another form.
    let mut key = format!("continue {}", next.join(" "));
    for question in asked {
        key.extend(["\n", question.shown.as_str()]);
    }
    html! {
        form.panel.asks data-does="continue" data-key=(key) {
            h2.who { "The run was stopped before " (next.join(" and ")) }
            @for question in asked { (verbatim(question, state)) }
            @if !asked.is_empty() {
                label.hidden for="value" { "Answer" }
                input #value type="text" name="value" dir="auto" autocomplete="off" placeholder="Answer";
                p.hint { "The answer is stored with the checkpoint from which the run continues." }
            }
            div.row {
                button { @if asked.is_empty() { "Continue the run" } @else { "Answer and continue" } }
                @if asked.is_empty() { span.hint { "A message below starts a new turn instead." } }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_question_is_another_form() {
        let key = |asked: &str| {
            let waiting =
                Waiting::Continuation { next: vec!["ask".to_owned()], asked: vec![Excerpt::of(asked)] };
            let form = waiting.shown(&|_| String::new(), "").into_string();
            form.split_once("data-key=\"").unwrap().1.split_once('"').unwrap().0.to_owned()
        };
        assert_eq!(key("Delete a?"), key("Delete a?"));
        assert_ne!(key("Delete a?"), key("Delete b?"));
    }
}
