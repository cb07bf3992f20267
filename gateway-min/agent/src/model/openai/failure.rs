//! Failures of a chat completion, and their kinds.

use std::error::Error;
use std::time::Duration;

use chrono::{DateTime, Utc};
use eventsource_stream::EventStreamError;
use futures::StreamExt;
use reqwest::header::{DATE, HeaderMap, LOCATION, RETRY_AFTER};
use reqwest::{Response, StatusCode};
use serde_json::Value;
use threadkeep_config::Hidden;

use super::super::{ModelError, ModelErrorKind, Secret};
use super::lines::Broken;

/// The maximum quotation from a server in an error, in characters.
const MAX_QUOTE_CHARS: usize = 500;
/// The maximum number of tools that many providers take: OpenAI, Groq.
const TOOLS_TAKEN: usize = 128;
/// The maximum part of an error body that is read, in bytes.
const MAX_BODY_BYTES: usize = 64 * 1024;

/// A failure without the name of its model.
#[derive(Debug)]
pub(super) struct Failure {
    kind: ModelErrorKind,
    detail: String,
    retry_after: Option<Duration>,
}

impl Failure {
    pub(super) fn new(kind: ModelErrorKind, detail: impl Into<String>) -> Self {
        Self { kind, detail: detail.into(), retry_after: None }
    }

    /// The connection failed.
    pub(super) fn from_transport(error: reqwest::Error) -> Self {
        let kind = if error.is_timeout() { ModelErrorKind::Timeout } else { ModelErrorKind::Connection };
        Self::new(kind, describe(error))
    }

    /// The event stream failed.
    pub(super) fn from_events(error: EventStreamError<Broken<reqwest::Error>>) -> Self {
        match error {
            EventStreamError::Transport(Broken::Transport(error)) => Self::from_transport(error),
            EventStreamError::Transport(Broken::Event(limit)) => Self::new(
                ModelErrorKind::TooLarge,
                format!("an event of the stream has more than {limit} bytes"),
            ),
            EventStreamError::Transport(Broken::Total(limit)) => {
                Self::new(ModelErrorKind::TooLarge, format!("the event stream has more than {limit} bytes"))
            }
            EventStreamError::Utf8(_) => Self::new(ModelErrorKind::Protocol, "the event stream is not UTF-8"),
            EventStreamError::Parser(_) => {
                Self::new(ModelErrorKind::Protocol, "the event stream cannot be parsed")
            }
        }
    }

    /// The server returned an error status for a request with this number of tools.
    pub(super) async fn from_response(response: Response, tools: usize) -> Self {
        let status = response.status();
        let retry_after = retry_after(response.headers());
        if status.is_redirection() {
            let target = if response.headers().contains_key(LOCATION) { " to another address" } else { "" };
            let detail =
                format!("HTTP {}: redirected{target}; set `base_url` to the final one", status.as_u16());
            return Self::new(ModelErrorKind::Rejected, detail);
        }
        let body = read_body(response).await;
        let error = serde_json::from_str::<Value>(&body).map(unwrap_error).unwrap_or_default();
        let quote = error["message"].as_str().unwrap_or(&body);
        // Many servers do not say what does not exist, or what to do about it. The hint precedes the quotation, which
        // may be cut.
        let hint = match status {
            StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED => {
                " (check `model` and `base_url`)".to_owned()
            }
            StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY if tools > TOOLS_TAKEN => format!(
                " (the request has {tools} tools, and many providers take no more than {TOOLS_TAKEN}: with \
                 `tool_search.enabled` those of MCP servers are sent when they are needed)"
            ),
            _ => String::new(),
        };
        Self {
            kind: kind_of_status(status, &error),
            detail: format!("HTTP {}{hint}: {}", status.as_u16(), quote.trim()),
            retry_after,
        }
    }

    /// The server returned a body of type `found` instead of a stream; some do that to report an error.
    pub(super) async fn from_body(found: &str, response: Response) -> Self {
        let said = format!("the answer is `{found}` instead of `text/event-stream`");
        if !found.starts_with("application/json") {
            return Self::new(ModelErrorKind::Protocol, said);
        }
        let body = serde_json::from_str::<Value>(&read_body(response).await).unwrap_or_default();
        match &body["error"] {
            Value::Null => Self::new(ModelErrorKind::Protocol, said),
            error => Self::from_event(error),
        }
    }

