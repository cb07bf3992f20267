use proptest::prelude::*;
use serde_json::json;

use super::super::error::SYNC_REDIS_CHECKPOINT_CACHE;
use super::super::testing::{Project, load, load_error, logged};
use super::super::{Config, Loaded};
use super::*;

fn database(yaml: &str) -> Database {
    load(yaml).unwrap().config.database
}

/// The warnings that a file gives, after checking that the log has them too.
fn warnings(yaml: &str) -> (Config, Vec<String>) {
    let (loaded, log) = logged(|| load(yaml));
    let Loaded { config, warnings, .. } = loaded.unwrap();
    assert_eq!(log.matches(" WARN ").count(), warnings.len(), "{log}");
    for warning in &warnings {
        assert!(log.contains(warning.as_str()), "{log}");
    }
    (config, warnings)
}

#[test]
fn the_type_defaults_to_memory_and_a_file_without_a_backend_to_sqlite() {
    assert_eq!(Database::default().backend, Backend::Memory);
    for yaml in ["", "database:\n", "database: {}\n", "database: {pool_size: 2}\n", "database: {backend: }\n"]
    {
        assert_eq!(database(yaml).backend, Backend::Sqlite, "{yaml:?}");
    }
    assert_eq!(Project::new().load_with(&[]).unwrap().config.database.backend, Backend::Sqlite);
}

#[test]
fn an_empty_section_has_the_documented_defaults() {
    let project = Project::with_config("database: {}\n");
    assert_eq!(
        project.load_with(&[]).unwrap().config.database,
        Database {
            backend: Backend::Sqlite,
            sqlite_dir: project.path(".svc/data"),
            sqlite_synchronous: SqliteSynchronous::Full,
            postgres_url: None,
            postgres_schema: None,
            pool_size: 5,
            echo_sql: false,
            checkpoint_channel_mode: CheckpointChannelMode::Full,
            checkpoint_delta: CheckpointDelta { snapshot_frequency: 10 },
            checkpoint_graph_cache: CheckpointGraphCache { accessor_graph_max: 64 },
            checkpoint_cache: CheckpointCache {
                kind: CheckpointCacheType::Memory,
                max_entries: 128,
                redis_url: Secret::new("redis://localhost:6379/0"),
                ttl_seconds: 86_400,
                key_prefix: String::new(),
            },
        }
    );
}

#[test]
fn every_key_is_read() {
    let section = database(
        "database:\n  backend: postgres\n  sqlite_dir: /var/x\n  sqlite_synchronous: normal\n  \
         postgres_url: postgres://u:p@h/d\n  postgres_schema: threads\n  pool_size: \"9\"\n  echo_sql: true\n  \
         checkpoint_channel_mode: delta\n  checkpoint_delta: {snapshot_frequency: 1000}\n  \
         checkpoint_graph_cache: {accessor_graph_max: 1}\n  checkpoint_cache:\n    type: redis\n    \
         max_entries: 0\n    redis_url: redis://r/1\n    ttl_seconds: 0\n    key_prefix: \"p:\"\n",
    );
    assert_eq!(
        section,
        Database {
            backend: Backend::Postgres,
            sqlite_dir: PathBuf::from("/var/x"),
            sqlite_synchronous: SqliteSynchronous::Normal,
            postgres_url: Some(Secret::new("postgres://u:p@h/d")),
            postgres_schema: Some("threads".into()),
            pool_size: 9,
            echo_sql: true,
            checkpoint_channel_mode: CheckpointChannelMode::Delta,
            checkpoint_delta: CheckpointDelta { snapshot_frequency: 1000 },
            checkpoint_graph_cache: CheckpointGraphCache { accessor_graph_max: 1 },
            checkpoint_cache: CheckpointCache {
                kind: CheckpointCacheType::Redis,
                max_entries: 0,
                redis_url: Secret::new("redis://r/1"),
                ttl_seconds: 0,
                key_prefix: "p:".into(),
            },
        }
    );
    let shown = format!("{section:?}");
    assert!(!shown.contains("u:p@h") && !shown.contains("redis://"), "{shown}");
}

