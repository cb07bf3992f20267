//! Settings without an effect: those that no feature reads yet, unknown keys, and names of models that do not exist.
//! All cause warnings at load, because an operator who sets one expects an effect.

use std::path::Path;
use std::sync::LazyLock;

use serde_json::{Map, Value};

use super::interpolate::{indexed, joined};
use super::node::Report;
use super::upgrade::EXAMPLE;
use super::version::EXAMPLE_FILE;
use super::yaml;
use super::{Config, INHERIT_MODEL, SECTIONS, Subagents};

/// The settings that are parsed and validated but not read yet, by dotted path; `models.x` is the key `x` of every
/// model. The example file marks each of them `[no effect yet]`. Remove a setting from this list when you implement it:
/// a test compares the list with the sources.
pub const UNREAD: [&str; 12] = [
    "database.echo_sql",
    "models.max_retries",
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
];

/// How alike an unknown key and a known one must be for the warning to suggest it; 1 is equal.
const ALIKE: f64 = 0.85;

/// The example file, which shows every default.
static DEFAULTS: LazyLock<Map<String, Value>> =
    LazyLock::new(|| yaml::parse(EXAMPLE, Path::new(EXAMPLE_FILE)).unwrap_or_default());

/// The warning for a setting that nothing reads yet.
pub fn no_effect_warning(path: &str) -> String {
    format!("`{path}` has no effect yet: it is checked, and nothing reads it")
}

/// The warning for an unknown top-level key.
pub fn unknown_section_warning(key: &str) -> String {
    let nearest = suggestion(key, SECTIONS);
    format!("`{key}` has no effect: no section of the configuration has this name{nearest}")
}

/// The warning for an unknown key of the mapping at `path`, which knows the keys `known`.
fn unknown_setting_warning<'a>(path: &str, key: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let nearest = suggestion(key, known);
    format!("`{}` has no effect: `{path}` has no such setting{nearest}", joined(path, key))
}

/// The known key that a misspelt one probably means.
fn suggestion<'a>(key: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let likeness = |known: &'a str| (strsim::jaro_winkler(key, known), known);
    let best = known.into_iter().map(likeness).max_by(|(one, _), (other, _)| one.total_cmp(other));
    match best {
        Some((likeness, best)) if likeness >= ALIKE => format!("; did you mean `{best}`?"),
        _ => String::new(),
    }
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
    for (key, value) in sections.iter().filter(|(key, _)| SECTIONS.contains(&key.as_str())) {
        warn_of_unknown(value, key, report);
    }
}

/// Warns about a model of titles, summaries or a subagent that is not configured: otherwise a run would be the first to
/// find out.
pub(super) fn warn_of_missing_models(config: &Config, report: &Report) {
    let Config { title, summarization, .. } = config;
    let title = title.model_name.as_deref().filter(|_| title.enabled);
    let summary = summarization.model_name.as_deref().filter(|_| summarization.enabled);
    for (key, name, effect) in [
        ("title.model_name", title, "titles are cut from the first message"),
        ("summarization.model_name", summary, "runs fail"),
    ] {
        if name.is_some_and(|name| config.model(name).is_none()) {
            report.warn(format!("`{key}` names no model of `models`: {effect}"));
        }
    }
    let Subagents { agents, custom_agents, .. } = &config.subagents;
    let overrides = agents.iter().filter_map(|(name, set)| Some(("agents", name, set.model.as_ref()?)));
    let is_overridden = |name: &str| agents.get(name).is_some_and(|set| set.model.is_some());
    let own = custom_agents.iter().filter(|agent| !is_overridden(&agent.name));
    let own = own.map(|agent| ("custom_agents", &agent.name, &agent.model));
    for (section, name, model) in overrides.chain(own) {
        if model != INHERIT_MODEL && config.model(model).is_none() {
            report.warn(format!(
                "`subagents.{section}.{name}.model` names no model of `models`: delegations to it fail"
            ));
        }
    }
}

