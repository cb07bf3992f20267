//! `subagents`: limits and definitions of the agents that the lead agent may delegate to. Read live.

use std::collections::BTreeMap;

use super::TokenBudget;
use crate::node::Node;

/// The model name that means "the model of the run that delegates".
pub const INHERIT_MODEL: &str = "inherit";

/// Tools that no configured subagent gets unless its definition says so.
const DISALLOWED_TOOLS: [&str; 3] = ["task", "ask_clarification", "present_files"];

/// A subagent's token limit, unless summarization is on (service reference, "Subagent settings").
const MAX_TOKENS: u64 = 2_000_000;
/// A subagent's token limit when summarization is on.
const MAX_TOKENS_WITH_SUMMARIZATION: u64 = 1_000_000;
/// The share of a subagent's budget at which it is warned.
const WARN_THRESHOLD: f64 = 0.7;

/// The keys of a token budget that are set; the others come from the budget it overrides.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TokenBudgetOverride {
    /// See [`TokenBudget::enabled`].
    pub enabled: Option<bool>,
    /// See [`TokenBudget::max_tokens`]; at least 1000.
    pub max_tokens: Option<u64>,
    /// See [`TokenBudget::max_input_tokens`]; at least 1.
    pub max_input_tokens: Option<u64>,
    /// See [`TokenBudget::max_output_tokens`]; at least 1.
    pub max_output_tokens: Option<u64>,
    /// See [`TokenBudget::warn_threshold`]; 0 to 1.
    pub warn_threshold: Option<f64>,
    /// See [`TokenBudget::hard_stop_threshold`]; 0 to 1.
    pub hard_stop_threshold: Option<f64>,
}

impl TokenBudgetOverride {
    pub(super) fn read(node: &Node<'_>) -> Self {
        Self {
            enabled: node.opt_bool("enabled"),
            max_tokens: node.opt_int("max_tokens", 1000..),
            max_input_tokens: node.opt_int("max_input_tokens", 1..),
            max_output_tokens: node.opt_int("max_output_tokens", 1..),
            warn_threshold: node.opt_float("warn_threshold", 0.0..=1.0),
            hard_stop_threshold: node.opt_float("hard_stop_threshold", 0.0..=1.0),
        }
    }

    /// The budget `base`, overridden with the keys that are set here.
    pub fn over(&self, base: TokenBudget) -> TokenBudget {
        TokenBudget {
            enabled: self.enabled.unwrap_or(base.enabled),
            max_tokens: self.max_tokens.unwrap_or(base.max_tokens),
            max_input_tokens: self.max_input_tokens.or(base.max_input_tokens),
            max_output_tokens: self.max_output_tokens.or(base.max_output_tokens),
            warn_threshold: self.warn_threshold.unwrap_or(base.warn_threshold),
            hard_stop_threshold: self.hard_stop_threshold.unwrap_or(base.hard_stop_threshold),
        }
    }
}

/// One entry of `subagents.agents`: what is set here overrides the definition, wherever that comes from.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SubagentOverride {
    /// Seconds it may take; at least 1.
    pub timeout_seconds: Option<u64>,
    /// Turns it may take; at least 1.
    pub max_turns: Option<u32>,
    /// Its model, or [`INHERIT_MODEL`].
    pub model: Option<String>,
    /// Its skills: `None` inherits all, an empty list allows none.
    pub skills: Option<Vec<String>>,
    /// Its token budget.
    pub token_budget: TokenBudgetOverride,
}

/// One entry of `subagents.custom_agents`: a subagent defined in the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CustomAgent {
    /// Its name.
    pub name: String,
    /// When to delegate to it; shown to the lead agent.
    pub description: String,
    /// Its system prompt.
    pub system_prompt: String,
    /// Its tools; `None` means all of the parent's.
    pub tools: Option<Vec<String>>,
    /// Tools it never gets; default `task`, `ask_clarification`, `present_files`.
    pub disallowed_tools: Vec<String>,
    /// Its skills: `None` inherits all, an empty list allows none.
    pub skills: Option<Vec<String>>,
    /// Its model; default [`INHERIT_MODEL`].
    pub model: String,
    /// Turns it may take; at least 1, default 50.
    pub max_turns: u32,
    /// Seconds it may take; at least 1, default 900.
    pub timeout_seconds: u64,
}

