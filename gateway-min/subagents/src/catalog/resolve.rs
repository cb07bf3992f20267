//! From the three sources to definitions: built-in, then configured, then managed ones, each with its overrides.

use std::time::Duration;

use threadkeep_config::{Config, CustomAgent, SubagentOverride};

use super::builtin;
use super::definition::{Definition, ModelChoice, Source};
use crate::managed::Managed;

/// The longest time limit: a hundred years. A longer one would be out of the range of deadlines.
const LONGEST: Duration = Duration::from_hours(100 * 365 * 24);

/// A time limit.
pub(super) fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds).min(LONGEST)
}

/// All subagents that the configuration and the enabled managed definitions make usable, in the order in which they are
/// offered: built-in, configured in the order of the file, managed by name. A name belongs to the first source that has
/// it.
pub(super) fn definitions(config: &Config, managed: &[Managed]) -> Vec<Definition> {
    let custom = config.subagents.custom_agents.iter();
    let custom = custom.filter(|agent| !conflicts(config, &agent.name, Source::Config));
    let mut managed: Vec<&Managed> = managed.iter().filter(|agent| agent.enabled).collect();
    managed.retain(|agent| !conflicts(config, &agent.name, Source::Managed));
    managed.sort_by(|one, other| one.name.cmp(&other.name));
    builtin::definitions(config)
        .into_iter()
        .chain(custom.map(|agent| of_config(config, agent)))
        .chain(managed.into_iter().map(|agent| of_managed(config, agent)))
        .map(|definition| overridden(config, definition))
        .collect()
}

/// Whether a source before this one has the name, in any case.
pub(super) fn conflicts(config: &Config, name: &str, source: Source) -> bool {
    let is = |other: &str| other.eq_ignore_ascii_case(name);
    let builtin = source > Source::Builtin && builtin::NAMES.iter().any(|other| is(other));
    builtin || (source > Source::Config && config.subagents.custom_agents.iter().any(|other| is(&other.name)))
}

/// A configured subagent without its overrides.
pub(super) fn of_config(config: &Config, agent: &CustomAgent) -> Definition {
    Definition {
        name: agent.name.clone(),
        display_name: None,
        description: agent.description.clone(),
        system_prompt: agent.system_prompt.clone(),
        tools: agent.tools.clone(),
        disallowed_tools: agent.disallowed_tools.clone(),
        skills: agent.skills.clone(),
        model: agent.model.clone().into(),
        max_turns: agent.max_turns,
        timeout: seconds(agent.timeout_seconds),
        source: Source::Config,
        token_budget: config.subagent_token_budget(&agent.name),
    }
}

/// A managed subagent without its overrides.
pub(super) fn of_managed(config: &Config, agent: &Managed) -> Definition {
    Definition {
        name: agent.name.clone(),
        display_name: agent.display_name.clone(),
        description: agent.description.clone(),
        system_prompt: agent.system_prompt.clone(),
        tools: agent.tools.clone(),
        disallowed_tools: agent.denied_tools(),
        skills: agent.skills.clone(),
        model: agent.model.clone(),
        max_turns: agent.max_turns,
        timeout: seconds(agent.timeout_seconds),
        source: Source::Managed,
        token_budget: config.subagent_token_budget(&agent.name),
    }
}

/// The definition with what `subagents.agents` sets for it. The token budget has its overrides already.
pub(super) fn overridden(config: &Config, mut definition: Definition) -> Definition {
    let Some(set) = config.subagents.agents.get(&definition.name) else { return definition };
    let SubagentOverride { timeout_seconds, max_turns, model, skills, token_budget: _ } = set.clone();
    definition.timeout = timeout_seconds.map_or(definition.timeout, seconds);
    definition.max_turns = max_turns.unwrap_or(definition.max_turns);
    definition.model = model.map_or(definition.model, ModelChoice::from);
    definition.skills = skills.or(definition.skills);
    definition
}
