//! The scenarios of `../delegation` on SQLite, in mode full.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test.

#[path = "../delegation/acceptance.rs"]
mod acceptance;
#[path = "../delegation/admission.rs"]
mod admission;
#[path = "../delegation/batch_budgets.rs"]
mod batch_budgets;
#[path = "../delegation/batches.rs"]
mod batches;
#[path = "../delegation/batches_restart.rs"]
mod batches_restart;
#[path = "../delegation/beside.rs"]
mod beside;
#[path = "../delegation/budget.rs"]
mod budget;
#[path = "../delegation/deferred.rs"]
mod deferred;
#[path = "../delegation/everywhere.rs"]
mod everywhere;
#[path = "../delegation/external.rs"]
mod external;
#[path = "../delegation/guards.rs"]
mod guards;
#[path = "../delegation/providers.rs"]
mod providers;
#[path = "../delegation/receipts.rs"]
mod receipts;
#[path = "../delegation/restart.rs"]
mod restart;
#[path = "../delegation/skills.rs"]
mod skills;
mod store;
#[path = "../delegation/support.rs"]
mod support;
#[path = "../delegation/task.rs"]
mod task;
