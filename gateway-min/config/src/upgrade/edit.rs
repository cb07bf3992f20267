//! Edits a YAML text and leaves the rest unchanged.

use std::ops::Range;

use serde_json::{Map, Value};

use super::outline::{Mapping, Node, Pair, Style, line_start, next_line};

/// Changes to a text, applied together.
pub(super) struct Edits<'a> {
    text: &'a str,
    changes: Vec<(Range<usize>, String)>,
}

impl<'a> Edits<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Self { text, changes: Vec::new() }
    }

    /// The text with all changes applied; changes at the same place apply in the order they were requested.
    pub(super) fn apply(mut self) -> String {
        self.changes.sort_by_key(|(place, _)| place.start);
        let (mut new, mut done) = (String::with_capacity(self.text.len()), 0);
        for (place, with) in self.changes {
            // Overlapping changes are a bug, which the comparison of meanings finds.
            new.push_str(self.text.get(done..place.start).unwrap_or_default());
            new.push_str(&with);
            done = place.end.max(done);
        }
        new.push_str(&self.text[done..]);
        new
    }

    /// An entry's value as written.
    pub(super) fn value(&self, entry: &Pair) -> Option<&'a str> {
        match &entry.value {
            Node::Other(at) => self.text.get(at.clone()).filter(|text| !text.is_empty()),
            Node::Mapping(_) => None,
        }
    }

    /// Replaces an entry's value with another scalar.
    pub(super) fn set(&mut self, entry: &Pair, value: &str) {
        match &entry.value {
            Node::Other(at) if !at.is_empty() => self.changes.push((at.clone(), value.to_owned())),
            _ => {
                let colon =
                    self.text[entry.at.end..].find(':').map_or(entry.at.end, |at| entry.at.end + at + 1);
                self.changes.push((colon..colon, format!(" {value}")));
            }
        }
    }

    /// Nests an entry's value one level deeper: `old: v` becomes `outer: {inner: v}`.
    pub(super) fn nest(&mut self, within: &Mapping, entry: &Pair, outer: &str, inner: &str) {
        match within.style {
            Style::Block { indent } => {
                let new = format!("{outer}:{}{:2$}{inner}", self.newline(), "", indent + 2);
                self.changes.push((entry.at.clone(), new));
            }
            Style::Flow { .. } => {
                self.changes.push((entry.at.clone(), format!("\"{outer}\": {{\"{inner}\"")));
                self.changes.push((entry.end..entry.end, "}".to_owned()));
            }
        }
    }

    /// Removes an entry, with its line or its comma. A comment beside it stays, on that line.
    pub(super) fn remove(&mut self, within: &Mapping, entry: &Pair) {
        let place = match within.style {
            Style::Block { .. } => {
                let end = next_line(self.text, entry.end);
                let comment = self.text[entry.end..end].trim_start();
                if comment.starts_with('#') {
                    entry.at.start..end - comment.len()
                } else {
                    line_start(self.text, entry.at.start)..end
                }
            }
            Style::Flow { .. } => {
                let (before, behind) = (&self.text[..entry.at.start], &self.text[entry.end..]);
                let rest = behind.trim_start();
                match (rest.strip_prefix(','), before.trim_end().strip_suffix(',')) {
                    (Some(rest), _) => entry.at.start..self.text.len() - rest.trim_start().len(),
                    (None, Some(before)) => before.len()..entry.end,
                    (None, None) => entry.at.start..entry.end,
                }
            }
        };
        self.changes.push((place, String::new()));
    }

    /// Adds lines at the end of a block-style mapping: after its last value and the comments that follow it. At the top
    /// level that is the end of the text.
    fn add_lines(&mut self, to: &Mapping, is_top: bool, indent: usize, lines: &[String]) {
        let end = match to.entries.last() {
            Some(last) if !is_top => self.behind_comments(next_line(self.text, last.end), indent),
            _ => self.text.len(),
        };
        let newline = self.newline();
        let mut new = String::new();
        // Only the first addition at a place can follow an unfinished line.
        let met = self.changes.iter().any(|(place, _)| place.start == end);
        if !met && !self.text[..end].is_empty() && !self.text[..end].ends_with('\n') {
            new.push_str(newline);
        }
        for line in lines {
            if !line.is_empty() {
                new.extend(std::iter::repeat_n(' ', indent));
                new.push_str(line);
            }
            new.push_str(newline);
        }
        self.changes.push((end..end, new));
    }

    /// Adds entries at the end of a flow-style mapping.
    fn add_flow(&mut self, to: &Mapping, open: usize, entries: &[(&str, String)]) {
        let quoted = to.entries.first().is_some_and(|entry| self.text[entry.at.clone()].starts_with('"'));
        let written = entries.iter().map(|(key, value)| {
            if quoted { format!("\"{key}\": {value}") } else { format!("{key}: {value}") }
        });
        let written = written.collect::<Vec<_>>().join(", ");
        match to.entries.last() {
            Some(last) => self.changes.push((last.end..last.end, format!(", {written}"))),
            None => self.changes.push((open..open, written)),
        }
    }

    /// Adds an entry with a scalar value, already formatted.
    pub(super) fn add(&mut self, to: &Mapping, key: &str, value: &str) {
        match to.style {
            Style::Block { indent } => self.add_lines(to, false, indent, &[format!("{key}: {value}")]),
            Style::Flow { open } => self.add_flow(to, open, &[(key, value.to_owned())]),
        }
    }

    /// The start of the first line from `at` on that is not a comment of at least this indentation.
    fn behind_comments(&self, mut at: usize, indent: usize) -> usize {
        loop {
            let line = &self.text[at..next_line(self.text, at)];
            let spaces = line.len() - line.trim_start_matches(' ').len();
            if !line.trim_start_matches(' ').starts_with('#') || spaces < indent.max(1) {
                return at;
            }
            at += line.len();
        }
    }

    fn newline(&self) -> &'static str {
        if self.text.contains("\r\n") { "\r\n" } else { "\n" }
    }
}

