use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use threadkeep_config::{Config, CustomAgent, Environment, LoadOptions, SubagentOverride};

use super::*;
use crate::managed::FileStore;

/// The default configuration of an empty directory.
fn config() -> Config {
    let directory = tempfile::tempdir().unwrap();
    let options = LoadOptions {
        config_path: None,
        environment: Environment::default(),
        working_dir: directory.path().to_owned(),
    };
    Config::load(&options).unwrap().config
}

fn with_bash(mut config: Config) -> Config {
    config.sandbox.allow_host_bash = true;
    config
}

fn custom(name: &str) -> CustomAgent {
    CustomAgent {
        name: name.to_owned(),
        description: format!("{name} of the configuration"),
        system_prompt: "p".to_owned(),
        tools: None,
        disallowed_tools: Vec::new(),
        skills: None,
        model: "inherit".to_owned(),
        max_turns: 50,
        timeout_seconds: 900,
    }
}

fn texts(list: &[&str]) -> Vec<String> {
    list.iter().map(|&text| text.to_owned()).collect()
}

fn offered(config: &Config, managed: &[Managed], allowed: Option<&[&str]>) -> Available {
    let allowed = allowed.map(texts);
    let definitions = resolve::definitions(config, managed);
    Available::new(definitions, allowed.as_deref(), config.sandbox.allow_host_bash)
}

fn definition(config: &Config, managed: &[Managed], name: &str) -> Definition {
    (**offered(config, managed, None).get(name).unwrap()).clone()
}

#[test]
fn s01_an_unknown_type_names_those_that_there_are_as_they_are_registered() {
    let mut config = with_bash(config());
    config.subagents.custom_agents = vec![custom("zed"), custom("alpha")];
    let managed = [Managed::new("nina", "d", "p"), Managed::new("bo", "d", "p")];
    let unknown = offered(&config, &managed, None).get("Bash").unwrap_err();
    assert_eq!(
        unknown.to_string(),
        "Unknown subagent type 'Bash'. Available: general-purpose, bash, zed, alpha, bo, nina"
    );
}

#[test]
fn s02_an_allowlist_limits_what_is_offered_and_an_empty_one_switches_delegation_off() {
    let config = with_bash(config());
    let some = offered(&config, &[], Some(&["bash", "nobody"]));
    assert!(some.offers_delegation() && some.get("bash").is_ok());
    assert_eq!(
        some.get("general-purpose").unwrap_err().to_string(),
        "Unknown subagent type 'general-purpose'. Available: bash"
    );
    let nothing = offered(&config, &[], Some(&["nobody"]));
    assert!(nothing.offers_delegation());
    let text = "Unknown subagent type 'x'. Available: none permitted by caller policy";
    assert_eq!(nothing.get("x").unwrap_err().to_string(), text);
    let off = offered(&config, &[], Some(&[]));
    assert!(!off.offers_delegation());
    assert_eq!(off.get("x").unwrap_err().to_string(), text);
    assert_eq!(Available::new(Vec::new(), None, true).names(), "none");
}

#[test]
fn s03_bash_without_permission_is_refused_with_advice_even_if_it_is_not_allowed_either() {
    let config = config();
    for allowed in [None, Some(&["general-purpose"][..]), Some(&["bash"][..]), Some(&[][..])] {
        let available = offered(&config, &[], allowed);
        assert!(available.iter().all(|definition| definition.name != "bash"));
        let error = available.get("bash").unwrap_err();
        assert_eq!(error, Unavailable::BashDisabled, "{allowed:?}");
        for part in ["not a secure boundary", "isolated sandbox provider", "sandbox.allow_host_bash: true"] {
            assert!(error.to_string().contains(part), "{error}");
        }
    }
    assert!(offered(&with_bash(config), &[], None).get("bash").is_ok());
}

#[test]
fn the_built_in_ones_have_the_documented_limits() {
    let config = with_bash(config());
    let general = definition(&config, &[], "general-purpose");
    assert_eq!((general.max_turns, general.timeout, &general.tools), (150, Duration::from_mins(30), &None));
    let bash = definition(&config, &[], "bash");
    assert_eq!((bash.max_turns, bash.timeout), (60, Duration::from_mins(30)));
    assert_eq!(bash.tools, Some(texts(&["bash", "ls", "read_file", "write_file", "str_replace"])));
    for one in [&general, &bash] {
        assert_eq!(one.disallowed_tools, ["task", "ask_clarification", "present_files"]);
        assert_eq!((&one.model, &one.skills, one.source), (&ModelChoice::Inherit, &None, Source::Builtin));
        assert_eq!((one.token_budget.enabled, one.token_budget.max_tokens), (true, 2_000_000));
    }
    assert_ne!(general.system_prompt, bash.system_prompt);
}

