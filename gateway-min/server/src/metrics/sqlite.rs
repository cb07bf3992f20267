//! The counters of the SQLite saver, read on request.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use threadkeep_storage::SqliteSaver;

/// The counters of a saver.
pub(super) struct Collected(pub(super) Arc<SqliteSaver>);

impl fmt::Debug for Collected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Collected").finish_non_exhaustive()
    }
}

impl Collector for Collected {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let stats = self.0.stats();
        for (name, help, count) in [
            (
                "sqlite_commands",
                "Write operations; those of one flush became durable together",
                stats.commands,
            ),
            (
                "sqlite_flushes",
                "Transactions; all or the last one of a turn wait for the disk",
                stats.transactions,
            ),
            ("sqlite_syncs", "Transactions that waited for the disk", stats.flushes),
            ("sqlite_elements_stored", "List elements that were stored", stats.elements_stored),
            ("sqlite_element_bytes", "Bytes of stored list elements before compression", stats.bytes_stored),
        ] {
            let counter = ConstCounter::new(count);
            counter.encode(encoder.encode_descriptor(name, help, None, counter.metric_type())?)?;
        }
        let help = "Write operations per flush";
        let mut sizes =
            encoder.encode_descriptor("sqlite_flush_commands", help, None, MetricType::Histogram)?;
        let buckets = stats.transaction_sizes.iter().zip(0..).map(|(count, size)| (2_f64.powi(size), *count));
        let mut buckets: Vec<(f64, u64)> = buckets.collect();
        if let Some((bound, _)) = buckets.last_mut() {
            // The last bucket has no upper bound.
            *bound = f64::MAX;
        }
        #[allow(clippy::cast_precision_loss, reason = "a count")]
        let sum = stats.committed as f64;
        sizes.encode_histogram::<NoLabelSet>(sum, stats.transactions, &buckets, None)?;
        let queued = ConstGauge::new(u64::try_from(self.0.queued()).unwrap_or(u64::MAX));
        let help = "Write operations waiting for the writer";
        queued.encode(encoder.encode_descriptor("sqlite_queued", help, None, queued.metric_type())?)
    }
}
