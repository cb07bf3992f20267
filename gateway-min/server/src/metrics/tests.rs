use std::collections::BTreeSet;

use super::*;

/// Everything that can be counted, counted, as text.
fn everything(sqlite: Option<Arc<SqliteSaver>>) -> String {
    let metrics = Metrics::new(sqlite, Arc::default());
    metrics.run_ended(RunStatus::Success, Duration::from_millis(30));
    metrics.run_ended(RunStatus::Success, Duration::from_millis(30));
    metrics.run_ended(RunStatus::Interrupted, Duration::from_secs(3));
    metrics.run_lost();
    metrics.runs_taken_over(2);
    metrics.renewal_failed();
    metrics.committed(Duration::from_millis(3), 100, CallOutcome::ok);
    metrics.committed(Duration::from_millis(3), 100, CallOutcome::conflict);
    metrics.replayed(5);
    metrics.looked_up(true);
    metrics.looked_up(false);
    metrics.refused(Refusal::Full);
    let snapshot = Snapshot {
        connections: 9,
        runs: 2,
        waiting: 6,
        subagents: Counts { running: 11, waiting_interactive: 5, waiting_batch: 7 },
        background: 3,
        streams: 4,
        followers: 7,
        stream_bytes: 8,
        heads: 5,
        config_valid: false,
        database: Some(FileSize { bytes: 4096, free: 0, incremental: true }),
        batches: Some(BatchSnapshot {
            batches: vec![("running", 2)],
            items: vec![("queued", 3)],
            attempts: vec![("succeeded", 4)],
        }),
    };
    metrics.rendered(snapshot)
}

/// The metrics that a text names.
fn named(text: &str) -> BTreeSet<&str> {
    let starts = text.match_indices("threadkeep_").map(|(at, _)| &text[at..]);
    let end = |name: &str| name.find(|c: char| c != '_' && !c.is_ascii_lowercase()).unwrap_or(name.len());
    starts.map(|name| &name[..end(name)]).collect()
}

/// Dashboard, alerts and their page name only what there is, and each alert is explained.
#[test]
fn the_dashboard_and_the_alerts_name_metrics_that_exist() {
    let dir = tempfile::TempDir::new().unwrap();
    let saver = SqliteSaver::open(dir.path().join("c.db"), &threadkeep_sqlite::Options::default()).unwrap();
    let text = everything(Some(Arc::new(saver)));
    let existing = named(&text);
    let (page, alerts, dashboard) = (
        include_str!("../../../../docs/metrics.md"),
        include_str!("../../../../docs/metrics/alerts.yaml"),
        include_str!("../../../../docs/metrics/dashboard.json"),
    );
    let used: BTreeSet<_> = named(alerts).union(&named(dashboard)).copied().collect();
    assert!(used.len() > 20, "{used:?}");
    let unknown: Vec<_> = used.difference(&existing).collect();
    assert!(unknown.is_empty(), "{unknown:?} are not among {existing:?}");
    // The page leaves the prefix out.
    let mut metrics = 0;
    for name in page.split('`').skip(1).step_by(2).filter_map(|code| code.split('{').next()) {
        let is_metric =
            ["runs_", "run_s", "commit_", "lease_", "subagents_", "refused", "database_b", "database_f"]
                .iter()
                .any(|start| name.starts_with(start));
        metrics += usize::from(is_metric);
        assert!(
            !is_metric
                || existing.contains(format!("threadkeep_{name}").as_str())
                || existing.contains(format!("threadkeep_{name}_count").as_str()),
            "{name}"
        );
    }
    assert!(metrics > 10, "only {metrics} names were recognised");
    let alerts = alerts.lines().filter_map(|line| line.trim().strip_prefix("- alert: "));
    let explained: Vec<_> = alerts.map(|alert| page.contains(&format!("| `{alert}` |"))).collect();
    assert_eq!(explained, [true; 10]);
    serde_json::from_str::<serde_json::Value>(dashboard).unwrap();
}

#[test]
fn what_is_counted_is_shown_with_its_unit() {
    let text = everything(None);
    for line in [
        "threadkeep_runs_total{outcome=\"success\"} 2",
        "threadkeep_runs_total{outcome=\"interrupted\"} 1",
        "threadkeep_run_seconds_bucket{le=\"0.04\",outcome=\"success\"} 2",
        "threadkeep_run_seconds_sum{outcome=\"interrupted\"} 3.0",
        "threadkeep_runs_lost_total 1",
        "threadkeep_runs_taken_over_total 2",
        "threadkeep_lease_renewals_failed_total 1",
        "threadkeep_commit_seconds_count{outcome=\"ok\"} 1",
        "threadkeep_commit_seconds_count{outcome=\"conflict\"} 1",
        "threadkeep_commit_values_bytes_total 100",
        "threadkeep_replay_supersteps_sum 5.0",
        "threadkeep_history_cache_lookups_total{result=\"hit\"} 1",
        "threadkeep_history_cache_lookups_total{result=\"miss\"} 1",
        "threadkeep_refused_total{reason=\"full\"} 1",
        "threadkeep_connections_open 9",
        "threadkeep_runs_active 2",
        "threadkeep_runs_waiting 6",
        "threadkeep_subagents_active 11",
        "threadkeep_subagents_waiting 12",
        "threadkeep_streams_open 7",
        "threadkeep_background_tasks 3",
        "threadkeep_streams_kept 4",
        "threadkeep_streams_kept_bytes 8",
        "threadkeep_warm_heads 5",
        "threadkeep_config_valid 0",
        "threadkeep_batches{status=\"running\"} 2",
        "threadkeep_batch_items{status=\"queued\"} 3",
        "threadkeep_batch_attempts_total{outcome=\"succeeded\"} 4",
        "# EOF",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
}

/// What happens for the first time is an increase from zero; with no zero before it, no alert sees it.
#[test]
fn what_has_not_happened_yet_is_a_zero() {
    let text = Metrics::new(None, Arc::default()).rendered(Snapshot::default());
    let counters: [(&str, &str, &[&str]); 5] = [
        ("runs_total", "outcome", &["success", "error", "timeout", "interrupted"]),
        ("run_seconds_count", "outcome", &["success", "error", "timeout", "interrupted"]),
        ("commit_seconds_count", "outcome", &["ok", "conflict", "in_doubt", "error"]),
        ("history_cache_lookups_total", "result", &["hit", "miss"]),
        ("refused_total", "reason", &["header_timeout", "body_timeout", "displaced", "full"]),
    ];
    for (name, label, values) in counters {
        let mut found: Vec<&str> =
            text.lines().filter(|line| line.starts_with(&format!("threadkeep_{name}{{"))).collect();
        let mut zeros: Vec<String> =
            values.iter().map(|value| format!("threadkeep_{name}{{{label}=\"{value}\"}} 0")).collect();
        found.sort_unstable();
        zeros.sort_unstable();
        assert_eq!(found, zeros, "{text}");
    }
}
