//! The delivery receipt of a run: the `run.delivery` event.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value as Json, json};

/// The files that a run wrote with its file tools. Files written by commands are only in the summary of changes.
#[derive(Debug, Default)]
pub(super) struct Delivery {
    by_tool: BTreeMap<String, BTreeSet<String>>,
}

impl Delivery {
    /// Records what a call of `tool` wrote, as paths in the thread's directory.
    pub(super) fn add(&mut self, tool: &str, written: &[String]) {
        if !written.is_empty() {
            self.by_tool.entry(tool.to_owned()).or_default().extend(written.iter().cloned());
        }
    }

    /// The content of the event: every path once, sorted, and the paths by tool. No tool of this gateway presents files
    /// to the user by itself, so `presented` is false.
    pub(super) fn receipt(&self) -> Json {
        let paths: BTreeSet<&String> = self.by_tool.values().flatten().collect();
        json!({ "presented": false, "paths": paths, "by_tool": self.by_tool })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_receipt_has_every_path_once_and_the_paths_by_tool() {
        let mut delivery = Delivery::default();
        assert_eq!(delivery.receipt(), json!({"presented": false, "paths": [], "by_tool": {}}));
        delivery.add("write_file", &["b".to_owned()]);
        delivery.add("write_file", &["a".to_owned()]);
        delivery.add("write_file", &["b".to_owned()]);
        delivery.add("str_replace", &["b".to_owned()]);
        delivery.add("ls", &[]);
        assert_eq!(
            delivery.receipt(),
            json!({
                "presented": false,
                "paths": ["a", "b"],
                "by_tool": {"str_replace": ["b"], "write_file": ["a", "b"]},
            })
        );
    }
}
