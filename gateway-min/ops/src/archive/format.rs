//! The lines of the file.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};
use threadkeep::json::is_deeper;
use threadkeep::metadata::Source as MadeBy;
use threadkeep::value::Element;

/// The name of the format.
pub const FORMAT: &str = "threadkeep-thread";
/// The version that is written, and the newest that can be read.
pub const VERSION: u64 = 1;

/// Maximum nesting of JSON in a line, so that every JSON reader accepts it. Deeper values are written as MessagePack.
const JSON_DEPTH: usize = 64;

/// Runs of elements: start and count.
pub(super) type Runs = Vec<(u32, u32)>;

/// A line.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Line {
    Header(Header),
    Element(ElementLine),
    Checkpoint(Box<CheckpointLine>),
    End(End),
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Header {
    pub(super) format: String,
    pub(super) version: u64,
    pub(super) thread: String,
    pub(super) source: Source,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) record: Option<Record>,
    /// The metadata of the record, if it is nested too deep for a line: MessagePack in base64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) record_metadata: Option<String>,
}

/// Where a thread was exported from. Informational.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// The program and its version.
    pub program: String,
    /// The saver.
    pub saver: String,
}

/// The gateway's record of a thread.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Its title.
    pub title: Option<String>,
    /// Its owner; without one, all users share the thread.
    pub owner: Option<String>,
    /// The agent it was created for.
    pub assistant: Option<String>,
    /// Free-form metadata.
    pub metadata: Map<String, Json>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ElementLine {
    pub(super) of: String,
    pub(super) n: u32,
    pub(super) hash: String,
    pub(super) value: Form,
}

/// The forms of a value.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Form {
    Json(Json),
    Msgpack(String),
    Element(u32),
    List(Runs),
    Append(Append),
    Map(Runs),
}

/// A list that starts with all elements of an earlier one.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Append {
    pub(super) to: String,
    pub(super) list: Runs,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CheckpointLine {
    pub(super) id: String,
    pub(super) namespace: String,
    pub(super) parent: Option<String>,
    pub(super) metadata: MetadataPart,
    pub(super) next: Vec<String>,
    pub(super) applied: Vec<String>,
    pub(super) channels: BTreeMap<String, ChannelPart>,
    pub(super) tasks: Vec<TaskPart>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MetadataPart {
    pub(super) source: MadeBy,
    pub(super) step: i64,
    pub(super) parents: BTreeMap<String, String>,
    pub(super) delta_marker: bool,
    pub(super) counters: BTreeMap<String, (u64, u64)>,
    pub(super) extra: BTreeMap<String, Form>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ChannelPart {
    pub(super) version: String,
    pub(super) stored: StoredName,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) value: Option<Form>,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum StoredName {
    Value,
    Snapshot,
    Sentinel,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TaskPart {
    pub(super) task: String,
    pub(super) node: String,
    pub(super) index: u32,
    pub(super) writes: Vec<WritePart>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WritePart {
    pub(super) channel: String,
    pub(super) overwrite: bool,
    pub(super) value: Form,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct End {
    pub(super) elements: u64,
    pub(super) checkpoints: u64,
    pub(super) tasks: u64,
    pub(super) blake3: String,
}

/// The name under which the entries of a metadata map are numbered as elements.
pub(super) fn entries_of(key: &str) -> String {
    format!("metadata.{key}")
}

/// The JSON that decodes to exactly these bytes; `None` if no JSON does.
pub(super) fn exact_json(element: &Element) -> Option<Json> {
    let json = element.to_json().ok()?;
    let back = shallow(&json).then(|| Element::from_json(&json).ok())??;
    (back.bytes() == element.bytes()).then_some(json)
}

/// Whether metadata is nested little enough to be written as JSON.
pub(super) fn shallow(value: &Json) -> bool {
    !is_deeper(value, JSON_DEPTH)
}

/// Bytes in hexadecimal.
pub(super) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        // Writing into a String cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}
