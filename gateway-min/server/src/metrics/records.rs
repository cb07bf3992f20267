//! The counters of the gateway's records, read on request.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::counter::ConstCounter;

use threadkeep_records::Commits;

/// The counters of a store.
#[derive(Debug)]
pub(super) struct Collected(pub(super) Arc<Commits>);

impl Collector for Collected {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for (name, help, count) in [
            ("records_commits", "Write transactions on threads, runs and events", self.0.all()),
            ("records_flushes", "Write transactions that waited for the disk", self.0.flushed()),
            (
                "values_decoded_bytes",
                "Bytes of stored values that were decoded",
                threadkeep::value::decoded_bytes(),
            ),
            ("records_round_trips", "Waits for the answer of a Postgres server", self.0.round_trips()),
            ("records_statements", "Statements on threads, runs and events", self.0.statements()),
        ] {
            let counter = ConstCounter::new(count);
            counter.encode(encoder.encode_descriptor(name, help, None, counter.metric_type())?)?;
        }
        Ok(())
    }
}