#[test]
fn words_are_those_of_the_reference() {
    for (word, backend) in [("memory", Backend::Memory), ("sqlite", Backend::Sqlite)] {
        assert_eq!(database(&format!("database: {{backend: {word}}}\n")).backend, backend);
    }
    for (word, mode) in [("full", CheckpointChannelMode::Full), ("delta", CheckpointChannelMode::Delta)] {
        let section = database(&format!("database: {{checkpoint_channel_mode: {word}}}\n"));
        assert_eq!((section.checkpoint_channel_mode, mode.as_str()), (mode, word));
    }
    assert!(Backend::Sqlite.is_sql() && Backend::Postgres.is_sql() && !Backend::Memory.is_sql());
}

#[test]
fn the_sqlite_directory_resolves_against_the_root_and_the_state_directory() {
    let project = Project::with_config("database: {sqlite_dir: files/db}\n");
    let dir = |variables: &[(&str, &str)]| project.load_with(variables).unwrap().config.database.sqlite_dir;
    assert_eq!(dir(&[("SVC_HOME", "/state")]), project.path("files/db"));
    project.write("config.yaml", "");
    assert_eq!(dir(&[("SVC_HOME", "/state")]), PathBuf::from("/state/data"));
}

#[test]
fn a_mode_outside_full_and_delta_is_an_error() {
    let error = load_error("database: {checkpoint_channel_mode: half}\n");
    assert!(
        error.contains("database.checkpoint_channel_mode: must be one of full, delta, got \"half\""),
        "{error}"
    );
}

#[test]
fn a_cadence_of_zero_or_less_is_an_error() {
    for value in ["0", "-1", "\"0\"", "1.5", "true", "often"] {
        let error = load_error(&format!("database: {{checkpoint_delta: {{snapshot_frequency: {value}}}}}\n"));
        assert!(
            error.contains("database.checkpoint_delta.snapshot_frequency: must be an integer >= 1"),
            "{error}"
        );
    }
    let section =
        database(&format!("database: {{checkpoint_delta: {{snapshot_frequency: {}}}}}\n", u64::MAX));
    assert_eq!(section.checkpoint_delta.snapshot_frequency, u64::MAX);
}

#[test]
fn a_flat_cadence_of_zero_or_less_is_an_error_on_the_nested_key() {
    for value in ["0", "-5"] {
        let error = load_error(&format!("database: {{checkpoint_delta_snapshot_frequency: {value}}}\n"));
        assert!(
            error.contains(&format!(
                "database.checkpoint_delta.snapshot_frequency: must be an integer >= 1, got {value}"
            )),
            "{error}"
        );
    }
}

#[test]
fn unknown_keys_are_ignored_with_a_warning() {
    let with = load("database: {backend: memory, no_such_key: 5, checkpoint_delta: {other: 1}}\n").unwrap();
    let without = database("database: {backend: memory}\n");
    assert_eq!(
        Database { sqlite_dir: PathBuf::new(), ..with.config.database },
        Database { sqlite_dir: PathBuf::new(), ..without }
    );
    assert_eq!(
        with.warnings,
        [
            "`database.checkpoint_delta.other` has no effect: `database.checkpoint_delta` has no such setting",
            "`database.no_such_key` has no effect: `database` has no such setting",
        ]
    );
    assert!(with.config.extra.is_empty());
}

#[test]
fn the_flat_key_is_carried_forward_with_its_warning() {
    for (yaml, shown) in [("5", "5"), ("\"5\"", "'5'")] {
        for nested in [
            "",
            ", checkpoint_delta: ",
            ", checkpoint_delta: {}",
            ", checkpoint_delta: {snapshot_frequency: }",
        ] {
            let yaml = format!("database: {{checkpoint_delta_snapshot_frequency: {yaml}{nested}}}\n");
            let (config, warnings) = warnings(&yaml);
            assert_eq!(config.snapshot_frequency(), 5, "{yaml}");
            assert_eq!(
                warnings,
                [format!(
                    "database.checkpoint_delta_snapshot_frequency is deprecated; use database.checkpoint_delta.snapshot_frequency instead. Carried the legacy value ({shown}) forward."
                )]
            );
        }
    }
}

#[test]
fn the_nested_key_wins_over_the_flat_key_with_its_warning() {
    for flat in ["5", "0", "nonsense"] {
        let (config, warnings) = warnings(&format!(
            "database: {{checkpoint_delta_snapshot_frequency: {flat}, checkpoint_delta: {{snapshot_frequency: 7}}}}\n"
        ));
        assert_eq!(config.snapshot_frequency(), 7);
        assert_eq!(
            warnings,
            [
                "Both database.checkpoint_delta_snapshot_frequency (deprecated) and database.checkpoint_delta.snapshot_frequency are set; the nested key wins."
            ]
        );
    }
}

