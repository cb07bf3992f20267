//! Settings without an effect: those that no feature reads yet, and unknown top-level keys. Both cause warnings at
//! load, because an operator who sets one expects an effect.

use std::path::Path;
use std::sync::LazyLock;

use serde_json::{Map, Value};

use super::SECTIONS;
use super::node::Report;
use super::upgrade::EXAMPLE;
use super::version::EXAMPLE_FILE;
use super::yaml;

/// The settings that are parsed and validated but not read yet, by dotted path; `models.x` is the key `x` of every
/// model. The example file marks each of them `[no effect yet]`. Remove a setting from this list when you implement it:
/// a test compares the list with the sources.
pub const UNREAD: [&str; 22] = [
    "database.echo_sql",
    "models.pricing",
    "models.supports_vision",
    "run_events.track_token_usage",
    "stream_bridge.type",
    "stream_bridge.redis_url",
    "stream_bridge.max_connections",
    "stream_bridge.stream_ttl_seconds",
    "stream_bridge.recovered_stream_cleanup_delay_seconds",
    "summarization.skill_file_read_tool_names",
    "loop_detection.max_tracked_threads",
    "token_budget",
    "verification",
    "sandbox.environment",
    "tools",
    "tool_groups",
    "tool_search",
    "subagents",
    "subagent_runtime",
    "subagent_batches",
    "acp_agents",
    "agent_storage",
];

/// The example file, which shows every default.
static DEFAULTS: LazyLock<Map<String, Value>> =
    LazyLock::new(|| yaml::parse(EXAMPLE, Path::new(EXAMPLE_FILE)).unwrap_or_default());

/// The warning for a setting that nothing reads yet.
pub fn no_effect_warning(path: &str) -> String {
    format!("`{path}` has no effect yet: it is checked, and nothing reads it")
}

/// The warning for an unknown top-level key.
pub fn unknown_section_warning(key: &str) -> String {
    format!("`{key}` has no effect: no section of the configuration has this name")
}

/// Warns about each setting in the file that has no effect. Setting a default value is fine.
pub(super) fn warn(sections: &Map<String, Value>, report: &Report) {
    let set = UNREAD.iter().filter(|path| values(sections, path).iter().any(|value| !value.is_null()));
    for path in set {
        let default = values(&DEFAULTS, path).first().copied();
        if !values(sections, path).into_iter().all(|value| says_no_more(value, default)) {
            report.warn(no_effect_warning(path));
        }
    }
    for key in sections.keys().filter(|key| !SECTIONS.contains(&key.as_str())) {
        report.warn(unknown_section_warning(key));
    }
}

/// The values at a path: several if it leads through a list, none if it is not set.
fn values<'a>(sections: &'a Map<String, Value>, path: &str) -> Vec<&'a Value> {
    let mut keys = path.split('.');
    let mut found: Vec<&Value> = keys.next().and_then(|key| sections.get(key)).into_iter().collect();
    for key in keys {
        let items = found.into_iter().flat_map(|value| match value {
            Value::Array(items) => items.iter().collect(),
            value => vec![value],
        });
        found = items.filter_map(|item| item.get(key)).collect();
    }
    found
}

