//! The items of a 422 response.

use std::fmt;
use std::io::{self, Write};
use std::ops::RangeInclusive;

use serde::Serialize;
use serde_json::{Value, json};

use super::Pattern;

/// A step on the path to a value of the request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Loc {
    /// The part of the request (`body`, `query`, `path`), or a key of an object.
    Key(String),
    /// An index in a list, from 0.
    Index(usize),
}

impl Loc {
    fn shortened(self) -> Self {
        match self {
            Self::Key(key) => Self::Key(shortened(key)),
            Self::Index(_) => self,
        }
    }
}

impl From<&str> for Loc {
    fn from(key: &str) -> Self {
        Self::Key(key.to_owned())
    }
}

impl From<usize> for Loc {
    fn from(index: usize) -> Self {
        Self::Index(index)
    }
}

/// What is wrong with a value.
#[derive(Debug, Clone)]
pub struct Flaw {
    kind: &'static str,
    msg: String,
    ctx: Option<Value>,
}

impl Flaw {
    /// A flaw of this machine-readable kind (`type` in the response) with this human-readable text.
    pub fn new(kind: &'static str, msg: impl Into<String>) -> Self {
        Self { kind, msg: msg.into(), ctx: None }
    }

    fn with(kind: &'static str, msg: String, ctx: Value) -> Self {
        Self { kind, msg, ctx: Some(ctx) }
    }

    /// A required field is absent.
    pub fn missing() -> Self {
        Self::new("missing", "Field required")
    }

    /// A field for what the gateway does not do, with the sentence that says so.
    pub fn unsupported(sentence: &str) -> Self {
        Self::new("unsupported", sentence)
    }

    /// A list with too many items.
    pub fn too_long(max: usize, found: usize) -> Self {
        let msg = format!("List should have at most {max} items, not {found}");
        Self::with("too_long", msg, json!({"max_length": max, "actual_length": found}))
    }

    /// A field unknown to the route.
    pub fn extra_forbidden() -> Self {
        Self::new("extra_forbidden", "Extra inputs are not permitted")
    }

    /// The body is not valid JSON.
    pub fn json_invalid(error: &serde_json::Error) -> Self {
        Self::with("json_invalid", "JSON decode error".into(), json!({"error": error.to_string()}))
    }

    /// The body is not an object, or is not sent as JSON.
    pub fn no_object() -> Self {
        Self::new(
            "model_attributes_type",
            "Input should be a valid dictionary or object to extract fields from",
        )
    }

    /// Not one of the allowed strings.
    pub fn literal(allowed: &[&str]) -> Self {
        let quoted: Vec<_> = allowed.iter().map(|text| format!("'{text}'")).collect();
        let expected = match quoted.as_slice() {
            [some @ .., last] if !some.is_empty() => format!("{} or {last}", some.join(", ")),
            one => one.concat(),
        };
        let msg = format!("Input should be {expected}");
        Self::with("literal_error", msg, json!({"expected": expected}))
    }

    /// A string that does not match the pattern.
    pub fn pattern(pattern: &Pattern) -> Self {
        let msg = format!("String should match pattern '{}'", pattern.text);
        Self::with("string_pattern_mismatch", msg, json!({"pattern": pattern.text}))
    }

    /// The flaw of an integer outside `range`.
    pub(super) fn out_of_range(number: i128, range: &RangeInclusive<i64>) -> Self {
        let (ge, le) = (range.start(), range.end());
        if number < (*ge).into() {
            let msg = format!("Input should be greater than or equal to {ge}");
            Self::with("greater_than_equal", msg, json!({"ge": ge}))
        } else {
            let msg = format!("Input should be less than or equal to {le}");
            Self::with("less_than_equal", msg, json!({"le": le}))
        }
    }

    /// The flaw of a string of this length, if it is out of range.
    pub(super) fn bad_length(length: usize, range: &RangeInclusive<usize>) -> Option<Self> {
        let (min, max) = (*range.start(), *range.end());
        let characters =
            |count| if count == 1 { "1 character".to_owned() } else { format!("{count} characters") };
        if length < min {
            let msg = format!("String should have at least {}", characters(min));
            Some(Self::with("string_too_short", msg, json!({"min_length": min})))
        } else if length > max {
            let msg = format!("String should have at most {}", characters(max));
            Some(Self::with("string_too_long", msg, json!({"max_length": max})))
        } else {
            None
        }
    }
}

#[derive(Clone, Serialize)]
struct Problem {
    #[serde(rename = "type")]
    kind: &'static str,
    loc: Vec<Loc>,
    msg: String,
    input: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    ctx: Option<Value>,
}

impl fmt::Debug for Problem {
    /// Omits the input, which may be a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {:?}", self.kind, self.loc)
    }
}

/// The maximum number of items of a 422 response. A request has few fields, but lists of any length.
const MAX_PROBLEMS: usize = 100;
/// The maximum length of each text that a 422 response repeats from the request, in characters.
const MAX_ECHOED: usize = 200;
/// The maximum length of a whole text, in characters, whatever of the request it repeats.
const MAX_TEXT: usize = 2_000;

/// The problems of a request. Serialises to the list of a 422 response, with at most 100 items and 200 characters per
/// input: a response must not be larger than its cause.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(transparent)]
pub struct Problems(Vec<Problem>);

impl Problems {
    /// One problem: the value `input` at `loc` has this flaw.
    pub fn one(loc: Vec<Loc>, flaw: Flaw, input: Value) -> Self {
        let mut problems = Self::default();
        problems.add(loc, flaw, input);
        problems
    }

    /// Adds a problem: the value `input` at `loc` has this flaw. Beyond the first hundred, problems are dropped.
    pub fn add(&mut self, loc: Vec<Loc>, flaw: Flaw, input: Value) {
        if self.0.len() < MAX_PROBLEMS {
            let Flaw { kind, msg, ctx } = flaw;
            let loc = loc.into_iter().map(Loc::shortened).collect();
            self.0.push(Problem { kind, loc, msg: bounded(msg), input: echoed(input), ctx });
        }
    }

    /// Whether there are no problems.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The input for the response: unchanged if its JSON is short, else the beginning of that as a string.
fn echoed(input: Value) -> Value {
    if let Value::String(text) = input {
        return Value::String(shortened(text));
    }
    let mut json = Beginning(Vec::new());
    match serde_json::to_writer(&mut json, &input) {
        Ok(()) => input,
        Err(_) => Value::String(shortened(String::from_utf8_lossy(&json.0).into_owned())),
    }
}

/// A text of the request as an error repeats it: its first 200 characters.
pub fn shortened(text: impl Into<String>) -> String {
    truncated(text.into(), MAX_ECHOED)
}

/// The text of an error, of which the gateway sends 2,000 characters.
pub fn bounded(text: impl Into<String>) -> String {
    truncated(text.into(), MAX_TEXT)
}

/// The text, truncated with an ellipsis.
fn truncated(mut text: String, max: usize) -> String {
    if let Some((cut, _)) = text.char_indices().nth(max) {
        text.truncate(cut);
        text.push('\u{2026}');
    }
    text
}

/// Accepts slightly more than is shown, and fails on the rest, so that a large input is not serialised only to be cut.
struct Beginning(Vec<u8>);

impl Write for Beginning {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > 4 * MAX_ECHOED {
            let room = 4 * MAX_ECHOED - self.0.len();
            self.0.extend_from_slice(&bytes[..room]);
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
