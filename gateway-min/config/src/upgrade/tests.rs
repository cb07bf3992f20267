use super::super::Config;
use super::super::testing::Project;
use super::*;

/// A small example: the content of a newer version.
const NEW: &str = "\
# Head.

# The version.
config_version: 49

# ----
# Where.
# ----
database:
  # The kind.
  backend: sqlite
  # The mode.
  #   full  all
  checkpoint_channel_mode: full

  checkpoint_delta:
    # Every so many.
    snapshot_frequency: 10

models: []

# A title.
title:
  enabled: true
  keep:
    type: messages
    value: 20
";

fn upgraded_with(text: &str, example: &str) -> Result<Option<Upgraded>, UpgradeError> {
    upgraded(text, example, Path::new("config.yaml"))
}

fn new(text: &str) -> Upgraded {
    match upgraded_with(text, NEW) {
        Ok(Some(new)) => new,
        other => panic!("{text}: {other:?}"),
    }
}

#[test]
fn new_keys_are_added_where_they_belong_and_everything_else_stays() {
    let old = "\
# My gateway.
config_version: 26   # old

database:   # ours
  backend: postgres
  postgres_url: $DATABASE_URL
  # a note at the end of the section

# the best
models:
- name: m   # first
  use: openai
title: {enabled: false}   # none
";
    let expected = "\
# My gateway.
config_version: 49   # old

database:   # ours
  backend: postgres
  postgres_url: $DATABASE_URL
  # a note at the end of the section
  # The mode.
  #   full  all
  checkpoint_channel_mode: full
  checkpoint_delta:
    # Every so many.
    snapshot_frequency: 10

# the best
models:
- name: m   # first
  use: openai
title: {enabled: false, keep: {\"type\":\"messages\",\"value\":20}}   # none
";
    let found = new(old);
    assert_eq!(found.text, expected);
    assert_eq!(found.versions, (26, 49));
    assert_eq!(found.added, ["database.checkpoint_channel_mode", "database.checkpoint_delta", "title.keep"]);
    assert_eq!(found.cadence, None);
    assert!(upgraded_with(expected, NEW).unwrap().is_none(), "once is enough");
}

#[test]
fn missing_sections_go_to_the_end_with_their_comments() {
    let found = new("models: [{name: m}]");
    let expected = "\
models: [{name: m}]

# The version.
config_version: 49

# ----
# Where.
# ----
database:
  # The kind.
  backend: sqlite
  # The mode.
  #   full  all
  checkpoint_channel_mode: full

  checkpoint_delta:
    # Every so many.
    snapshot_frequency: 10

# A title.
title:
  enabled: true
  keep:
    type: messages
    value: 20
";
    assert_eq!(found.text, expected);
    assert_eq!(found.versions, (0, 49));
    assert_eq!(found.added, ["config_version", "database", "title"]);
}

#[test]
fn the_comment_beside_a_key_that_goes_stays() {
    let flat = "checkpoint_delta_snapshot_frequency";
    for (old, cadence) in [
        (
            format!("database:\n  {flat}: 7   # ticket 17\n  checkpoint_delta: {{snapshot_frequency: 5}}\n"),
            Cadence::Dropped,
        ),
        (format!("database:\n  checkpoint_delta: {{}}\n  {flat}: 7   # ticket 17"), Cadence::Moved),
        (
            format!("database:\r\n  checkpoint_delta:\r\n    other: 1\r\n  {flat}: \"7\" # ticket 17\r\n"),
            Cadence::Moved,
        ),
    ] {
        let found = new(&old);
        assert_eq!(found.cadence, Some(cadence), "{old}");
        let lines: Vec<&str> = found.text.lines().collect();
        assert!(lines.contains(&"  # ticket 17") && !found.text.contains(flat), "{old}\n---\n{}", found.text);
    }
}

#[test]
fn files_of_every_layout_are_upgraded() {
    for old in [
        "",
        "# nothing but this",
        "---\n",
        "---\nmodels: []\n",
        "{}",
        "{\"config_version\": 3, \"database\": {\"backend\": \"memory\"}}",
        "{config_version: 3, database: {}, title: {enabled: false,}}\n",
        "database:\n    backend: memory\n    checkpoint_delta:\n            snapshot_frequency: 3\n",
        "database:\n  backend: memory\ntitle:\n  keep:\n    type: tokens",
        "database:\r\n  backend: memory\r\n# end\r\n",
        "database:\n",
        "database: ~\nmodels:\ntitle: null\n",
        "config_version:\n",
        "config_version: \"7\"\n",
        "config_version: $V\n",
        "title:\n  text: |\n    a\n\n    b\n\n\nmodels: []\n",
        "title:\n  keep:\n    # one\n    value: 5\n    # two\n  # three\n# four\nmodels: []\n",
        "unknown: {a: [1, {b: 2}]}\n\"models\": []\n",
        "database:\n  \"backend\": 'sqlite'\n  list:\n  - a\n  - b\n",
    ] {
        let found = new(old);
        // `upgraded` checks the meaning of the new text before it returns it.
        assert!(upgraded_with(&found.text, NEW).unwrap().is_none(), "{old}\n---\n{}", found.text);
        for line in old.lines().filter(|line| line.trim_start().starts_with('#')) {
            assert!(found.text.contains(line), "{line}\n---\n{}", found.text);
        }
        if old.contains("\r\n") {
            assert_eq!(
                found.text.matches('\n').count(),
                found.text.matches("\r\n").count(),
                "{}",
                found.text
            );
        }
    }
}

#[test]
fn the_value_of_the_deprecated_cadence_key_is_carried_over() {
    let old = "\
database:
  # slow reads, small files
  checkpoint_delta_snapshot_frequency: 1000   # was the default
  backend: memory
  checkpoint_channel_mode: delta
config_version: 26
models: []
title: {enabled: true, keep: {type: messages, value: 20}}
";
    let expected = "\
database:
  # slow reads, small files
  checkpoint_delta:
    snapshot_frequency: 1000   # was the default
  backend: memory
  checkpoint_channel_mode: delta
config_version: 49
models: []
title: {enabled: true, keep: {type: messages, value: 20}}
";
    let found = new(old);
    assert_eq!((found.text.as_str(), found.cadence), (expected, Some(Cadence::Moved)));
    assert_eq!(found.added, [] as [&str; 0]);

    let flat = "checkpoint_delta_snapshot_frequency";
    for (database, cadence, moved) in [
        (format!("database: {{{flat}: 7}}"), "7", Some(Cadence::Moved)),
        (format!("database: {{{flat}: 7, backend: memory}}"), "7", Some(Cadence::Moved)),
        (format!("database:\n  {flat}: $CADENCE"), "\"$CADENCE\"", Some(Cadence::Moved)),
        (format!("database:\n  {flat}: \"7\"\n  checkpoint_delta:"), "\"7\"", Some(Cadence::Moved)),
        (format!("database:\n  checkpoint_delta: {{}}\n  {flat}: 7"), "7", Some(Cadence::Moved)),
        (format!("database:\n  checkpoint_delta:\n    other: 1\n  {flat}: 7\n"), "7", Some(Cadence::Moved)),
        (
            format!("database:\n  checkpoint_delta:\n    snapshot_frequency:\n  {flat}: 7\n"),
            "7",
            Some(Cadence::Moved),
        ),
        (
            format!("database:\n  {flat}: 7\n  checkpoint_delta: {{snapshot_frequency: 5}}"),
            "5",
            Some(Cadence::Dropped),
        ),
        (
            format!("database: {{checkpoint_delta: {{snapshot_frequency: 5}}, {flat}: 7}}"),
            "5",
            Some(Cadence::Dropped),
        ),
        (format!("database:\n  {flat}:"), "10", None),
    ] {
        let found = new(&database);
        assert_eq!(found.cadence, moved, "{database}");
        let values = yaml::parse(&found.text, Path::new("x")).unwrap();
        let nested = &values["database"]["checkpoint_delta"]["snapshot_frequency"];
        assert_eq!(nested.to_string(), cadence, "{database}\n---\n{}", found.text);
        assert!(moved.is_none() || values["database"].get(flat).is_none(), "{}", found.text);
    }
}

#[test]
fn a_layout_that_cannot_be_edited_is_refused_and_told() {
    for old in ["base: &b {backend: memory}\ndatabase: *b\n", "models: []\n...\n"] {
        let error = upgraded_with(old, NEW).unwrap_err();
        let UpgradeError::Layout { added, .. } = &error else { panic!("{old}: {error}") };
        assert!(added.iter().any(|key| key.starts_with("database")), "{old}: {added:?}");
        assert!(error.to_string().contains("config.yaml has a layout"), "{error}");
    }
    for broken in ["a: [", "- a\n", "a: 1\na: 2\n"] {
        let error = upgraded_with(broken, NEW).unwrap_err();
        assert!(matches!(error, UpgradeError::Config(_)), "{broken}: {error}");
    }
}

/// An upgrade changes no setting, whatever the file says.
#[test]
fn a_file_means_the_same_before_and_after() {
    for old in [
        "",
        "database: {checkpoint_channel_mode: delta, checkpoint_delta_snapshot_frequency: 3}\n",
        "database:\n  backend: memory\nmodels:\n  - {name: a, use: scripted, model: b, script: s.json}\n",
        "summarization:\n  enabled: true\n  trigger: {type: tokens, value: 9000}\nsubagents:\n  token_budget: {max_tokens: 5000}\n  agents: {bash: {max_turns: 3}}\n",
        "sandbox: {use: local, allow_host_bash: true}\nloop_detection: {tool_freq_overrides: {bash: {warn: 60, hard_limit: 90}}}\n",
        "acp_agents: {x: {command: c, description: d}}\nother: {kept: 1}\nmax_recursion_limit: 7\n",
        "auth:\n  enabled: true\nrun_events:\n  backend: db\n",
    ] {
        let project = Project::with_config(old);
        let crate::Loaded { config: before, mut warnings, .. } = project.load_with(&[]).unwrap();
        let Upgrade::Upgraded { versions, .. } = upgrade(&project.options(&[])).unwrap() else {
            panic!("{old}: not upgraded")
        };
        assert_eq!(versions, (0, 49));
        let loaded = project.load_with(&[]).unwrap();
        // Outdated keys are updated; keys without effect still have none.
        warnings.retain(|warning| warning.contains("has no effect"));
        assert_eq!(loaded.warnings, warnings, "{old}");
        assert_eq!(Config { config_version: 0, ..loaded.config }, before, "{old}");
    }
}

#[test]
fn the_file_is_replaced_and_the_old_one_kept_beside_it() {
    let old = "config_version: 26\n# kept\nmodels: []\n";
    let project = Project::with_config(old);
    let path = fs::canonicalize(project.path("config.yaml")).unwrap();
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    }
    let done = upgrade(&project.options(&[])).unwrap();
    let Upgrade::Upgraded { path: of, backup, versions, added, cadence } = done else { panic!("{done:?}") };
    assert_eq!(
        (of, &backup, versions, cadence),
        (path.clone(), &path.with_added_extension("bak"), (26, 49), None)
    );
    assert!(added.contains(&"database".to_owned()), "{added:?}");
    assert_eq!(fs::read_to_string(&backup).unwrap(), old);
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.starts_with("config_version: 49\n# kept\nmodels: []\n"), "{text}");
    assert!(text.contains("\n  checkpoint_channel_mode: full\n"), "{text}");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
    }

    let again = upgrade(&project.options(&[])).unwrap();
    assert_eq!(again, Upgrade::UpToDate { path: path.clone(), version: 49 });
    assert_eq!(fs::read_to_string(&path).unwrap(), text);
    assert_eq!(fs::read_to_string(&backup).unwrap(), old, "the backup is that of the last change");
    let names: Vec<_> =
        fs::read_dir(&project.root).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), 2, "nothing else is left: {names:?}");
}