/// Warns about each key that nobody looked for, in mappings whose keys were looked for one by one.
fn warn_of_unknown(value: &Value, path: &str, report: &Report) {
    match value {
        Value::Object(map) => {
            let known = report.asked_of(path);
            for (key, value) in map.iter().filter(|_| !known.is_empty()) {
                if known.contains(key) {
                    warn_of_unknown(value, &joined(path, key), report);
                } else {
                    report.warn(unknown_setting_warning(path, key, known.iter().map(String::as_str)));
                }
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                warn_of_unknown(item, &indexed(path, index), report);
            }
        }
        _ => {}
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
        ] {
            assert_eq!(warnings(yaml), [no_effect_warning(path)], "{yaml}");
        }
    }

    #[test]
    fn retries_of_a_model_are_a_warning_because_their_number_is_fixed() {
        assert_eq!(
            warnings("models: [{name: a, use: openai, model: x, max_retries: 9}]"),
            [no_effect_warning("models.max_retries")]
        );
    }

    #[test]
    fn a_setting_that_says_what_is_the_default_is_no_warning() {
        for yaml in [
            "token_budget: {enabled: false, hard_stop_threshold: 1}",
            "subagents: {timeout_seconds: 1800, token_budget: {max_tokens: }}",
            "tools:",
            "tools: [{name: ls, group: files, use: ls}]\ntool_groups: [{name: files}]",
            "acp_agents: {}",
            "sandbox: {use: local, environment: {}}",
        ] {
            assert_eq!(warnings(yaml), Vec::<String>::new(), "{yaml}");
        }
    }

    #[test]
    fn a_model_of_no_such_name_is_a_warning_unless_nothing_needs_it() {
        let title = "`title.model_name` names no model of `models`: titles are cut from the first message";
        let summary = "`summarization.model_name` names no model of `models`: runs fail";
        let summaries = "trigger: {type: tokens, value: 9}, model_name";
        for (yaml, expected) in [
            ("title: {model_name: gone}".to_owned(), Some(title)),
            (format!("summarization: {{enabled: true, {summaries}: gone}}"), Some(summary)),
            ("title: {model_name: demo}".to_owned(), None),
            (format!("summarization: {{enabled: true, {summaries}: demo}}"), None),
            ("title: {enabled: false, model_name: gone}".to_owned(), None),
            (format!("summarization: {{enabled: false, {summaries}: gone}}"), None),
            // As a variable that is empty.
            ("title: {model_name: \"\"}".to_owned(), None),
            (format!("summarization: {{enabled: true, {summaries}: \"\"}}"), None),
        ] {
            assert_eq!(warnings(&yaml), Vec::from_iter(expected), "{yaml}");
        }
    }

    #[test]
    fn a_model_of_no_such_name_is_a_warning_at_the_subagent_that_has_it() {
        let warning = |path: &str| {
            format!("`subagents.{path}.model` names no model of `models`: delegations to it fail")
        };
        let custom = |model: &str| {
            format!("custom_agents: {{x: {{description: d, system_prompt: p, model: {model}}}}}")
        };
        for (section, expected) in [
            ("agents: {bash: {model: gone}}".to_owned(), Some(warning("agents.bash"))),
            (custom("gone"), Some(warning("custom_agents.x"))),
            (format!("{}, agents: {{x: {{model: inherit}}}}", custom("gone")), None),
            (custom("demo"), None),
            (custom("inherit"), None),
            (custom("\"\""), None),
            ("agents: {bash: {model: demo}}".to_owned(), None),
        ] {
            let yaml = format!("subagents: {{{section}}}");
            assert_eq!(warnings(&yaml), Vec::from_iter(expected), "{yaml}");
        }
    }

    #[test]
    fn a_section_of_no_such_name_is_a_warning() {
        assert_eq!(warnings("sumarization: {enabled: true}"), [unknown_section_warning("sumarization")]);
        assert_eq!(
            unknown_section_warning("sumarization"),
            "`sumarization` has no effect: no section of the configuration has this name; did you mean `summarization`?"
        );
        assert!(unknown_section_warning("zzz").ends_with("has this name"));
    }

    #[test]
    fn a_setting_of_no_such_name_is_a_warning_that_suggests_one() {
        for (yaml, warning) in [
            (
                "stream_bridge: {queue_maxsiz: 3}",
                "`stream_bridge.queue_maxsiz` has no effect: `stream_bridge` has no such setting; did you mean \
                 `queue_maxsize`?",
            ),
            (
                "database: {backend: memory, checkpoint_delta: {frequency_of_snapshots: 3}}",
                "`database.checkpoint_delta.frequency_of_snapshots` has no effect: `database.checkpoint_delta` has \
                 no such setting",
            ),
            (
                "sandbox: {use: local, bash_comand_timeout: 3}",
                "`sandbox.bash_comand_timeout` has no effect: `sandbox` has no such setting; did you mean \
                 `bash_command_timeout`?",
            ),
            // A setting of a container, of which this build has none.
            (
                "sandbox: {use: local, mounts: [/srv]}",
                "`sandbox.mounts` has no effect: `sandbox` has no such setting",
            ),
            (
                "summarization: {trigger: [{type: messages, value: 5, valeu: 6}]}",
                "`summarization.trigger[0].valeu` has no effect: `summarization.trigger[0]` has no such setting; did \
                 you mean `value`?",
            ),
        ] {
            assert_eq!(warnings(yaml), [warning], "{yaml}");
        }
    }

    /// Models take keys of their providers, and names are chosen by the operator.
    #[test]
    fn keys_that_are_passed_on_and_names_are_no_unknown_settings() {
        for yaml in [
            "models: [{name: a, use: openai, model: x, extra_body: {anything: {at: all}}, temperature: 1}]",
            "loop_detection: {tool_freq_overrides: {my_tool: {warn: 3, hard_limit: 9}}}",
        ] {
            assert_eq!(warnings(yaml), Vec::<String>::new(), "{yaml}");
        }
    }

    /// A dot in a name is no step into a mapping.
    #[test]
    fn a_name_with_dots_is_known_and_its_settings_are_looked_through() {
        for yaml in [
            "acp_agents: {gemini-2.5: {command: gemini, description: d}}",
            "loop_detection: {tool_freq_overrides: {repo.search: {warn: 3, hard_limit: 9}}}",
            "mcp_servers: {docs: {command: docs, routing: {repo.search: {keywords: [find]}}}}",
            "models: [{name: a, use: openai, model: x, extra.body: 1}]",
        ] {
            assert_eq!(warnings(yaml), Vec::<String>::new(), "{yaml}");
        }
        assert_eq!(
            warnings("acp_agents: {gemini-2.5: {command: gemini, description: d, timeout_secnods: 5}}"),
            [
                "`acp_agents.gemini-2.5.timeout_secnods` has no effect: `acp_agents.gemini-2.5` has no such setting; did you \
                 mean `timeout_seconds`?"
            ]
        );
    }

    #[test]
    fn every_setting_of_the_example_is_known() {
        assert_eq!(warnings(EXAMPLE), Vec::<String>::new());
    }

    /// It means that agents have no tools.
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
