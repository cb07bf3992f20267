//! The checkpoints of a thread: the tree, a state, the difference of two.

use maud::{Markup, html};

use crate::layout::{self, Place, Session, Tab, ThreadHead, time};
use crate::text::{Excerpt, bytes, count, segment, verbatim};
use crate::tree::{self, Node, Tree};

/// A checkpoint, without its values.
#[derive(Debug, Clone)]
pub struct CheckpointLine {
    /// Its id.
    pub id: String,
    /// Its parent's.
    pub parent: Option<String>,
    /// When it was created, ISO-8601.
    pub created_at: String,
    /// The nodes whose writes made it.
    pub by: Vec<String>,
    /// `input`, `loop`, `update` or `fork`.
    pub source: String,
    /// The number of its superstep.
    pub step: i64,
    /// The run that made it.
    pub run: Option<String>,
    /// `full`, `snapshot`, `sentinel` or `note`.
    pub form: &'static str,
    /// Rows under it that no checkpoint applied.
    pub pending: usize,
    /// The nodes to run next.
    pub next: Vec<String>,
}

/// The checkpoints of a thread, or a part of them.
#[derive(Debug, Clone)]
pub struct Checkpoints {
    /// The thread.
    pub thread: ThreadHead,
    /// All checkpoints, newest first.
    pub nodes: Vec<Node>,
    /// Those shown, in the same order.
    pub lines: Vec<CheckpointLine>,
    /// How many are before those shown.
    pub offset: usize,
    /// The maximum number that is shown at a time.
    pub page: usize,
    /// How many checkpoints nested graphs have.
    pub nested: usize,
}

/// A channel of a state.
#[derive(Debug, Clone)]
pub struct Channel {
    /// Its name.
    pub name: String,
    /// The bytes of its value, encoded.
    pub bytes: u64,
    /// Its value as JSON.
    pub value: Excerpt,
}

/// The state at a checkpoint.
#[derive(Debug, Clone)]
pub struct State {
    /// The thread.
    pub thread: ThreadHead,
    /// The checkpoint.
    pub line: CheckpointLine,
    /// The channels with a value.
    pub channels: Vec<Channel>,
    /// Its metadata as JSON.
    pub metadata: Excerpt,
    /// What does the same at a terminal: what, and the command.
    pub commands: Vec<(&'static str, String)>,
}

/// What became of a message, or of a channel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// A channel, or who wrote the message.
    pub name: String,
    /// What the first state has; `None` if it was added.
    pub before: Option<Excerpt>,
    /// What the second state has; `None` if it was removed.
    pub after: Option<Excerpt>,
}

/// The difference of two states.
#[derive(Debug, Clone)]
pub struct Difference {
    /// The thread.
    pub thread: ThreadHead,
    /// The first checkpoint.
    pub a: CheckpointLine,
    /// The second one.
    pub b: CheckpointLine,
    /// The messages that differ.
    pub messages: Vec<Change>,
    /// The number of messages that both states have.
    pub same: usize,
    /// The other channels that differ.
    pub channels: Vec<Change>,
    /// The command that shows the same.
    pub command: String,
}

impl CheckpointLine {
    fn path(&self, thread: &ThreadHead) -> String {
        format!("{}/checkpoints/{}", thread.path(), segment(&self.id))
    }

    /// What made it, for people.
    fn made(&self) -> String {
        match (self.form, self.by.is_empty()) {
            ("note", _) => "duration note".to_owned(),
            (_, false) => self.by.join(" + "),
            (_, true) => self.source.clone(),
        }
    }
}

/// The end of an id, which differs more than its beginning.
fn short(id: &str) -> &str {
    id.char_indices().rev().nth(11).map_or(id, |(at, _)| &id[at..])
}

