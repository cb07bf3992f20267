//! Signing in, what could not be done, and what is asked before it is done.

use maud::html;

use crate::layout::{self, Place, Session, Tab, ThreadHead, proof};
use crate::text::count;

/// The page that asks for a key. `next` is the address to go on to; `refused` says that the last key was not accepted.
pub fn sign_in(next: &str, refused: bool) -> String {
    let main = html! {
        main #main.narrow {
            h1 { "Sign in" }
            p.lead { "This gateway needs an API key." }
            form.stack method="post" action="/sign-in" {
                @if refused { p.failure role="alert" { "This key is not valid. It may have been revoked." } }
                label for="key" { "API key" }
                input #key type="password" name="key" required autofocus autocomplete="current-password" spellcheck="false";
                input type="hidden" name="next" value=(next);
                button { "Sign in" }
            }
            p.hint { code { "threadkeep keys create --user NAME" } " makes one on the gateway's machine." }
        }
    };
    layout::document(&Session::default(), Place::Other, "Sign in", &main)
}

/// The page of a request that was refused or failed.
pub fn problem(session: &Session, status: u16, text: &str) -> String {
    let title = match status {
        401 | 403 => "Not allowed",
        404 => "Not found",
        409 => "Not now",
        503 => "Not available",
        400..500 => "Not possible",
        _ => "Something went wrong",
    };
    let main = html! {
        main #main.narrow {
            h1 { (title) }
            p.lead dir="auto" { (text) }
            p { a.button href="/" { "All threads" } }
            p.hint { "HTTP " (status) }
        }
    };
    layout::document(session, Place::Threads, title, &main)
}

/// What goes with a thread.
#[derive(Debug, Clone)]
pub struct Deletion {
    /// The thread.
    pub thread: ThreadHead,
    /// Checkpoints, those of its subagents not counted.
    pub checkpoints: u64,
    /// Runs, with their events.
    pub runs: u64,
    /// Delegations, with their checkpoints.
    pub delegations: u64,
    /// Whether it has a working directory.
    pub has_files: bool,
}

impl Deletion {
    /// The page that asks before the thread is deleted.
    pub fn page(&self, session: &Session) -> String {
        let path = self.thread.path();
        let lines = [
            (self.checkpoints, "checkpoints, with every state of the thread"),
            (self.runs, "runs, with their events"),
            (self.delegations, "delegations, with the checkpoints of their subagents"),
        ];
        let main = html! {
            main #main {
                (layout::thread_head(&self.thread, None::<Tab>))
                section.panel.ask {
                    h2 { "Delete this thread?" }
                    p { "This goes with it, and cannot be restored:" }
                    ul {
                        @for (number, what) in lines { @if number > 0 { li { b { (count(number)) } " " (what) } } }
                        @if self.has_files { li { "its working directory, with every file in it" } }
                        li { "its record: title, metadata, goal" }
                    }
                    form.row method="post" action={ (path) "/delete" } {
                        (proof(session))
                        button.danger { "Delete the thread" }
                        a.button.quiet href=(path) { "Keep it" }
                    }
                }
            }
        };
        layout::document(session, Place::Threads, "Delete a thread", &main)
    }
}
