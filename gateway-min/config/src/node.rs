//! Reads typed settings from the value tree: defaults, coercion, ranges, and problems that name their key.
//!
//! Every getter returns a usable value and reports a [`Problem`] if the value in the file is invalid, so that one load
//! reports everything there is to fix. A missing or null key takes its default. After interpolation any value may be a
//! string, so numbers and booleans are also read from strings; a boolean is never read as a number, nor a number as a
//! string.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::ops::{Bound, RangeBounds};
use std::path::PathBuf;
use std::rc::Rc;

use serde_json::{Map, Value};

use super::error::{ConfigError, Problem};
use super::interpolate::{FromEnvironment, indexed, joined};
use super::secret::{FreeForm, MASK, Secret, is_secret_path};

/// How many characters of a string an error shows.
const SHOWN_CHARS: usize = 80;

/// What one load finds besides the values.
#[derive(Default)]
pub(super) struct Report {
    problems: RefCell<Vec<Problem>>,
    warnings: RefCell<Vec<String>>,
    from_environment: FromEnvironment,
    /// The settings that were looked for, set or not, by the dotted path of their mapping. Names may have dots, so the
    /// path of a setting does not say where that of its mapping ends.
    asked: Rc<RefCell<BTreeMap<String, BTreeSet<String>>>>,
}

impl Report {
    /// A report that knows which values came from the environment; those are not shown.
    pub(super) fn new(from_environment: FromEnvironment) -> Self {
        Self { from_environment, ..Self::default() }
    }

    /// Logs a warning and keeps it.
    pub(super) fn warn(&self, text: String) {
        tracing::warn!("{text}");
        self.warnings.borrow_mut().push(text);
    }

    /// Reports a problem with the value at a dotted key path, once.
    pub(super) fn problem(&self, key: impl Into<String>, message: impl Into<String>) {
        let problem = Problem { key: key.into(), message: message.into() };
        let mut problems = self.problems.borrow_mut();
        if !problems.contains(&problem) {
            problems.push(problem);
        }
    }

    fn ask(&self, path: &str, key: &str) {
        self.asked.borrow_mut().entry(path.to_owned()).or_default().insert(key.to_owned());
    }

    /// The keys that were looked for in the mapping at `path`; none if the mapping was taken as it is.
    pub(super) fn asked_of(&self, path: &str) -> BTreeSet<String> {
        self.asked.borrow().get(path).cloned().unwrap_or_default()
    }

    /// The warnings, or all problems as one error.
    pub(super) fn finish(self, path: Option<PathBuf>) -> Result<Vec<String>, ConfigError> {
        let problems = self.problems.into_inner();
        if problems.is_empty() {
            Ok(self.warnings.into_inner())
        } else {
            Err(ConfigError::Invalid { path, problems })
        }
    }

    /// A value as an error may show it: masked if secret, only the variable's name if it came from the environment.
    fn shown(&self, path: &str, value: &Value) -> String {
        if let Some(variable) = self.from_environment.get(path) {
            return format!("the value of ${variable}");
        }
        match value {
            Value::Array(_) => "a list".to_owned(),
            Value::Object(_) => "a mapping".to_owned(),
            _ if is_secret_path(path) => MASK.to_owned(),
            _ => {
                let text = value.to_string();
                let cut: String = text.chars().take(SHOWN_CHARS).collect();
                if cut.len() < text.len() { format!("{cut}...") } else { text }
            }
        }
    }
}

/// A mapping of the tree, with its dotted path.
pub(super) struct Node<'a> {
    path: String,
    map: Option<&'a Map<String, Value>>,
    report: &'a Report,
}

impl<'a> Node<'a> {
    /// The root of a tree.
    pub(super) fn root(sections: &'a Map<String, Value>, report: &'a Report) -> Self {
        Self { path: String::new(), map: Some(sections), report }
    }

    /// A mapping at `path`.
    pub(super) fn at(path: &str, map: &'a Map<String, Value>, report: &'a Report) -> Self {
        Self { path: path.to_owned(), map: Some(map), report }
    }

    /// An empty report for [`Self::reporting_to`]. What it is asked for counts for this mapping's report too.
    pub(super) fn scratch(&self) -> Report {
        Report { asked: Rc::clone(&self.report.asked), ..Report::default() }
    }

