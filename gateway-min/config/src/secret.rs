//! Values that must never be shown: the [`Secret`] newtype, free-form settings whose values stay out of
//! `Debug`, and the rule that says which keys hold secrets.

use std::fmt;

use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

/// What is shown in place of a secret.
pub const MASK: &str = "***";

/// Keys that hold a secret, with or without a prefix (`api_key`, `openai_api_key`).
const SECRET_SUFFIXES: [&str; 7] =
    ["api_key", "token", "secret", "password", "authorization", "credentials", "private_key"];

/// Keys that hold a connection URL, which usually contains a password.
const SECRET_URLS: [&str; 2] = ["postgres_url", "redis_url"];

/// Sections in which every value may be a secret, because the operator chooses the keys.
const SECRET_SECTIONS: [&str; 5] = ["env", "environment", "headers", "default_headers", "default_query"];

/// A text that `Debug`, `Display` and `Serialize` show as `***`.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps a text that must not be shown.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text itself, for the one place that sends it to its destination.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// `text` with every occurrence of the secret masked: an endpoint may quote the key it refuses.
    pub fn redact(&self, text: &str) -> String {
        if self.0.is_empty() { text.to_owned() } else { text.replace(&self.0, MASK) }
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(MASK)
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(MASK)
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(MASK)
    }
}

/// Free-form settings that are passed on unchanged. `Debug` shows only the keys, because any value may be a credential.
#[derive(Clone, Default, PartialEq)]
pub struct FreeForm(Map<String, Value>);

impl FreeForm {
    /// The settings themselves.
    pub fn as_map(&self) -> &Map<String, Value> {
        &self.0
    }

    /// One setting, if present.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key)
    }

    /// Whether there is no setting at all.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl From<Map<String, Value>> for FreeForm {
    fn from(map: Map<String, Value>) -> Self {
        Self(map)
    }
}

impl fmt::Debug for FreeForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

/// Whether the value at a dotted key path (`models[0].api_key`) is a secret.
pub(super) fn is_secret_path(path: &str) -> bool {
    path.split(['.', '[']).any(|segment| {
        let key = segment.to_ascii_lowercase().replace('-', "_");
        SECRET_SECTIONS.contains(&key.as_str())
            || SECRET_URLS.contains(&key.as_str())
            || SECRET_SUFFIXES.iter().any(|suffix| {
                key.strip_suffix(suffix).is_some_and(|before| before.is_empty() || before.ends_with('_'))
            })
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_secret_is_masked_everywhere_and_exposed_on_request() {
        let secret = Secret::new("sk-1234");
        assert_eq!(format!("{secret} {secret:?} {:?}", Some(&secret)), "*** *** Some(***)");
        assert_eq!(serde_json::to_string(&secret).unwrap(), "\"***\"");
        assert_eq!(secret.expose(), "sk-1234");
        assert_eq!(secret.redact("sk-1234 and sk-1234"), "*** and ***");
        assert_eq!(Secret::new("").redact("text"), "text");
    }

    #[test]
    fn free_form_settings_show_their_keys_only() {
        let Value::Object(map) = json!({"organization": "sk-1", "nested": {"a": "sk-2"}}) else {
            panic!("an object")
        };
        let settings = FreeForm::from(map);
        let shown = format!("{settings:?}");
        assert!(shown.contains("organization") && shown.contains("nested"), "{shown}");
        assert!(!shown.contains("sk-"), "{shown}");
        assert_eq!(settings.get("organization"), Some(&json!("sk-1")));
        assert!(!settings.is_empty());
    }

    #[test]
    fn secret_keys_are_recognised_by_name_and_by_section() {
        for path in [
            "models[0].api_key",
            "models[3].openai_api_key",
            "github_token",
            "a.client_secret",
            "a.password",
            "a.DB_PASSWORD",
            "database.postgres_url",
            "stream_bridge.redis_url",
            "acp_agents.x.env.FOO",
            "sandbox.environment.FOO",
            "models[0].default_headers.X-Thing",
            "models[0].default_query.key",
            "a.x-api-key",
            "token.value",
        ] {
            assert!(is_secret_path(path), "{path}");
        }
        for path in ["models[0].max_tokens", "database.backend", "subagents.token_budget.enabled", "tokens"] {
            assert!(!is_secret_path(path), "{path}");
        }
    }
}
