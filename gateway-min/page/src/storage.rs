//! What a thread takes, and what a deletion of checkpoints would take from it.

use maud::{Markup, html};

use crate::layout::{self, Place, Session, Tab, ThreadHead, proof};
use crate::text::{bytes, count, things};

/// A part of a thread's bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    /// A channel or a turn.
    pub name: String,
    /// Its bytes, encoded.
    pub bytes: u64,
    /// What else there is to say, such as a number of checkpoints.
    pub detail: String,
}

/// Which checkpoints a policy removes.
#[derive(Debug, Clone)]
pub struct Plan {
    /// What was asked for, as `last:10`.
    pub asked: String,
    /// For each reason: whether checkpoints go, why, and how many.
    pub reasons: Vec<(bool, String, u64)>,
    /// The remaining checkpoints that are rewritten.
    pub rewritten: u64,
    /// Logical bytes after it.
    pub after: u64,
    /// The command that does the same.
    pub command: String,
    /// Identifies the plan: every checkpoint of the thread, and whether it goes.
    pub id: String,
}

impl Plan {
    /// The checkpoints that it removes.
    pub fn removed(&self) -> u64 {
        self.reasons.iter().filter(|(goes, ..)| *goes).map(|(_, _, number)| number).sum()
    }
}

/// What a thread takes.
#[derive(Debug, Clone)]
pub struct Storage {
    /// The thread.
    pub thread: ThreadHead,
    /// The bytes of its rows, if the driver knows them.
    pub stored: Option<u64>,
    /// Its bytes as encoded values, which a store without sharing would take.
    pub logical: u64,
    /// Its checkpoints, stored values, and writes.
    pub rows: (u64, u64, u64),
    /// Bytes by channel, the largest first.
    pub channels: Vec<Share>,
    /// Bytes by turn, the newest first.
    pub turns: Vec<Share>,
    /// The turns that are not listed.
    pub more_turns: u64,
    /// A plan that was asked for.
    pub plan: Option<Plan>,
    /// What `verify` found, if it was asked.
    pub violations: Option<Vec<String>>,
    /// What was removed just now.
    pub removed: Option<u64>,
}

/// The policies to choose from: the value, and what it does.
const POLICIES: [(&str, &str); 6] = [
    ("notes", "Remove duration notes at the ends"),
    ("branches", "Remove duration notes and ends of abandoned branches"),
    ("last:100", "Keep the last 100 checkpoints"),
    ("last:20", "Keep the last 20 checkpoints"),
    ("last:5", "Keep the last 5 checkpoints"),
    ("latest", "Keep the newest checkpoint alone"),
];

