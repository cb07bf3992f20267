//! What every page has: the head, the bar at the top, the way to the places of a thread.

use maud::{DOCTYPE, Markup, html};

use crate::assets;
use crate::text::{is_blank, segment};

/// Who looks at the page.
#[derive(Debug, Clone, Default)]
pub struct Session {
    /// The user that signed in; `None` without keys.
    pub user: Option<String>,
    /// What proves that a request comes from the page; `None` without keys.
    pub token: Option<String>,
}

/// A place of the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The list of threads, and each thread.
    Threads,
    /// The runs of all threads.
    Runs,
    /// The gateway itself.
    Health,
    /// None of those in the bar.
    Other,
}

/// A place of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tab {
    /// The messages.
    Conversation,
    /// The tree, states, differences.
    Checkpoints,
    /// Runs, their events, batches.
    Runs,
    /// Sizes, and what a deletion of checkpoints would take.
    Storage,
}

/// What the pages of a thread have at the top.
#[derive(Debug, Clone)]
pub struct ThreadHead {
    /// The thread's id.
    pub id: String,
    /// Its title.
    pub title: Option<String>,
    /// `idle`, `busy`, `interrupted` or `error`.
    pub status: String,
}

impl ThreadHead {
    /// Its title, or what stands for a missing one.
    pub(crate) fn name(&self) -> &str {
        self.title.as_deref().filter(|title| !is_blank(title)).unwrap_or("Untitled thread")
    }

    /// Its address.
    pub(crate) fn path(&self) -> String {
        format!("/threads/{}", segment(&self.id))
    }
}

/// A whole document.
pub(crate) fn document(session: &Session, place: Place, title: &str, main: &Markup) -> String {
    let here = |this: Place| (this == place).then_some("page");
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                @if let Some(token) = &session.token { meta name="page-token" content=(token); }
                title { (title) " · Threadkeep" }
                link rel="icon" href="data:,";
                link rel="stylesheet" href=(assets::style());
                script src=(assets::script()) defer {}
            }
            body {
                a.skip href="#main" { "Skip to content" }
                header.bar {
                    a.brand href="/" { (mark()) "Threadkeep" }
                    @if place != Place::Other || session.user.is_some() {
                        nav aria-label="Places" {
                            a href="/" aria-current=[here(Place::Threads)] { "Threads" }
                            a href="/runs" aria-current=[here(Place::Runs)] { "Runs" }
                            a href="/status" aria-current=[here(Place::Health)] { "Health" }
                        }
                    }
                    @if let Some(user) = &session.user {
                        form.leave method="post" action="/sign-out" {
                            (proof(session))
                            span.who { bdi { (user) } }
                            button.quiet { "Sign out" }
                        }
                    }
                }
                (main)
                p #notice role="status" aria-live="polite" hidden {}
            }
        }
    };
    page.into_string()
}

/// The sign: a line of checkpoints with a fork.
fn mark() -> Markup {
    html! {
        svg.mark viewBox="0 0 20 20" width="20" height="20" aria-hidden="true" {
            path d="M5 3v14M5 8c0 4 9 2 9 7" {}
            circle cx="5" cy="3.5" r="2" {}
            circle cx="5" cy="16.5" r="2" {}
            circle cx="14" cy="15.5" r="2" {}
        }
    }
}

/// The field of a form that proves that it comes from the page.
pub(crate) fn proof(session: &Session) -> Markup {
    html! {
        @if let Some(token) = &session.token { input type="hidden" name="token" value=(token); }
    }
}

/// The head of a thread's pages: title, status, id, places.
pub(crate) fn thread_head(thread: &ThreadHead, tab: Option<Tab>) -> Markup {
    let path = thread.path();
    let tabs = [
        (Tab::Conversation, "Conversation", path.clone()),
        (Tab::Checkpoints, "Checkpoints", format!("{path}/checkpoints")),
        (Tab::Runs, "Runs", format!("{path}/runs")),
        (Tab::Storage, "Storage", format!("{path}/storage")),
    ];
    html! {
        div.thread-head {
            h1 { bdi { (thread.name()) } }
            (status(&thread.status))
            code.id { bdi { (thread.id) } }
            a.danger href={ (path) "/delete" } { "Delete" }
        }
        nav.tabs aria-label="Thread" {
            @for (this, name, href) in &tabs {
                a href=(href) aria-current=[(Some(*this) == tab).then_some("page")] { (name) }
            }
        }
    }
}

/// A status as a word with a dot.
pub(crate) fn status(status: &str) -> Markup {
    html! { span.status data-status=(status) { (status) } }
}

/// A time, which the script shows as what a person says.
pub(crate) fn time(iso: &str) -> Markup {
    html! { time datetime=(iso) { (iso.get(..19).unwrap_or(iso).replace('T', " ")) } }
}
