//! The `models` section: the language models that runs may use.

use std::collections::HashSet;
use std::ops::Bound;
use std::path::{Path, PathBuf};

use super::node::Node;
use super::secret::{FreeForm, Secret};
use super::sections::LONGEST_SECONDS;

/// The name of the model used when none is configured.
pub const DEMO_MODEL: &str = "demo";
/// The `use` of a scripted model.
pub const SCRIPTED: &str = "scripted";
/// The plain `use` of a model behind an OpenAI-compatible endpoint.
pub const OPENAI: &str = "openai";

/// The class name, or ending of one, for the OpenAI chat-completions protocol.
const OPENAI_CLASS: &str = "ChatOpenAI";
/// Has the same ending as the class above, but its own addresses and credentials.
const AZURE_CLASS: &str = "AzureChatOpenAI";

/// Keys that are read here; all others go to the client.
const KNOWN: [&str; 26] = [
    "name",
    "use",
    "model",
    "script",
    "display_name",
    "description",
    "supports_thinking",
    "supports_reasoning_effort",
    "supports_vision",
    "context_window",
    "when_thinking_enabled",
    "when_thinking_disabled",
    "thinking",
    "stream_chunk_timeout",
    "pricing",
    "api_key",
    "base_url",
    "api_base",
    "max_tokens",
    "temperature",
    "request_timeout",
    "timeout",
    "max_retries",
    "use_responses_api",
    "output_version",
    "disable_streaming",
];

/// What implements a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelKind {
    /// Prepared answers, for demonstrations and tests.
    Scripted {
        /// The file with the answers; `None` for the built-in demonstration. A relative path resolves against the
        /// directory of the configuration file.
        script: Option<PathBuf>,
    },
    /// An endpoint that speaks the OpenAI chat-completions protocol.
    OpenAiCompatible,
}

/// One entry of `models`.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// The name by which runs ask for it; unique.
    pub name: String,
    /// The `use` key as written.
    pub class: String,
    /// What implements it, derived from `use`.
    pub kind: ModelKind,
    /// The provider's name for the model.
    pub model: String,
    /// The name shown to people.
    pub display_name: Option<String>,
    /// One line about the model.
    pub description: Option<String>,
    /// Whether thinking can be switched on.
    pub supports_thinking: bool,
    /// Whether a reasoning effort can be requested.
    pub supports_reasoning_effort: bool,
    /// Whether images may be sent.
    pub supports_vision: bool,
    /// The size of the context in tokens; at least 1.
    pub context_window: Option<u64>,
    /// Request fields merged in when a run thinks.
    pub when_thinking_enabled: FreeForm,
    /// Request fields merged in when a run does not think.
    pub when_thinking_disabled: FreeForm,
    /// The short form of the field `thinking` of [`Model::when_thinking_enabled`]; keys of both are taken from here.
    pub thinking: FreeForm,
    /// Seconds without a chunk after which a stream is considered dead; more than 0, at most a hundred years, default
    /// 240.
    pub stream_chunk_timeout: f64,
    /// Token prices, as shown to users.
    pub pricing: FreeForm,
    /// The credential sent to the endpoint.
    pub api_key: Option<Secret>,
    /// The endpoint's base URL; `api_base` is an alias.
    pub base_url: Option<String>,
    /// The maximum tokens of an answer; at least 1.
    pub max_tokens: Option<u64>,
    /// The sampling temperature; at least 0.
    pub temperature: Option<f64>,
    /// Seconds until an answer must have begun; more than 0, at most a hundred years. `timeout` is an alias.
    pub request_timeout: Option<f64>,
    /// How often to retry a failed request. Not read: a call is tried three times.
    pub max_retries: Option<u32>,
    /// All other keys, which the client sends unchanged.
    pub client_options: FreeForm,
}

impl Model {
    /// The model used when none is configured: it plays the built-in demonstration.
    pub fn demo() -> Self {
        Self {
            name: DEMO_MODEL.to_owned(),
            class: SCRIPTED.to_owned(),
            kind: ModelKind::Scripted { script: None },
            model: DEMO_MODEL.to_owned(),
            display_name: None,
            description: None,
            supports_thinking: false,
            supports_reasoning_effort: false,
            supports_vision: false,
            context_window: None,
            when_thinking_enabled: FreeForm::default(),
            when_thinking_disabled: FreeForm::default(),
            thinking: FreeForm::default(),
            stream_chunk_timeout: 240.0,
            pricing: FreeForm::default(),
            api_key: None,
            base_url: None,
            max_tokens: None,
            temperature: None,
            request_timeout: None,
            max_retries: None,
            client_options: FreeForm::default(),
        }
    }

