//! Delegations: as cards in a conversation, and with all their steps.

use maud::{Markup, html};

use crate::layout::{self, Place, Session, Tab, ThreadHead, status};
use crate::text::{Excerpt, segment, things};

/// The steps that a card shows: the last ones.
const SHOWN: usize = 4;

/// Work that was delegated to a subagent.
#[derive(Debug, Clone)]
pub struct Delegation {
    /// The execution.
    pub id: String,
    /// The subagent.
    pub agent: String,
    /// What the work is about.
    pub description: String,
    /// `pending`, `running`, `completed`, `failed`, `cancelled` or `timed_out`.
    pub status: String,
    /// Duration, tokens and model, for people.
    pub facts: Vec<String>,
    /// Why it has no result.
    pub error: Option<String>,
    /// What its subagent has said and done so far, if it is at work.
    pub steps: Vec<Step>,
    /// Whether its steps can be read: those of an older attempt, of external agents and of batches cannot.
    pub has_steps: bool,
    /// What it delegated itself.
    pub children: Vec<Delegation>,
}

/// What a subagent said or did.
#[derive(Debug, Clone)]
pub struct Step {
    /// The tool that this is the result of.
    pub tool: Option<String>,
    /// What it says.
    pub text: Excerpt,
    /// The tools that it calls, each with its arguments on one line.
    pub calls: Vec<(String, String)>,
}

/// A delegation with all its steps.
#[derive(Debug, Clone)]
pub struct Execution {
    /// The thread.
    pub thread: ThreadHead,
    /// The delegation, with its steps.
    pub delegation: Delegation,
    /// Whether it has ended.
    pub has_ended: bool,
}

impl Delegation {
    /// It as a card, with what else there is to show of it.
    pub(crate) fn card(&self, thread: &ThreadHead, more: &Markup) -> Markup {
        let path = format!("{}/executions/{}", thread.path(), segment(&self.id));
        let earlier = self.steps.len().saturating_sub(SHOWN);
        html! {
            div.card data-status=(self.status) role="group" aria-label={ "Delegated to " (self.agent) } {
                div.row {
                    b { bdi { (self.agent) } }
                    (status(&self.status))
                    @for fact in &self.facts { span.fact { (fact) } }
                    @if self.has_steps { a.fact href=(path) { "Steps" } }
                }
                p dir="auto" { (self.description) }
                @if let Some(error) = &self.error { p.failure dir="auto" { (error) } }
                @if earlier > 0 { p.fact { (things(earlier as u64, "earlier step")) } }
                @if !self.steps.is_empty() { (list(&self.steps[earlier..], true)) }
                @for child in &self.children { (child.card(thread, &html! {})) }
                (more)
            }
        }
    }
}

/// Steps as a list; `is_short` for their beginnings.
fn list(steps: &[Step], is_short: bool) -> Markup {
    let text = |step: &Step| {
        html! {
            @if !step.text.is_empty() {
                span.said.short[is_short] dir="auto" { (step.text.shown) @if step.text.whole.is_some() { " …" } }
            }
        }
    };
    html! {
        ol.steps {
            @for step in steps {
                li data-kind=(if step.tool.is_some() { "tool" } else { "ai" }) {
                    @if let Some(tool) = &step.tool { code.tool { (tool) } " " }
                    (text(step))
                    @for (name, arguments) in &step.calls {
                        div.calls { "calls " code.tool { (name) } " " span.summary dir="auto" { (arguments) } }
                    }
                }
            }
        }
    }
}

impl Execution {
    /// Its page.
    pub fn page(&self, session: &Session) -> String {
        let delegation = Delegation { steps: Vec::new(), has_steps: false, ..self.delegation.clone() };
        let steps = &self.delegation.steps;
        let main = html! {
            main #main data-thread=(self.thread.id) data-watch[!self.has_ended] {
                (layout::thread_head(&self.thread, Some(Tab::Conversation)))
                section #watched aria-label="Delegation" {
                    (delegation.card(&self.thread, &html! {}))
                    h2 { (things(steps.len() as u64, "step")) }
                    @if !steps.is_empty() { (list(steps, false)) }
                    @else { p.hint { @if self.has_ended { "It has no steps." } @else { "It has not said or done anything yet." } } }
                }
            }
        };
        layout::document(session, Place::Threads, "A delegation", &main)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_shows_the_last_steps_as_text() {
        let hostile = "<script>1</script>";
        let step = |number: usize| Step {
            tool: (number.is_multiple_of(2)).then(|| hostile.to_owned()),
            text: Excerpt::of(&format!("step {number} {hostile}")),
            calls: vec![(hostile.to_owned(), hostile.to_owned())],
        };
        let delegation = Delegation {
            id: "a/b".to_owned(),
            agent: "a".to_owned(),
            description: String::new(),
            status: "running".to_owned(),
            facts: Vec::new(),
            error: None,
            steps: (0..7).map(step).collect(),
            has_steps: true,
            children: Vec::new(),
        };
        let thread = ThreadHead { id: "t".to_owned(), title: None, status: "busy".to_owned() };
        let card = delegation.card(&thread, &html! {}).into_string();
        assert!(
            card.contains("3 earlier steps") && card.contains("href=\"/threads/t/executions/a%2Fb\""),
            "{card}"
        );
        assert!(!card.contains("step 2") && card.contains("step 3") && card.contains("step 6"), "{card}");
        let page = Execution { thread, delegation, has_ended: false }.page(&Session::default());
        assert!(page.contains("step 0") && page.contains("7 steps") && page.contains("data-watch"), "{page}");
        assert_eq!(page.matches("<script").count(), 1, "only ours: {page}");
    }
}
