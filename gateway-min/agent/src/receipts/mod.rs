//! Receipts of tool calls: what ran, with digests of its arguments and of its output.
//!
//! The loop stamps every tool result ([`stamp`]). Before a model call it numbers the stamps of the conversation
//! ([`ledger`]) and shows the newest of them ([`Shown`]); the answer records exactly what was shown
//! ([`stamp_shown`], [`shown_to`]). A model cites receipts by number, and a citation is checked against that record:
//! compaction removes messages, and so changes later numbers.
//!
//! A receipt is evidence of execution. It does not say that a claim about the execution is correct.

mod receipt;
mod shown;

pub use receipt::{RECEIPT_KEY, Receipt, ReceiptStatus, Stamp, ledger, sha256, stamp};
pub use shown::{LEDGER_KEY, LEDGER_MAX_CHARS, LEDGER_NAME, Shown, contiguous, shown_to, stamp_shown};

#[cfg(test)]
mod tests;
