use std::collections::{BTreeMap, BTreeSet};

use regex::Regex;

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

/// The labels of each metric, with their values.
type Labels = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

/// What Prometheus adds to all metrics.
const ADDED: [&str; 2] = ["instance", "job"];

/// The metrics in a text of the OpenMetrics format.
fn existing(text: &str) -> Labels {
    let label = Regex::new(r#"([a-z_]+)="([^"]*)""#).unwrap();
    let mut existing = Labels::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let name = line.split(['{', ' ']).next().unwrap_or_default();
        let labels = existing.entry(name.to_owned()).or_default();
        for [label, value] in label.captures_iter(line).map(|found| found.extract::<2>().1) {
            labels.entry(label.to_owned()).or_default().insert(value.to_owned());
        }
    }
    existing
}

/// The metrics that a query names, or what is wrong: a metric, a label or a value does not exist, or a label is shown
/// that the answer does not have. The query may be followed by what is shown of its answer.
fn used<'t>(query: &'t str, existing: &Labels) -> Result<Vec<&'t str>, String> {
    let metric = Regex::new(r"(threadkeep_[a-z_]+)(\{[^}]*\})?").unwrap();
    let selector = Regex::new(r#"([a-z_]+)=~?"([^"]*)""#).unwrap();
    let group = Regex::new(r" by \(([^)]*)\)").unwrap();
    let shown = Regex::new(r"\{\{ ?(?:\$labels\.)?([a-z_]+) ?\}\}").unwrap();
    let groups: Vec<&str> = group
        .captures_iter(query)
        .flat_map(|found| found.extract::<1>().1)
        .flat_map(|labels| labels.split(", "))
        .collect();
    let mut names = Vec::new();
    for found in metric.captures_iter(query) {
        let name = found.get(1).map_or("", |name| name.as_str());
        let selectors = found.get(2).map_or("", |selectors| selectors.as_str());
        // The name of a histogram alone is that of all its samples.
        let labels = existing.get(name).or_else(|| existing.get(&format!("{name}_count")));
        let labels = labels.ok_or_else(|| format!("no metric {name}: {query}"))?;
        let has = |label: &str| ADDED.contains(&label) || labels.contains_key(label);
        for [label, values] in selector.captures_iter(selectors).map(|found| found.extract::<2>().1) {
            let known = labels.get(label);
            let is_known = |value: &str| known.is_some_and(|known| known.contains(value));
            if !has(label) || (known.is_some() && !values.split('|').all(is_known)) {
                return Err(format!("{name} has no {label} {values}: {query}"));
            }
        }
        if let Some(label) = groups.iter().find(|label| !has(label)) {
            return Err(format!("{name} has no {label}: {query}"));
        }
        for label in shown.captures_iter(query).flat_map(|found| found.extract::<1>().1) {
            let of_each = groups.is_empty() && !query.contains("sum(");
            let is_left = groups.contains(&label) || (of_each && has(label));
            if !is_left {
                return Err(format!("{label} is not in the answer: {query}"));
            }
        }
        names.push(name);
    }
    Ok(names)
}

/// The metrics that a page names in code, with their labels. It leaves the prefix out, and the name before a further
/// selector of the same metric.
fn on_page(page: &str) -> Vec<String> {
    let mut named = Vec::new();
    let mut last = "";
    for code in page.split('`').skip(1).step_by(2) {
        let name = code.split('{').next().unwrap_or_default();
        if name.contains('_') && name.chars().all(|c| c == '_' || c.is_ascii_lowercase()) {
            last = name;
            named.push(format!("threadkeep_{code}"));
        } else if code.starts_with('{') {
            named.push(format!("threadkeep_{last}{code}"));
        }
    }
    // What it says of all names.
    named.retain(|name| name != "threadkeep_threadkeep_");
    named
}

