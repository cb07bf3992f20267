//! A thread's conversation.

use maud::{Markup, html};

use crate::executions::Delegation;
use crate::goal::GoalPanel;
use crate::layout::{self, Place, Session, Tab, ThreadHead};
use crate::text::{Excerpt, prose, segment, verbatim};
use crate::waiting::Waiting;

/// A conversation, or the end of a long one.
#[derive(Debug, Clone)]
pub struct Conversation {
    /// The thread.
    pub thread: ThreadHead,
    /// The checkpoint that is shown, if it is not the head.
    pub at: Option<String>,
    /// The number of messages before those shown.
    pub earlier: usize,
    /// The messages shown.
    pub messages: Vec<Message>,
    /// The run that is active.
    pub active_run: Option<String>,
    /// Whether it can be compacted.
    pub can_compact: bool,
    /// Why the last run failed.
    pub failure: Option<String>,
    /// Its goal; `None` if an older state is shown.
    pub goal: Option<GoalPanel>,
    /// What the thread waits for.
    pub waiting: Option<Waiting>,
}

/// A message.
#[derive(Debug, Clone)]
pub enum Message {
    /// Of a person.
    Person {
        /// Its id.
        id: String,
        /// What it says.
        text: Excerpt,
        /// Whether the turn can be run again with another text.
        can_edit: bool,
    },
    /// Of the agent.
    Agent {
        /// Its id.
        id: String,
        /// What it says.
        text: Excerpt,
        /// The tools that it called.
        calls: Vec<Call>,
        /// Duration and tokens, for people.
        facts: Vec<String>,
        /// Whether it ends a turn, so that the thread can be branched after it.
        ends_turn: bool,
        /// Whether it can be generated again.
        can_repeat: bool,
    },
    /// Of neither, such as a summary.
    Note {
        /// Its id.
        id: String,
        /// What it is.
        name: &'static str,
        /// What it says.
        text: Excerpt,
    },
}

/// How a tool call went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallState {
    /// It has no result yet.
    Open,
    /// It has a result.
    Done,
    /// Its result is an error.
    Failed,
}

/// A call of a tool.
#[derive(Debug, Clone)]
pub struct Call {
    /// The call's id.
    pub id: String,
    /// The tool.
    pub name: String,
    /// The arguments on one line.
    pub summary: String,
    /// The arguments as JSON.
    pub arguments: Excerpt,
    /// The result, and the id of the message that has it.
    pub result: Option<(String, Excerpt)>,
    /// The batch that it submitted.
    pub batch: Option<String>,
    /// How it went.
    pub state: CallState,
    /// Whether its result is for the person, such as a question, and so is shown.
    pub is_open: bool,
    /// What it delegated.
    pub delegations: Vec<Delegation>,
}