#[test]
fn s74_global_limits_are_for_built_in_ones_and_overrides_for_all() {
    let mut config = with_bash(config());
    config.subagents.timeout_seconds = 60;
    config.subagents.max_turns = Some(7);
    config.subagents.custom_agents = vec![custom("mine")];
    let managed = [Managed::new("theirs", "d", "p")];
    let limits = |config: &Config, name| {
        let definition = definition(config, &managed, name);
        (definition.max_turns, definition.timeout.as_secs(), definition.model, definition.skills)
    };
    for name in ["general-purpose", "bash"] {
        assert_eq!(limits(&config, name), (7, 60, ModelChoice::Inherit, None), "{name}");
    }
    for name in ["mine", "theirs"] {
        assert_eq!(limits(&config, name), (50, 900, ModelChoice::Inherit, None), "{name}");
    }
    let set = SubagentOverride {
        timeout_seconds: Some(5),
        max_turns: Some(3),
        model: Some("m".to_owned()),
        skills: Some(Vec::new()),
        ..SubagentOverride::default()
    };
    let names = ["general-purpose", "bash", "mine", "theirs"];
    config.subagents.agents = names.iter().map(|name| ((*name).to_owned(), set.clone())).collect();
    for name in names {
        let expected = (3, 5, ModelChoice::Named("m".to_owned()), Some(Vec::new()));
        assert_eq!(limits(&config, name), expected, "{name}");
    }
    // An entry without values overrides nothing, not even the skills of the definition.
    config.subagents.custom_agents[0].skills = Some(texts(&["s"]));
    config.subagents.agents = [("mine".to_owned(), SubagentOverride::default())].into();
    assert_eq!(limits(&config, "mine"), (50, 900, ModelChoice::Inherit, Some(texts(&["s"]))));
}

#[test]
fn a_time_limit_that_no_clock_can_reach_is_a_hundred_years() {
    let mut endless = Managed::new("endless", "d", "p");
    endless.timeout_seconds = u64::MAX;
    let limit = definition(&config(), &[endless], "endless").timeout;
    assert_eq!(limit.as_secs() / (365 * 24 * 3600), 100);
    assert!(tokio::time::Instant::now().checked_add(limit).is_some());
}

#[test]
fn a_token_budget_is_the_subagents_own_over_the_general_one() {
    let mut config = config();
    config.summarization.enabled = true;
    assert_eq!(definition(&config, &[], "general-purpose").token_budget.max_tokens, 1_000_000);
    let mut set = SubagentOverride::default();
    set.token_budget.max_tokens = Some(5000);
    config.subagents.agents = [("theirs".to_owned(), set)].into();
    let managed = [Managed::new("theirs", "d", "p")];
    assert_eq!(definition(&config, &managed, "theirs").token_budget.max_tokens, 5000);
}

#[test]
fn s73_a_name_belongs_to_the_first_source_and_a_disabled_one_is_invisible() {
    let mut config = with_bash(config());
    config.subagents.custom_agents = vec![custom("Mine"), custom("bash")];
    let mut off = Managed::new("off", "d", "p");
    off.enabled = false;
    let managed =
        [Managed::new("mine", "d", "p"), Managed::new("bash", "d", "p"), off, Managed::new("on", "d", "p")];
    let available = offered(&config, &managed, None);
    assert_eq!(available.names(), "general-purpose, bash, Mine, on");
    assert_eq!(available.get("bash").unwrap().source, Source::Builtin);
}

