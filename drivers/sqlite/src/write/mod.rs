//! Writing: the thread that commits what is queued, the writing methods of the contract, and what they remember.

pub(crate) mod commit;
pub(crate) mod doubt;
pub(crate) mod rewrite;
mod thread;
pub(crate) mod writer;