    /// The server reported `error` in the middle of its stream.
    pub(super) fn from_event(error: &Value) -> Self {
        let words = error["message"].as_str().map_or_else(|| error.to_string(), str::to_owned);
        Self::new(kind_of_event(error), words)
    }

    /// The failure, whose text has none of these.
    pub(super) fn without(self, hidden: &Hidden) -> Self {
        Self { detail: hidden.from(&self.detail), ..self }
    }

    /// The error of the model `model` at `host`, with the server's text truncated and free of `key`.
    pub(super) fn into_error(self, model: &str, host: &str, key: Option<&Secret>) -> ModelError {
        let detail = key.map_or_else(|| self.detail.clone(), |key| key.redact(&self.detail));
        ModelError {
            model: model.to_owned(),
            kind: self.kind,
            detail: format!("{host}: {}", cut(&detail)),
            retry_after: self.retry_after,
        }
    }
}

/// The error and its causes in one line, without the URL, which may contain a password.
pub(super) fn describe(error: reqwest::Error) -> String {
    let error = error.without_url();
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    text
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(MAX_QUOTE_CHARS) {
        None => text.to_owned(),
        // The ellipsis replaces the last character.
        Some(_) => text.chars().take(MAX_QUOTE_CHARS - 1).chain(['\u{2026}']).collect(),
    }
}