    fn read(node: &Node<'_>, config_dir: &Path) -> Self {
        let default = Self::demo();
        let time = (Bound::Excluded(0.0), Bound::Included(f64::from(LONGEST_SECONDS)));
        let class = node.required_text("use");
        let (base_url, api_base) = (node.nonempty_text("base_url"), node.nonempty_text("api_base"));
        if base_url.is_some() && api_base.is_some() {
            node.problem("api_base", "is an alias of base_url; set only one of them");
        }
        let (request_timeout, timeout) =
            (node.opt_float("request_timeout", time), node.opt_float("timeout", time));
        if request_timeout.is_some() && timeout.is_some() {
            node.problem("timeout", "is an alias of request_timeout; set only one of them");
        }
        Self {
            name: node.required_text("name"),
            kind: read_kind(node, &class, config_dir),
            class,
            model: node.required_text("model"),
            display_name: node.text("display_name"),
            description: node.text("description"),
            supports_thinking: node.bool("supports_thinking", default.supports_thinking),
            supports_reasoning_effort: node
                .bool("supports_reasoning_effort", default.supports_reasoning_effort),
            supports_vision: node.bool("supports_vision", default.supports_vision),
            context_window: node.opt_int("context_window", 1..),
            when_thinking_enabled: node.free_form("when_thinking_enabled"),
            when_thinking_disabled: node.free_form("when_thinking_disabled"),
            thinking: node.free_form("thinking"),
            stream_chunk_timeout: node.float("stream_chunk_timeout", default.stream_chunk_timeout, time),
            pricing: node.free_form("pricing"),
            // Keys from files and clipboards end with a line break, which no header may have.
            api_key: node
                .secret("api_key")
                .map(|key| Secret::new(key.expose().trim()))
                .filter(|key| !key.expose().is_empty()),
            base_url: base_url.or(api_base),
            max_tokens: node.opt_int("max_tokens", 1..),
            temperature: node.opt_float("temperature", 0.0..),
            request_timeout: request_timeout.or(timeout),
            max_retries: node.opt_int("max_retries", 0..),
            client_options: node.rest(&KNOWN),
        }
    }
}

/// Reads the section. Without any model, the demo model is the only one; a duplicate name is a problem.
pub(super) fn read(root: &Node<'_>, config_dir: &Path) -> Vec<Model> {
    let mut names = HashSet::new();
    let mut models = Vec::new();
    for node in root.items("models") {
        let model = Model::read(&node, config_dir);
        if !model.name.is_empty() && !names.insert(model.name.clone()) {
            node.problem(
                "name",
                format!("another model is also called {}; names must be unique", node.shown("name")),
            );
        }
        models.push(model);
    }
    if models.is_empty() {
        models.push(Model::demo());
    }
    models
}

fn read_kind(node: &Node<'_>, class: &str, config_dir: &Path) -> ModelKind {
    let name = class.rsplit([':', '.']).next().unwrap_or(class);
    if class == SCRIPTED {
        ModelKind::Scripted { script: node.nonempty_text("script").map(|script| config_dir.join(script)) }
    } else {
        let speaks_openai = class == OPENAI || (name.ends_with(OPENAI_CLASS) && !name.ends_with(AZURE_CLASS));
        // A missing `use` has already been reported.
        if !speaks_openai && !class.trim().is_empty() {
            node.problem(
                "use",
                format!(
                    "no client for {} in this build; `use: {OPENAI}` with the endpoint's base_url reaches \
                     any OpenAI-compatible service, `use: {SCRIPTED}` plays a script",
                    node.shown("use")
                ),
            );
        }
        refuse_unsupported(node);
        if node.value("script").is_some() {
            node.problem("script", format!("is only for models with `use: {SCRIPTED}`"));
        }
        ModelKind::OpenAiCompatible
    }
}