/// Whether a value equals the default; omitted keys have their defaults.
fn says_no_more(value: &Value, default: Option<&Value>) -> bool {
    match (value, default) {
        (Value::Null, _) => true,
        (Value::Object(map), Some(Value::Object(defaults))) => {
            map.iter().all(|(key, value)| says_no_more(value, defaults.get(key)))
        }
        (Value::Number(number), Some(Value::Number(default))) => number.as_f64() == default.as_f64(),
        (value, Some(default)) => value == default,
        (_, None) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{load, load_error};
    use super::*;

    const MARK: &str = "[no effect yet]";

    fn warnings(yaml: &str) -> Vec<String> {
        load(yaml).unwrap().warnings
    }

    #[test]
    fn a_setting_that_nothing_reads_is_a_warning_that_names_it() {
        for (yaml, path) in [
            ("database: {echo_sql: true}", "database.echo_sql"),
            (
                "models: [{name: a, use: openai, model: x}, {name: b, use: openai, model: x, pricing: {currency: USD}}]",
                "models.pricing",
            ),
            ("run_events: {track_token_usage: false}", "run_events.track_token_usage"),
            ("stream_bridge: {stream_ttl_seconds: 5}", "stream_bridge.stream_ttl_seconds"),
            ("token_budget: {enabled: true}", "token_budget"),
            ("verification: {receipts_enabled: false}", "verification"),
            ("sandbox: {use: local, environment: {A: b}}", "sandbox.environment"),
            ("tools: [{name: ls, use: ls}]", "tools"),
            ("tool_groups: [{name: shell}]", "tool_groups"),
            ("tool_search: {enabled: true}", "tool_search"),
            ("subagents: {token_budget: {max_tokens: 9000}}", "subagents"),
            ("subagents: {max_total_per_run: 2}", "subagents"),
            ("subagent_runtime: {max_running: 4}", "subagent_runtime"),
            ("subagent_batches: {enabled: true}", "subagent_batches"),
            ("acp_agents: {a: {command: a, description: b}}", "acp_agents"),
            ("agent_storage: {backend: db}", "agent_storage"),
        ] {
            assert_eq!(warnings(yaml), [no_effect_warning(path)], "{yaml}");
        }
    }

    #[test]
    fn a_setting_that_says_what_is_the_default_is_no_warning() {
        for yaml in [
            "token_budget: {enabled: false, hard_stop_threshold: 1}",
            "subagents: {timeout_seconds: 1800, token_budget: {max_tokens: }}",
            "tools:",
            "acp_agents: {}",
            "sandbox: {use: local, environment: {}}",
        ] {
            assert_eq!(warnings(yaml), Vec::<String>::new(), "{yaml}");
        }
    }

    #[test]
    fn a_section_of_no_such_name_is_a_warning() {
        assert_eq!(warnings("sumarization: {enabled: true}"), [unknown_section_warning("sumarization")]);
    }

    /// It means that agents have no tools, which is not implemented.
    #[test]
    fn an_empty_list_of_tools_is_refused() {
        let error = load_error("tools: []");
        assert!(error.contains("tools: ") && error.contains("remove the key"), "{error}");
    }

    /// The dotted path of each marked key in the example; the mark is in the key's own comment or in the one before it.
    fn marked() -> Vec<String> {
        let (mut found, mut path, mut comment_is_marked) = (Vec::new(), Vec::<(usize, &str)>::new(), false);
        for line in EXAMPLE.lines() {
            let text = line.trim_start();
            if text.is_empty() {
                comment_is_marked = false;
            } else if text.starts_with('#') {
                // Ignore indented comments, which show example entries.
                comment_is_marked |= text.contains(MARK) && !text.starts_with("#  ");
            } else {
                let (indent, (key, rest)) = (line.len() - text.len(), text.split_once(':').unwrap());
                path.retain(|(outer, _)| *outer < indent);
                path.push((indent, key));
                if comment_is_marked || rest.contains(MARK) {
                    found.push(path.iter().map(|(_, key)| *key).collect::<Vec<_>>().join("."));
                }
                comment_is_marked = false;
            }
        }
        found
    }

    #[test]
    fn the_example_marks_what_has_no_effect_and_nothing_else() {
        // Models are only shown in a comment.
        let (of_models, mut others): (Vec<&str>, Vec<&str>) =
            UNREAD.iter().partition(|path| path.starts_with("models."));
        let mut marked = marked();
        others.sort_unstable();
        marked.sort_unstable();
        assert_eq!(marked, others);
        for key in of_models.iter().map(|path| path.trim_start_matches("models.")) {
            let shown = EXAMPLE.lines().find(|line| line.starts_with(&format!("#     {key}:"))).unwrap();
            assert!(shown.contains(MARK), "{shown}");
        }
    }
}
