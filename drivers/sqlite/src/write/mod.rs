//! Writing: who runs the writer, its transactions, the writing methods of the contract, and what they remember.

pub(crate) mod commit;
pub(crate) mod copy;
pub(crate) mod doubt;
pub(crate) mod log;
pub(crate) mod remains;
pub(crate) mod rewrite;
pub(crate) mod size;
pub(crate) mod stage;
mod thread;
pub(crate) mod turn;
pub(crate) mod writer;