#[test]
fn a_flat_key_of_null_is_not_set() {
    let (config, warnings) = warnings("database: {checkpoint_delta_snapshot_frequency: }\n");
    assert_eq!((config.snapshot_frequency(), warnings), (10, vec![]));
}

#[test]
fn a_nested_section_that_is_no_mapping_is_an_error_with_or_without_the_flat_key() {
    for flat in ["", "checkpoint_delta_snapshot_frequency: 5, "] {
        let error = load_error(&format!("database: {{{flat}checkpoint_delta: 7}}\n"));
        assert!(error.contains("database.checkpoint_delta: must be a mapping, got 7"), "{error}");
    }
}

#[test]
fn the_flat_key_from_the_environment_is_a_text() {
    let project = Project::with_config("database: {checkpoint_delta_snapshot_frequency: $N}\n");
    let loaded = project.load_with(&[("N", "12")]).unwrap();
    assert_eq!(loaded.config.snapshot_frequency(), 12);
    assert!(loaded.warnings[0].contains("('12')"), "{:?}", loaded.warnings);
}

/// What [`Database::around_delta`] makes of a section, and what it logs.
fn around(section: &Value, delta: CheckpointDelta) -> (Result<(Database, Vec<String>), ConfigError>, String) {
    let project = Project::new();
    let section = section.as_object().unwrap().clone();
    logged(|| Database::around_delta(section, delta, &project.options(&[])))
}

#[test]
fn a_typed_delta_section_makes_the_flat_key_ignored_with_its_warning() {
    let section = json!({"backend": "memory", "checkpoint_delta_snapshot_frequency": 5});
    let (built, log) = around(&section, CheckpointDelta { snapshot_frequency: 20 });
    let (database, warnings) = built.unwrap();
    assert_eq!((database.backend, database.checkpoint_delta.snapshot_frequency), (Backend::Memory, 20));
    assert_eq!(
        warnings,
        [
            "Ignoring deprecated database.checkpoint_delta_snapshot_frequency because database.checkpoint_delta is already set."
        ]
    );
    assert!(log.contains(&warnings[0]), "{log}");
}

#[test]
fn a_typed_delta_section_without_the_flat_key_is_silent_and_wins() {
    for section in [
        json!({}),
        json!({"checkpoint_delta_snapshot_frequency": null}),
        json!({"checkpoint_delta": {"snapshot_frequency": 0}}),
    ] {
        let (built, log) = around(&section, CheckpointDelta { snapshot_frequency: 20 });
        let (database, warnings) = built.unwrap();
        assert_eq!((database.checkpoint_delta.snapshot_frequency, warnings), (20, vec![]));
        assert_eq!(log, "");
    }
}

#[test]
fn a_typed_delta_section_is_validated_like_a_file() {
    let (built, _) = around(&json!({"pool_size": 0}), CheckpointDelta { snapshot_frequency: 0 });
    let error = built.unwrap_err().to_string();
    assert!(error.contains("database.pool_size: must be an integer >= 1, got 0"), "{error}");
    assert!(
        error.contains("database.checkpoint_delta.snapshot_frequency: must be an integer >= 1"),
        "{error}"
    );
}

#[test]
fn an_unusable_accessor_limit_is_a_warning_and_the_default() {
    for value in ["{accessor_graph_max: 0}", "{accessor_graph_max: -1}", "{accessor_graph_max: many}", "7"] {
        let (config, warnings) = warnings(&format!("database: {{checkpoint_graph_cache: {value}}}\n"));
        assert_eq!(config.accessor_graph_max(), 64);
        assert_eq!(
            warnings,
            [
                "database.checkpoint_graph_cache.accessor_graph_max must be an integer >= 1; its value is unusable, so 64 is used."
            ]
        );
    }
}

#[test]
fn an_unknown_cache_type_is_an_error_in_the_reference_words() {
    let error = load_error("database: {checkpoint_cache: {type: disk}}\n");
    assert!(error.contains("database.checkpoint_cache.type: Unknown checkpoint cache type: disk"), "{error}");
    let error = load_error("database: {checkpoint_cache: {type: 5}}\n");
    assert!(error.contains("database.checkpoint_cache.type: must be a string"), "{error}");
}