impl Checkpoints {
    /// Its page.
    pub fn page(&self, session: &Session) -> String {
        let Tree { rows, forks, abandoned } =
            tree::tree(&self.nodes, &(self.offset..self.offset + self.lines.len()));
        let columns = rows.iter().map(tree::Row::width).max().unwrap_or(1);
        let path = self.thread.path();
        let main = html! {
            main #main {
                (layout::thread_head(&self.thread, Some(Tab::Checkpoints)))
                p.facts {
                    (fact(self.nodes.len(), "checkpoint", "checkpoints"))
                    (fact(forks, "fork", "forks"))
                    (fact(abandoned, "on abandoned branches", "on abandoned branches"))
                    @if self.nested > 0 { (fact(self.nested, "in nested graphs, not shown", "in nested graphs, not shown")) }
                }
                @if self.lines.is_empty() { div.empty { p { b { "No checkpoints." } } } }
                @else {
                    form action={ (path) "/diff" } {
                        div.row.tools {
                            button.quiet { "Compare A with B" }
                            span.legend aria-hidden="true" {
                                (key("full", "complete values")) (key("snapshot", "snapshot")) (key("note", "note"))
                            }
                        }
                        div.scroll tabindex="0" role="region" aria-label="Checkpoints" {
                            table.tree {
                                thead {
                                    tr {
                                        th scope="col" { span.hidden { "Tree" } }
                                        th scope="col" { "Checkpoint" }
                                        th scope="col" { "Made by" }
                                        th.number scope="col" { "Step" }
                                        th scope="col" { "Run" }
                                        th scope="col" { "Time" }
                                        th scope="col" { "Stored" }
                                        th.mid scope="col" { "A" }
                                        th.mid scope="col" { "B" }
                                    }
                                }
                                tbody {
                                    @for (at, (line, row)) in self.lines.iter().zip(&rows).enumerate() {
                                        (self.row(at + self.offset, line, row, columns))
                                    }
                                }
                            }
                        }
                    }
                }
                (self.pages(&path))
            }
        };
        layout::document(session, Place::Threads, self.thread.name(), &main)
    }

    fn row(&self, at: usize, line: &CheckpointLine, row: &tree::Row, columns: usize) -> Markup {
        let is_head = at == 0;
        html! {
            tr.side[!row.is_main] {
                td.graph { (row.draw(columns, line.form)) }
                td {
                    a href=(line.path(&self.thread)) title=(line.id) { code { (short(&line.id)) } }
                    @if is_head { span.tag.head-tag { "head" } }
                    @if row.children > 1 { span.tag { "fork of " (row.children) } }
                    @if !row.is_main { span.hidden { ", on an abandoned branch" } }
                    @if row.is_cut { span.tag.bad { "its parent is gone" } }
                    span.hidden { ", child of " (line.parent.as_deref().map_or("nothing", short)) }
                }
                td { bdi { (line.made()) } @if !line.next.is_empty() { span.soft { " → " (line.next.join(" + ")) } } }
                td.number { (line.step) }
                td { @if let Some(run) = &line.run { code.soft title=(run) { (run.get(..8).unwrap_or(run)) } } }
                td { (time(&line.created_at)) }
                td { (line.form) @if line.pending > 0 { span.tag { (line.pending) " pending" } } }
                td.mid { input type="radio" name="a" value=(line.id) checked[at == self.offset + 1] aria-label={ "A: " (short(&line.id)) }; }
                td.mid { input type="radio" name="b" value=(line.id) checked[at == self.offset] aria-label={ "B: " (short(&line.id)) }; }
            }
        }
    }

    fn pages(&self, path: &str) -> Markup {
        let end = self.offset + self.lines.len();
        html! {
            @if self.offset > 0 || end < self.nodes.len() {
                nav.pages aria-label="Pages" {
                    @if self.offset > 0 {
                        a.button.quiet rel="prev" href={ (path) "/checkpoints?offset=" (self.offset.saturating_sub(self.page)) } { "Newer" }
                    }
                    span { (count(self.offset as u64 + 1)) "–" (count(end as u64)) " of " (count(self.nodes.len() as u64)) }
                    @if end < self.nodes.len() { a.button.quiet rel="next" href={ (path) "/checkpoints?offset=" (end) } { "Older" } }
                }
            }
        }
    }
}

fn key(form: &str, name: &str) -> Markup {
    let node = Node { id: String::new(), parent: None };
    html! { @for row in tree::tree(&[node], &(0..1)).rows { (row.draw(1, form)) } (name) }
}

fn fact(number: usize, one: &str, more: &str) -> Markup {
    html! { @if number > 0 { span.fact { b { (count(number as u64)) } " " (if number == 1 { one } else { more }) } } }
}

/// A command line with a button that copies it.
pub(crate) fn command(what: &str, text: &str) -> Markup {
    html! {
        div.command {
            span.soft { (what) }
            code { (text) }
            button.quiet type="button" data-copy=(text) aria-label={ "Copy: " (what) } { "Copy" }
        }
    }
}

impl State {
    /// Where the whole state is, as JSON.
    fn whole(&self) -> String {
        format!("/api/threads/{}/state/{}", segment(&self.thread.id), segment(&self.line.id))
    }