/// The `subagents` section.
#[derive(Debug, Clone, PartialEq)]
pub struct Subagents {
    /// Seconds a built-in subagent may take; at least 1, default 1800.
    pub timeout_seconds: u64,
    /// Turns a built-in subagent may take instead of its own limit; at least 1.
    pub max_turns: Option<u32>,
    /// Delegations of one run; 1 to 50, default 6.
    pub max_total_per_run: u32,
    /// The budget keys set for all subagents; see [`Subagents::token_budget_of`].
    pub token_budget: TokenBudgetOverride,
    /// Overrides by subagent name.
    pub agents: BTreeMap<String, SubagentOverride>,
    /// Further subagents, in the order of the file.
    pub custom_agents: Vec<CustomAgent>,
}

impl Default for Subagents {
    fn default() -> Self {
        Self {
            timeout_seconds: 1800,
            max_turns: None,
            max_total_per_run: 6,
            token_budget: TokenBudgetOverride::default(),
            agents: BTreeMap::new(),
            custom_agents: Vec::new(),
        }
    }
}

impl Subagents {
    pub(crate) fn read(root: &Node<'_>, summarization: bool) -> Self {
        let (node, default) = (root.section("subagents"), Self::default());
        let agents = node.named("agents");
        let subagents = Self {
            timeout_seconds: node.int("timeout_seconds", default.timeout_seconds, 1..),
            max_turns: node.opt_int("max_turns", 1..),
            max_total_per_run: node.int("max_total_per_run", default.max_total_per_run, 1..=50),
            token_budget: TokenBudgetOverride::read(&node.section("token_budget")),
            agents: agents.iter().map(|(name, node)| ((*name).to_owned(), read_override(node))).collect(),
            custom_agents: node
                .named("custom_agents")
                .into_iter()
                .map(|(name, node)| read_custom(name, &node))
                .collect(),
        };
        subagents.general_budget(summarization).check(&node.section("token_budget"));
        for (name, node) in agents.iter().filter(|(_, node)| node.value("token_budget").is_some()) {
            subagents.token_budget_of(name, summarization).check(&node.section("token_budget"));
        }
        subagents
    }

    /// The token budget of one subagent: its own keys, then those of `subagents.token_budget`, then the defaults:
    /// enabled, 2,000,000 tokens (1,000,000 if `summarization` is on), warning at 0.7.
    pub fn token_budget_of(&self, name: &str, summarization: bool) -> TokenBudget {
        let general = self.general_budget(summarization);
        self.agents.get(name).map_or(general, |agent| agent.token_budget.over(general))
    }

    /// Puts the custom agents in the order of `names`, which the value tree does not keep.
    pub(crate) fn in_order(&mut self, names: &[String]) {
        self.custom_agents.sort_by_key(|agent| names.iter().position(|name| *name == agent.name));
    }

    fn general_budget(&self, summarization: bool) -> TokenBudget {
        self.token_budget.over(TokenBudget {
            enabled: true,
            max_tokens: if summarization { MAX_TOKENS_WITH_SUMMARIZATION } else { MAX_TOKENS },
            warn_threshold: WARN_THRESHOLD,
            ..TokenBudget::default()
        })
    }
}

fn read_override(node: &Node<'_>) -> SubagentOverride {
    SubagentOverride {
        timeout_seconds: node.opt_int("timeout_seconds", 1..),
        max_turns: node.opt_int("max_turns", 1..),
        model: node.given_text("model"),
        skills: node.texts("skills"),
        token_budget: TokenBudgetOverride::read(&node.section("token_budget")),
    }
}