/// A text from which entries are copied, with their comments.
pub(super) struct Example<'a> {
    pub(super) text: &'a str,
    pub(super) values: &'a Map<String, Value>,
    pub(super) outline: &'a Mapping,
}

impl Example<'_> {
    /// Adds what `mapping`, whose values are `values`, lacks of this one's values, recursively.
    pub(super) fn add_missing(
        &self,
        edits: &mut Edits<'_>,
        mapping: &Mapping,
        values: &Map<String, Value>,
        is_top: bool,
    ) {
        for entry in &self.outline.entries {
            let both = (mapping.entry(&entry.key), values.get(&entry.key), self.values.get(&entry.key));
            if let (Some(old), Some(Value::Object(values)), Some(Value::Object(wanted))) = both
                && let (Node::Mapping(mapping), Node::Mapping(outline)) = (&old.value, &entry.value)
            {
                Example { text: self.text, values: wanted, outline }
                    .add_missing(edits, mapping, values, false);
            }
        }
        let is_missing = |key: &String| self.values.contains_key(key) && !values.contains_key(key);
        let missing = self.outline.entries.iter().filter(|entry| is_missing(&entry.key));
        match mapping.style {
            Style::Block { indent } => {
                let mut lines = Vec::new();
                for entry in missing {
                    if is_top {
                        lines.push(String::new());
                    }
                    lines.extend(self.lines(entry));
                }
                if !lines.is_empty() {
                    edits.add_lines(mapping, is_top, indent, &lines);
                }
            }
            Style::Flow { open } => {
                let json = |entry: &Pair| {
                    Some((
                        self.values.get_key_value(&entry.key)?.0.as_str(),
                        self.values[&entry.key].to_string(),
                    ))
                };
                let entries: Vec<_> = missing.filter_map(json).collect();
                if !entries.is_empty() {
                    edits.add_flow(mapping, open, &entries);
                }
            }
        }
    }

    /// The lines of an entry and the comment above it, without their indentation.
    fn lines(&self, entry: &Pair) -> Vec<String> {
        let key_line = line_start(self.text, entry.at.start);
        let indent = entry.at.start - key_line;
        let mut start = key_line;
        while start > 0 {
            let above = line_start(self.text, start - 1);
            let line = &self.text[above..start];
            if line.len() - line.trim_start().len() != indent || !line.trim_start().starts_with('#') {
                break;
            }
            start = above;
        }
        let lines = self.text[start..next_line(self.text, entry.end)].lines();
        lines.map(|line| line.get(indent..).unwrap_or_default().trim_end().to_owned()).collect()
    }
}
