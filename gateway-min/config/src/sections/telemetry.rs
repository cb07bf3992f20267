//! `telemetry`: traces.

use std::collections::BTreeMap;

use http::{HeaderName, HeaderValue};

use crate::node::Node;
use crate::secret::Secret;

/// `telemetry`, read once at start.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Telemetry {
    /// Traces for an OpenTelemetry collector.
    pub traces: Traces,
}

/// `telemetry.traces`.
#[derive(Debug, Clone, PartialEq)]
pub struct Traces {
    /// Whether traces are sent; default false.
    pub enabled: bool,
    /// The collector's base URL, `http` or `https`; `None` uses the `OTEL_EXPORTER_OTLP_*` variables.
    pub endpoint: Option<String>,
    /// The name of this gateway at the collector; `None` uses `OTEL_SERVICE_NAME`, then `threadkeep`.
    pub service_name: Option<String>,
    /// The share of new traces that are sent, from 0 to 1; default 1.
    pub sample_ratio: f64,
    /// Headers of each request to the collector.
    pub headers: BTreeMap<String, Secret>,
}

impl Default for Traces {
    fn default() -> Self {
        Self {
            enabled: false,
            endpoint: None,
            service_name: None,
            sample_ratio: 1.0,
            headers: BTreeMap::new(),
        }
    }
}

impl Telemetry {
    pub(crate) fn read(root: &Node<'_>) -> Self {
        let (node, default) = (root.section("telemetry").section("traces"), Traces::default());
        let endpoint = node.given_text("endpoint");
        if let Some(problem) = endpoint.as_deref().and_then(problem_of_address) {
            node.problem("endpoint", problem);
        }
        let headers = node.variables("headers");
        for (name, value) in &headers {
            if HeaderName::try_from(name).is_err() || HeaderValue::try_from(value.expose()).is_err() {
                // The value is not shown, because it may be a key.
                node.problem(&format!("headers.{name}"), "is not a valid HTTP header");
            }
        }
        Self {
            traces: Traces {
                enabled: node.bool("enabled", default.enabled),
                endpoint,
                service_name: node.given_text("service_name"),
                sample_ratio: node.float("sample_ratio", default.sample_ratio, 0.0..=1.0),
                headers,
            },
        }
    }
}

/// Why an address is unusable. It is not repeated, because it may contain a password.
fn problem_of_address(address: &str) -> Option<&'static str> {
    match url::Url::parse(address) {
        Ok(url) if !matches!(url.scheme(), "http" | "https") => Some("must begin with http:// or https://"),
        Ok(url) if !url.username().is_empty() || url.password().is_some() => {
            Some("must not contain a user or a password; put them into headers")
        }
        Ok(_) => None,
        Err(_) => Some("must be a URL such as http://localhost:4318"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::{assert_refused, read};
    use super::*;

    #[test]
    fn traces_are_off_unless_they_are_asked_for() {
        for tree in [json!({}), json!({"telemetry": null}), json!({"telemetry": {"traces": null}})] {
            assert_eq!(read(&tree, Telemetry::read).unwrap(), Telemetry::default());
        }
        assert!(!Traces::default().enabled);
        let blank = json!({"telemetry": {"traces": {"endpoint": "", "service_name": ""}}});
        assert_eq!(read(&blank, Telemetry::read).unwrap(), Telemetry::default());
    }

    #[test]
    fn every_key_is_read_and_headers_are_not_shown() {
        let tree = json!({"telemetry": {"traces": {
            "enabled": true, "endpoint": "https://collector:4318", "service_name": "mine", "sample_ratio": "0.25",
            "headers": {"authorization": "Bearer hunter2"},
        }}});
        let read = read(&tree, Telemetry::read).unwrap();
        let headers = BTreeMap::from([("authorization".to_owned(), Secret::new("Bearer hunter2"))]);
        let expected = Traces {
            enabled: true,
            endpoint: Some("https://collector:4318".to_owned()),
            service_name: Some("mine".to_owned()),
            sample_ratio: 0.25,
            headers,
        };
        assert_eq!(read.traces, expected);
        assert!(!format!("{read:?}").contains("hunter2"));
    }

    #[test]
    fn what_cannot_be_meant_is_a_problem_and_no_secret_is_repeated() {
        for (traces, key) in [
            (json!({"sample_ratio": 1.5}), "sample_ratio"),
            (json!({"sample_ratio": -0.1}), "sample_ratio"),
            (json!({"enabled": "perhaps"}), "enabled"),
            (json!({"endpoint": "collector"}), "endpoint"),
            (json!({"endpoint": "ftp://c"}), "endpoint"),
            (json!({"endpoint": "http://me:hunter2@c"}), "endpoint"),
            (json!({"headers": {"a b": "hunter2"}}), "headers.a b"),
            (json!({"headers": {"a": "hunter2\n"}}), "headers.a"),
        ] {
            let tree = json!({ "telemetry": { "traces": traces } });
            let error = read(&tree, Telemetry::read).unwrap_err();
            assert!(error.contains(&format!("\n  telemetry.traces.{key}: ")), "{error}");
            assert!(!error.contains("hunter2"), "{error}");
        }
        assert_refused("telemetry", &[(json!({"traces": 5}), "traces")], Telemetry::read);
    }
}
