use std::fs::File;
use std::time::{Duration, SystemTime};

use super::super::testing::{Project, logged};
use super::*;

fn limit(handle: &ConfigHandle) -> u32 {
    handle.current().max_recursion_limit
}

/// A project whose file says `max_recursion_limit: <limit>`, and a handle on it.
fn followed(limit: u32) -> (Project, ConfigHandle) {
    let project = Project::with_config(&yaml(limit));
    let handle = ConfigHandle::open(&project.options(&[])).unwrap();
    (project, handle)
}

fn yaml(limit: u32) -> String {
    format!("max_recursion_limit: {limit}\n")
}

/// Sets the file's time stamp.
fn stamp(project: &Project, modified: SystemTime) {
    let file = File::options().write(true).open(project.path("config.yaml")).unwrap();
    file.set_modified(modified).unwrap();
}

/// A time stamp old enough to be trusted.
fn hours_ago(hours: u64) -> SystemTime {
    SystemTime::now() - Duration::from_hours(hours)
}

#[test]
fn an_edit_counts_from_the_next_access_on() {
    let (project, handle) = followed(10);
    let before = handle.current();
    assert_eq!(before.max_recursion_limit, 10);
    project.write("config.yaml", &yaml(2000));
    assert_eq!(limit(&handle), 2000);
    assert_eq!(before.max_recursion_limit, 10, "a configuration that was handed out does not change");
    assert_eq!(limit(&handle.clone()), 2000);
}

#[test]
fn the_cadence_and_the_accessor_limit_follow_an_edit() {
    let (project, handle) = followed(10);
    assert_eq!((handle.current().snapshot_frequency(), handle.current().accessor_graph_max()), (10, 64));
    project.write(
        "config.yaml",
        "database: {checkpoint_delta: {snapshot_frequency: 7}, checkpoint_graph_cache: {accessor_graph_max: 5}}\n",
    );
    assert_eq!((handle.current().snapshot_frequency(), handle.current().accessor_graph_max()), (7, 5));
}

#[test]
fn an_edit_that_leaves_size_and_stamp_is_seen_while_the_stamp_is_young() {
    let (project, handle) = followed(10);
    // A future stamp is never old enough to be trusted, however slowly this test runs.
    let young = SystemTime::now() + Duration::from_hours(1);
    stamp(&project, young);
    assert_eq!(limit(&handle), 10);
    project.write("config.yaml", &yaml(20));
    stamp(&project, young);
    assert_eq!(limit(&handle), 20);
}

#[test]
fn an_old_stamp_vouches_for_the_content() {
    let (project, handle) = followed(10);
    let old = hours_ago(2);
    stamp(&project, old);
    let first = handle.current();
    // Other content with the same size and stamp: only reading the file would reveal it.
    project.write("config.yaml", &yaml(20));
    stamp(&project, old);
    assert!(Arc::ptr_eq(&first, &handle.current()), "the file was read although its stamp is unchanged");
    stamp(&project, hours_ago(1));
    assert_eq!(limit(&handle), 20);
}

#[test]
fn unchanged_content_is_not_built_again() {
    let (project, handle) = followed(10);
    let first = handle.current();
    project.write("config.yaml", &yaml(10));
    stamp(&project, hours_ago(3));
    assert!(Arc::ptr_eq(&first, &handle.current()));
    stamp(&project, hours_ago(4));
    assert!(Arc::ptr_eq(&first, &handle.current()));
}

#[test]
fn a_broken_edit_keeps_the_last_good_one_and_is_logged_once_per_content() {
    let (project, handle) = followed(10);
    let edit = |content: &str| {
        project.write("config.yaml", content);
        let (limits, log) = logged(|| [limit(&handle), limit(&handle), limit(&handle)]);
        (limits, log.matches("the last good one stays in use").count())
    };
    assert_eq!(edit("max_recursion_limit: 0\n"), ([10; 3], 1));
    let error = handle.last_error().unwrap();
    assert!(error.to_string().contains("max_recursion_limit: must be an integer >= 1, got 0"), "{error}");
    assert_eq!(edit("max_recursion_limit: [\n"), ([10; 3], 1));
    assert!(matches!(*handle.last_error().unwrap(), ConfigError::Syntax { .. }));
    assert_eq!(edit("max_recursion_limit: $NOT_SET\n"), ([10; 3], 1));
    assert_eq!(edit(&yaml(30)), ([30; 3], 0));
    assert!(handle.last_error().is_none());
}

#[test]
fn an_edit_of_what_is_read_at_start_only_is_told_until_it_is_taken_back() {
    let (project, handle) = followed(10);
    let edit = |content: &str| {
        project.write("config.yaml", content);
        let (_, log) = logged(|| limit(&handle));
        let told = log.lines().find(|line| line.contains("restart to apply them"));
        told.map(|line| line.split('"').nth(1).unwrap().to_owned())
    };
    for section in [
        "auth: {enabled: true}",
        "gateway: {max_connections: 7}",
        "database: {checkpoint_channel_mode: delta}",
        "database: {checkpoint_delta: {snapshot_frequency: 3}}",
        "run_events: {backend: db}",
        "stream_bridge: {queue_maxsize: 7}",
        "run_ownership: {lease_seconds: 7}",
        "sandbox: {use: local, allow_host_bash: true}",
        "subagent_runtime: {max_running: 1}",
        "subagent_batches: {poll_interval_seconds: 2}",
        "agent_storage: {backend: db}",
    ] {
        let name = section.split(':').next().map(str::to_owned);
        assert_eq!(edit(&format!("{section}\n")), name, "{section}");
    }
    assert_eq!(edit("auth: {enabled: true}\ndatabase: {pool_size: 1}\n").as_deref(), Some("auth, database"));
    for live in [
        "database: {checkpoint_graph_cache: {accessor_graph_max: 5}}",
        "title: {enabled: false}",
        "token_usage: {enabled: false}",
        "models: [{name: a, use: openai, model: b}]",
        "summarization: {enabled: true}",
        "loop_detection: {enabled: false}",
        "token_budget: {enabled: true}",
        "subagents: {max_total_per_run: 2}",
        "tools: []",
    ] {
        assert_eq!(edit(&format!("{live}\n")), None, "{live}");
    }
}

