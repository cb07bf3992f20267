//! The goal of a thread: what it is, how far it is, and setting it. The script sends the forms.

use maud::{Markup, html};

use crate::text::Excerpt;

/// The maximum of characters in an objective, and of continuations.
const OBJECTIVE_MAX: u32 = 4000;
const CONTINUATIONS_MAX: u64 = 8;

/// The goal of a thread.
#[derive(Debug, Clone)]
pub struct Goal {
    /// What to reach.
    pub objective: String,
    /// How often the agent has continued by itself.
    pub continuations: u64,
    /// How often it may.
    pub max_continuations: u64,
    /// What the last run lacked.
    pub reason: Option<Excerpt>,
    /// Why the agent does not continue by itself.
    pub suspended: Option<String>,
}

/// The goal of a thread, or its absence, and whether it can be changed now.
#[derive(Debug, Clone)]
pub struct GoalPanel {
    /// The goal.
    pub goal: Option<Goal>,
    /// Whether no run is at work.
    pub can_change: bool,
}

impl GoalPanel {
    pub(crate) fn shown(&self) -> Markup {
        html! {
            details.call.goal data-key="goal" {
                summary {
                    b { "Goal" }
                    @match &self.goal {
                        Some(goal) => {
                            span.summary dir="auto" { (goal.objective) }
                            span.fact { (goal.continuations) " of " (goal.max_continuations) " continuations" }
                            @if goal.suspended.is_some() { span.tag { "suspended" } }
                        }
                        None => span.summary { "None. With one, runs continue until a model finds it reached." },
                    }
                }
                @if let Some(goal) = &self.goal {
                    p.text dir="auto" { (goal.objective) }
                    @if let Some(reason) = &goal.reason {
                        p { b { "After the last run: " } bdi { (reason.shown) } @if let Some(why) = &goal.suspended { " (" (why) ")" } }
                    }
                }
                @if self.can_change { (self.form()) }
                @else { p.hint { "It can be changed when no run is at work." } }
            }
        }
    }

    fn form(&self) -> Markup {
        let limit = self.goal.as_ref().map_or(CONTINUATIONS_MAX, |goal| goal.max_continuations);
        html! {
            form.stack data-does="goal" data-key="goal-form" {
                label for="objective" { @if self.goal.is_some() { "Another goal" } @else { "What to reach" } }
                textarea #objective name="objective" rows="2" dir="auto" required maxlength=(OBJECTIVE_MAX) {}
                div.row {
                    label for="continuations" { "Continuations" }
                    input #continuations type="number" name="continuations" min="0" max=(CONTINUATIONS_MAX) value=(limit) required;
                    button { "Set the goal" }
                    @if self.goal.is_some() {
                        button.quiet type="button" data-do="unset" { "Clear the goal" }
                    }
                }
            }
        }
    }
}
