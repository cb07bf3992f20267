//! Batches of delegations: their progress, and the items of one.

use maud::{Markup, html};

use crate::layout::{self, Place, Session, Tab, ThreadHead, status};
use crate::text::{Excerpt, count, segment};

/// The statuses of an item to choose from, in the order in which items go through them.
const STATUSES: [&str; 7] = ["pending", "queued", "leased", "running", "succeeded", "failed", "cancelled"];

/// A batch of delegations.
#[derive(Debug, Clone)]
pub struct BatchLine {
    /// Its id.
    pub id: String,
    /// What people call it.
    pub title: String,
    /// The subagent.
    pub agent: String,
    /// `queued`, `running`, `paused`, or how it ended.
    pub status: String,
    /// Whether it has ended.
    pub has_ended: bool,
    /// Its number of items.
    pub total: u64,
    /// Items by status, in the order in which they go through them.
    pub items: Vec<(String, u64)>,
    /// What can be done with it: `pause`, `resume`, `cancel`.
    pub can: Vec<&'static str>,
}

/// An item of a batch.
#[derive(Debug, Clone)]
pub struct ItemLine {
    /// Its id.
    pub id: String,
    /// What the submission calls it.
    pub key: String,
    /// Its status.
    pub status: String,
    /// The current or the last attempt; 0 before the first.
    pub attempt: u64,
    /// Duration, tokens and model of that attempt, for people.
    pub facts: Vec<String>,
    /// The beginning of its result.
    pub preview: Option<Excerpt>,
    /// Why it has no result, or why an earlier attempt had none.
    pub error: Option<String>,
    /// Whether it can be tried again.
    pub can_retry: bool,
}

/// A batch with a part of its items.
#[derive(Debug, Clone)]
pub struct Batch {
    /// The thread.
    pub thread: ThreadHead,
    /// The batch.
    pub batch: BatchLine,
    /// The status of the items shown; empty for any.
    pub status: String,
    /// The items shown, by position.
    pub items: Vec<ItemLine>,
    /// How many are before those shown.
    pub offset: u64,
    /// The maximum number that is shown at a time.
    pub page: u64,
    /// Whether there are more.
    pub has_more: bool,
}

impl BatchLine {
    fn path(&self, thread: &ThreadHead) -> String {
        format!("{}/batches/{}", thread.path(), segment(&self.id))
    }

    /// It with its progress, as a card.
    pub(crate) fn card(&self, thread: &ThreadHead) -> Markup {
        let mut start = 0;
        let places = self.items.iter().map(|(name, number)| {
            let width = number.saturating_mul(1000) / self.total.max(1);
            start += width;
            (name, number, start - width, width)
        });
        let places: Vec<_> = places.collect();
        html! {
            div.card data-status=(self.status) role="group" aria-label={ "Batch " (self.title) } {
                div.row {
                    a href=(self.path(thread)) { b { bdi { (self.title) } } }
                    (status(&self.status))
                    span.fact { bdi { (self.agent) } }
                    @for action in &self.can {
                        button.quiet type="button" data-post={ "/subagent-batches/" (segment(&self.id)) "/" (action) } { (capital(action)) }
                    }
                }
                svg.bar-of viewBox="0 0 1000 8" preserveAspectRatio="none" aria-hidden="true" {
                    @for (name, _, x, width) in &places { rect class=(name) x=(x) y="0" width=(width) height="8" {} }
                }
                p.facts {
                    span.fact { b { (count(self.total)) } " items" }
                    @for (name, number, ..) in &places { span.fact { b { (count(**number)) } " " (name) } }
                }
            }
        }
    }
}

/// A word with a capital letter.
fn capital(word: &str) -> String {
    let mut chars = word.chars();
    chars.next().map(|first| first.to_ascii_uppercase()).into_iter().chain(chars).collect()
}

