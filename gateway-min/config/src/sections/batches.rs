//! Durable batches of delegations.

use crate::node::Node;

/// `subagent_batches`: durable batches of delegations. Read once at start.
#[derive(Debug, Clone, PartialEq)]
pub struct SubagentBatches {
    /// Whether this process works on batches; needs a SQL database; default false.
    pub enabled: bool,
    /// Seconds between two polls for work; 0.1 to 60, default 1.
    pub poll_interval_seconds: f64,
    /// Seconds for which a worker owns an item; 10 to 3600, default 120.
    pub lease_seconds: u64,
    /// Items of one batch; 1 to 100,000, default 5000.
    pub max_items_per_batch: u32,
    /// Live items of a batch that does not request a number; 1 to 10,000, default 100.
    pub default_max_live_items: u32,
    /// The maximum live items a batch may request; 1 to 100,000, default 1000.
    pub max_live_items_per_batch: u32,
    /// Running items of a batch that does not request a number; 1 to 64, default 3.
    pub default_max_running_items: u32,
    /// The maximum running items a batch may request; 1 to 1000, default 64.
    pub max_running_items_per_batch: u32,
    /// How often an item is tried; 1 to 10, default 3.
    pub max_attempts: u32,
    /// The longest result kept, in characters; 1000 to 1,000,000, default 100,000.
    pub max_result_chars: usize,
    /// The longest preview of a result, in characters; 64 to 100,000, default 2000.
    pub result_preview_max_chars: usize,
}

impl Default for SubagentBatches {
    fn default() -> Self {
        Self {
            enabled: false,
            poll_interval_seconds: 1.0,
            lease_seconds: 120,
            max_items_per_batch: 5000,
            default_max_live_items: 100,
            max_live_items_per_batch: 1000,
            default_max_running_items: 3,
            max_running_items_per_batch: 64,
            max_attempts: 3,
            max_result_chars: 100_000,
            result_preview_max_chars: 2000,
        }
    }
}

impl SubagentBatches {
    pub(crate) fn read(root: &Node<'_>) -> Self {
        let (node, d) = (root.section("subagent_batches"), Self::default());
        let int = |key, default: u32, max| node.int(key, default, 1..=max);
        let batches = Self {
            enabled: node.bool("enabled", d.enabled),
            poll_interval_seconds: node.float("poll_interval_seconds", d.poll_interval_seconds, 0.1..=60.0),
            lease_seconds: node.int("lease_seconds", d.lease_seconds, 10..=3600),
            max_items_per_batch: int("max_items_per_batch", d.max_items_per_batch, 100_000),
            default_max_live_items: int("default_max_live_items", d.default_max_live_items, 10_000),
            max_live_items_per_batch: int("max_live_items_per_batch", d.max_live_items_per_batch, 100_000),
            default_max_running_items: int("default_max_running_items", d.default_max_running_items, 64),
            max_running_items_per_batch: int(
                "max_running_items_per_batch",
                d.max_running_items_per_batch,
                1000,
            ),
            max_attempts: int("max_attempts", d.max_attempts, 10),
            max_result_chars: node.int("max_result_chars", d.max_result_chars, 1000..=1_000_000),
            result_preview_max_chars: node.int(
                "result_preview_max_chars",
                d.result_preview_max_chars,
                64..=100_000,
            ),
        };
        batches.check(&node);
        batches
    }