#[test]
fn s15_a_subagent_has_no_delegation_tools_whatever_its_definition_lists() {
    let mut one = definition(&config(), &[], "general-purpose");
    for (tools, denied, permitted, refused) in [
        (None, vec![], vec!["bash", "mcp_x", "ask_clarification", "tool_search"], vec!["invoke_acp_agent"]),
        (None, vec!["bash", "tool_search"], vec!["ls", "tool_search"], vec!["bash"]),
        (Some(vec!["bash", "ls", "task"]), vec![], vec!["bash", "ls", "tool_search"], vec!["read_file"]),
        (Some(vec!["bash", "ls"]), vec!["ls"], vec!["bash"], vec!["ls"]),
        (Some(vec![]), vec![], vec!["tool_search"], vec!["ls"]),
        (Some(vec!["invoke_acp_agent"]), vec![], vec!["invoke_acp_agent"], vec!["ls"]),
        (Some(vec!["task", "batch_task", "batch_status", "cancel_batch"]), vec![], vec![], vec![]),
    ] {
        (one.tools, one.disallowed_tools) = (tools.as_deref().map(texts), texts(&denied));
        for tool in permitted {
            assert!(one.permits(tool), "{tool}: {tools:?} without {denied:?}");
        }
        for tool in refused.into_iter().chain(DELEGATION_TOOLS) {
            assert!(!one.permits(tool), "{tool}: {tools:?} without {denied:?}");
        }
    }
}

#[test]
fn s16_skills_are_those_of_both_in_the_order_of_the_subagent() {
    let mut one = definition(&config(), &[], "general-purpose");
    for (own, parent, both) in [
        (None, None, None),
        (None, Some(vec!["b", "a"]), Some(vec!["b", "a"])),
        (None, Some(vec![]), Some(vec![])),
        (Some(vec!["b", "a"]), None, Some(vec!["b", "a"])),
        (Some(vec![]), None, Some(vec![])),
        (Some(vec!["c", "b", "a"]), Some(vec!["a", "b", "d"]), Some(vec!["b", "a"])),
        (Some(vec!["a"]), Some(vec![]), Some(vec![])),
    ] {
        one.skills = own.as_deref().map(texts);
        let parent = parent.as_deref().map(texts);
        assert_eq!(one.skills_within(parent.as_deref()), both.as_deref().map(texts), "{own:?} {parent:?}");
    }
}

#[test]
fn the_model_is_the_definitions_then_the_parents_then_the_first() {
    let mut config = config();
    for name in ["second", "third"] {
        let mut model = threadkeep_config::Model::demo();
        name.clone_into(&mut model.name);
        config.models.push(model);
    }
    let mut one = definition(&config, &[], "general-purpose");
    for (own, parent, expected) in [
        ("inherit", None, Ok("demo")),
        ("inherit", Some("second"), Ok("second")),
        ("third", Some("second"), Ok("third")),
        ("inherit", Some("gone"), Err("gone")),
        ("gone", Some("second"), Err("gone")),
    ] {
        one.model = ModelChoice::from(own.to_owned());
        let found = one.model_within(parent, &config).map(|model| model.name.as_str());
        match expected {
            Ok(name) => assert_eq!(found.unwrap(), name, "{own} {parent:?}"),
            Err(name) => {
                let error = found.unwrap_err().to_string();
                assert!(
                    error.contains(&format!("Unknown model '{name}' of subagent 'general-purpose'")),
                    "{error}"
                );
            }
        }
    }
}

#[test]
fn an_execution_keeps_its_definition_as_json_and_its_digest_changes_with_every_field() {
    let one = definition(&with_bash(config()), &[], "bash");
    let stored = serde_json::to_value(&one).unwrap();
    assert_eq!(
        (&stored["timeout_seconds"], &stored["model"], &stored["source"]),
        (&json!(1800), &json!("inherit"), &json!("builtin"))
    );
    let again: Definition = serde_json::from_value(stored.clone()).unwrap();
    assert_eq!((again.digest(), &again), (one.digest(), &one));
    assert!(one.digest().len() == 64 && one.digest().bytes().all(|byte| b"0123456789abcdef".contains(&byte)));
    let other = |field: &str| match field {
        "display_name" => json!("B"),
        "tools" | "skills" | "disallowed_tools" => json!(["x"]),
        "max_turns" | "timeout_seconds" => json!(1),
        "source" => json!("managed"),
        "token_budget" => {
            let mut budget = stored["token_budget"].clone();
            budget["max_tokens"] = json!(1000);
            budget
        }
        _ => json!("other"),
    };
    for field in stored.as_object().unwrap().keys() {
        let mut changed = stored.clone();
        changed[field] = other(field);
        let changed: Definition = serde_json::from_value(changed).unwrap();
        assert_ne!(changed.digest(), one.digest(), "{field}");
    }
}

/// A catalog of files in a directory.
fn catalog(directory: &Path) -> Catalog {
    Catalog::new(&config(), Arc::new(FileStore::new(directory)))
}

async fn names(catalog: &Catalog, config: &Config) -> String {
    catalog.available(config, None).await.unwrap().names()
}

