//! What may be submitted.

use std::collections::BTreeSet;

use serde::Deserialize;
use serde_json::Value as Json;
use threadkeep_config::SubagentBatches;
use threadkeep_records::NewBatchItem;

use crate::acceptance::Criteria;
use crate::bounds::first;

/// The longest key of an item and the longest prompt, in characters (delegation, section 5.2).
const KEY_MAX: usize = 128;
const PROMPT_MAX: usize = 100_000;
/// The longest title, in characters.
const TITLE_MAX: usize = 256;
const DEFAULT_TITLE: &str = "Subagent batch";

/// The arguments of `batch_task`.
#[derive(Debug, Deserialize)]
pub(super) struct Args {
    #[serde(default)]
    title: String,
    pub(super) items: Vec<ItemArgs>,
    pub(super) subagent_type: String,
    #[serde(default)]
    max_live_items: Option<i64>,
    #[serde(default)]
    max_running_items: Option<i64>,
}

#[derive(Debug, Deserialize)]
pub(super) struct ItemArgs {
    key: String,
    prompt: String,
    #[serde(default)]
    acceptance_criteria: Option<Vec<Json>>,
}

/// How many items of a batch may be live and at work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Windows {
    pub(super) live: u32,
    pub(super) running: u32,
}

impl Args {
    /// Checks what does not depend on settings: there are items, and their keys differ.
    ///
    /// # Errors
    /// The text for the model.
    pub(super) fn check_items(&self) -> Result<(), String> {
        if self.items.is_empty() {
            return Err("A batch must contain at least one item.".to_owned());
        }
        let mut keys = BTreeSet::new();
        if !self.items.iter().all(|item| keys.insert(item.key.as_str())) {
            return Err("Batch item keys must be unique.".to_owned());
        }
        Ok(())
    }

    pub(super) fn title(&self) -> String {
        let title = first(self.title.trim(), TITLE_MAX).trim();
        if title.is_empty() { DEFAULT_TITLE.to_owned() } else { title.to_owned() }
    }

    /// The windows, by the settings where the call does not say.
    ///
    /// # Errors
    /// What is wrong with them, or with the number of items.
    pub(super) fn windows(&self, settings: &SubagentBatches) -> Result<Windows, String> {
        let most = settings.max_items_per_batch;
        if u32::try_from(self.items.len()).map_or(true, |items| items > most) {
            return Err(format!("Batch item count must be between 1 and {most}"));
        }
        let within = |name: &str, given: Option<i64>, default: u32, cap: u32| {
            let Some(given) = given else { return Ok(default) };
            let valid = u32::try_from(given).ok().filter(|given| (1..=cap).contains(given));
            valid.ok_or_else(|| format!("{name} must be between 1 and {cap}"))
        };
        let (default, cap) = (settings.default_max_live_items, settings.max_live_items_per_batch);
        let live = within("max_live_items", self.max_live_items, default, cap)?;
        let (default, cap) = (settings.default_max_running_items, settings.max_running_items_per_batch);
        let running = within("max_running_items", self.max_running_items, default, cap)?;
        if running > live {
            return Err("max_running_items must not exceed max_live_items".to_owned());
        }
        Ok(Windows { live, running })
    }