/// The version of the example is fixed, and `subagent_runtime.hooks` came later.
#[test]
fn a_file_of_the_same_version_gets_the_keys_that_came_within_it() {
    let hooks = EXAMPLE.find("  # Commands to run when a task starts").unwrap();
    let end = hooks + EXAMPLE[hooks..].find("  hooks: []\n").unwrap() + "  hooks: []\n".len();
    let old = format!("{}{}", &EXAMPLE[..hooks], &EXAMPLE[end..]);
    let project = Project::with_config(&old);
    let done = upgrade(&project.options(&[])).unwrap();
    let Upgrade::Upgraded { path, versions, added, cadence, .. } = done else { panic!("{done:?}") };
    assert_eq!((versions, cadence), ((49, 49), None));
    assert_eq!(added, ["subagent_runtime.hooks"]);
    assert_eq!(fs::read_to_string(&path).unwrap(), EXAMPLE, "the example is the result of an upgrade");
    assert_eq!(upgrade(&project.options(&[])).unwrap(), Upgrade::UpToDate { path, version: 49 });

    let small = Project::with_config("config_version: 49\nsubagent_runtime: {max_running: 2}\n");
    upgrade(&small.options(&[])).unwrap();
    let text = fs::read_to_string(small.path("config.yaml")).unwrap();
    assert_eq!(text, "config_version: 49\nsubagent_runtime: {max_running: 2, hooks: []}\n");
    // Who leaves a section out takes its defaults.
    let none = Project::with_config("config_version: 49\n");
    assert!(matches!(upgrade(&none.options(&[])).unwrap(), Upgrade::UpToDate { .. }));
}

