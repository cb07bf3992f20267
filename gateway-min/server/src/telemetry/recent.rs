//! The errors that this process has logged in the last hour. A process has one log, so there is one list of them.

use std::collections::VecDeque;
use std::fmt::{Debug, Write as _};
use std::sync::{Mutex, MutexGuard, PoisonError};

use chrono::{DateTime, TimeDelta, Utc};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

/// The maximum number of errors that are kept: the newest.
const KEPT: usize = 200;
/// The maximum characters of one.
const TEXT_MAX: usize = 1000;
/// For how long they are shown.
const SHOWN: TimeDelta = TimeDelta::hours(1);

/// The errors of this process.
pub(crate) static ERRORS: Errors = Errors::new();

/// The newest errors of a log.
pub(crate) struct Errors(Mutex<VecDeque<Logged>>);

/// An error in the log.
#[derive(Debug, Clone)]
pub(crate) struct Logged {
    /// When it was logged.
    pub(crate) at: DateTime<Utc>,
    /// The module that logged it.
    pub(crate) target: &'static str,
    /// What it says, with its fields.
    pub(crate) text: String,
}

impl Errors {
    const fn new() -> Self {
        Self(Mutex::new(VecDeque::new()))
    }

    /// Those of the last hour, the newest first.
    pub(crate) fn of_last_hour(&self) -> Vec<Logged> {
        let since = Utc::now() - SHOWN;
        self.logged().iter().rev().take_while(|logged| logged.at > since).cloned().collect()
    }

    fn add(&self, new: Logged) {
        let mut logged = self.logged();
        if logged.len() >= KEPT {
            logged.pop_front();
        }
        logged.push_back(new);
    }

    fn logged(&self) -> MutexGuard<'_, VecDeque<Logged>> {
        // Nothing that holds it panics between two changes of the list.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Remembers what is logged as an error.
pub(crate) struct Recent(pub(crate) &'static Errors);

impl<S: Subscriber> Layer<S> for Recent {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if *event.metadata().level() != Level::ERROR {
            return;
        }
        let mut words = Words::default();
        event.record(&mut words);
        let text = format!("{}{}", words.message, words.fields).chars().take(TEXT_MAX).collect();
        self.0.add(Logged { at: Utc::now(), target: event.metadata().target(), text });
    }
}

/// The words of an event.
#[derive(Default)]
struct Words {
    message: String,
    fields: String,
}

impl Visit for Words {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => self.message.push_str(value),
            name => self.fields.extend([" ", name, "=", value]),
        }
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt as _;
    use tracing_subscriber::registry::Registry;

    use super::*;

    #[test]
    fn errors_are_kept_with_their_fields_up_to_a_number() {
        let errors: &'static Errors = Box::leak(Box::new(Errors::new()));
        let _guard = tracing::subscriber::set_default(Registry::default().with(Recent(errors)));
        tracing::warn!("only a warning of this test");
        tracing::error!(thread = %"t", count = 2, cause = "no disk", "cannot write {}", "here");
        let newest = |text: &str| errors.of_last_hour().into_iter().find(|logged| logged.text.contains(text));
        let found = newest("cannot write here").unwrap();
        assert_eq!(found.text, "cannot write here thread=t count=2 cause=no disk");
        assert!(found.target.ends_with("telemetry::recent::tests"), "{}", found.target);
        assert!(newest("only a warning").is_none());
        for number in 0..=KEPT {
            tracing::error!("{}", format!("number {number} {}", "x".repeat(2 * TEXT_MAX)));
        }
        let all = errors.of_last_hour();
        assert!(all.len() <= KEPT && all.iter().all(|logged| logged.text.chars().count() <= TEXT_MAX));
        assert!(newest("cannot write here").is_none(), "the oldest give way");
    }
}