    /// Its page.
    pub fn page(&self, session: &Session) -> String {
        let (line, path) = (&self.line, self.thread.path());
        let main = html! {
            main #main {
                (layout::thread_head(&self.thread, Some(Tab::Checkpoints)))
                h2 { "State at " code { (line.id) } }
                p.facts {
                    span.fact { (line.made()) }
                    span.fact { "step " (line.step) }
                    span.fact { (time(&line.created_at)) }
                    span.fact { (line.form) }
                    @if !line.next.is_empty() { span.fact { "next: " (line.next.join(", ")) } }
                    @if line.pending > 0 { span.fact { (line.pending) " pending rows" } }
                }
                p.row {
                    a.button href={ (path) "?at=" (segment(&line.id)) } { "Continue from here" }
                    @if let Some(parent) = &line.parent {
                        a.button.quiet href={ (path) "/diff?a=" (segment(parent)) "&b=" (segment(&line.id)) } { "Compare with its parent" }
                        a.button.quiet href={ (path) "/checkpoints/" (segment(parent)) } { "Parent" }
                    }
                }
                p.hint { "Continuing shows the conversation as it was. What is said there goes on from it; what came after stays in the history." }
                @for channel in &self.channels {
                    details.call open[channel.name != "messages" && channel.bytes < 400] data-key=(channel.name) {
                        summary { code.tool { bdi { (channel.name) } } span.summary {} span.fact { (bytes(channel.bytes)) } }
                        (verbatim(&channel.value, &self.whole()))
                    }
                }
                details.call data-key="metadata" {
                    summary { code.tool { "metadata" } span.summary { "of the checkpoint" } }
                    (verbatim(&self.metadata, &self.whole()))
                }
                h3 { "The same at a terminal" }
                @for (what, text) in &self.commands { (command(what, text)) }
            }
        };
        layout::document(session, Place::Threads, "A checkpoint", &main)
    }
}

impl Difference {
    /// Its page.
    pub fn page(&self, session: &Session) -> String {
        let of = |which: fn(&Change) -> bool| self.messages.iter().filter(|change| which(change)).count();
        let added = of(|change| change.before.is_none());
        let removed = of(|change| change.after.is_none());
        let changed = self.messages.len() - added - removed;
        let main = html! {
            main #main {
                (layout::thread_head(&self.thread, Some(Tab::Checkpoints)))
                h2 { "From " (self.link(&self.a)) " to " (self.link(&self.b)) }
                p.facts {
                    span.fact { (time(&self.a.created_at)) " → " (time(&self.b.created_at)) }
                    span.fact { b { (added) } " added" }
                    span.fact { b { (removed) } " removed" }
                    span.fact { b { (changed) } " changed" }
                    span.fact { b { (self.same) } " messages alike" }
                }
                (bar(&[("same", self.same), ("changed", changed), ("removed", removed), ("added", added)]))
                @if self.messages.is_empty() && self.channels.is_empty() { p { "These states are the same." } }
                @for change in &self.messages { (entry(change)) }
                @if !self.channels.is_empty() { h3 { "Channels" } }
                @for change in &self.channels { (entry(change)) }
                h3 { "The same at a terminal" }
                (command("difference", &self.command))
            }
        };
        layout::document(session, Place::Threads, "A difference", &main)
    }

    fn link(&self, line: &CheckpointLine) -> Markup {
        html! { a href=(line.path(&self.thread)) title=(line.id) { code { (short(&line.id)) } } }
    }
}

/// One change: what was, what is.
fn entry(change: &Change) -> Markup {
    let what = match (&change.before, &change.after) {
        (None, _) => "added",
        (_, None) => "removed",
        _ => "changed",
    };
    let side = |text: &Option<Excerpt>, class: &str| {
        html! {
            @if let Some(text) = text {
                pre class={ "code " (class) } dir="auto" tabindex="0" { (text.shown) @if text.whole.is_some() { " …" } }
            }
        }
    };
    html! {
        section.change data-what=(what) {
            h3 { (what) " " bdi { (change.name) } }
            (side(&change.before, "was"))
            (side(&change.after, "is"))
        }
    }
}

/// Parts of a whole, as a bar; the numbers are in the text beside it.
fn bar(parts: &[(&str, usize)]) -> Markup {
    let all = parts.iter().map(|(_, number)| number).sum::<usize>().max(1);
    let mut start = 0;
    let places = parts.iter().map(|(name, number)| {
        let width = number * 1000 / all;
        start += width;
        (*name, start - width, width)
    });
    let places: Vec<_> = places.collect();
    html! {
        svg.bar-of viewBox="0 0 1000 8" preserveAspectRatio="none" aria-hidden="true" {
            @for (name, x, width) in places { rect class=(name) x=(x) y="0" width=(width) height="8" {} }
        }
    }
}