    /// The same mapping, reporting its problems to another report.
    pub(super) fn reporting_to<'b>(&self, report: &'b Report) -> Node<'b>
    where
        'a: 'b,
    {
        Node { path: self.path.clone(), map: self.map, report }
    }

    /// Whether the key is present, even if null.
    pub(super) fn has(&self, key: &str) -> bool {
        self.report.ask(&self.path, key);
        self.map.is_some_and(|map| map.contains_key(key))
    }

    /// The value of a key that is neither missing nor null.
    pub(super) fn value(&self, key: &str) -> Option<&'a Value> {
        self.report.ask(&self.path, key);
        self.map?.get(key).filter(|value| !value.is_null())
    }

    /// Reports a problem with one key of this mapping.
    pub(super) fn problem(&self, key: &str, message: impl Into<String>) {
        self.report.problem(joined(&self.path, key), message);
    }

    /// Logs a warning and keeps it.
    pub(super) fn warn(&self, text: String) {
        self.report.warn(text);
    }

    /// A nested mapping; empty if missing or null.
    pub(super) fn section(&self, key: &str) -> Node<'a> {
        self.child(joined(&self.path, key), self.value(key))
    }

    /// The mappings of a list; empty if missing or null.
    pub(super) fn items(&self, key: &str) -> Vec<Node<'a>> {
        let path = joined(&self.path, key);
        match self.value(key) {
            None => Vec::new(),
            Some(Value::Array(items)) => {
                let nodes = items.iter().enumerate();
                nodes.map(|(index, item)| self.child(indexed(&path, index), Some(item))).collect()
            }
            Some(other) => {
                self.refuse(key, "a list", other);
                Vec::new()
            }
        }
    }

    /// The mappings of a mapping whose keys are names chosen by the operator.
    pub(super) fn named(&self, key: &str) -> Vec<(&'a str, Node<'a>)> {
        let section = self.section(key);
        let entries = section.map.into_iter().flatten();
        let entries = entries.map(|(name, value)| {
            let path = joined(&section.path, name);
            self.report.ask(&section.path, name);
            (name.as_str(), section.child(path, Some(value)))
        });
        entries.collect()
    }

    fn child(&self, path: String, value: Option<&'a Value>) -> Node<'a> {
        let map = match value {
            None | Some(Value::Null) => None,
            Some(Value::Object(map)) => Some(map),
            Some(other) => {
                let found = self.report.shown(&path, other);
                self.report.problem(path.clone(), format!("must be a mapping, got {found}"));
                None
            }
        };
        Node { path, map, report: self.report }
    }

    /// An integer within a range.
    pub(super) fn int<T>(&self, key: &str, default: T, range: impl RangeBounds<T>) -> T
    where
        T: TryFrom<i128> + PartialOrd + Display,
    {
        self.opt_int(key, range).unwrap_or(default)
    }

    /// An integer within a range, or `None`.
    pub(super) fn opt_int<T>(&self, key: &str, range: impl RangeBounds<T>) -> Option<T>
    where
        T: TryFrom<i128> + PartialOrd + Display,
    {
        let value = self.value(key)?;
        let whole = integer(value);
        let number = whole.and_then(|n| T::try_from(n).ok()).filter(|n| range.contains(n));
        if number.is_none() {
            let has_no_end = matches!(range.end_bound(), Bound::Unbounded);
            let is_too_large = has_no_end && whole.is_some_and(|n| n > 0 && T::try_from(n).is_err());
            let allowed = if is_too_large { "a smaller integer" } else { "an integer" };
            self.refuse(key, &format!("{allowed}{}", described(&range)), value);
        }
        number
    }

    /// An integer that is clamped to its range instead of being refused.
    pub(super) fn clamped_int(&self, key: &str, default: u32, min: u32, max: u32) -> u32 {
        let Some(value) = self.value(key) else { return default };
        let Some(number) = integer(value) else {
            self.refuse(key, "an integer", value);
            return default;
        };
        u32::try_from(number.clamp(min.into(), max.into())).unwrap_or(default)
    }

    /// A number within a range.
    pub(super) fn float(&self, key: &str, default: f64, range: impl RangeBounds<f64>) -> f64 {
        self.opt_float(key, range).unwrap_or(default)
    }

    /// A number within a range, or `None`.
    pub(super) fn opt_float(&self, key: &str, range: impl RangeBounds<f64>) -> Option<f64> {
        let value = self.value(key)?;
        let number = number(value).filter(|n| range.contains(n));
        if number.is_none() {
            self.refuse(key, &format!("a number{}", described(&range)), value);
        }
        number
    }

    /// A boolean.
    pub(super) fn bool(&self, key: &str, default: bool) -> bool {
        self.opt_bool(key).unwrap_or(default)
    }

    /// A boolean, or `None`.
    pub(super) fn opt_bool(&self, key: &str) -> Option<bool> {
        let value = self.value(key)?;
        let truth = boolean(value);
        if truth.is_none() {
            self.refuse(key, "true or false", value);
        }
        truth
    }

    /// A string, or `None`.
    pub(super) fn text(&self, key: &str) -> Option<String> {
        match self.value(key)? {
            Value::String(text) => Some(text.clone()),
            other => {
                self.refuse(key, "a string (put it in quotes)", other);
                None
            }
        }
    }

    /// A string, or `None`; an empty one, as a variable may be, counts as `None`.
    pub(super) fn given_text(&self, key: &str) -> Option<String> {
        self.text(key).filter(|text| !text.is_empty())
    }

    /// A string that must be present and not blank. An empty string stands in for an invalid one.
    pub(super) fn required_text(&self, key: &str) -> String {
        if self.value(key).is_none() {
            self.problem(key, "is required");
            return String::new();
        }
        // A value of another type has already been reported.
        self.text(key)
            .inspect(|text| {
                if text.trim().is_empty() {
                    self.problem(key, "must not be blank");
                }
            })
            .unwrap_or_default()
    }

    /// A string that is never shown, or `None`; an empty string counts as `None`.
    pub(super) fn secret(&self, key: &str) -> Option<Secret> {
        let Value::String(text) = self.value(key)? else {
            // The value is not shown, whatever the key's name.
            self.problem(key, "must be a string (put it in quotes)");
            return None;
        };
        Some(text.as_str()).filter(|text| !text.is_empty()).map(Secret::new)
    }

    /// One of several words.
    pub(super) fn choice<T: Copy>(&self, key: &str, words: &[(&str, T)], default: T) -> T {
        let Some(value) = self.value(key) else { return default };
        let chosen = words.iter().find(|(word, _)| value.as_str() == Some(word));
        if chosen.is_none() {
            let allowed: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
            self.refuse(key, &format!("one of {}", allowed.join(", ")), value);
        }
        chosen.map_or(default, |(_, choice)| *choice)
    }

    /// A list of strings, or `None`.
    pub(super) fn texts(&self, key: &str) -> Option<Vec<String>> {
        let value = self.value(key)?;
        let texts = value.as_array().and_then(|items| {
            items.iter().map(|item| item.as_str().map(str::to_owned)).collect::<Option<Vec<_>>>()
        });
        if texts.is_none() {
            self.refuse(key, "a list of strings", value);
        }
        texts
    }

    /// A mapping of names to strings that may be secrets, such as an environment. Numbers and booleans become strings.
    pub(super) fn variables(&self, key: &str) -> BTreeMap<String, Secret> {
        let section = self.section(key);
        let mut variables = BTreeMap::new();
        for (name, value) in section.map.into_iter().flatten() {
            let text = match value {
                Value::String(text) => text.clone(),
                Value::Number(number) => number.to_string(),
                Value::Bool(truth) => truth.to_string(),
                Value::Null => String::new(),
                Value::Array(_) | Value::Object(_) => {
                    section.problem(name, "must be a string");
                    continue;
                }
            };
            variables.insert(name.clone(), Secret::new(text));
        }
        variables
    }

    /// A mapping that is passed on unchanged.
    pub(super) fn free_form(&self, key: &str) -> FreeForm {
        self.section(key).rest(&[])
    }

    /// Every key of this mapping except the known ones.
    pub(super) fn rest(&self, known: &[&str]) -> FreeForm {
        let entries = self.map.into_iter().flatten().filter(|(key, _)| !known.contains(&key.as_str()));
        let entries = entries.inspect(|(key, _)| self.report.ask(&self.path, key));
        entries.map(|(key, value)| (key.clone(), value.clone())).collect::<Map<_, _>>().into()
    }

    /// The value of a key as an error may show it.
    pub(super) fn shown(&self, key: &str) -> String {
        self.report.shown(&joined(&self.path, key), self.value(key).unwrap_or(&Value::Null))
    }

    fn refuse(&self, key: &str, allowed: &str, value: &Value) {
        let path = joined(&self.path, key);
        let found = self.report.shown(&path, value);
        self.report.problem(path, format!("must be {allowed}, got {found}"));
    }
}