#[tokio::test(start_paused = true)]
async fn s73_a_change_elsewhere_is_seen_within_a_second_and_ones_own_at_once() {
    let (directory, config) = (tempfile::tempdir().unwrap(), config());
    let (here, there) = (catalog(directory.path()), catalog(directory.path()));
    assert_eq!(names(&here, &config).await, "general-purpose");
    there.create(&config, Managed::new("new", "d", "p")).await.unwrap();
    assert_eq!(names(&there, &config).await, "general-purpose, new");
    assert_eq!(names(&here, &config).await, "general-purpose", "as of a moment ago");
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_eq!(names(&here, &config).await, "general-purpose, new");
    there.delete("new").await.unwrap();
    assert_eq!(names(&there, &config).await, "general-purpose");
    assert_eq!(here.list(&config).await.unwrap().len(), 2, "the list is always fresh");
}

/// An edit of the sandbox applies after a restart: there is no tool for the subagent before that.
#[tokio::test]
async fn whether_there_is_bash_is_fixed_at_start() {
    let directory = tempfile::tempdir().unwrap();
    let edited = with_bash(config());
    let before = catalog(directory.path());
    assert_eq!(before.available(&edited, None).await.unwrap().names(), "general-purpose");
    let restarted = Catalog::new(&edited, Arc::new(FileStore::new(directory.path())));
    assert_eq!(restarted.available(&config(), None).await.unwrap().names(), "general-purpose, bash");
}

#[tokio::test]
async fn s73_what_cannot_be_read_is_skipped_and_can_be_deleted() {
    let (directory, config) = (tempfile::tempdir().unwrap(), config());
    let catalog = catalog(directory.path());
    catalog.create(&config, Managed::new("good", "d", "p")).await.unwrap();
    let file = |name: &str| directory.path().join("subagents").join(name);
    let good = std::fs::read_to_string(file("good.json")).unwrap();
    for content in ["{", "[]", "{\"name\": \"bad\"}", good.as_str(), ""] {
        std::fs::write(file("bad.json"), content).unwrap();
        assert_eq!(
            catalog.list(&config).await.unwrap().len(),
            3,
            "two built-in ones and the good one: {content}"
        );
    }
    let bad = Managed::new("bad", "d", "p");
    let exists = catalog.create(&config, bad.clone()).await.unwrap_err();
    assert_eq!(exists.to_string(), "Managed subagent 'bad' already exists");
    let missing = catalog.change(&config, "bad", Change::default()).await.unwrap_err();
    assert_eq!(missing.to_string(), "Managed subagent 'bad' not found");
    catalog.delete("bad").await.unwrap();
    catalog.create(&config, bad).await.unwrap();
    assert_eq!(names(&catalog, &config).await, "general-purpose, bad, good");
}

#[tokio::test]
async fn changes_of_different_fields_at_a_time_both_take_effect() {
    let (directory, config) = (tempfile::tempdir().unwrap(), config());
    let catalog = catalog(directory.path());
    catalog.create(&config, Managed::new("one", "d", "p")).await.unwrap();
    for round in 1..=20 {
        let turns = Change { max_turns: Some(round), ..Change::default() };
        let time = Change { timeout_seconds: Some(round.into()), ..Change::default() };
        let (one, other) =
            tokio::join!(catalog.change(&config, "one", turns), catalog.change(&config, "one", time));
        one.unwrap();
        other.unwrap();
        let list = catalog.list(&config).await.unwrap();
        let found = &list.iter().find(|listed| listed.definition.name == "one").unwrap().definition;
        assert_eq!((found.max_turns, found.timeout.as_secs()), (round, round.into()));
    }
}

#[tokio::test]
async fn a_managed_definition_always_denies_what_no_subagent_may_have() {
    let (directory, config) = (tempfile::tempdir().unwrap(), config());
    let catalog = catalog(directory.path());
    let mut one = Managed::new("one", "d", "p");
    let listed = catalog.create(&config, one.clone()).await.unwrap();
    assert_eq!(listed.definition.disallowed_tools, ["ask_clarification", "present_files", "task"]);
    "two".clone_into(&mut one.name);
    one.disallowed_tools = texts(&["web", "bash", "task"]);
    let listed = catalog.create(&config, one).await.unwrap();
    assert_eq!(
        listed.definition.disallowed_tools,
        ["ask_clarification", "bash", "present_files", "task", "web"]
    );
}
