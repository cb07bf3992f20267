//! Keeps credentials out of stored, logged and displayed data.

use serde_json::Value;
use threadkeep_agent::serialize::is_secret;

/// Replaces a secret in stored requests.
const REDACTED: &str = "[redacted]";

/// The value with every secret masked.
pub(super) fn redact(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let entry = |(key, value): (&String, &Value)| {
                let value = if is_secret(key) { REDACTED.into() } else { redact(value) };
                (key.clone(), value)
            };
            Value::Object(map.iter().map(entry).collect())
        }
        Value::Array(list) => list.iter().map(redact).collect(),
        plain => plain.clone(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn redaction_replaces_the_values_of_secret_keys_at_any_depth() {
        let config = json!({
            "context": {"secrets": {"ERP_TOKEN": "s1"}, "github_token": "s2", "model_name": "m"},
            "list": [{"API_KEY": "s3", "x-api-key": "s6", "n": 1}, "text"],
            "Authorization": "s4", "client_secret": {"a": "s5"}, "max_tokens": 5, "recursion_limit": 7,
        });
        assert_eq!(
            redact(&config),
            json!({
                "context": {"secrets": "[redacted]", "github_token": "[redacted]", "model_name": "m"},
                "list": [{"API_KEY": "[redacted]", "x-api-key": "[redacted]", "n": 1}, "text"],
                "Authorization": "[redacted]", "client_secret": "[redacted]", "max_tokens": 5, "recursion_limit": 7,
            })
        );
    }
}