fn read_custom(name: &str, node: &Node<'_>) -> CustomAgent {
    CustomAgent {
        name: name.to_owned(),
        description: node.required_text("description"),
        system_prompt: node.required_text("system_prompt"),
        tools: node.texts("tools"),
        disallowed_tools: node
            .texts("disallowed_tools")
            .unwrap_or_else(|| DISALLOWED_TOOLS.map(str::to_owned).into()),
        skills: node.texts("skills"),
        model: node.given_text("model").unwrap_or_else(|| INHERIT_MODEL.to_owned()),
        max_turns: node.int("max_turns", 50, 1..),
        timeout_seconds: node.int("timeout_seconds", 900, 1..),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::testing::{assert_refused, read};
    use super::*;

    fn subagents(section: &Value) -> Result<Subagents, String> {
        read(&json!({ "subagents": section }), |root| Subagents::read(root, false))
    }

    fn texts(list: &[&str]) -> Vec<String> {
        list.iter().map(|&text| text.to_owned()).collect()
    }

    #[test]
    fn a_missing_or_null_section_is_the_documented_defaults() {
        let expected = Subagents {
            timeout_seconds: 1800,
            max_turns: None,
            max_total_per_run: 6,
            token_budget: TokenBudgetOverride::default(),
            agents: BTreeMap::new(),
            custom_agents: Vec::new(),
        };
        assert_eq!(read(&json!({}), |root| Subagents::read(root, false)).unwrap(), expected);
        assert_eq!(subagents(&json!(null)).unwrap(), expected);
    }

    #[test]
    fn limits_and_overrides_are_read() {
        let section = subagents(&json!({
            "timeout_seconds": 60, "max_turns": 7, "max_total_per_run": 50,
            "agents": {
                "bash": {"timeout_seconds": 5, "max_turns": 6, "model": "m", "skills": [],
                         "token_budget": {"max_tokens": 5000}},
                "empty": null,
            },
        }))
        .unwrap();
        assert_eq!(
            (section.timeout_seconds, section.max_turns, section.max_total_per_run),
            (60, Some(7), 50)
        );
        assert_eq!(
            section.agents["bash"],
            SubagentOverride {
                timeout_seconds: Some(5),
                max_turns: Some(6),
                model: Some("m".into()),
                skills: Some(vec![]),
                token_budget: TokenBudgetOverride {
                    max_tokens: Some(5000),
                    ..TokenBudgetOverride::default()
                },
            }
        );
        assert_eq!(section.agents["empty"], SubagentOverride::default());
    }

    #[test]
    fn custom_agents_have_their_own_defaults() {
        let section = subagents(&json!({"custom_agents": {
            "short": {"description": "d", "system_prompt": "p"},
            "full": {
                "description": "d", "system_prompt": "p", "tools": ["bash"], "disallowed_tools": [],
                "skills": ["s"], "model": "m", "max_turns": 1, "timeout_seconds": 2,
            },
        }}))
        .unwrap();
        let short = CustomAgent {
            name: "short".into(),
            description: "d".into(),
            system_prompt: "p".into(),
            tools: None,
            disallowed_tools: texts(&["task", "ask_clarification", "present_files"]),
            skills: None,
            model: "inherit".into(),
            max_turns: 50,
            timeout_seconds: 900,
        };
        assert_eq!(section.custom_agents[1], short);
        assert_eq!(
            section.custom_agents[0],
            CustomAgent {
                name: "full".into(),
                tools: Some(texts(&["bash"])),
                disallowed_tools: vec![],
                skills: Some(texts(&["s"])),
                model: "m".into(),
                max_turns: 1,
                timeout_seconds: 2,
                ..short
            }
        );
    }

    #[test]
    fn an_empty_model_counts_as_none() {
        let section = subagents(&json!({
            "agents": {"bash": {"model": ""}},
            "custom_agents": {"own": {"description": "d", "system_prompt": "p", "model": ""}},
        }))
        .unwrap();
        assert_eq!(section.agents["bash"].model, None);
        assert_eq!(section.custom_agents[0].model, INHERIT_MODEL);
    }

    #[test]
    fn the_budget_depends_on_summarization_until_it_is_set() {
        let budget = |section: &Subagents, summarization| section.token_budget_of("any", summarization);
        let default = Subagents::default();
        assert_eq!(
            budget(&default, false),
            TokenBudget {
                enabled: true,
                max_tokens: 2_000_000,
                max_input_tokens: None,
                max_output_tokens: None,
                warn_threshold: 0.7,
                hard_stop_threshold: 1.0,
            }
        );
        assert_eq!(budget(&default, true).max_tokens, 1_000_000);
        let explicit = subagents(&json!({"token_budget": {"max_tokens": 2_000_000}})).unwrap();
        for summarization in [false, true] {
            let budget = budget(&explicit, summarization);
            assert_eq!((budget.max_tokens, budget.enabled, budget.warn_threshold), (2_000_000, true, 0.7));
        }
        // Setting another key of the section does not change the coupling.
        let partial = subagents(&json!({"token_budget": {"warn_threshold": 0.5}})).unwrap();
        assert_eq!(budget(&partial, true).max_tokens, 1_000_000);
        assert_eq!(budget(&partial, true).warn_threshold.to_bits(), 0.5_f64.to_bits());
    }

    #[test]
    fn an_agents_own_budget_stands_over_the_general_one() {
        let section = subagents(&json!({
            "token_budget": {
                "max_tokens": 9000, "warn_threshold": 0.6, "max_input_tokens": 10, "max_output_tokens": 20,
            },
            "agents": {"bash": {"token_budget": {"enabled": false, "max_tokens": 8000, "max_input_tokens": 5}}},
        }))
        .unwrap();
        assert_eq!(
            section.token_budget_of("bash", false),
            TokenBudget {
                enabled: false,
                max_tokens: 8000,
                max_input_tokens: Some(5),
                max_output_tokens: Some(20),
                warn_threshold: 0.6,
                hard_stop_threshold: 1.0,
            }
        );
        assert_eq!(section.token_budget_of("other", false).max_tokens, 9000);
    }

    #[test]
    fn values_outside_their_ranges_are_problems() {
        assert_refused(
            "subagents",
            &[
                (json!({"timeout_seconds": 0}), "timeout_seconds"),
                (json!({"max_turns": 0}), "max_turns"),
                (json!({"max_total_per_run": 0}), "max_total_per_run"),
                (json!({"max_total_per_run": 51}), "max_total_per_run"),
                (json!({"token_budget": {"max_tokens": 999}}), "token_budget.max_tokens"),
                (json!({"token_budget": {"warn_threshold": 2}}), "token_budget.warn_threshold"),
                (json!({"token_budget": {"hard_stop_threshold": 0.6}}), "token_budget.hard_stop_threshold"),
                (json!({"agents": {"a": {"timeout_seconds": 0}}}), "agents.a.timeout_seconds"),
                (json!({"agents": {"a": {"max_turns": 0}}}), "agents.a.max_turns"),
                (json!({"agents": {"a": {"skills": "x"}}}), "agents.a.skills"),
                (
                    json!({"agents": {"a": {"token_budget": {"hard_stop_threshold": 0.5}}}}),
                    "agents.a.token_budget.hard_stop_threshold",
                ),
                (json!({"custom_agents": {"a": null}}), "custom_agents.a.description"),
                (json!({"custom_agents": {"a": {"description": "d"}}}), "custom_agents.a.system_prompt"),
                (
                    json!({"custom_agents": {"a": {"description": "d", "system_prompt": "p", "max_turns": 0}}}),
                    "custom_agents.a.max_turns",
                ),
            ],
            |root| Subagents::read(root, false),
        );
    }
}