impl Storage {
    /// Its page.
    pub fn page(&self, session: &Session) -> String {
        let (checkpoints, values, writes) = self.rows;
        let main = html! {
            main #main {
                (layout::thread_head(&self.thread, Some(Tab::Storage)))
                @if let Some(removed) = self.removed {
                    p.banner role="status" { (things(removed, "checkpoint")) " removed." }
                }
                dl.figures {
                    @if let Some(stored) = self.stored { (figure("Stored", &bytes(stored), "bytes of its rows")) }
                    (figure("Logical", &bytes(self.logical), "without sharing or compression"))
                    (figure("Checkpoints", &count(checkpoints), ""))
                    (figure("Values", &count(values), ""))
                    (figure("Writes", &count(writes), ""))
                }
                div.columns {
                    section.panel { h2 { "By channel" } (shares(&self.channels, "Channel")) }
                    section.panel {
                        h2 { "By turn" }
                        (shares(&self.turns, "Turn"))
                        @if self.more_turns > 0 { p.hint { (count(self.more_turns)) " older turns are not listed." } }
                    }
                }
                (self.policies(session))
                (self.verification())
            }
        };
        layout::document(session, Place::Threads, "Storage", &main)
    }

    fn policies(&self, session: &Session) -> Markup {
        let asked = self.plan.as_ref().map_or("", |plan| plan.asked.as_str());
        let path = self.thread.path();
        html! {
            section #prune.panel {
                h2 { "Remove checkpoints" }
                form.row action={ (path) "/storage#prune" } {
                    label.hidden for="keep" { "What to remove" }
                    select #keep name="keep" {
                        @for (value, name) in POLICIES { option value=(value) selected[value == asked] { (name) } }
                    }
                    button.quiet { "Show what would go" }
                }
                @if let Some(plan) = &self.plan { (self.preview(plan, session)) }
                @else { p.hint { "Nothing is removed before you have seen what goes, and why." } }
            }
        }
    }

    fn preview(&self, plan: &Plan, session: &Session) -> Markup {
        let removed = plan.removed();
        html! {
            div.scroll tabindex="0" role="region" aria-label="What would go" {
                table.plan {
                    thead { tr { th scope="col" { "Verdict" } th.number scope="col" { "Checkpoints" } th scope="col" { "Because" } } }
                    tbody {
                        @for (goes, reason, number) in &plan.reasons {
                            tr { td { @if *goes { b.bad { "goes" } } @else { "stays" } } td.number { (count(*number)) } td { (reason) } }
                        }
                    }
                }
            }
            @if removed == 0 { p { "Nothing to remove: every checkpoint stays." } }
            @else {
                p {
                    "Logical size " (bytes(self.logical)) " → " b { (bytes(plan.after)) } "."
                    @if plan.rewritten > 0 { " Rewritten: " (things(plan.rewritten, "remaining checkpoint")) "." }
                    " Every checkpoint that stays keeps its state."
                }
                form.row method="post" action={ (self.thread.path()) "/storage" } {
                    (proof(session))
                    input type="hidden" name="keep" value=(plan.asked);
                    input type="hidden" name="plan" value=(plan.id);
                    button.danger { "Remove " (things(removed, "checkpoint")) }
                    a.button.quiet href={ (self.thread.path()) "/storage" } { "Keep all" }
                }
            }
            (crate::checkpoints::command("the same at a terminal", &plan.command))
        }
    }

    fn verification(&self) -> Markup {
        html! {
            section #verify.panel {
                h2 { "Verify" }
                form.row action={ (self.thread.path()) "/storage#verify" } {
                    input type="hidden" name="verify" value="1";
                    button.quiet { "Check every invariant" }
                    @match &self.violations {
                        Some(found) if found.is_empty() => span.status data-status="completed" { "No violations" },
                        Some(found) => span.status data-status="failed" { (found.len()) " violations" },
                        None => span.hint { "lineages, replay, markers, counters, versions" },
                    }
                }
                @if let Some(found) = &self.violations { @for text in found { p.failure dir="auto" { (text) } } }
            }
        }
    }
}

fn figure(name: &str, value: &str, hint: &str) -> Markup {
    html! { div { dt { (name) } dd { b { (value) } @if !hint.is_empty() { span.hint { (hint) } } } } }
}

/// Shares as a table with bars.
fn shares(shares: &[Share], name: &str) -> Markup {
    let most = shares.iter().map(|share| share.bytes).max().unwrap_or(0).max(1);
    html! {
        div.scroll tabindex="0" role="region" aria-label={ "Bytes by " (name) } {
            table.shares {
                thead { tr { th scope="col" { (name) } th scope="col" { span.hidden { "Share" } } th.number scope="col" { "Bytes" } th scope="col" { span.hidden { "Details" } } } }
                tbody {
                    @for share in shares {
                        tr {
                            td { bdi { (share.name) } }
                            td.graph {
                                svg.share viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true" {
                                    rect.rest x="0" y="0" width="100" height="8" rx="2" {}
                                    rect.part x="0" y="0" width=(share.bytes.saturating_mul(100) / most) height="8" rx="2" {}
                                }
                            }
                            td.number { (bytes(share.bytes)) }
                            td { span.soft { (share.detail) } }
                        }
                    }
                }
            }
        }
    }
}