impl Batch {
    /// Its page.
    pub fn page(&self, session: &Session) -> String {
        let batch = &self.batch;
        let main = html! {
            main #main data-thread=(self.thread.id) data-watch[!batch.has_ended] {
                (layout::thread_head(&self.thread, Some(Tab::Runs)))
                form.filters action=(batch.path(&self.thread)) {
                    label.hidden for="status" { "Status of the items" }
                    select #status name="status" {
                        option value="" { "All items" }
                        @for name in STATUSES { option value=(name) selected[name == self.status] { (capital(name)) } }
                    }
                    button.quiet { "Show" }
                    a href={ "/api" (self.thread.path()) "/subagent-batches/" (segment(&batch.id)) "/results.jsonl" } { "Download all results" }
                }
                section #watched aria-label="Batch" {
                    (batch.card(&self.thread))
                    (self.table())
                    (self.pages())
                }
            }
        };
        layout::document(session, Place::Threads, &batch.title, &main)
    }

    fn table(&self) -> Markup {
        html! {
            @if self.items.is_empty() { div.empty { p { "No item has this status." } } }
            @else {
                div.scroll tabindex="0" role="region" aria-label="Items" {
                    table.list.stacked {
                        thead {
                            tr {
                                th scope="col" { "Item" }
                                th scope="col" { "Status" }
                                th.number scope="col" { "Attempt" }
                                th scope="col" { "Result" }
                                th scope="col" { span.hidden { "Actions" } }
                            }
                        }
                        tbody { @for item in &self.items { (self.row(item)) } }
                    }
                }
            }
        }
    }

    fn row(&self, item: &ItemLine) -> Markup {
        html! {
            tr data-status=(item.status) {
                td { bdi { (item.key) } }
                td { (status(&item.status)) }
                td.number { (item.attempt) }
                td.wide {
                    @for fact in &item.facts { span.fact { (fact) } " " }
                    @if let Some(error) = &item.error { p.bad dir="auto" { (error) } }
                    @if let Some(preview) = &item.preview { div.text dir="auto" { (preview.shown) @if preview.whole.is_some() { " …" } } }
                }
                td.actions {
                    @if item.can_retry {
                        button.quiet type="button" aria-label={ "Retry " (item.key) }
                            data-post={ "/subagent-batches/" (segment(&self.batch.id)) "/items/" (segment(&item.id)) "/retry" } { "Retry" }
                    }
                }
            }
        }
    }

    fn pages(&self) -> Markup {
        let at = |offset: u64| {
            let query = crate::threads::form_query(&[("status", &self.status)]);
            format!("{}?{query}offset={offset}", self.batch.path(&self.thread))
        };
        html! {
            @if self.offset > 0 || self.has_more {
                nav.pages aria-label="Pages" {
                    @if self.offset > 0 { a.button.quiet rel="prev" href=(at(self.offset.saturating_sub(self.page))) { "Earlier" } }
                    span { (count(self.offset + 1)) "–" (count(self.offset + self.items.len() as u64)) }
                    @if self.has_more { a.button.quiet rel="next" href=(at(self.offset + self.items.len() as u64)) { "Later" } }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_item_says_is_text() {
        let hostile = "\"><script>alert(1)</script>";
        let item = ItemLine {
            id: hostile.to_owned(),
            key: hostile.to_owned(),
            status: "failed".to_owned(),
            attempt: 1,
            facts: vec![hostile.to_owned()],
            preview: Some(Excerpt::of(hostile)),
            error: Some(hostile.to_owned()),
            can_retry: true,
        };
        let batch = BatchLine {
            id: hostile.to_owned(),
            title: hostile.to_owned(),
            agent: hostile.to_owned(),
            status: "running".to_owned(),
            has_ended: false,
            total: 2,
            items: vec![("failed".to_owned(), 1), ("pending".to_owned(), 1)],
            can: vec!["pause", "cancel"],
        };
        let thread = ThreadHead { id: hostile.to_owned(), title: None, status: "idle".to_owned() };
        let status = hostile.to_owned();
        let batch = Batch { thread, batch, status, items: vec![item], offset: 0, page: 1, has_more: true };
        let page = batch.page(&Session::default());
        assert_eq!(page.matches("<script").count(), 1, "only ours: {page}");
        assert!(
            page.contains("width=\"500\"") && page.contains(">Retry<") && page.contains("data-watch"),
            "{page}"
        );
    }
}
