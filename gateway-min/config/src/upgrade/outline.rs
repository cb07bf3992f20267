//! The structure of a YAML text: the mappings of a document with the positions of their keys and values.

use std::ops::Range;

use granit_parser::{Event, Parser, ScanError, Span, StructureStyle};

/// A mapping and its entries, in text order.
#[derive(Debug, PartialEq)]
pub(super) struct Mapping {
    pub(super) style: Style,
    pub(super) entries: Vec<Pair>,
}

/// How a mapping is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    /// One key per line, indented by this many columns.
    Block { indent: usize },
    /// In braces; `open` is the position after the opening one.
    Flow { open: usize },
}

/// A key with its value.
#[derive(Debug, PartialEq)]
pub(super) struct Pair {
    pub(super) key: String,
    /// The bytes of the key.
    pub(super) at: Range<usize>,
    pub(super) value: Node,
    /// The end of its last byte, exclusive.
    pub(super) end: usize,
}

/// A value.
#[derive(Debug, PartialEq)]
pub(super) enum Node {
    Mapping(Mapping),
    /// A scalar, a list or a reference: its bytes, empty for an omitted value.
    Other(Range<usize>),
}

impl Mapping {
    pub(super) fn entry(&self, key: &str) -> Option<&Pair> {
        self.entries.iter().find(|entry| entry.key == key)
    }
}

impl Pair {
    pub(super) fn mapping(&self) -> Option<&Mapping> {
        match &self.value {
            Node::Mapping(mapping) => Some(mapping),
            Node::Other(_) => None,
        }
    }
}

/// The top-level mapping; `None` if the document is empty or something else.
pub(super) fn outline(text: &str) -> Result<Option<Mapping>, ScanError> {
    let mut events = Vec::new();
    for next in Parser::new_from_str(text) {
        let (event, span) = next?;
        if !matches!(event, Event::Comment(..)) {
            events.push((event, bytes(span)));
        }
    }
    let mut events = events.into_iter().peekable();
    while let Some((event, _)) = events.peek() {
        if matches!(event, Event::StreamStart | Event::DocumentStart(..)) {
            events.next();
        } else {
            break;
        }
    }
    let top = Reader { events, text }.node();
    Ok(match top {
        Some((Node::Mapping(mapping), _)) => Some(mapping),
        _ => None,
    })
}

/// The input is a string, so byte offsets are always known.
fn bytes(span: Span) -> Range<usize> {
    span.byte_range().unwrap_or(0..0)
}

struct Reader<'a, I: Iterator<Item = (Event<'a>, Range<usize>)>> {
    events: std::iter::Peekable<I>,
    text: &'a str,
}

impl<'a, I: Iterator<Item = (Event<'a>, Range<usize>)>> Reader<'a, I> {
    /// The next node and its end.
    fn node(&mut self) -> Option<(Node, usize)> {
        let (event, at) = self.events.next()?;
        match event {
            Event::MappingStart(style, ..) => Some(self.mapping(style, at)),
            Event::SequenceStart(style, ..) => {
                let mut end = at.end;
                while let Some((event, last)) = self.events.peek() {
                    if matches!(event, Event::SequenceEnd) {
                        end = if style == StructureStyle::Flow { last.end } else { end };
                        self.events.next();
                        break;
                    }
                    end = self.node()?.1;
                }
                Some((Node::Other(at.start..end), end))
            }
            Event::Scalar(..) | Event::Alias(..) => {
                // The line breaks after a multi-line scalar do not belong to it.
                let end = at.start + self.text[at.clone()].trim_end().len();
                Some((Node::Other(at.start..end), end))
            }
            _ => None,
        }
    }

    fn mapping(&mut self, style: StructureStyle, at: Range<usize>) -> (Node, usize) {
        let mut entries: Vec<Pair> = Vec::new();
        let mut end = at.end;
        loop {
            match self.events.peek() {
                Some((Event::MappingEnd, last)) => {
                    end = if style == StructureStyle::Flow { last.end } else { end };
                    self.events.next();
                    break;
                }
                Some((Event::Scalar(key, ..), place)) => {
                    let (key, place) = (key.to_string(), place.clone());
                    self.events.next();
                    let Some((value, value_end)) = self.node() else { break };
                    end = value_end.max(place.end);
                    entries.push(Pair { key, at: place, value, end });
                }
                // Configuration keys are scalars; skip any other.
                Some(_) => {
                    if self.node().is_none() || self.node().is_none() {
                        break;
                    }
                }
                None => break,
            }
        }
        let style = match style {
            StructureStyle::Flow => Style::Flow { open: at.start + 1 },
            StructureStyle::Block => {
                let first = entries.first().map_or(at.start, |entry| entry.at.start);
                Style::Block { indent: first - line_start(self.text, first) }
            }
        };
        (Node::Mapping(Mapping { style, entries }), end)
    }
}

/// The start of the line that contains this byte.
pub(super) fn line_start(text: &str, at: usize) -> usize {
    text[..at].rfind('\n').map_or(0, |newline| newline + 1)
}

/// The start of the next line, or the end of the text.
pub(super) fn next_line(text: &str, at: usize) -> usize {
    text[at..].find('\n').map_or(text.len(), |newline| at + newline + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The paths, texts and ends of every entry.
    fn listed(text: &str) -> Vec<(String, String)> {
        fn walk(text: &str, mapping: &Mapping, path: &str, found: &mut Vec<(String, String)>) {
            for entry in &mapping.entries {
                let path = format!("{path}/{}", entry.key);
                found.push((path.clone(), text[entry.at.start..entry.end].to_owned()));
                if let Node::Mapping(mapping) = &entry.value {
                    walk(text, mapping, &path, found);
                }
            }
        }
        let mut found = Vec::new();
        if let Some(top) = outline(text).unwrap() {
            walk(text, &top, "", &mut found);
        }
        found
    }

    #[test]
    fn entries_are_found_with_their_texts_in_either_style() {
        let text = "# head\na: 1 # one\nb:\n  # inside\n  c: \"x\"\n  d: {e: [1, 2], \"f\": {}}\n  g:\n    - 1\n    - h: 2\ni:\nj: |\n  text\n  more\n\nk: *r\n";
        let text = &text.replace("*r", "z");
        let entries = [
            ("/a", "a: 1"),
            ("/b", "b:\n  # inside\n  c: \"x\"\n  d: {e: [1, 2], \"f\": {}}\n  g:\n    - 1\n    - h: 2"),
            ("/b/c", "c: \"x\""),
            ("/b/d", "d: {e: [1, 2], \"f\": {}}"),
            ("/b/d/e", "e: [1, 2]"),
            ("/b/d/f", "\"f\": {}"),
            ("/b/g", "g:\n    - 1\n    - h: 2"),
            ("/i", "i"),
            ("/j", "j: |\n  text\n  more"),
            ("/k", "k: z"),
        ];
        let found = listed(text);
        let found: Vec<(&str, &str)> =
            found.iter().map(|(path, text)| (path.as_str(), text.trim_end_matches(':'))).collect();
        assert_eq!(found, entries);
    }

    #[test]
    fn a_document_without_a_mapping_has_no_outline() {
        for text in ["", "# only\n", "---\n", "- a\n", "word\n", "null\n"] {
            assert_eq!(outline(text).unwrap(), None, "{text:?}");
        }
        assert!(outline("a: [").is_err());
        let flow = outline("{\"a\": 1}").unwrap().unwrap();
        assert_eq!(flow.style, Style::Flow { open: 1 });
        let block = outline("---\n  a: 1\n").unwrap().unwrap();
        assert_eq!(block.style, Style::Block { indent: 2 });
    }
}