    fn check(&self, node: &Node<'_>) {
        let at_most = |key: &str, value: u32, cap_key: &str, cap: u32| {
            if value > cap {
                node.problem(key, format!("must be at most {cap_key} ({cap}), got {value}"));
            }
        };
        let (live, running) = (self.default_max_live_items, self.default_max_running_items);
        at_most("default_max_live_items", live, "max_live_items_per_batch", self.max_live_items_per_batch);
        at_most(
            "default_max_running_items",
            running,
            "max_running_items_per_batch",
            self.max_running_items_per_batch,
        );
        at_most("default_max_running_items", running, "default_max_live_items", live);
        if self.result_preview_max_chars > self.max_result_chars {
            node.problem(
                "result_preview_max_chars",
                format!(
                    "must be at most max_result_chars ({}), got {}",
                    self.max_result_chars, self.result_preview_max_chars
                ),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::{assert_refused, read};
    use super::*;

    #[test]
    fn batches_are_read_at_both_ends_of_their_ranges() {
        let low = json!({"subagent_batches": {
            "enabled": true, "poll_interval_seconds": 0.1, "lease_seconds": 10, "max_items_per_batch": 1,
            "default_max_live_items": 1, "max_live_items_per_batch": 1, "default_max_running_items": 1,
            "max_running_items_per_batch": 1, "max_attempts": 1, "max_result_chars": 1000,
            "result_preview_max_chars": 64,
        }});
        let low = read(&low, SubagentBatches::read).unwrap();
        assert_eq!(
            low,
            SubagentBatches {
                enabled: true,
                poll_interval_seconds: 0.1,
                lease_seconds: 10,
                max_items_per_batch: 1,
                default_max_live_items: 1,
                max_live_items_per_batch: 1,
                default_max_running_items: 1,
                max_running_items_per_batch: 1,
                max_attempts: 1,
                max_result_chars: 1000,
                result_preview_max_chars: 64,
            }
        );
        let high = json!({"subagent_batches": {
            "poll_interval_seconds": 60, "lease_seconds": 3600, "max_items_per_batch": 100_000,
            "default_max_live_items": 10_000, "max_live_items_per_batch": 100_000,
            "default_max_running_items": 64, "max_running_items_per_batch": 1000, "max_attempts": 10,
            "max_result_chars": 1_000_000, "result_preview_max_chars": 100_000,
        }});
        assert_eq!(read(&high, SubagentBatches::read).unwrap().default_max_live_items, 10_000);
    }

    #[test]
    fn batches_outside_their_ranges_are_problems() {
        let cases: Vec<(serde_json::Value, &str)> = [
            ("poll_interval_seconds", json!(0.05)),
            ("poll_interval_seconds", json!(61)),
            ("poll_interval_seconds", json!(true)),
            ("lease_seconds", json!(9)),
            ("lease_seconds", json!(3601)),
            ("max_items_per_batch", json!(0)),
            ("max_items_per_batch", json!(100_001)),
            ("max_items_per_batch", json!(true)),
            ("default_max_live_items", json!(0)),
            ("default_max_live_items", json!(10_001)),
            ("max_live_items_per_batch", json!(0)),
            ("max_live_items_per_batch", json!(100_001)),
            ("default_max_running_items", json!(0)),
            ("default_max_running_items", json!(65)),
            ("max_running_items_per_batch", json!(0)),
            ("max_running_items_per_batch", json!(1001)),
            ("max_attempts", json!(0)),
            ("max_attempts", json!(11)),
            ("max_result_chars", json!(999)),
            ("max_result_chars", json!(1_000_001)),
            ("result_preview_max_chars", json!(63)),
            ("result_preview_max_chars", json!(100_001)),
        ]
        .map(|(key, value)| (json!({ key: value }), key))
        .into();
        assert_refused("subagent_batches", &cases, SubagentBatches::read);
    }

    #[test]
    fn batch_defaults_must_fit_their_caps() {
        assert_refused(
            "subagent_batches",
            &[
                (json!({"max_live_items_per_batch": 99}), "default_max_live_items"),
                (json!({"max_running_items_per_batch": 2}), "default_max_running_items"),
                (json!({"default_max_live_items": 2}), "default_max_running_items"),
                (
                    json!({"max_result_chars": 1000, "result_preview_max_chars": 1001}),
                    "result_preview_max_chars",
                ),
            ],
            SubagentBatches::read,
        );
    }
}
