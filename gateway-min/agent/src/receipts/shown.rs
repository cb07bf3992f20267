//! The ledger as a model sees it, and the record of what it saw.

use serde::Deserialize as _;
use serde_json::{Value, json};

use super::Receipt;
use crate::model::message;

/// Key in an assistant message's `additional_kwargs`: the receipts that the model saw when it wrote the message. Only
/// the loop writes it.
pub const LEDGER_KEY: &str = "svc_tool_receipt_ledger";
/// The name of the hidden message that shows the ledger.
pub const LEDGER_NAME: &str = "tool_receipt_ledger";
/// The maximum length of the ledger that is shown, in characters.
pub const LEDGER_MAX_CHARS: usize = 2_000;

/// The service reference, "Receipts", has these texts.
const HEADING: &str = "Tool receipts of this conversation:";
const INSTRUCTION: &str = "Cite the receipt of each action you report by its id, as [r1] or [r1 tool_name].";
const LIMITS: &str = "Receipts are execution evidence only; they do not validate claim correctness.";

/// The newest receipts of a ledger, within [`LEDGER_MAX_CHARS`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    /// The text for the model.
    pub text: String,
    /// The receipts in it, under the numbers that they have in the whole ledger.
    pub receipts: Vec<Receipt>,
}

impl Shown {
    /// What a model sees of `ledger`: the oldest receipts give way if it is too long. `None` without a receipt.
    pub fn of(ledger: &[Receipt]) -> Option<Self> {
        if ledger.is_empty() {
            return None;
        }
        let mut text = [HEADING, INSTRUCTION, LIMITS].join("\n");
        let lines: Vec<String> = ledger.iter().map(line).collect();
        let first = first_shown(text.chars().count(), &lines);
        for line in omission(first).iter().chain(&lines[first..]) {
            text.push('\n');
            text.push_str(line);
        }
        Some(Self { text, receipts: ledger[first..].to_vec() })
    }

    /// The hidden message that shows it. It is part of one model call and never stored.
    pub fn message(&self) -> Value {
        message::hidden(LEDGER_NAME, self.text.as_str())
    }
}

/// The first of `lines` from which on they fit after `above` characters. A turn may have thousands, and each model call
/// needs this, so each line is counted once.
fn first_shown(above: usize, lines: &[String]) -> usize {
    // With the end of the line before it.
    let chars = |line: &String| 1 + line.chars().count();
    let mut rest: usize = lines.iter().map(chars).sum();
    for (first, line) in lines.iter().enumerate() {
        if above + omission(first).as_ref().map_or(0, chars) + rest <= LEDGER_MAX_CHARS {
            return first;
        }
        rest -= chars(line);
    }
    // A tool's name is the model's choice and may be of any length, so that nothing may fit.
    lines.len()
}

/// What is said of the receipts before the first one that is shown.
fn omission(first: usize) -> Option<String> {
    (first > 0).then(|| format!("- ({first} older receipts omitted)"))
}

fn line(receipt: &Receipt) -> String {
    let stamp = &receipt.stamp;
    // The name comes from a model: one receipt stays one line.
    let tool: Vec<&str> = stamp.tool_name.split_whitespace().collect();
    format!(
        "- [{}] {} status={} args_sha256={} output_sha256={} bytes={}",
        receipt.id(),
        tool.join(" "),
        stamp.status.as_str(),
        stamp.args_sha256,
        stamp.output_sha256,
        stamp.output_bytes
    )
}

/// Records on `answer` which receipts the model saw, over any record that is there. No receipts are recorded too.
pub fn stamp_shown(answer: &mut Value, receipts: &[Receipt]) {
    let kwargs = &mut answer["additional_kwargs"];
    if !kwargs.is_object() {
        *kwargs = json!({});
    }
    kwargs[LEDGER_KEY] = json!(receipts);
}

/// The receipts that the model saw when it wrote `answer`. `None` if there is no record or if it is malformed: then
/// nothing in the answer can be cited.
pub fn shown_to(answer: &Value) -> Option<Vec<Receipt>> {
    contiguous(answer["additional_kwargs"].get(LEDGER_KEY)?)
}

/// A stored list of receipts: all valid, with consecutive numbers that may start anywhere. `None` for anything else.
pub fn contiguous(stored: &Value) -> Option<Vec<Receipt>> {
    let receipts: Vec<Receipt> =
        stored.as_array()?.iter().map(Receipt::deserialize).collect::<Result<_, _>>().ok()?;
    let follow = |pair: &[Receipt]| pair[0].number.checked_add(1) == Some(pair[1].number);
    receipts.windows(2).all(follow).then_some(receipts)
}
