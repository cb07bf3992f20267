//! The runs of a thread with its batches, and the events of a run.

use maud::{Markup, html};

use crate::batches::BatchLine;
use crate::layout::{self, Place, Session, Tab, ThreadHead, status, time};
use crate::text::{Excerpt, count, segment, verbatim};

/// A run.
#[derive(Debug, Clone)]
pub struct RunLine {
    /// Its id.
    pub id: String,
    /// `pending`, `running`, `success`, `error`, `interrupted` or `timeout`.
    pub status: String,
    /// Whether it waits for earlier runs.
    pub is_waiting: bool,
    /// Whether it can be cancelled.
    pub is_active: bool,
    /// When it was admitted, ISO-8601.
    pub created_at: String,
    /// How long it took, for people.
    pub took: Option<String>,
    /// The model.
    pub model: Option<String>,
    /// Tokens of all its models.
    pub tokens: u64,
    /// Model calls.
    pub calls: u64,
    /// The beginning of what was asked.
    pub question: Option<String>,
    /// Why it failed.
    pub error: Option<String>,
}

/// The runs and batches of a thread.
#[derive(Debug, Clone)]
pub struct Runs {
    /// The thread.
    pub thread: ThreadHead,
    /// The runs, newest first.
    pub runs: Vec<RunLine>,
    /// Whether there are older runs.
    pub has_more: bool,
    /// The batches, newest first.
    pub batches: Vec<BatchLine>,
}

/// An event of a run.
#[derive(Debug, Clone)]
pub struct EventLine {
    /// Its position in the thread's feed.
    pub seq: i64,
    /// When it happened, ISO-8601.
    pub at: String,
    /// For example `run.start`.
    pub kind: String,
    /// For example `trace`.
    pub category: String,
    /// Its content and metadata as JSON.
    pub content: Excerpt,
}

/// A run with its events.
#[derive(Debug, Clone)]
pub struct RunEvents {
    /// The thread.
    pub thread: ThreadHead,
    /// The run.
    pub run: RunLine,
    /// Its events, oldest first.
    pub events: Vec<EventLine>,
    /// The last position shown, if there are more events.
    pub more_after: Option<i64>,
}

impl Runs {
    /// Its page.
    pub fn page(&self, session: &Session) -> String {
        let is_at_work =
            self.runs.iter().any(|run| run.is_active) || self.batches.iter().any(|batch| !batch.has_ended);
        let main = html! {
            main #main data-thread=(self.thread.id) data-watch[is_at_work] {
                (layout::thread_head(&self.thread, Some(Tab::Runs)))
                section #watched aria-label="Batches and runs" {
                    @if !self.batches.is_empty() {
                        h2 { "Batches" }
                        @for batch in &self.batches { (batch.card(&self.thread)) }
                        h2 { "Runs" }
                    }
                    (self.table())
                    @if self.has_more { p.hint { "Older runs are not listed." } }
                }
            }
        };
        layout::document(session, Place::Threads, "Runs", &main)
    }

    fn table(&self) -> Markup {
        let has_models = self.runs.iter().any(|run| run.model.is_some());
        html! {
            @if self.runs.is_empty() { div.empty { p { b { "No runs." } } } }
            @else {
                div.scroll tabindex="0" role="region" aria-label="Runs" {
                    table.list {
                        thead {
                            tr {
                                th scope="col" { "Run" }
                                th scope="col" { "Status" }
                                th scope="col" { "Started" }
                                th.number scope="col" { "Took" }
                                th.number scope="col" { "Tokens" }
                                th.number scope="col" { "Model calls" }
                                @if has_models { th scope="col" { "Model" } }
                                th scope="col" { span.hidden { "Actions" } }
                            }
                        }
                        tbody { @for run in &self.runs { (self.row(run, has_models)) } }
                    }
                }
            }
        }
    }

    fn row(&self, run: &RunLine, has_models: bool) -> Markup {
        html! {
            tr {
                td.name {
                    a href={ (self.thread.path()) "/runs/" (segment(&run.id)) } { bdi { (run.question.as_deref().unwrap_or("Run")) } }
                    code.id { (run.id) }
                    @if let Some(error) = &run.error { p.bad dir="auto" { (error) } }
                }
                td { (status(&run.status)) @if run.is_waiting { span.tag { "waits" } } }
                td { (time(&run.created_at)) }
                td.number { (run.took.as_deref().unwrap_or("–")) }
                td.number { (count(run.tokens)) }
                td.number { (count(run.calls)) }
                @if has_models { td { bdi { (run.model.as_deref().unwrap_or("–")) } } }
                td.actions {
                    @if run.is_active {
                        button.quiet type="button" data-post={ "/runs/" (segment(&run.id)) "/cancel" } { "Cancel" }
                    }
                }
            }
        }
    }
}

impl EventLine {
    /// The address of this event alone, uncut. `run` is the address of its run.
    fn whole(&self, run: &str) -> String {
        // The first event of a feed comes after none.
        let after = if self.seq > 1 { format!("&after_seq={}", self.seq - 1) } else { String::new() };
        format!("/api{run}/events?limit=1{after}")
    }
}

impl RunEvents {
    /// Its page.
    pub fn page(&self, session: &Session) -> String {
        let (run, path) = (&self.run, self.thread.path());
        let here = format!("{path}/runs/{}", segment(&run.id));
        let main = html! {
            main #main data-thread=(self.thread.id) {
                (layout::thread_head(&self.thread, Some(Tab::Runs)))
                h2 { "Run " code { (run.id) } }
                p.facts {
                    (status(&run.status))
                    span.fact { (time(&run.created_at)) }
                    @if let Some(took) = &run.took { span.fact { (took) } }
                    span.fact { (count(run.tokens)) " tokens" }
                    span.fact { (count(run.calls)) " model calls" }
                    @if let Some(model) = &run.model { span.fact { bdi { (model) } } }
                }
                @if let Some(error) = &run.error { p.failure dir="auto" { (error) } }
                @if self.events.is_empty() { div.empty { p { "The feed has no event of this run." } } }
                ol.timeline {
                    @for event in &self.events {
                        li {
                            details.call data-key=(event.seq) {
                                summary {
                                    code.tool { (event.kind) }
                                    span.summary { (event.category) }
                                    span.fact { (event.at.get(11..23).unwrap_or(&event.at)) }
                                }
                                (verbatim(&event.content, &event.whole(&here)))
                            }
                        }
                    }
                }
                @if let Some(after) = self.more_after { p { a.button.quiet href={ (here) "?after=" (after) } { "Later events" } } }
            }
        };
        layout::document(session, Place::Threads, "A run", &main)
    }
}
