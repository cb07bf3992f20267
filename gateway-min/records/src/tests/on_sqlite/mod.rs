//! The tests on SQLite, and those about its file.

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
mod full;
#[cfg(unix)]
mod gone;
mod kept;
#[path = "../leases.rs"]
mod leases;
#[path = "../lifecycle.rs"]
mod lifecycle;
#[path = "../lost.rs"]
mod lost;
#[path = "../model.rs"]
mod model;
mod open;
#[cfg(unix)]
mod read_only;
mod receipts;
#[path = "../recovery.rs"]
mod recovery;
#[path = "../reservation.rs"]
mod reservation;
#[path = "../search.rs"]
mod search;
mod send;
#[path = "../subagents.rs"]
mod subagents;
#[path = "../threads.rs"]
mod threads;
mod writer;

mod support {
    pub(super) use crate::tests::support::*;
    use crate::{EventBackend, Records, RecordsOptions};

    pub(super) async fn fixture() -> Fixture {
        fixture_with(EventBackend::Memory).await
    }

    pub(super) async fn fixture_with(event_backend: EventBackend) -> Fixture {
        Fixture::in_place(Location::file(), event_backend).await
    }

    /// Records in their own file.
    pub(super) async fn lone(options: RecordsOptions) -> Records {
        Records::open_memory(options).await.unwrap()
    }
}