impl Conversation {
    /// Its page.
    pub fn page(&self, session: &Session) -> String {
        let main = html! {
            main #main data-thread=(self.thread.id) data-run=[self.active_run.as_deref()] data-at=[self.at.as_deref()] {
                div #thread-head { (layout::thread_head(&self.thread, Some(Tab::Conversation))) }
                section #goal.conversation aria-label="Goal" { @if let Some(goal) = &self.goal { (goal.shown()) } }
                section #conversation.conversation aria-label="Conversation" { (self.messages()) }
                section #live.conversation aria-label="Streaming answer" aria-live="off" {}
                (self.composer())
            }
        };
        layout::document(session, Place::Threads, self.thread.name(), &main)
    }

    fn address(&self) -> String {
        match &self.at {
            Some(at) => format!("{}?at={}&", self.thread.path(), segment(at)),
            None => format!("{}?", self.thread.path()),
        }
    }

    fn messages(&self) -> Markup {
        html! {
            @if self.at.is_some() {
                p.banner {
                    "This is an older state. What you say here continues from it; what came after stays in the history. "
                    a href=(self.thread.path()) { "Back to the newest" }
                }
            }
            @if self.earlier > 0 {
                p.earlier { a.button.quiet href={ (self.address()) "end=" (self.earlier) } { (self.earlier) " earlier messages" } }
            }
            @if self.messages.is_empty() && self.active_run.is_none() {
                div.empty { p { b { "Nothing has been said yet." } } p { "Write below. Each step of the answer becomes a checkpoint." } }
            }
            @for message in &self.messages { (self.message(message)) }
            @if let Some(failure) = &self.failure { p.failure role="alert" dir="auto" { b { "The last run failed. " } (failure) } }
            @if let Some(waiting) = &self.waiting { (waiting.shown(&|id| self.whole(id), &format!("/api{}/state", self.thread.path()))) }
        }
    }

    /// Where the whole of a message is.
    fn whole(&self, id: &str) -> String {
        let at = self.at.as_deref().map(|at| format!("?at={}", segment(at))).unwrap_or_default();
        format!("{}/messages/{}{at}", self.thread.path(), segment(id))
    }

    fn message(&self, message: &Message) -> Markup {
        let whole = |id: &str| self.whole(id);
        match message {
            Message::Person { id, text, can_edit } => html! {
                article.person data-message=(id) {
                    h2.who { "You" }
                    (prose(text, &whole(id)))
                    @if *can_edit && text.whole.is_none() {
                        p.does { button.quiet type="button" data-do="edit" data-message=(id) data-text=(text.shown) { "Edit" } }
                    }
                }
            },
            Message::Agent { id, text, calls, facts, ends_turn, can_repeat } => html! {
                article.agent data-message=(id) {
                    h2.who { "Agent" }
                    @if !text.is_empty() || text.whole.is_some() { (prose(text, &whole(id))) }
                    @for call in calls { (self.call(call, id, &whole)) }
                    @if !facts.is_empty() || *ends_turn || *can_repeat {
                        p.does {
                            @for fact in facts { span.fact { (fact) } }
                            @if *can_repeat { button.quiet type="button" data-do="repeat" data-message=(id) { "Regenerate" } }
                            @if *ends_turn && self.at.is_none() {
                                button.quiet type="button" data-do="branch" data-message=(id) { "Branch from here" }
                            }
                        }
                    }
                }
            },
            Message::Note { id, name, text } => html! {
                article.note { details data-key=(id) { summary { (name) } (verbatim(text, &whole(id))) } }
            },
        }
    }

    fn call(&self, call: &Call, of: &str, whole: &impl Fn(&str) -> String) -> Markup {
        let details = self.details(call, of, whole);
        match call.delegations.split_last() {
            None => details,
            Some((last, others)) => html! {
                @for delegation in others { (delegation.card(&self.thread, &html! {})) }
                (last.card(&self.thread, &details))
            },
        }
    }

    fn details(&self, call: &Call, of: &str, whole: &impl Fn(&str) -> String) -> Markup {
        let state = match call.state {
            CallState::Open => "running",
            CallState::Done => "completed",
            CallState::Failed => "failed",
        };
        html! {
            details.call data-key=(call.id) open[call.is_open] {
                summary {
                    code.tool { (call.name) }
                    span.summary dir="auto" { (call.summary) }
                    (layout::status(state))
                }
                h3 { "Arguments" }
                (verbatim(&call.arguments, &whole(of)))
                @if let Some((id, result)) = &call.result {
                    h3 { "Result" }
                    (verbatim(result, &whole(id)))
                }
                @if let Some(batch) = &call.batch {
                    p { a href={ (self.thread.path()) "/batches/" (segment(batch)) } { "The batch and its items" } }
                }
            }
        }
    }

    /// Where a person writes. The script sends it, so that the answer can stream.
    fn composer(&self) -> Markup {
        html! {
            form #talk.talk {
                label.hidden for="say" { "Message" }
                textarea #say name="say" rows="2" dir="auto" placeholder="Write a message" required {}
                div.row {
                    button #send { @if self.at.is_some() { "Continue from here" } @else { "Send" } }
                    button #stop.danger type="button" hidden[self.active_run.is_none()] { "Stop" }
                    @if self.can_compact { button.quiet type="button" data-do="compact" { "Compact" } }
                    label.check { input #delegates type="checkbox" checked; " May delegate" }
                    span.hint { kbd { "Enter" } " sends, " kbd { "Shift" } "+" kbd { "Enter" } " starts a line" }
                }
                noscript { p.failure { "Talking needs the script of this page, which your browser does not run." } }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::goal::Goal;
    use crate::waiting::Question;

    fn conversation(messages: Vec<Message>) -> Conversation {
        Conversation {
            thread: ThreadHead { id: "t".to_owned(), title: None, status: "idle".to_owned() },
            at: None,
            earlier: 0,
            messages,
            active_run: None,
            can_compact: true,
            failure: None,
            goal: None,
            waiting: None,
        }
    }

    #[test]
    fn nothing_that_a_model_says_is_markup() {
        let hostile = "</div><script src=//evil.example></script>\" onload=\"x";
        let text = Excerpt::of(hostile);
        let delegation = Delegation {
            id: hostile.to_owned(),
            agent: hostile.to_owned(),
            description: hostile.to_owned(),
            status: hostile.to_owned(),
            facts: vec![hostile.to_owned()],
            error: Some(hostile.to_owned()),
            steps: Vec::new(),
            has_steps: true,
            children: Vec::new(),
        };
        let call = Call {
            id: hostile.to_owned(),
            name: hostile.to_owned(),
            summary: hostile.to_owned(),
            arguments: text.clone(),
            result: Some((hostile.to_owned(), text.clone())),
            batch: Some(hostile.to_owned()),
            state: CallState::Failed,
            is_open: true,
            delegations: vec![delegation],
        };
        let of_agent = Message::Agent {
            id: hostile.to_owned(),
            text: text.clone(),
            calls: vec![call],
            facts: vec![hostile.to_owned()],
            ends_turn: true,
            can_repeat: true,
        };
        let of_person = Message::Person { id: hostile.to_owned(), text: text.clone(), can_edit: true };
        let mut conversation = conversation(vec![
            of_person,
            of_agent,
            Message::Note { id: hostile.to_owned(), name: "Note", text },
        ]);
        conversation.failure = Some(hostile.to_owned());
        let question = Question {
            id: hostile.to_owned(),
            text: Excerpt::of(hostile),
            options: vec![hostile.to_owned()],
        };
        conversation.waiting = Some(Waiting::Answers(vec![question]));
        let goal = Goal {
            objective: hostile.to_owned(),
            continuations: 1,
            max_continuations: 8,
            reason: Some(Excerpt::of(hostile)),
            suspended: Some(hostile.to_owned()),
        };
        conversation.goal = Some(GoalPanel { goal: Some(goal), can_change: true });
        conversation.at = Some(hostile.to_owned());
        conversation.thread.title = Some(hostile.to_owned());
        let mut page = conversation.page(&Session::default());
        let asked = vec![Excerpt::of(hostile)];
        conversation.waiting = Some(Waiting::Continuation { next: vec![hostile.to_owned()], asked });
        page.push_str(&conversation.page(&Session::default()));
        assert_eq!(page.matches("<script").count(), 2, "only ours: {page}");
        assert!(!page.contains("\" onload=\""), "{page}");
        assert!(page.matches("&lt;script src=//evil.example&gt;").count() >= 12, "{page}");
    }

    #[test]
    fn no_page_has_inline_style_or_script() {
        let page = conversation(Vec::new()).page(&Session::default());
        for part in [" style=", " onclick", "<style", "javascript:"] {
            assert!(!page.contains(part), "{part}: {page}");
        }
    }
}
