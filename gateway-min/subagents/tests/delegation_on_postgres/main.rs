//! The scenarios of `../delegation` on Postgres, in mode delta, without those in which a runtime dies with its connections:
//! `kill -9` on Postgres is in the gateway's tests.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test.

#[path = "../delegation/acceptance.rs"]
mod acceptance;
#[path = "../delegation/admission.rs"]
mod admission;
#[allow(dead_code, reason = "no process dies here")]
#[path = "../delegation/batch_budgets.rs"]
mod batch_budgets;
#[allow(dead_code, reason = "no process dies here")]
#[path = "../delegation/batches.rs"]
mod batches;
#[path = "../delegation/beside.rs"]
mod beside;
#[path = "../delegation/deferred.rs"]
mod deferred;
#[path = "../delegation/external.rs"]
mod external;
#[path = "../delegation/guards.rs"]
mod guards;
#[path = "../delegation/providers.rs"]
mod providers;
#[path = "../delegation/receipts.rs"]
mod receipts;
#[path = "../delegation/skills.rs"]
mod skills;
mod store;
#[allow(dead_code, reason = "no process dies here")]
#[path = "../delegation/support.rs"]
mod support;
#[path = "../delegation/task.rs"]
mod task;
