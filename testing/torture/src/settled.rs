//! Counts the writes in doubt whose outcome the Postgres driver finds out by itself: its caller sees the answer only.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::NoSubscriber;
use tracing::{Dispatch, Event, Metadata, Subscriber};

/// The field of the driver's event.
const FIELD: &str = "is_stored";

/// The count of one future, which runs with [`Self::dispatch`].
#[derive(Debug, Clone)]
pub(crate) struct Settled {
    count: Arc<AtomicUsize>,
    dispatch: Dispatch,
}

impl Default for Settled {
    fn default() -> Self {
        // While there is one subscriber, the first thread that meets an event decides for all whether it is wanted.
        static SECOND: OnceLock<Dispatch> = OnceLock::new();
        SECOND.get_or_init(|| Dispatch::new(NoSubscriber::new()));
        let count = Arc::new(AtomicUsize::new(0));
        Self { dispatch: Dispatch::new(Counter(count.clone())), count }
    }
}

impl Settled {
    /// What the future runs with.
    pub(crate) fn dispatch(&self) -> Dispatch {
        self.dispatch.clone()
    }

    /// How many were settled so far.
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }
}

struct Counter(Arc<AtomicUsize>);

impl Subscriber for Counter {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && metadata.fields().field(FIELD).is_some()
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_settled_doubts_are_counted() {
        let settled = Settled::default();
        tracing::dispatcher::with_default(&settled.dispatch(), || {
            tracing::debug!(is_stored = true, "a write in doubt is settled");
            tracing::debug!("the database did not answer; trying again");
        });
        assert_eq!(settled.count(), 1);
    }
}
