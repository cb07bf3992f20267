//! The list of threads.

use maud::html;

use crate::layout::{self, Place, Session, ThreadHead, proof, status, time};
use crate::text::{bytes, count};

/// The statuses to choose from, and their names.
const STATUSES: [(&str, &str); 5] = [
    ("", "Any status"),
    ("busy", "Busy"),
    ("idle", "Idle"),
    ("interrupted", "Interrupted"),
    ("error", "Error"),
];

/// A line of the list.
#[derive(Debug, Clone)]
pub struct ThreadLine {
    /// The thread.
    pub thread: ThreadHead,
    /// Its owner, where there are several users.
    pub owner: Option<String>,
    /// The bytes of its rows, if the driver knows them.
    pub bytes: Option<u64>,
    /// When its record last changed, ISO-8601.
    pub updated_at: String,
}

/// A page of the list.
#[derive(Debug, Clone, Default)]
pub struct ThreadList {
    /// What was searched for, in titles and ids.
    pub search: String,
    /// The status that was chosen; empty for any.
    pub status: String,
    /// The threads found.
    pub lines: Vec<ThreadLine>,
    /// How many were skipped.
    pub offset: u64,
    /// The offset of the next page, if there is one.
    pub next: Option<u64>,
    /// The offset of the page before, if there is one.
    pub previous: Option<u64>,
    /// How many threads there are in all.
    pub total: u64,
    /// How many threads were searched, if not all of them.
    pub searched: Option<u64>,
}

impl ThreadList {
    /// Its page.
    pub fn page(&self, session: &Session) -> String {
        let has_owners = self.lines.iter().any(|line| line.owner.is_some());
        let is_filtered = !self.search.is_empty() || !self.status.is_empty();
        let main = html! {
            main #main {
                div.head {
                    h1 { "Threads" }
                    span.total { (count(self.total)) }
                    form method="post" action="/threads" { (proof(session)) button { "New thread" } }
                }
                form.filters role="search" action="/" {
                    label.hidden for="q" { "Search titles and ids" }
                    input #q type="search" name="q" value=(self.search) placeholder="Search titles and ids" dir="auto" data-key="/";
                    label.hidden for="status" { "Status" }
                    select #status name="status" {
                        @for (value, name) in STATUSES {
                            option value=(value) selected[value == self.status] { (name) }
                        }
                    }
                    button.quiet { "Search" }
                    @if is_filtered { a href="/" { "Clear" } }
                }
                @if self.lines.is_empty() {
                    div.empty {
                        @if is_filtered { p { "No thread matches." } }
                        @else {
                            p { b { "No threads yet." } }
                            p { "A thread is a conversation with its whole history: every step is a checkpoint to return to." }
                        }
                    }
                } @else {
                    div.scroll tabindex="0" role="region" aria-label="Threads" {
                        table.list {
                            thead {
                                tr {
                                    th scope="col" { "Title" }
                                    th scope="col" { "Status" }
                                    @if has_owners { th scope="col" { "Owner" } }
                                    th.number scope="col" { "Size" }
                                    th scope="col" { "Last activity" }
                                    th scope="col" { span.hidden { "Actions" } }
                                }
                            }
                            tbody { @for line in &self.lines { (row(line, has_owners)) } }
                        }
                    }
                }
                @if let Some(searched) = self.searched {
                    p.hint { "The " (count(searched)) " threads that changed last were searched." }
                }
                (self.pages())
            }
        };
        layout::document(session, Place::Threads, "Threads", &main)
    }

    fn pages(&self) -> maud::Markup {
        let query = form_query(&[("q", &self.search), ("status", &self.status)]);
        let at = |offset: u64| format!("/?{query}offset={offset}");
        html! {
            @if self.previous.is_some() || self.next.is_some() {
                nav.pages aria-label="Pages" {
                    @if let Some(previous) = self.previous { a.button.quiet rel="prev" href=(at(previous)) { "Newer" } }
                    span { (count(self.offset + 1)) "–" (count(self.offset + self.lines.len() as u64)) }
                    @if let Some(next) = self.next { a.button.quiet rel="next" href=(at(next)) { "Older" } }
                }
            }
        }
    }
}

fn row(line: &ThreadLine, has_owners: bool) -> maud::Markup {
    let thread = &line.thread;
    html! {
        tr {
            td.name {
                a href=(thread.path()) { bdi { (thread.name()) } }
                code.id { bdi { (thread.id) } }
            }
            td { (status(&thread.status)) }
            @if has_owners { td { bdi { (line.owner.as_deref().unwrap_or("–")) } } }
            td.number { (line.bytes.map_or_else(|| "–".to_owned(), bytes)) }
            td { (time(&line.updated_at)) }
            td.actions { a.danger href={ (thread.path()) "/delete" } aria-label={ "Delete " (thread.name()) } { "Delete" } }
        }
    }
}

/// The parameters of a query, those that are empty left out, each with an `&` after it.
pub(crate) fn form_query(parameters: &[(&str, &str)]) -> String {
    let mut query = String::new();
    for (name, value) in parameters.iter().filter(|(_, value)| !value.is_empty()) {
        query.extend([name, "=", &crate::text::segment(value), "&"]);
    }
    query
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_title_is_text_and_an_id_stays_in_its_path() {
        let thread = ThreadHead {
            id: "a/../\"b".to_owned(),
            title: Some("<b>\u{202e}bold</b>".to_owned()),
            status: "idle".to_owned(),
        };
        let line =
            ThreadLine { thread, owner: None, bytes: Some(1), updated_at: "2026-01-02T03:04:05Z".to_owned() };
        let list = ThreadList {
            lines: vec![line],
            search: "\"><i>".to_owned(),
            next: Some(50),
            ..ThreadList::default()
        };
        let page = list.page(&Session::default());
        assert!(page.contains("href=\"/threads/a%2F..%2F%22b\""), "{page}");
        assert!(
            !page.contains("<b>\u{202e}") && !page.contains("<i>") && page.contains("<bdi>&lt;b&gt;"),
            "{page}"
        );
        assert!(page.contains("/?q=%22%3E%3Ci%3E&amp;offset=50"), "{page}");
    }
}