#[test]
fn going_back_to_the_good_content_clears_the_error() {
    let (project, handle) = followed(10);
    let first = handle.current();
    project.write("config.yaml", "[");
    handle.current();
    assert!(handle.last_error().is_some());
    project.write("config.yaml", &yaml(10));
    assert!(Arc::ptr_eq(&first, &handle.current()));
    assert!(handle.last_error().is_none());
}

#[test]
fn a_file_that_vanishes_is_a_broken_edit_until_it_returns() {
    let (project, handle) = followed(10);
    std::fs::remove_file(project.path("config.yaml")).unwrap();
    let (limits, log) = logged(|| [limit(&handle), limit(&handle)]);
    assert_eq!(limits, [10, 10]);
    assert_eq!(log.matches("the last good one stays in use").count(), 1, "{log}");
    assert!(matches!(
        *handle.last_error().unwrap(),
        ConfigError::Missing { origin: Origin::ProjectRoot, .. }
    ));
    project.write("config.yaml", &yaml(10));
    assert_eq!(limit(&handle), 10);
    assert!(handle.last_error().is_none());
    std::fs::remove_file(project.path("config.yaml")).unwrap();
    handle.current();
    project.write("config.yaml", &yaml(11));
    assert_eq!(limit(&handle), 11);
    assert!(handle.last_error().is_none());
}

/// As an editor leaves it between emptying and writing it; empty, it would be a valid file of defaults.
#[test]
fn a_file_that_becomes_empty_is_a_broken_edit_until_it_is_written() {
    let (project, handle) = followed(10);
    for empty in ["", " \n\n"] {
        project.write("config.yaml", empty);
        let (limits, log) = logged(|| [limit(&handle), limit(&handle)]);
        assert_eq!(limits, [10, 10], "{empty:?}");
        assert_eq!(log.matches("the last good one stays in use").count(), 1, "{log}");
        assert!(matches!(*handle.last_error().unwrap(), ConfigError::Empty { .. }));
    }
    project.write("config.yaml", &yaml(20));
    assert_eq!(limit(&handle), 20);
    assert!(handle.last_error().is_none());
}

#[test]
fn an_empty_file_at_the_start_is_one_of_defaults() {
    let project = Project::with_config("");
    let handle = ConfigHandle::open(&project.options(&[])).unwrap();
    assert_eq!(limit(&handle), 1000);
    project.write("config.yaml", &yaml(10));
    assert_eq!(limit(&handle), 10);
}

#[test]
fn a_file_that_appears_is_taken_up() {
    let project = Project::new();
    let handle = ConfigHandle::open(&project.options(&[])).unwrap();
    assert_eq!(limit(&handle), 1000);
    project.write("config.yaml", "[");
    assert_eq!(limit(&handle), 1000);
    assert!(handle.last_error().is_some());
    std::fs::remove_file(project.path("config.yaml")).unwrap();
    assert_eq!(limit(&handle), 1000);
    assert!(handle.last_error().is_none());
    project.write("config.yaml", &yaml(12));
    assert_eq!(limit(&handle), 12);
}

#[test]
fn an_outdated_file_is_warned_about_on_each_reload() {
    let (project, handle) = followed(10);
    project.write("config.example.yaml", "config_version: 49\n");
    project.write("config.yaml", &yaml(11));
    let (_, log) = logged(|| [limit(&handle), limit(&handle)]);
    assert_eq!(log.matches("is outdated").count(), 1, "{log}");
    project.write("config.yaml", &yaml(12));
    let (_, log) = logged(|| limit(&handle));
    assert_eq!(log.matches("is outdated").count(), 1, "{log}");
}

#[test]
fn there_is_no_handle_on_a_file_that_never_loaded() {
    let project = Project::with_config("[");
    assert!(matches!(ConfigHandle::open(&project.options(&[])), Err(ConfigError::Syntax { .. })));
}

#[test]
fn variables_are_those_of_the_start() {
    let project = Project::with_config("max_recursion_limit: $LIMIT\n");
    project.write(".env", "LIMIT=5\n");
    let handle = ConfigHandle::open(&project.options(&[])).unwrap();
    assert_eq!((limit(&handle), handle.environment().get("LIMIT")), (5, Some("5")));
    project.write(".env", "LIMIT=6\n");
    project.write("config.yaml", "# edited\nmax_recursion_limit: $LIMIT\n");
    assert_eq!(limit(&handle), 5);
}

#[test]
fn a_handle_shows_neither_variables_nor_configuration() {
    let project = Project::with_config("plugins: {token: $T}\n");
    let handle = ConfigHandle::open(&project.options(&[("T", "sk-hidden")])).unwrap();
    let shown = format!("{handle:?}");
    assert!(shown.contains("ConfigHandle") && !shown.contains("sk-hidden"), "{shown}");
}

#[tokio::test]
async fn async_code_gets_the_same_configuration_off_the_reactor() {
    let (project, handle) = followed(10);
    assert_eq!(handle.current_async().await.max_recursion_limit, 10);
    project.write("config.yaml", &yaml(13));
    let fresh = handle.current_async().await;
    assert_eq!(fresh.max_recursion_limit, 13);
    assert!(Arc::ptr_eq(&fresh, &handle.current()));
}
