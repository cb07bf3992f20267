//! Errors of model calls.

use std::fmt;
use std::time::Duration;

/// A failed attempt to get an answer. Never contains a credential.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("model `{model}`: {kind}: {detail}")]
pub struct ModelError {
    /// The configured name of the model.
    pub model: String,
    /// The kind of failure, which decides whether to retry.
    pub kind: ModelErrorKind,
    /// The details: a truncated error body, a file, a limit.
    pub detail: String,
    /// How long the provider asked to wait before the next attempt.
    pub retry_after: Option<Duration>,
}

impl ModelError {
    pub(super) fn new(model: &str, kind: ModelErrorKind, detail: impl Into<String>) -> Self {
        Self { model: model.to_owned(), kind, detail: detail.into(), retry_after: None }
    }
}

/// The kinds of failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelErrorKind {
    /// Too many requests (429).
    RateLimited,
    /// The provider failed (5xx).
    Server,
    /// No answer, or no next event, in time.
    Timeout,
    /// The connection failed or broke.
    Connection,
    /// The account has no quota or credit left.
    Quota,
    /// The credentials are missing or were refused (401, 403).
    Authentication,
    /// The provider refused the request (other 4xx).
    Rejected,
    /// The provider's answer does not follow the protocol.
    Protocol,
    /// The answer is larger than an answer may be.
    TooLarge,
    /// The settings are unusable.
    Configuration,
    /// A script has no answer for the conversation.
    Script,
}

impl ModelErrorKind {
    /// Whether the same request may succeed later.
    pub fn is_transient(self) -> bool {
        matches!(self, Self::RateLimited | Self::Server | Self::Timeout | Self::Connection)
    }

    /// The short machine-readable name, stored as `svc_error_type` of a fallback answer.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::RateLimited => "rate_limited",
            Self::Server => "server_error",
            Self::Timeout => "timeout",
            Self::Connection => "connection_error",
            Self::Quota => "quota",
            Self::Authentication => "authentication",
            Self::Rejected => "rejected",
            Self::Protocol => "protocol_error",
            Self::TooLarge => "answer_too_large",
            Self::Configuration => "configuration",
            Self::Script => "script",
        }
    }

    /// What the user can do about it: the text of a fallback answer.
    pub fn remedy(self) -> &'static str {
        match self {
            Self::RateLimited | Self::Server | Self::Timeout => {
                "The language model could not be reached or is overloaded. Please wait a moment and send \
                 your message again."
            }
            Self::Connection => {
                "The language model could not be reached, or the connection broke off. Please wait a moment and send \
                 your message again. If that does not help, check `base_url` of the model in the configuration."
            }
            Self::Quota => {
                "The language model's provider refused the request because the account has no quota or \
                 credit left. Please fix the account, then send your message again."
            }
            Self::Authentication => {
                "The language model's provider did not accept the credentials. Please check `api_key` and \
                 `base_url` of the model in the configuration, then send your message again."
            }
            Self::Rejected => {
                "The language model's provider refused the request. Please check the model's settings, or \
                 choose another model."
            }
            Self::Protocol => {
                "The language model's endpoint gave an answer that is not in the chat-completions protocol. \
                 Please check `base_url` of the model in the configuration."
            }
            Self::TooLarge => {
                "The language model's answer did not end where an answer must, so it was cut off. Please ask for \
                 less at once, or set `max_tokens` of the model in the configuration."
            }
            Self::Configuration => {
                "The language model is not configured correctly. Please check its settings."
            }
            Self::Script => {
                "The scripted model has no answer for this conversation. Please extend its script, or \
                 choose another model."
            }
        }
    }
}

impl fmt::Display for ModelErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::RateLimited => "too many requests",
            Self::Server => "the provider failed",
            Self::Timeout => "no answer in time",
            Self::Connection => "connection failed",
            Self::Quota => "quota or credit used up",
            Self::Authentication => "credentials not accepted",
            Self::Rejected => "request refused",
            Self::Protocol => "malformed answer",
            Self::TooLarge => "the answer is too large",
            Self::Configuration => "unusable settings",
            Self::Script => "no scripted answer",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_reached_may_have_another_address() {
        for (kind, names_it) in [(ModelErrorKind::Connection, true), (ModelErrorKind::Server, false)] {
            assert_eq!(kind.remedy().contains("`base_url`"), names_it, "{kind:?}");
            assert!(kind.remedy().contains("wait a moment"), "{kind:?}");
        }
    }
}
