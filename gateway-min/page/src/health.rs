//! The gateway itself: how it is configured, and its figures.

use maud::{Markup, html};

use crate::layout::{self, Place, Session, time};

/// A figure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Figure {
    /// Its name.
    pub name: String,
    /// What it counts.
    pub help: String,
    /// Its value, for people.
    pub value: String,
}

/// An error in the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ErrorLine {
    /// When it was logged, ISO-8601.
    pub at: String,
    /// The module that logged it.
    pub target: String,
    /// What it says.
    pub text: String,
}

/// What the gateway says of itself.
#[derive(Debug, Clone)]
pub struct Health {
    /// How it is configured: a name, a value.
    pub facts: Vec<(&'static str, String)>,
    /// Its figures, and the errors of the last hour; `None` for callers who may not read them.
    pub inside: Option<(Vec<Figure>, Vec<ErrorLine>)>,
}

impl Health {
    /// Its page.
    pub fn page(&self, session: &Session) -> String {
        let main = html! {
            main #main {
                div.head { h1 { "Health" } span.status data-status="completed" { "healthy" } }
                dl.figures {
                    @for (name, value) in &self.facts { div { dt { (name) } dd { b { bdi { (value) } } } } }
                }
                @match &self.inside {
                    Some((figures, errors)) => {
                        h2 { "Errors of the last hour" }
                        (logged(errors))
                        h2 { "Figures" }
                        div.scroll tabindex="0" role="region" aria-label="Figures" {
                            table.list.stacked {
                                thead { tr { th scope="col" { "Figure" } th.number scope="col" { "Value" } th scope="col" { "Meaning" } } }
                                tbody {
                                    @for figure in figures {
                                        tr { td { code { (figure.name) } } td.number { (figure.value) } td.wide { span.soft { (figure.help) } } }
                                    }
                                }
                            }
                        }
                        p.hint { "Counters are since the start of this process. The same for Prometheus: " code { "/metrics" } }
                    }
                    None => p.hint { "Administrators also see the figures of this process." },
                }
            }
        };
        layout::document(session, Place::Health, "Health", &main)
    }
}

/// Errors as a table.
fn logged(errors: &[ErrorLine]) -> Markup {
    html! {
        @if errors.is_empty() { p.hint { "This process has logged none." } }
        @else {
            div.scroll tabindex="0" role="region" aria-label="Errors of the last hour" {
                table.list {
                    thead { tr { th scope="col" { "Logged" } th scope="col" { "Error" } th scope="col" { "Module" } } }
                    tbody {
                        @for error in errors {
                            tr { td { (time(&error.at)) } td.wide { bdi.bad { (error.text) } } td { code.soft { (error.target) } } }
                        }
                    }
                }
            }
        }
    }
}

/// The figures of a text for Prometheus, without the parts of histograms.
pub fn figures(metrics: &str) -> Vec<Figure> {
    let (mut help, mut figures) = ("", Vec::new());
    for line in metrics.lines() {
        if let Some(text) = line.strip_prefix("# HELP ") {
            help = text.split_once(' ').map_or("", |(_, help)| help);
            continue;
        }
        let Some((name, value)) = line.rsplit_once(' ').filter(|_| !line.starts_with('#')) else { continue };
        if name.contains("_bucket") {
            continue;
        }
        let name = name.strip_prefix("threadkeep_").unwrap_or(name).to_owned();
        let value = match value.parse::<u64>() {
            Ok(number) if name.contains("_bytes") => crate::text::bytes(number),
            Ok(number) => crate::text::count(number),
            Err(_) => value.parse::<f64>().map_or_else(|_| value.to_owned(), thousandths),
        };
        figures.push(Figure { name, help: help.to_owned(), value });
    }
    figures
}

/// A number to three places after its point, as a person reads it.
fn thousandths(number: f64) -> String {
    let text = format!("{number:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_those_of_the_text() {
        let text = "# HELP threadkeep_runs_active Runs at work.\n# TYPE threadkeep_runs_active gauge\nthreadkeep_runs_active 1200\n\
             # HELP threadkeep_wait Waits.\nthreadkeep_wait_bucket{le=\"1\"} 2\nthreadkeep_wait_sum 0.5\nthreadkeep_busy_sum 3.3405675219999857\nthreadkeep_idle_sum 0.0\n\
             # HELP threadkeep_database_bytes Size.\nthreadkeep_database_bytes{db=\"a b\"} 65536\n# EOF\n";
        let figure = |name: &str, help: &str, value: &str| Figure {
            name: name.to_owned(),
            help: help.to_owned(),
            value: value.to_owned(),
        };
        assert_eq!(
            figures(text),
            [
                figure("runs_active", "Runs at work.", "1,200"),
                figure("wait_sum", "Waits.", "0.5"),
                figure("busy_sum", "Waits.", "3.341"),
                figure("idle_sum", "Waits.", "0"),
                figure("database_bytes{db=\"a b\"}", "Size.", "65 kB"),
            ]
        );
    }
}