#[test]
fn only_the_memory_cache_serves_the_embedded_client() {
    let cache = |kind| CheckpointCache { kind, ..CheckpointCache::default() };
    assert!(cache(CheckpointCacheType::Memory).check_sync().is_ok());
    let error = cache(CheckpointCacheType::Redis).check_sync().unwrap_err();
    assert_eq!(error.to_string(), SYNC_REDIS_CHECKPOINT_CACHE);
}

#[test]
fn cache_limits_may_be_zero_but_not_less() {
    for key in ["max_entries", "ttl_seconds"] {
        let error = load_error(&format!("database: {{checkpoint_cache: {{{key}: -1}}}}\n"));
        let expected = format!("database.checkpoint_cache.{key}: must be an integer >= 0, got -1");
        assert!(error.contains(&expected), "{error}");
    }
}

#[test]
fn the_redis_url_falls_back_to_the_environment_in_order() {
    let own = ("SVC_CHECKPOINT_CACHE_REDIS_URL", "redis://own");
    let general = ("REDIS_URL", "redis://general");
    let url = |yaml: &str, variables: &[(&str, &str)]| {
        let loaded = Project::with_config(yaml).load_with(variables).unwrap();
        loaded.config.database.checkpoint_cache.redis_url.expose().to_owned()
    };
    assert_eq!(
        url("database: {checkpoint_cache: {redis_url: redis://file}}\n", &[own, general]),
        "redis://file"
    );
    assert_eq!(url("", &[own, general]), "redis://own");
    assert_eq!(url("", &[general]), "redis://general");
    assert_eq!(url("", &[("SVC_CHECKPOINT_CACHE_REDIS_URL", ""), general]), "redis://general");
    assert_eq!(url("database: {checkpoint_cache: {redis_url: }}\n", &[]), "redis://localhost:6379/0");
}

#[test]
fn postgres_needs_its_url_and_never_shows_it() {
    for url in ["", "postgres_url: , ", "postgres_url: \"\", "] {
        let error = load_error(&format!("database: {{{url}backend: postgres}}\n"));
        assert!(
            error.contains("database.postgres_url: is required when database.backend is postgres"),
            "{error}"
        );
    }
    let error = load_error("database: {postgres_url: [\"postgres://u:hidden@h\"], pool_size: 0}\n");
    assert!(error.contains("database.postgres_url") && !error.contains("hidden"), "{error}");
}

#[test]
fn other_values_outside_their_ranges_are_errors() {
    for (key, value) in [
        ("backend", "mysql"),
        ("sqlite_synchronous", "off"),
        ("pool_size", "0"),
        ("echo_sql", "5"),
        ("sqlite_dir", "5"),
    ] {
        let error = load_error(&format!("database: {{{key}: {value}}}\n"));
        assert!(error.contains(&format!("database.{key}: must be")), "{error}");
    }
}

#[test]
fn values_are_shown_like_the_reference_shows_them() {
    for (value, shown) in [
        (json!(5), "5"),
        (json!(-1), "-1"),
        (json!(2.5), "2.5"),
        (json!(true), "True"),
        (json!(false), "False"),
        (json!("5"), "'5'"),
        (json!("it's"), "\"it's\""),
        (json!("both ' and \""), "'both \\' and \"'"),
        (json!("a\\b\nc"), "'a\\\\b\\nc'"),
    ] {
        assert_eq!(python_repr(&value), shown);
    }
}

proptest! {
    // Each case writes a file.
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The flat key means the same as the nested key, for every integer.
    #[test]
    fn flat_and_nested_cadence_agree(cadence in prop_oneof![any::<i64>(), -3..=3_i64]) {
        let read = |yaml: String| load(&yaml).ok().map(|loaded| loaded.config.snapshot_frequency());
        let flat = read(format!("database: {{checkpoint_delta_snapshot_frequency: {cadence}}}\n"));
        let nested = read(format!("database: {{checkpoint_delta: {{snapshot_frequency: {cadence}}}}}\n"));
        prop_assert_eq!(flat, nested);
        prop_assert_eq!(flat, u64::try_from(cadence).ok().filter(|&cadence| cadence >= 1));
    }
}
