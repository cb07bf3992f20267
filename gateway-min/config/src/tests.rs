use proptest::prelude::*;
use serde_json::json;

use super::testing::{Project, load, load_error, logged, shipped_example};
use super::*;

#[test]
fn no_file_at_all_is_the_built_in_configuration() {
    let project = Project::new();
    let loaded = project.load_with(&[]).unwrap();
    assert_eq!((loaded.source, loaded.warnings), (None, vec![]));
    let config = loaded.config;
    assert_eq!(config.config_version, 49);
    assert_eq!((&config.root, &config.state_dir), (&project.root, &project.path(".svc")));
    assert_eq!(config.database.backend, Backend::Sqlite);
    assert_eq!(config.database.sqlite_dir, project.path(".svc/data"));
    assert_eq!(config.models, [Model::demo()]);
    assert_eq!(config.max_recursion_limit, 1000);
    assert!(config.extra.is_empty());
}

#[test]
fn an_empty_file_differs_from_none_in_its_version_only() {
    let project = Project::new();
    let none = project.load_with(&[]).unwrap().config;
    project.write("config.yaml", "");
    let loaded = project.load_with(&[]).unwrap();
    assert_eq!(loaded.source, Some(project.path("config.yaml")));
    assert_eq!(loaded.config, Config { config_version: 0, ..none });
}

#[test]
fn null_sections_are_defaults() {
    let project = Project::new();
    let none = project.load_with(&[]).unwrap().config;
    let sections = SECTIONS.iter().filter(|key| !["sandbox", CONFIG_VERSION_KEY].contains(key));
    let nulls: Vec<String> = sections.map(|key| format!("{key}:\n")).collect();
    project.write("config.yaml", &format!("config_version: 49\n{}", nulls.concat()));
    assert_eq!(project.load_with(&[]).unwrap().config, none);
}

#[test]
fn a_named_but_missing_file_is_an_error_that_names_it() {
    let project = Project::new();
    let error = project.load_with(&[("SVC_CONFIG_PATH", "gone.yaml")]).unwrap_err();
    assert!(matches!(error, ConfigError::Missing { origin: Origin::Environment, .. }), "{error:?}");
    assert!(error.to_string().contains(&project.path("gone.yaml").display().to_string()), "{error}");
}

#[test]
fn a_file_that_is_no_text_is_an_error() {
    let project = Project::new();
    std::fs::write(project.path("config.yaml"), [0xff, 0xfe, 0x00]).unwrap();
    let error = project.load_with(&[]).unwrap_err();
    assert!(matches!(error, ConfigError::Unreadable { .. }), "{error:?}");
}

#[test]
fn values_come_from_the_process_first_and_from_dot_env_second() {
    let project = Project::with_config("max_recursion_limit: $LIMIT\ntitle: {max_words: $WORDS}\n");
    project.write(".env", "LIMIT=1\nWORDS=2\n");
    let loaded = project.load_with(&[("LIMIT", "500")]).unwrap();
    assert_eq!((loaded.config.max_recursion_limit, loaded.config.title.max_words), (500, 2));
    assert_eq!(loaded.environment.get("WORDS"), Some("2"));
    assert_eq!(std::env::var_os("WORDS"), None);
}

#[test]
fn values_from_the_environment_are_coerced_like_the_numbers_and_booleans_they_spell() {
    let project = Project::with_config(
        "database: {checkpoint_delta: {snapshot_frequency: $N}, echo_sql: $T, backend: $B}\n\
         title: {enabled: $F}\nloop_detection: {window_size: $N}\ntoken_budget: {warn_threshold: $X}\n",
    );
    let variables = [("N", "10"), ("T", "true"), ("F", "False"), ("B", "memory"), ("X", "0.25")];
    let config = project.load_with(&variables).unwrap().config;
    assert_eq!((config.snapshot_frequency(), config.loop_detection.window_size), (10, 10));
    assert_eq!((config.database.echo_sql, config.title.enabled), (true, false));
    assert_eq!(config.database.backend, Backend::Memory);
    assert_eq!(config.token_budget.warn_threshold.to_bits(), 0.25_f64.to_bits());
}

#[test]
fn an_unset_variable_stops_the_load_wherever_it_stands() {
    let error = load_error("anything:\n  - {deep: $NOT_SET}\n");
    assert!(error.starts_with("Environment variable NOT_SET not found for config value $NOT_SET"), "{error}");
    assert!(error.contains("anything[0].deep"), "{error}");
}

