//! The runs of all threads: what works, what waits, what failed.

use maud::{Markup, html};

use crate::layout::{self, Place, Session, status, time};
use crate::runs::RunLine;
use crate::text::{count, segment, things};

/// A run of some thread.
#[derive(Debug, Clone)]
pub struct ThreadRun {
    /// Its thread.
    pub thread: String,
    /// The process that works on it, if there may be several.
    pub process: Option<String>,
    /// The run.
    pub run: RunLine,
}

/// The runs of all threads, the newest of each kind first.
#[derive(Debug, Clone, Default)]
pub struct Overview {
    /// The name of this process, if there may be several.
    pub process: Option<String>,
    /// Those at work.
    pub running: Vec<ThreadRun>,
    /// Those that wait.
    pub waiting: Vec<ThreadRun>,
    /// Those that failed.
    pub failed: Vec<ThreadRun>,
    /// The maximum number of each.
    pub limit: usize,
}

impl Overview {
    /// Its page.
    pub fn page(&self, session: &Session) -> String {
        let main = html! {
            main #main data-watch {
                div.head { h1 { "Runs" } }
                section #watched aria-label="Runs of all threads" {
                    (self.processes())
                    (self.part("Running", &self.running, "No run is at work."))
                    (self.part("Waiting", &self.waiting, "No run waits."))
                    (self.part("Failed", &self.failed, "No run has failed of late."))
                }
            }
        };
        layout::document(session, Place::Runs, "Runs", &main)
    }

    /// How many runs each process works on.
    fn processes(&self) -> Markup {
        let mut names: Vec<&str> = self.process.iter().map(String::as_str).collect();
        for run in &self.running {
            if let Some(name) = &run.process
                && !names.contains(&name.as_str())
            {
                names.push(name);
            }
        }
        let number =
            |name: &str| self.running.iter().filter(|run| run.process.as_deref() == Some(name)).count();
        html! {
            @if !names.is_empty() {
                ul.plain {
                    @for name in names {
                        li {
                            code.id { bdi { (name) } }
                            @if self.process.as_deref() == Some(name) { span.tag { "this process" } }
                            " " span.fact { (things(number(name) as u64, "run")) }
                        }
                    }
                }
            }
        }
    }

    fn part(&self, name: &str, runs: &[ThreadRun], none: &str) -> Markup {
        let has_processes = runs.iter().any(|run| run.process.is_some());
        html! {
            h2 { (name) @if !runs.is_empty() { " " span.total { (count(runs.len() as u64)) @if runs.len() >= self.limit { " or more" } } } }
            @if runs.is_empty() { p.hint { (none) } }
            @else {
                div.scroll tabindex="0" role="region" aria-label=(name) {
                    table.list {
                        thead {
                            tr {
                                th scope="col" { "Run" }
                                th scope="col" { "Thread" }
                                th scope="col" { "Status" }
                                @if has_processes { th scope="col" { "Process" } }
                                th scope="col" { "Started" }
                                th.number scope="col" { "Took" }
                                th.number scope="col" { "Tokens" }
                                th scope="col" { span.hidden { "Actions" } }
                            }
                        }
                        tbody { @for run in runs { (row(run, has_processes)) } }
                    }
                }
            }
        }
    }
}

fn row(of: &ThreadRun, has_processes: bool) -> Markup {
    let (run, path) = (&of.run, format!("/threads/{}", segment(&of.thread)));
    html! {
        tr {
            td.name {
                a href={ (path) "/runs/" (segment(&run.id)) } { bdi { (run.question.as_deref().unwrap_or("Run")) } }
                @if let Some(error) = &run.error { p.bad dir="auto" { (error) } }
            }
            td { a href=(path) { code.id { bdi { (of.thread) } } } }
            td { (status(&run.status)) }
            @if has_processes { td { code.id { bdi { (of.process.as_deref().unwrap_or("–")) } } } }
            td { (time(&run.created_at)) }
            td.number { (run.took.as_deref().unwrap_or("–")) }
            td.number { (count(run.tokens)) }
            td.actions {
                @if run.is_active {
                    button.quiet type="button" data-of=(of.thread) data-post={ "/runs/" (segment(&run.id)) "/cancel" } { "Cancel" }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_counted_per_process_and_say_nothing_as_markup() {
        let hostile = "\"><script>alert(1)</script>";
        let run = |process: &str| ThreadRun {
            thread: hostile.to_owned(),
            process: Some(process.to_owned()),
            run: RunLine {
                id: hostile.to_owned(),
                status: "running".to_owned(),
                is_waiting: false,
                is_active: true,
                created_at: "2026-01-02T03:04:05Z".to_owned(),
                took: None,
                model: None,
                tokens: 0,
                calls: 0,
                question: Some(hostile.to_owned()),
                error: Some(hostile.to_owned()),
            },
        };
        let running = vec![run("a"), run("b"), run("b")];
        let overview = Overview { process: Some("a".to_owned()), running, limit: 3, ..Overview::default() };
        let page = overview.page(&Session::default());
        assert_eq!(page.matches("<script").count(), 1, "only ours: {page}");
        assert_eq!(page.matches("this process").count(), 1, "{page}");
        assert!(page.contains("1 run<") && page.contains("2 runs<") && page.contains("3 or more"), "{page}");
    }
}
