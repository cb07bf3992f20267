//! What is specific to Postgres.
//!
//! # Write transactions
//!
//! Those of one thread run one after the other, in any process: each begins by taking the thread's lock, which ends
//! with the transaction. A transaction for all threads takes a lock that every other one shares. Within a process they
//! queue for the thread before they take a connection, so that one busy thread does not take the connections of all.
//!
//! A transaction begins in the round trip of its first statement and ends in that of its last ones: what it need not
//! know before it commits is queued, and goes with the commit.
//!
//! # Connections
//!
//! A connection goes back to the pool only if nothing is in progress on it: what a dropped future leaves behind is rolled
//! back first, or the connection is closed ([`pool`], [`transaction`]). Every wait has an end.

mod changes;
mod connect;
mod pool;
mod sql;
mod transaction;

pub use changes::Changes;
pub use connect::{Connected, Opener, PostgresTarget};
pub(crate) use pool::Pool;
pub(crate) use sql::{
    Answer, TEXT_IN, Tables, is_corruption, json_without_nul, push_json, push_json_at, text_of,
};
pub(crate) use transaction::{Scope, Transaction};