#[test]
fn unknown_sections_are_kept_with_their_variables_replaced_and_hidden() {
    let project = Project::with_config("plugins: {token: $T}\nlog_level: debug\n");
    let config = project.load_with(&[("T", "sk-1")]).unwrap().config;
    assert_eq!(config.extra.get("plugins"), Some(&json!({"token": "sk-1"})));
    assert_eq!(config.extra.get("log_level"), Some(&json!("debug")));
    assert_eq!(config.extra.as_map().len(), 2);
    assert!(!format!("{config:?}").contains("sk-1"));
}

#[test]
fn all_problems_are_reported_at_once_under_the_file() {
    let project = Project::with_config(
        "database: {backend: mysql, pool_size: 0}\nmodels: [{name: a}]\ntitle: 5\nsandbox:\n",
    );
    let error = project.load_with(&[]).unwrap_err();
    let ConfigError::Invalid { path, problems } = &error else { panic!("{error:?}") };
    assert_eq!(path.as_deref(), Some(project.path("config.yaml").as_path()));
    let keys: Vec<&str> = problems.iter().map(|problem| problem.key.as_str()).collect();
    for key in
        ["database.backend", "database.pool_size", "models[0].use", "models[0].model", "title", "sandbox.use"]
    {
        assert!(keys.contains(&key), "{key}: {error}");
    }
    assert_eq!(keys.len(), 6, "{error}");
}

#[test]
fn secrets_stay_out_of_errors_and_debug_output() {
    let project = Project::with_config(
        "models: [{name: m, use: $K, model: x, api_key: $K, context_window: $K}]\n\
         database: {postgres_url: $K, backend: $K, checkpoint_cache: {redis_url: $K}}\n\
         sandbox: {use: local, environment: {A: $K}}\nacp_agents: {a: {env: {K: $K}}}\n",
    );
    let error = project.load_with(&[("K", "sk-hidden")]).unwrap_err();
    let shown = format!("{error} {error:?}");
    assert!(shown.contains("no client for the value of $K"), "{shown}");
    assert!(shown.contains("models[0].context_window"), "{shown}");
    assert!(shown.contains("the value of $K"), "{shown}");
    assert!(!shown.contains("sk-hidden"), "{shown}");

    let project = Project::with_config(
        "models: [{name: m, use: openai, model: x, api_key: $K, extra_key: $K}]\n\
         database: {postgres_url: $K, checkpoint_cache: {redis_url: $K}}\nstream_bridge: {redis_url: $K}\n\
         sandbox: {use: local, environment: {A: $K}}\n\
         acp_agents: {a: {command: c, description: d, env: {K: $K}}}\n",
    );
    let loaded = project.load_with(&[("K", "sk-hidden")]).unwrap();
    assert_eq!(loaded.config.models[0].api_key, Some(Secret::new("sk-hidden")));
    let shown = format!("{loaded:?}");
    assert!(!shown.contains("sk-hidden"), "{shown}");
}

#[test]
fn groups_of_tools_are_those_of_tools_and_servers() {
    let yaml = "tools: [{name: ls, group: files, use: ls}, {name: glob, use: glob}, {name: bash, group: shell, use: bash}]\n\
        mcp_servers: {web: {command: c, group: net}}\n";
    let config = load(yaml).unwrap().config;
    assert!(
        config.has_builtin_tool("ls") && config.has_builtin_tool("bash") && !config.has_builtin_tool("grep")
    );
    assert!(config.has_tool_group(Some("any")), "without a list every group is on");
    let config = load(&format!("{yaml}tool_groups: [{{name: files}}]")).unwrap().config;
    assert!(
        config.has_builtin_tool("ls") && config.has_builtin_tool("glob") && !config.has_builtin_tool("bash")
    );
    assert!(!config.has_tool_group(Some("net")) && config.has_tool_group(None));
    assert!(load(&format!("{yaml}tool_groups: [{{name: net}}]")).unwrap().config.has_tool_group(Some("net")));
    let error = load_error(&format!("{yaml}tool_groups: [{{name: file}}]"));
    assert!(error.contains("tool_groups[0].name: no entry of tools and no server of mcp_servers"), "{error}");
    let everything = load("").unwrap().config;
    assert!(BUILTIN_TOOLS.iter().all(|tool| everything.has_builtin_tool(tool)));
}

#[test]
fn s65_features_that_need_a_sql_database_say_so() {
    for (section, text) in [
        (
            "subagent_batches: {enabled: true}",
            "subagent_batches.enabled requires database.backend sqlite or postgres",
        ),
        (
            "agent_storage: {backend: db}",
            "agent_storage.backend db requires database.backend sqlite or postgres",
        ),
    ] {
        let error = load_error(&format!("database: {{backend: memory}}\n{section}\n"));
        assert!(error.contains(text), "{error}");
        assert!(load(&format!("database: {{backend: sqlite}}\n{section}\n")).is_ok());
    }
}