#[test]
fn a_missing_file_is_made_from_the_example_and_a_named_one_is_not() {
    let project = Project::new();
    let path = project.path("config.yaml");
    assert_eq!(upgrade(&project.options(&[])).unwrap(), Upgrade::Created { path: path.clone(), version: 49 });
    assert_eq!(fs::read_to_string(&path).unwrap(), EXAMPLE);
    assert!(project.load_with(&[]).unwrap().warnings.is_empty());
    let error = upgrade(&project.options(&[("SVC_CONFIG_PATH", "gone.yaml")])).unwrap_err();
    assert!(matches!(error, UpgradeError::Config(ConfigError::Missing { .. })), "{error}");
}

#[cfg(unix)]
#[test]
fn a_link_stays_a_link() {
    let project = Project::new();
    project.write("real.yaml", "models: []\n");
    std::os::unix::fs::symlink(project.path("real.yaml"), project.path("config.yaml")).unwrap();
    upgrade(&project.options(&[])).unwrap();
    assert!(fs::symlink_metadata(project.path("config.yaml")).unwrap().is_symlink());
    assert!(fs::read_to_string(project.path("real.yaml")).unwrap().contains("checkpoint_channel_mode"));
    assert!(project.path("real.yaml.bak").is_file());
}

#[test]
fn a_backup_that_cannot_be_written_leaves_the_file() {
    let project = Project::with_config("models: []\n");
    fs::create_dir_all(project.path("config.yaml.bak/x")).unwrap();
    let error = upgrade(&project.options(&[])).unwrap_err();
    assert!(matches!(error, UpgradeError::Write { .. }), "{error}");
    assert_eq!(fs::read_to_string(project.path("config.yaml")).unwrap(), "models: []\n");
}