/// Refuses settings of LangChain's client that ask for what this one does not do. Providers refuse them as parameters.
fn refuse_unsupported(node: &Node<'_>) {
    if node.bool("use_responses_api", false) {
        node.problem(
            "use_responses_api",
            "must be false: models are called over the chat-completions protocol",
        );
    }
    if node.nonempty_text("output_version").is_some_and(|version| version != "v0") {
        node.problem("output_version", "must be v0, that of the chat-completions protocol; remove the key");
    }
    if node.bool("disable_streaming", false) {
        node.problem("disable_streaming", "must be false: answers are always streamed");
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::node::Report;
    use super::*;

    fn models(list: &Value) -> Result<Vec<Model>, String> {
        let report = Report::default();
        let tree = json!({ "models": list });
        let models = read(&Node::root(tree.as_object().unwrap(), &report), Path::new("/etc/threadkeep"));
        report.finish(None).map(|_| models).map_err(|error| error.to_string())
    }

    fn one(entry: &Value) -> Result<Model, String> {
        models(&json!([entry])).map(|mut models| models.remove(0))
    }

    #[test]
    fn no_model_gives_the_scripted_demo() {
        for list in [json!(null), json!([])] {
            assert_eq!(models(&list).unwrap(), [Model::demo()]);
        }
        assert_eq!(Model::demo().name, "demo");
        assert_eq!(Model::demo().kind, ModelKind::Scripted { script: None });
    }

    #[test]
    fn a_full_entry_is_read_and_the_rest_goes_to_the_client() {
        let model = one(&json!({
            "name": "big", "use": "langchain_openai:ChatOpenAI", "model": "gpt-x",
            "display_name": "Big", "description": "d",
            "supports_thinking": "true", "supports_reasoning_effort": true, "supports_vision": true,
            "context_window": "200000",
            "when_thinking_enabled": {"extra_body": {"thinking": 1}},
            "when_thinking_disabled": {"extra_body": {"thinking": 0}},
            "thinking": {"type": "enabled"},
            "stream_chunk_timeout": 30, "pricing": {"currency": "EUR"},
            "api_key": "sk-1", "base_url": "http://localhost/v1",
            "max_tokens": 4096, "temperature": "0.7", "request_timeout": 600.5, "max_retries": 2,
            "top_p": 0.9, "default_headers": {"X-Key": "sk-2"},
        }))
        .unwrap();
        assert_eq!((model.name.as_str(), model.model.as_str()), ("big", "gpt-x"));
        assert_eq!(model.kind, ModelKind::OpenAiCompatible);
        assert_eq!(model.class, "langchain_openai:ChatOpenAI");
        assert_eq!((model.display_name.as_deref(), model.description.as_deref()), (Some("Big"), Some("d")));
        assert!(model.supports_thinking && model.supports_reasoning_effort && model.supports_vision);
        assert_eq!(model.context_window, Some(200_000));
        assert_eq!(model.when_thinking_enabled.get("extra_body"), Some(&json!({"thinking": 1})));
        assert_eq!(model.when_thinking_disabled.get("extra_body"), Some(&json!({"thinking": 0})));
        assert_eq!(model.thinking.get("type"), Some(&json!("enabled")));
        assert_eq!((model.stream_chunk_timeout, model.temperature), (30.0, Some(0.7)));
        assert_eq!(model.pricing.get("currency"), Some(&json!("EUR")));
        assert_eq!(model.api_key, Some(Secret::new("sk-1")));
        assert_eq!(model.base_url.as_deref(), Some("http://localhost/v1"));
        assert_eq!(
            (model.max_tokens, model.request_timeout, model.max_retries),
            (Some(4096), Some(600.5), Some(2))
        );
        let rest: Vec<&String> = model.client_options.as_map().keys().collect();
        assert_eq!(rest, ["default_headers", "top_p"]);
        let shown = format!("{model:?}");
        assert!(!shown.contains("sk-1") && !shown.contains("sk-2"), "{shown}");
    }

    #[test]
    fn a_key_is_read_without_the_line_break_after_it() {
        let key = |text: &str| {
            one(&json!({"name": "m", "use": "openai", "model": "x", "api_key": text})).unwrap().api_key
        };
        assert_eq!(key(" sk-1\r\n"), Some(Secret::new("sk-1")));
        assert_eq!(key("\r\n"), None);
    }

    #[test]
    fn a_short_entry_has_the_defaults() {
        let model = one(&json!({"name": "demo", "use": "scripted", "model": "demo"})).unwrap();
        assert_eq!(model, Model::demo());
    }

    #[test]
    fn api_base_is_another_word_for_base_url_but_not_beside_it() {
        let entry = |extra: Value| {
            let mut entry = json!({"name": "m", "use": "openai", "model": "x"});
            entry.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            one(&entry)
        };
        assert_eq!(entry(json!({"api_base": "http://a"})).unwrap().base_url.as_deref(), Some("http://a"));
        let error = entry(json!({"api_base": "http://a", "base_url": "http://b"})).unwrap_err();
        assert!(error.contains("models[0].api_base"), "{error}");
    }

    #[test]
    fn settings_of_langchains_client_that_this_one_lacks_are_refused_by_name() {
        for (key, without_effect, refused) in [
            ("use_responses_api", json!(false), json!(true)),
            ("output_version", json!("v0"), json!("responses/v1")),
            ("output_version", json!(""), json!("v1")),
            ("disable_streaming", json!("false"), json!("tool_calls")),
            ("disable_streaming", json!(null), json!(true)),
        ] {
            let entry = |value: Value| one(&json!({"name": "m", "use": "openai", "model": "x", key: value}));
            assert_eq!(entry(without_effect).unwrap().client_options.as_map().len(), 0, "{key}");
            let error = entry(refused).unwrap_err();
            assert!(error.contains(&format!("models[0].{key}: must be")), "{error}");
        }
    }

    #[test]
    fn openai_classes_are_recognised_and_others_refused_with_a_remedy() {
        let with =
            |class: &str| one(&json!({"name": "m", "use": class, "model": "x"})).map(|model| model.kind);
        for class in [
            "openai",
            "langchain_openai:ChatOpenAI",
            "ChatOpenAI",
            "pkg.mod:PatchedChatOpenAI",
            "a.b.ChatOpenAI",
        ] {
            assert_eq!(with(class), Ok(ModelKind::OpenAiCompatible), "{class}");
        }
        for class in [
            "langchain_anthropic:ChatAnthropic",
            "langchain_openai:AzureChatOpenAI",
            "Scripted",
            "ChatOpenAI:x",
        ] {
            let error = with(class).unwrap_err();
            assert!(error.contains("models[0].use") && error.contains(class), "{error}");
            assert!(error.contains("use: openai") && error.contains("use: scripted"), "{error}");
        }
    }

    #[test]
    fn timeout_is_another_word_for_request_timeout_but_not_beside_it() {
        let entry = |fields: Value| {
            let mut entry = json!({"name": "m", "use": "openai", "model": "x"});
            entry.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            one(&entry)
        };
        let model = entry(json!({"timeout": 30})).unwrap();
        assert_eq!((model.request_timeout, model.client_options.as_map().len()), (Some(30.0), 0));
        for (fields, said) in [
            (json!({"timeout": 0}), "models[0].timeout: must be a number > 0"),
            (
                json!({"timeout": 30, "request_timeout": 60}),
                "models[0].timeout: is an alias of request_timeout",
            ),
        ] {
            let error = entry(fields).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }

    #[test]
    fn scripts_resolve_against_the_configuration_and_belong_to_scripted_models() {
        let with = |class: &str, script: &str| {
            one(&json!({"name": "m", "use": class, "model": "x", "script": script})).map(|model| model.kind)
        };
        let at = |path: &str| Ok(ModelKind::Scripted { script: Some(PathBuf::from(path)) });
        assert_eq!(with("scripted", "scripts/a.json"), at("/etc/threadkeep/scripts/a.json"));
        assert_eq!(with("scripted", "/srv/a.json"), at("/srv/a.json"));
        assert!(with("openai", "a.json").unwrap_err().contains("models[0].script"));
    }

    #[test]
    fn names_uses_and_models_are_required() {
        let error = models(&json!([{}, null])).unwrap_err();
        for key in ["[0].name", "[0].use", "[0].model", "[1].name", "[1].use", "[1].model"] {
            assert!(error.contains(&format!("models{key}: is required")), "{error}");
        }
        assert!(!error.contains("no client") && !error.contains("unique"), "{error}");
    }

    #[test]
    fn two_models_of_one_name_are_a_problem() {
        let entry = json!({"name": "m", "use": "openai", "model": "x"});
        let error = models(&json!([entry, entry])).unwrap_err();
        assert!(error.contains("models[1].name: another model is also called \"m\""), "{error}");
    }

    #[test]
    fn numbers_outside_their_ranges_are_problems() {
        for (key, value) in [
            ("context_window", json!(0)),
            ("stream_chunk_timeout", json!(0)),
            ("max_tokens", json!(0)),
            ("temperature", json!(-0.1)),
            ("request_timeout", json!(0)),
            ("max_retries", json!(-1)),
            ("supports_vision", json!("maybe")),
            ("pricing", json!(5)),
        ] {
            let mut entry = json!({"name": "m", "use": "openai", "model": "x"});
            entry[key] = value;
            let error = one(&entry).unwrap_err();
            assert!(error.contains(&format!("models[0].{key}: must be")), "{error}");
        }
    }

    #[test]
    fn a_time_that_no_clock_reaches_is_a_problem() {
        for key in ["stream_chunk_timeout", "request_timeout"] {
            for (seconds, is_refused) in [(3_153_600_000.0, false), (3_153_600_001.0, true), (1e300, true)] {
                let mut entry = json!({"name": "m", "use": "openai", "model": "x"});
                entry[key] = json!(seconds);
                let error = one(&entry).err().unwrap_or_default();
                let text = format!("models[0].{key}: must be a number > 0 and <= 3153600000");
                assert_eq!(error.contains(&text), is_refused, "{seconds}: {error}");
            }
        }
    }
}