#[test]
fn shells_are_counted_against_the_runtime_section() {
    let yaml = |running: u32| {
        format!(
            "subagent_runtime: {{max_running: {running}}}\n\
             sandbox: {{use: local, environment: {{MAX_SHELL_SESSIONS: 10}}}}\n"
        )
    };
    assert!(load(&yaml(9)).is_ok());
    assert!(load_error(&yaml(10)).contains("must be at least 11 (subagent_runtime.max_running is 10"));
}

#[test]
fn the_subagent_budget_follows_the_summarization_section() {
    let budget = |yaml: &str| load(yaml).unwrap().config.subagent_token_budget("bash").max_tokens;
    assert_eq!(budget(""), 2_000_000);
    assert_eq!(budget("summarization: {enabled: true}\n"), 1_000_000);
    let explicit = "summarization: {enabled: true}\nsubagents: {token_budget: {max_tokens: 2000000}}\n";
    assert_eq!(budget(explicit), 2_000_000);
    // The thresholds of the resulting budget are checked.
    let error = load_error("subagents: {token_budget: {hard_stop_threshold: 0.65}}\n");
    assert!(error.contains("subagents.token_budget.hard_stop_threshold"), "{error}");
}

#[test]
fn models_are_found_by_name_and_scripts_beside_the_file() {
    let project = Project::new();
    std::fs::create_dir(project.path("etc")).unwrap();
    project.write("etc/c.yaml", "models: [{name: a, use: scripted, model: x, script: s.json}]\n");
    let config = project.load_with(&[("SVC_CONFIG_PATH", "etc/c.yaml")]).unwrap().config;
    let script = Some(project.path("etc/s.json"));
    assert_eq!(config.model("a").map(|model| &model.kind), Some(&ModelKind::Scripted { script }));
    assert_eq!(config.model("demo"), None);
}

#[test]
fn an_outdated_file_is_warned_about_before_its_variables_are_looked_at() {
    let project = Project::with_config("config_version: 26\nx: $NOT_SET\n");
    project.write(EXAMPLE_FILE, "config_version: 49\n");
    let (loaded, log) = logged(|| project.load_with(&[]));
    assert!(matches!(loaded, Err(ConfigError::UnsetVariable { .. })));
    assert!(log.contains(&outdated_warning(26, 49)), "{log}");

    project.write("config.yaml", "config_version: $V\n");
    let loaded = project.load_with(&[("V", "49")]).unwrap();
    assert_eq!(loaded.warnings, [outdated_warning(0, 49)]);

    project.write("config.yaml", "config_version: 49\n");
    assert!(project.load_with(&[]).unwrap().warnings.is_empty());
}

#[test]
fn warnings_come_in_the_order_of_the_steps() {
    let project = Project::with_config(
        "database: {checkpoint_delta_snapshot_frequency: 5, checkpoint_graph_cache: {accessor_graph_max: 0}}\n",
    );
    project.write(EXAMPLE_FILE, "config_version: 49\n");
    let warnings = project.load_with(&[]).unwrap().warnings;
    assert_eq!(warnings.len(), 3, "{warnings:?}");
    assert_eq!(warnings[..2], [outdated_warning(0, 49), flat_cadence_key_carried("5")]);
    assert!(warnings[2].contains("accessor_graph_max"));
}

#[test]
fn summaries_that_nothing_triggers_are_a_warning_that_names_the_key() {
    const NO_TRIGGER: &str = "`summarization.trigger` is empty: conversations are summarized only when a client asks for \
                              it; set one, for example {type: tokens, value: 100000}";
    let no_window = |models: &str| {
        format!(
            "`summarization.trigger` is a fraction of the model's context, and these models have no `context_window`: \
             {models}; their conversations are summarized only when a client asks for it"
        )
    };
    let fraction = "{type: fraction, value: 0.8}";
    let models = "models: [{name: a, use: openai, model: x}, {name: b, use: openai, model: x, context_window: 9}, \
                  {name: c, use: openai, model: x}]";
    for (yaml, warnings) in [
        ("summarization: {enabled: true}".to_owned(), vec![NO_TRIGGER.to_owned()]),
        ("summarization: {enabled: true, trigger: []}".to_owned(), vec![NO_TRIGGER.to_owned()]),
        (
            "summarization: {enabled: true}\ndatabase: {backend: memory}".to_owned(),
            vec![NO_TRIGGER.to_owned()],
        ),
        (format!("summarization: {{enabled: true, trigger: {fraction}}}"), vec![no_window("demo")]),
        (
            format!("summarization: {{enabled: true, trigger: [{fraction}]}}\n{models}"),
            vec![no_window("a, c")],
        ),
        // One of them applies to every model.
        (
            format!("summarization: {{enabled: true, trigger: [{fraction}, {{type: messages, value: 9}}]}}"),
            Vec::new(),
        ),
        ("summarization: {enabled: true, trigger: {type: tokens, value: 9}}".to_owned(), Vec::new()),
        (format!("summarization: {{enabled: false, trigger: {fraction}}}"), Vec::new()),
        ("summarization: {enabled: false}".to_owned(), Vec::new()),
    ] {
        assert_eq!(load(&yaml).unwrap().warnings, warnings, "{yaml}");
    }
}