fn integer(value: &Value) -> Option<i128> {
    match value {
        Value::Number(number) => match (number.as_u64(), number.as_i64(), number.as_f64()) {
            (Some(n), _, _) => Some(n.into()),
            (_, Some(n), _) => Some(n.into()),
            // `1e6` is an integer, too.
            (_, _, Some(n)) if n.fract() == 0.0 => format!("{n:.0}").parse().ok(),
            _ => None,
        },
        Value::String(text) => text.trim().parse().ok(),
        _ => None,
    }
}

fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => text.trim().parse().ok().filter(|n: &f64| n.is_finite()),
        _ => None,
    }
}

fn boolean(value: &Value) -> Option<bool> {
    match value {
        Value::Bool(truth) => Some(*truth),
        Value::Number(number) => match number.as_u64() {
            Some(0) => Some(false),
            Some(1) => Some(true),
            _ => None,
        },
        Value::String(text) => match text.trim().to_ascii_lowercase().as_str() {
            "true" | "yes" | "on" | "1" | "t" | "y" => Some(true),
            "false" | "no" | "off" | "0" | "f" | "n" => Some(false),
            _ => None,
        },
        _ => None,
    }
}

fn described<T: Display>(range: &impl RangeBounds<T>) -> String {
    match (range.start_bound(), range.end_bound()) {
        (Bound::Included(min), Bound::Included(max)) => format!(" from {min} to {max}"),
        (Bound::Excluded(min), Bound::Included(max)) => format!(" > {min} and <= {max}"),
        (Bound::Included(min), _) => format!(" >= {min}"),
        (Bound::Excluded(min), _) => format!(" > {min}"),
        (Bound::Unbounded, _) => String::new(),
    }
}

#[cfg(test)]
mod tests;