/// Dashboard, alerts and their page name only metrics, labels and values that there are, and each alert is explained.
#[test]
fn the_dashboard_and_the_alerts_name_metrics_that_exist() {
    let dir = tempfile::TempDir::new().unwrap();
    let saver = SqliteSaver::open(dir.path().join("c.db"), &threadkeep_sqlite::Options::default()).unwrap();
    let existing = existing(&everything(Some(Arc::new(saver))));
    let (page, alerts, dashboard) = (
        include_str!("../../../../docs/metrics.md"),
        include_str!("../../../../docs/metrics/alerts.yaml"),
        include_str!("../../../../docs/metrics/dashboard.json"),
    );
    let parsed: serde_json::Value = serde_json::from_str(dashboard).unwrap();
    let list = |place: &serde_json::Value| place.as_array().cloned().unwrap_or_default();
    let targets = list(&parsed["panels"]).into_iter().flat_map(|panel| list(&panel["targets"]));
    let mut queries: Vec<String> = targets
        .map(|target| [&target["expr"], &target["legendFormat"]].map(|text| text.as_str().unwrap()).join(" "))
        .collect();
    let variables = list(&parsed["templating"]["list"]);
    queries.extend(variables.iter().map(|variable| variable["query"].as_str().unwrap().to_owned()));
    queries.extend(alerts.split("- alert: ").map(str::to_owned));
    let found: BTreeSet<&str> = queries.iter().flat_map(|query| used(query, &existing).unwrap()).collect();
    // None is anywhere else.
    let name = Regex::new("threadkeep_[a-z_]+").unwrap();
    let named = [alerts, dashboard].into_iter().flat_map(|text| name.find_iter(text));
    let all: BTreeSet<&str> = named.map(|name| name.as_str()).collect();
    assert_eq!(found, all);
    assert!(found.len() > 20, "{found:?}");

    let codes = on_page(page);
    let figures: BTreeSet<&str> = codes.iter().flat_map(|code| used(code, &existing).unwrap()).collect();
    for figure in ["connections_open", "config_valid", "batch_attempts_total", "replay_supersteps"] {
        assert!(figures.contains(format!("threadkeep_{figure}").as_str()), "{figure} is not in {figures:?}");
    }
    assert!(figures.len() > 15, "only {figures:?} were recognised");
    let alerts = alerts.lines().filter_map(|line| line.trim().strip_prefix("- alert: "));
    let explained: Vec<_> = alerts.map(|alert| page.contains(&format!("| `{alert}` |"))).collect();
    assert_eq!(explained, [true; 10]);
}

#[test]
fn a_query_of_what_does_not_exist_is_recognised() {
    let existing = existing(&everything(None));
    for (query, wrong) in [
        ("threadkeep_runs_total{outcome=\"error\",instance=~\"$instance\"}", ""),
        ("sum by (le, outcome) (rate(threadkeep_run_seconds_bucket[1m])) {{outcome}}", ""),
        ("threadkeep_config_valid == 0 {{ $labels.instance }} {{ $value }}", ""),
        ("threadkeep_run_seconds", ""),
        ("threadkeep_runs{outcome=\"error\"}", "no metric threadkeep_runs:"),
        ("threadkeep_runs_total{status=\"error\"}", "threadkeep_runs_total has no status error:"),
        ("threadkeep_runs_total{outcome=~\"error|no\"}", "threadkeep_runs_total has no outcome error|no:"),
        ("sum by (status) (threadkeep_runs_total)", "threadkeep_runs_total has no status:"),
        ("sum by (outcome) (threadkeep_runs_total) {{instance}}", "instance is not in the answer:"),
        ("sum(threadkeep_runs_total) {{outcome}}", "outcome is not in the answer:"),
    ] {
        match used(query, &existing) {
            Ok(names) => assert!(wrong.is_empty() && names.len() == 1, "{query}"),
            Err(error) => assert!(!wrong.is_empty() && error.starts_with(wrong), "{error}"),
        }
    }
    let page =
        "`threadkeep_` `runs_total{outcome=\"ok\"}`, `{outcome=\"error\"}` `a.b_c` `error` `runs_lost_total`";
    let names = ["runs_total{outcome=\"ok\"}", "runs_total{outcome=\"error\"}", "runs_lost_total"];
    assert_eq!(on_page(page), names.map(|name| format!("threadkeep_{name}")));
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
