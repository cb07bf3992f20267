//! The tests on Postgres.
#![allow(clippy::duplicate_mod, reason = "the same tests on another database")]

#[path = "../admission.rs"]
mod admission;
#[path = "../batches.rs"]
mod batches;
#[path = "../batches_control.rs"]
mod batches_control;
#[path = "../batches_deletion.rs"]
mod batches_deletion;
#[path = "../batches_model.rs"]
mod batches_model;
#[path = "../batches_pages.rs"]
mod batches_pages;
#[path = "../batches_tokens.rs"]
mod batches_tokens;
mod clocks;
mod connections;
#[path = "../deletion.rs"]
mod deletion;
#[path = "../dropped.rs"]
mod dropped;
#[path = "../events.rs"]
mod events;
#[path = "../executions.rs"]
mod executions;
#[path = "../faults.rs"]
mod faults;
#[path = "../flush.rs"]
mod flush;
#[path = "../form.rs"]
mod form;
#[path = "../leases.rs"]
mod leases;
#[path = "../lifecycle.rs"]
mod lifecycle;
#[path = "../lost.rs"]
mod lost;
#[path = "../model.rs"]
mod model;
mod open;
#[path = "../recovery.rs"]
mod recovery;
#[path = "../reservation.rs"]
mod reservation;
#[path = "../search.rs"]
mod search;
#[path = "../subagents.rs"]
mod subagents;
#[path = "../threads.rs"]
mod threads;

mod support {
    pub(super) use crate::tests::support::*;
    use crate::{EventBackend, Records, RecordsOptions};

    pub(super) async fn fixture() -> Fixture {
        fixture_with(EventBackend::Memory).await
    }

    pub(super) async fn fixture_with(event_backend: EventBackend) -> Fixture {
        Fixture::in_place(Location::schema().await, event_backend).await
    }

    /// Records in their own schema.
    pub(super) async fn lone(options: RecordsOptions) -> Records {
        Location::schema().await.open(options).await
    }
}
