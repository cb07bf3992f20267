//! A lead agent and its subagents, in one process and over restarts of it, with scripted models: in memory, in mode delta.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test.

mod acceptance;
mod admission;
mod batch_budgets;
mod batches;
mod batches_restart;
mod beside;
mod budget;
mod deferred;
mod everywhere;
mod external;
mod guards;
mod providers;
mod receipts;
mod restart;
mod seeded;
mod skills;
mod store;
mod stuck;
mod support;
mod task;