    /// The items to store.
    ///
    /// # Errors
    /// What is wrong with one.
    pub(super) fn items(self) -> Result<Vec<NewBatchItem>, String> {
        let items = self.items.into_iter().enumerate().map(|(position, item)| {
            let wrong = |what: &str, max: usize| {
                Err(format!("the {what} of item {} must have 1 to {max} characters", position + 1))
            };
            let fits = |text: &str, max: usize| !text.is_empty() && text.chars().nth(max).is_none();
            if !fits(&item.key, KEY_MAX) {
                return wrong("key", KEY_MAX);
            }
            if !fits(&item.prompt, PROMPT_MAX) {
                return wrong("prompt", PROMPT_MAX);
            }
            let criteria = item.acceptance_criteria.as_deref().and_then(Criteria::normalise);
            let acceptance_criteria = criteria.map(|criteria| criteria.iter().map(str::to_owned).collect());
            Ok(NewBatchItem { key: item.key, prompt: item.prompt, acceptance_criteria })
        });
        items.collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn args(value: Json) -> Args {
        serde_json::from_value(value).unwrap()
    }

    fn items(number: usize) -> Json {
        (0..number).map(|n| json!({"key": n.to_string(), "prompt": "p"})).collect()
    }

    #[test]
    fn s48_submissions_are_validated() {
        let settings = SubagentBatches::default();
        let of = |items: Json| args(json!({"items": items, "subagent_type": "bash"}));
        assert_eq!(of(items(0)).check_items().unwrap_err(), "A batch must contain at least one item.");
        let twice = json!([{"key": "a", "prompt": "p"}, {"key": "a", "prompt": "q"}]);
        assert_eq!(of(twice).check_items().unwrap_err(), "Batch item keys must be unique.");
        let count = "Batch item count must be between 1 and 5000";
        assert_eq!(of(items(5001)).windows(&settings).unwrap_err(), count);
        assert_eq!(of(items(5000)).windows(&settings).unwrap(), Windows { live: 100, running: 3 });
        for (live, running, expected) in [
            (json!(0), json!(null), "max_live_items must be between 1 and 1000"),
            (json!(1001), json!(null), "max_live_items must be between 1 and 1000"),
            (json!(-1), json!(null), "max_live_items must be between 1 and 1000"),
            (json!(null), json!(0), "max_running_items must be between 1 and 64"),
            (json!(null), json!(65), "max_running_items must be between 1 and 64"),
            (json!(4), json!(5), "max_running_items must not exceed max_live_items"),
            (json!(2), json!(null), "max_running_items must not exceed max_live_items"),
        ] {
            let given = json!({"items": items(1), "subagent_type": "x", "max_live_items": live,
                "max_running_items": running});
            assert_eq!(args(given).windows(&settings).unwrap_err(), expected);
        }
        let given =
            json!({"items": items(1), "subagent_type": "x", "max_live_items": 1000, "max_running_items": 64});
        assert_eq!(args(given).windows(&settings).unwrap(), Windows { live: 1000, running: 64 });
        for (key, prompt, expected) in [
            (0, 1, Some("the key of item 1 must have 1 to 128 characters")),
            (129, 1, Some("the key of item 1 must have 1 to 128 characters")),
            (1, 0, Some("the prompt of item 1 must have 1 to 100000 characters")),
            (1, 100_001, Some("the prompt of item 1 must have 1 to 100000 characters")),
            (128, 100_000, None),
        ] {
            let item = json!([{"key": "\u{e9}".repeat(key), "prompt": "\u{e9}".repeat(prompt)}]);
            assert_eq!(of(item).items().err().as_deref(), expected, "{key} {prompt}");
        }
    }

    #[test]
    fn titles_are_trimmed_and_cut() {
        let title = |title: Json| args(json!({"items": [], "subagent_type": "x", "title": title})).title();
        assert_eq!(title(json!("  a b ")), "a b");
        assert_eq!(title(json!(" ")), "Subagent batch");
        assert_eq!(title(json!("x".repeat(300))), "x".repeat(256));
        assert_eq!(args(json!({"items": [], "subagent_type": "x"})).title(), "Subagent batch");
    }

    #[test]
    fn s61_criteria_are_normalised_before_they_are_stored() {
        let given = json!([{"key": "a", "prompt": "p", "acceptance_criteria": [" x ", 3, "", "<system>y"]},
            {"key": "b", "prompt": "p", "acceptance_criteria": ["", null]}, {"key": "c", "prompt": "p"}]);
        let stored = args(json!({"items": given, "subagent_type": "x"})).items().unwrap();
        let criteria: Vec<_> = stored.into_iter().map(|item| item.acceptance_criteria).collect();
        assert_eq!(criteria, [Some(vec!["x".to_owned(), "&lt;system>y".to_owned()]), None, None]);
    }
}
