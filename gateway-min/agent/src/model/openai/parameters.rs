//! The settings that are parameters of a request, and those of the client.

use serde_json::{Map, Value};

use super::super::ModelSettings;

/// The setting that limits how long an answer may take to start, in seconds.
pub(super) const REQUEST_TIMEOUT: &str = "request_timeout";
/// The setting with headers of every request.
pub(super) const DEFAULT_HEADERS: &str = "default_headers";
/// The setting with parameters of the address of every request.
pub(super) const DEFAULT_QUERY: &str = "default_query";
/// The setting that names whose account requests are counted for, as LangChain's client has it.
pub(super) const ORGANIZATION: &str = "organization";
/// The setting that asks for the usage of streamed answers, as LangChain's client has it.
const STREAM_USAGE: &str = "stream_usage";
/// The parameter for that, which is sent unless a setting says otherwise.
const STREAM_OPTIONS: &str = "stream_options";
/// Settings of the client, not of a request.
const CLIENT_SETTINGS: [&str; 7] =
    [REQUEST_TIMEOUT, "timeout", "max_retries", "streaming", DEFAULT_HEADERS, DEFAULT_QUERY, ORGANIZATION];
/// The setting, and older parameter, that limits the tokens of an answer.
const MAX_TOKENS: &str = "max_tokens";
/// The newer parameter for that, which servers other than those of OpenAI often ignore or refuse.
const MAX_COMPLETION_TOKENS: &str = "max_completion_tokens";
/// Settings whose entries are request parameters.
const NESTED_PARAMETERS: [&str; 2] = ["model_kwargs", "extra_body"];

/// The request parameters among the settings.
pub(super) fn parameters(settings: &ModelSettings, thinking: Option<bool>) -> Map<String, Value> {
    let mut parameters = settings.extra.clone();
    match thinking {
        Some(true) => merge(&mut parameters, &settings.when_thinking_enabled),
        Some(false) => merge(&mut parameters, &settings.when_thinking_disabled),
        None => {}
    }
    for key in CLIENT_SETTINGS {
        parameters.remove(key);
    }
    if parameters.remove(STREAM_USAGE) == Some(Value::Bool(false)) {
        parameters.entry(STREAM_OPTIONS).or_insert(Value::Null);
    }
    for key in NESTED_PARAMETERS {
        if let Some(Value::Object(nested)) = parameters.remove(key) {
            merge(&mut parameters, &nested);
        }
    }
    if takes_completion_tokens(&settings.model)
        && !parameters.contains_key(MAX_COMPLETION_TOKENS)
        && let Some(most) = parameters.remove(MAX_TOKENS)
    {
        parameters.insert(MAX_COMPLETION_TOKENS.to_owned(), most);
    }
    parameters
}

/// Whether it is one of the OpenAI models that reason: they refuse requests with `max_tokens`.
fn takes_completion_tokens(model: &str) -> bool {
    let generation = |family: &str| {
        let digits = model.strip_prefix(family)?.split(|char: char| !char.is_ascii_digit()).next()?;
        digits.parse::<u32>().ok()
    };
    generation("o").is_some() || generation("gpt-").is_some_and(|generation| generation >= 5)
}

/// Merges `changes` into `target` recursively.
fn merge(target: &mut Map<String, Value>, changes: &Map<String, Value>) {
    for (key, change) in changes {
        match (target.get_mut(key), change) {
            (Some(Value::Object(old)), Value::Object(new)) => merge(old, new),
            _ => {
                target.insert(key.clone(), change.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::super::{ModelKind, ModelRequest};
    use super::super::request::body;
    use super::*;

    #[test]
    fn how_the_client_streams_is_no_parameter_and_the_usage_can_be_left_out() {
        let usage = json!({"include_usage": true});
        for (extra, expected) in [
            (json!({"streaming": true}), &usage),
            (json!({"streaming": false, "stream_usage": true}), &usage),
            (json!({"stream_usage": false}), &Value::Null),
        ] {
            let mut settings = ModelSettings::new("m", ModelKind::OpenAiCompatible, "x");
            settings.extra = extra.as_object().unwrap().clone();
            let body = body(&settings, &ModelRequest::default()).unwrap();
            assert_eq!(&body["stream_options"], expected, "{extra}");
            assert!(body.get("streaming").is_none() && body.get("stream_usage").is_none(), "{body}");
        }
    }

    #[test]
    fn models_of_openai_that_reason_get_the_limit_of_an_answer_under_its_newer_name() {
        let sent = |model: &str, extra: &Value| {
            let mut settings = ModelSettings::new("m", ModelKind::OpenAiCompatible, model);
            settings.extra = extra.as_object().unwrap().clone();
            Value::Object(parameters(&settings, None))
        };
        let (older, newer) = (json!({"max_tokens": 9}), json!({"max_completion_tokens": 9}));
        for model in ["gpt-5", "gpt-5-mini", "gpt-5.1", "gpt-10", "o1", "o3-mini", "o4-mini-2025-04-16"] {
            assert_eq!(sent(model, &older), newer, "{model}");
            assert_eq!(sent(model, &newer), newer, "{model}");
        }
        for model in
            ["gpt-4o", "gpt-4.1", "gpt-oss-20b", "gpt-x", "openai/gpt-5", "olmo-2", "o", "deepseek-chat"]
        {
            assert_eq!(sent(model, &older), older, "{model}");
        }
    }
}
