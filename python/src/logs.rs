//! What the stores warn of, for Python's `logging`.
//!
//! They warn on threads of their own, where no Python may run. So a warning is kept until a call ends, which passes it on.

use std::collections::VecDeque;
use std::fmt::{Debug, Write};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::thread::yield_now;

use pyo3::prelude::*;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Warnings kept; further ones are dropped.
const KEPT: usize = 256;
/// How often a lock is tried that the child of a fork may have found locked.
const TRIES: usize = 1000;

static WARNINGS: Mutex<VecDeque<Warning>> = Mutex::new(VecDeque::new());

struct Warning {
    /// The name of Python's logger.
    logger: String,
    is_error: bool,
    text: String,
}

fn warnings() -> Option<MutexGuard<'static, VecDeque<Warning>>> {
    for _ in 0..TRIES {
        match WARNINGS.try_lock() {
            Ok(warnings) => return Some(warnings),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => yield_now(),
        }
    }
    None
}

/// Keeps the warnings of the stores from now on.
pub(crate) fn watch() {
    // Nobody else sets one: programs do not link this library.
    let _ = tracing::subscriber::set_global_default(Keeper);
}

/// Hands kept warnings to Python.
pub(crate) fn pass_on(py: Python<'_>) -> PyResult<()> {
    let kept = warnings().filter(|kept| !kept.is_empty()).map(|mut kept| std::mem::take(&mut *kept));
    let Some(kept) = kept else { return Ok(()) };
    let logging = py.import("logging")?;
    for Warning { logger, is_error, text } in kept {
        let method = if is_error { "error" } else { "warning" };
        logging.call_method1("getLogger", (logger,))?.call_method1(method, ("%s", text))?;
    }
    Ok(())
}

struct Keeper;

impl Subscriber for Keeper {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN && metadata.is_event() && metadata.target().starts_with("threadkeep")
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::WARN)
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = Text::default();
        event.record(&mut text);
        let metadata = event.metadata();
        let library = metadata.target().split("::").next().unwrap_or_default();
        let warning = Warning {
            logger: library.replacen('_', ".", 1),
            is_error: *metadata.level() == Level::ERROR,
            text: text.message + &text.fields,
        };
        if let Some(mut kept) = warnings()
            && kept.len() < KEPT
        {
            kept.push_back(warning);
        }
    }

    // Spans are not enabled.
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// The text of an event.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // Writing to a text does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, "; {name}: {value:?}"),
        };
    }
}