/// Reads the part worth quoting; a body that breaks off is quoted as far as it was received.
async fn read_body(response: Response) -> String {
    let mut bytes = Vec::new();
    let mut parts = response.bytes_stream();
    while let Some(Ok(part)) = parts.next().await {
        bytes.extend_from_slice(&part);
        if bytes.len() > MAX_BODY_BYTES {
            break;
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The error object in `{"error": {...}}`, or the value itself if the server omits the envelope.
fn unwrap_error(mut body: Value) -> Value {
    match body.get_mut("error") {
        Some(error) => error.take(),
        None => body,
    }
}

fn kind_of_status(status: StatusCode, error: &Value) -> ModelErrorKind {
    match status.as_u16() {
        429 if is_quota(error) => ModelErrorKind::Quota,
        429 => ModelErrorKind::RateLimited,
        402 => ModelErrorKind::Quota,
        401 | 403 => ModelErrorKind::Authentication,
        408 => ModelErrorKind::Timeout,
        500.. => ModelErrorKind::Server,
        _ => ModelErrorKind::Rejected,
    }
}

fn is_quota(error: &Value) -> bool {
    ["code", "type"].iter().filter_map(|key| error[*key].as_str()).any(|word| {
        matches!(word, "insufficient_quota" | "billing_hard_limit_reached" | "billing_not_active")
    })
}

/// An event has no HTTP status; some servers send it as the code, as a number or a text.
fn kind_of_event(error: &Value) -> ModelErrorKind {
    let code = &error["code"];
    let code = code.as_u64().or_else(|| code.as_str().and_then(|code| code.parse().ok()));
    let status = code.and_then(|code| u16::try_from(code).ok());
    if let Some(status) = status.and_then(|code| StatusCode::from_u16(code).ok()) {
        return kind_of_status(status, error);
    }
    if is_quota(error) {
        return ModelErrorKind::Quota;
    }
    let words = format!("{} {}", error["type"], error["code"]);
    let known = [
        ("rate_limit", ModelErrorKind::RateLimited),
        ("authentication", ModelErrorKind::Authentication),
        ("invalid_request", ModelErrorKind::Rejected),
    ];
    known.iter().find(|(word, _)| words.contains(word)).map_or(ModelErrorKind::Server, |(_, kind)| *kind)
}

/// `Retry-After`, in seconds or as a date, which is compared with the server's own clock if it sends that.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim);
    let asked = text(RETRY_AFTER)?;
    if let Ok(seconds) = asked.parse::<f64>() {
        return Duration::try_from_secs_f64(seconds).ok();
    }
    let date = |value: &str| DateTime::parse_from_rfc2822(value).ok().map(|date| date.with_timezone(&Utc));
    let now = text(DATE).and_then(date).unwrap_or_else(Utc::now);
    // A date in the past means now.
    Some((date(asked)? - now).to_std().unwrap_or(Duration::ZERO))
}

#[cfg(test)]
mod tests {
    use super::*;
    use reqwest::header::{HeaderName, HeaderValue};
    use serde_json::json;

    #[test]
    fn every_status_has_its_kind() {
        let cases = [
            (400, ModelErrorKind::Rejected),
            (401, ModelErrorKind::Authentication),
            (402, ModelErrorKind::Quota),
            (403, ModelErrorKind::Authentication),
            (404, ModelErrorKind::Rejected),
            (408, ModelErrorKind::Timeout),
            (422, ModelErrorKind::Rejected),
            (429, ModelErrorKind::RateLimited),
            (500, ModelErrorKind::Server),
            (503, ModelErrorKind::Server),
            (529, ModelErrorKind::Server),
        ];
        for (status, kind) in cases {
            assert_eq!(kind_of_status(StatusCode::from_u16(status).unwrap(), &json!({})), kind, "{status}");
        }
        let quota = json!({"code": "insufficient_quota"});
        assert_eq!(kind_of_status(StatusCode::TOO_MANY_REQUESTS, &quota), ModelErrorKind::Quota);
    }

    #[test]
    fn an_error_event_is_classified_by_its_code_and_type() {
        let cases = [
            (json!({"code": 429}), ModelErrorKind::RateLimited),
            (json!({"code": 400}), ModelErrorKind::Rejected),
            (json!({"code": "401", "type": "None"}), ModelErrorKind::Authentication),
            (json!({"code": "rate_limit_exceeded"}), ModelErrorKind::RateLimited),
            (json!({"type": "insufficient_quota"}), ModelErrorKind::Quota),
            (json!({"type": "invalid_request_error"}), ModelErrorKind::Rejected),
            (json!({"type": "authentication_error"}), ModelErrorKind::Authentication),
            (json!({"type": "overloaded_error"}), ModelErrorKind::Server),
            (json!("it broke"), ModelErrorKind::Server),
        ];
        for (error, kind) in cases {
            assert_eq!(kind_of_event(&error), kind, "{error}");
        }
    }

    #[test]
    fn retry_after_is_read_as_seconds_or_as_a_date() {
        let headers = |entries: &[(HeaderName, &'static str)]| {
            entries.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value))).collect()
        };
        let read = |entries: &[(HeaderName, &'static str)]| retry_after(&headers(entries));
        assert_eq!(read(&[]), None);
        assert_eq!(read(&[(RETRY_AFTER, "7")]), Some(Duration::from_secs(7)));
        assert_eq!(read(&[(RETRY_AFTER, "0.5")]), Some(Duration::from_millis(500)));
        assert_eq!(read(&[(RETRY_AFTER, "-1")]), None);
        assert_eq!(read(&[(RETRY_AFTER, "soon")]), None);
        let now = (DATE, "Wed, 21 Oct 2015 07:28:00 GMT");
        assert_eq!(
            read(&[now.clone(), (RETRY_AFTER, "Wed, 21 Oct 2015 07:28:30 GMT")]),
            Some(Duration::from_secs(30))
        );
        assert_eq!(read(&[now, (RETRY_AFTER, "Wed, 21 Oct 2015 07:00:00 GMT")]), Some(Duration::ZERO));
    }

    #[test]
    fn words_are_cut_to_500_characters_after_the_key_is_removed() {
        let key = Secret::new("sk-hush");
        // The key is across the truncation limit, so truncating before masking would leave a part of it.
        let words = format!("{}sk-hush{}", "\u{e9}".repeat(496), "x".repeat(100));
        let error = Failure::new(ModelErrorKind::Rejected, words).into_error("m", "host", Some(&key));
        let quoted = error.detail.strip_prefix("host: ").unwrap();
        assert_eq!(quoted.chars().count(), 500);
        assert!(!quoted.contains("sk-"), "{quoted}");
        assert_eq!(cut(&"x".repeat(500)), "x".repeat(500));
    }
}
