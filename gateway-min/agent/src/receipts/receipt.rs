//! One receipt: stamped on a tool result, numbered by its position in a conversation.

use std::fmt::Write as _;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::model::message;
use crate::serialize;
use crate::tools::ToolStatus;

/// Key in a tool message's `additional_kwargs`: its [`Stamp`]. Only the loop writes it.
pub const RECEIPT_KEY: &str = "svc_tool_receipt";
/// How many hex digits of a SHA-256 a receipt has.
const DIGEST_CHARS: usize = 16;

/// The status of a receipt (service reference, "Receipts").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReceiptStatus {
    /// The call succeeded.
    Success,
    /// The call failed.
    Error,
    /// A part of the call succeeded. No tool of ours reports it; threads of other writers may contain it.
    PartialSuccess,
}

impl ReceiptStatus {
    /// The status as receipts and texts spell it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Success => "success",
            Self::Error => "error",
            Self::PartialSuccess => "partial_success",
        }
    }
}

/// What a tool result records about its call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    /// The id that the model gave the call.
    pub tool_call_id: String,
    /// The tool.
    pub tool_name: String,
    /// Whether the call succeeded.
    pub status: ReceiptStatus,
    /// The first 16 hex digits of the SHA-256 of the arguments, as JSON with sorted keys.
    pub args_sha256: String,
    /// The first 16 hex digits of the SHA-256 of the message's content.
    pub output_sha256: String,
    /// The length of the content in bytes of UTF-8.
    pub output_bytes: u64,
    /// When the call ended, ISO-8601 in UTC.
    pub created_at: String,
}

/// A stamp with its number in a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Receipt {
    /// The display id, `r1`, `r2`, ..., as a number.
    #[serde(rename = "id", with = "display_id")]
    pub number: u64,
    /// What was recorded.
    #[serde(flatten)]
    pub stamp: Stamp,
}

impl Receipt {
    /// The id by which a model cites it.
    pub fn id(&self) -> String {
        format!("r{}", self.number)
    }
}

/// `r7` for 7; no other spelling is valid.
mod display_id {
    use serde::{Deserialize as _, Deserializer, Serializer, de};

    #[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
    pub(super) fn serialize<S: Serializer>(number: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("r{number}"))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        let text = String::deserialize(deserializer)?;
        let number = text.strip_prefix('r').and_then(|digits| digits.parse().ok());
        number
            .filter(|number| *number > 0 && format!("r{number}") == text)
            .ok_or_else(|| de::Error::custom("a receipt's id is `r` and a positive number"))
    }
}

/// Stamps `result`, the tool message of `call`, over any stamp that the tool itself left there.
///
/// A command that ended with another exit code than 0 failed, although its tool did what it was asked for: the code is
/// the artifact of `bash`, so no text decides it.
pub fn stamp(result: &mut Value, call: &Value, status: ToolStatus, now: DateTime<Utc>) {
    // A command killed by a signal has none: null.
    let exit_code = result["artifact"].get("exit_code");
    let status = match status {
        ToolStatus::Success if exit_code.is_none_or(|code| code == 0) => ReceiptStatus::Success,
        ToolStatus::Success | ToolStatus::Error => ReceiptStatus::Error,
    };
    let output = raw(&result["content"]);
    let stamp = Stamp {
        tool_call_id: call["id"].as_str().unwrap_or_default().to_owned(),
        tool_name: call["name"].as_str().unwrap_or_default().to_owned(),
        status,
        // The keys of a JSON object are sorted here; a test holds it.
        args_sha256: digest(&call["args"].to_string()),
        output_sha256: digest(&output),
        output_bytes: output.len() as u64,
        created_at: serialize::time(now),
    };
    let kwargs = &mut result["additional_kwargs"];
    if !kwargs.is_object() {
        *kwargs = json!({});
    }
    kwargs[RECEIPT_KEY] = json!(stamp);
}

/// The content as it is stored: a text, or blocks as JSON.
fn raw(content: &Value) -> String {
    content.as_str().map_or_else(|| content.to_string(), str::to_owned)
}

fn digest(text: &str) -> String {
    let mut digest = sha256(text);
    digest.truncate(DIGEST_CHARS);
    digest
}

/// The SHA-256 of a text in UTF-8, as 64 lowercase hex digits.
pub fn sha256(text: &str) -> String {
    Sha256::digest(text.as_bytes()).iter().fold(String::new(), |mut hex, byte| {
        // Writing into a String cannot fail.
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

/// The receipts of a conversation, numbered from 1 in the order of its tool messages. A message without a valid stamp
/// has none.
pub fn ledger(messages: &[Value]) -> Vec<Receipt> {
    let results = messages.iter().filter(|message| message::kind(message) == "tool");
    let stamps = results.filter_map(|message| message["additional_kwargs"].get(RECEIPT_KEY));
    let valid = stamps.filter_map(|stamp| Stamp::deserialize(stamp).ok());
    (1..).zip(valid).map(|(number, stamp)| Receipt { number, stamp }).collect()
}