#[test]
fn the_options_of_the_process_are_its_own() {
    let options = LoadOptions::from_process(Some("x.yaml".into())).unwrap();
    assert_eq!(options.working_dir, std::env::current_dir().unwrap());
    assert_eq!(options.config_path, Some("x.yaml".into()));
    assert_eq!(options.environment, Environment::of_process());
}

fn example() -> Map<String, Value> {
    let text = std::fs::read_to_string(shipped_example()).unwrap();
    yaml::parse(&text, shipped_example()).unwrap()
}

#[test]
fn the_shipped_example_is_the_built_in_configuration() {
    let project = Project::new();
    let built_in = project.load_with(&[]).unwrap().config;
    std::fs::copy(shipped_example(), project.path("config.yaml")).unwrap();
    std::fs::copy(shipped_example(), project.path(EXAMPLE_FILE)).unwrap();
    let loaded = project.load_with(&[]).unwrap();
    assert_eq!(loaded.config, built_in);
    assert_eq!(loaded.warnings, Vec::<String>::new());
}

#[test]
fn the_shipped_example_shows_every_section_and_its_version() {
    let example = example();
    assert_eq!(stated_version(&example), CONFIG_VERSION);
    let mut expected = SECTIONS;
    expected.sort_unstable();
    let mut shown: Vec<&str> = example.keys().map(String::as_str).collect();
    shown.sort_unstable();
    assert_eq!(shown, expected);
}

/// The paths of all values in the tree except non-empty mappings.
fn leaves(value: &Value, path: &mut Vec<String>, found: &mut Vec<Vec<String>>) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            for (key, value) in map {
                path.push(key.clone());
                leaves(value, path, found);
                path.pop();
            }
        }
        _ => found.push(path.clone()),
    }
}

/// A misspelt or unread key in the example would go unnoticed, so replace each value in turn by one that no key
/// accepts; the load must object.
#[test]
fn every_key_of_the_shipped_example_is_read() {
    let example = example();
    let mut found = Vec::new();
    leaves(&Value::Object(example.clone()), &mut Vec::new(), &mut found);
    assert!(found.len() > 80, "the example shows {} keys", found.len());
    for path in found.iter().filter(|path| path[0] != CONFIG_VERSION_KEY) {
        let mut broken = Value::Object(example.clone());
        let slot = path.iter().fold(&mut broken, |value, key| &mut value[key.as_str()]);
        *slot = json!([[]]);
        // JSON is valid YAML.
        let result = load(&broken.to_string());
        // A warning that nothing reads it says nothing of whether it is checked.
        let objects = |warning: &String| !UNREAD.iter().any(|path| *warning == no_effect_warning(path));
        let warned = result.as_ref().is_ok_and(|loaded| loaded.warnings.iter().any(objects));
        assert!(result.is_err() || warned, "nothing reads {}", path.join("."));
    }
}

/// Neither an error nor `Debug` shows a secret key's value, whatever the section or shape.
#[test]
fn a_secret_key_is_never_shown_wherever_it_stands() {
    for section in SECTIONS.into_iter().chain(["unknown"]) {
        for key in ["api_key", "password", "postgres_url", "redis_url", "x_token", "x_secret"] {
            for value in [json!("sk-hidden"), json!(["sk-hidden"]), json!({"deep": "sk-hidden"})] {
                let entry = json!({ key: value });
                for tree in
                    [json!({section: entry}), json!({section: [entry]}), json!({section: {"a": entry}})]
                {
                    let shown = match load(&tree.to_string()) {
                        Ok(loaded) => format!("{loaded:?}"),
                        Err(error) => format!("{error} {error:?}"),
                    };
                    assert!(!shown.contains("sk-hidden"), "{tree}: {shown}");
                }
            }
        }
    }
}

proptest! {
    // Each case writes a file.
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any text yields a configuration or an error, never a panic.
    #[test]
    fn any_text_is_loaded_or_refused(text in "(.|\\n){0,200}") {
        let project = Project::with_config(&text);
        if let Ok(loaded) = project.load_with(&[]) {
            prop_assert!(!loaded.config.models.is_empty());
        }
    }
}
