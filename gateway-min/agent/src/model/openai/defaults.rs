//! The settings `default_headers`, `organization` and `default_query`: what every request has besides its body.

use reqwest::Url;
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};
use serde_json::Value;
use threadkeep_config::{Hidden, Secret};

use super::super::ModelSettings;
use super::parameters::{DEFAULT_HEADERS, DEFAULT_QUERY, ORGANIZATION};

/// The header with the `organization`.
const ORGANIZATION_HEADER: &str = "OpenAI-Organization";

/// What every request has. Any value may be a key.
pub(super) struct Defaults {
    headers: Vec<(String, String)>,
    query: Vec<(String, String)>,
}

impl Defaults {
    /// Reads the settings; an error says what is wrong with one, without its values.
    pub(super) fn of(settings: &ModelSettings) -> Result<Self, String> {
        let mut headers: Vec<_> = organization(settings)?.into_iter().collect();
        // One of them replaces that of the organization.
        headers.extend(pairs(settings, DEFAULT_HEADERS)?);
        Ok(Self { headers, query: pairs(settings, DEFAULT_QUERY)? })
    }

    /// The headers; with the key as a bearer token, unless a header says how requests are authorized.
    pub(super) fn headers(&self, key: Option<&Secret>) -> Result<HeaderMap, String> {
        let mut headers = HeaderMap::new();
        for (name, value) in &self.headers {
            let unusable = || format!("`{DEFAULT_HEADERS}.{name}` cannot be sent as a header");
            let header = HeaderName::from_bytes(name.as_bytes()).map_err(|_| unusable())?;
            let mut value = HeaderValue::from_str(value).map_err(|_| unusable())?;
            value.set_sensitive(true);
            headers.insert(header, value);
        }
        if let Some(key) = key
            && !headers.contains_key(AUTHORIZATION)
        {
            headers.insert(AUTHORIZATION, authorization(key)?);
        }
        Ok(headers)
    }

    /// The address with the query.
    pub(super) fn at(&self, mut endpoint: Url) -> Url {
        if !self.query.is_empty() {
            endpoint.query_pairs_mut().extend_pairs(&self.query);
        }
        endpoint
    }

    /// What an error of the server at this address must not contain. It may quote the query as it was sent.
    pub(super) fn hidden(&self, endpoint: &Url) -> Hidden {
        let hidden = Hidden::default().with_headers(self.headers.iter().map(|(_, value)| value.as_str()));
        let hidden = hidden.with_values(self.query.iter().map(|(_, value)| value.as_str()));
        let sent = endpoint.query().unwrap_or_default().split('&').filter_map(|pair| pair.split_once('='));
        hidden.with_values(sent.map(|(_, value)| value))
    }
}

/// The header with the organization; none without it.
fn organization(settings: &ModelSettings) -> Result<Option<(String, String)>, String> {
    let name = match settings.extra.get(ORGANIZATION) {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(name)) => name,
        Some(_) => return Err(format!("`{ORGANIZATION}` must be a text")),
    };
    header_value(ORGANIZATION, name)?;
    Ok((!name.is_empty()).then(|| (ORGANIZATION_HEADER.to_owned(), name.clone())))
}

/// The names and texts of a setting that is a mapping; none without it.
fn pairs(settings: &ModelSettings, key: &str) -> Result<Vec<(String, String)>, String> {
    let text = |(name, value): (&String, &Value)| match value {
        Value::String(text) => Some((name.clone(), text.clone())),
        Value::Number(_) | Value::Bool(_) => Some((name.clone(), value.to_string())),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    };
    let found = match settings.extra.get(key) {
        None | Some(Value::Null) => Some(Vec::new()),
        Some(Value::Object(named)) => named.iter().map(text).collect(),
        Some(_) => None,
    };
    found.ok_or_else(|| format!("`{key}` must be a mapping of names to texts"))
}

fn authorization(key: &Secret) -> Result<HeaderValue, String> {
    let mut value = header_value("api_key", &format!("Bearer {}", key.expose()))?;
    value.set_sensitive(true);
    Ok(value)
}

/// The value of the header for a setting, which an error names.
fn header_value(setting: &str, text: &str) -> Result<HeaderValue, String> {
    let value = HeaderValue::from_str(text);
    value.map_err(|_| format!("`{setting}` has a character that cannot be sent in a header"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, json};

    use super::super::super::ModelKind;
    use super::super::parameters::parameters;
    use super::*;

    #[test]
    fn an_organization_is_a_header_and_no_parameter() {
        for (extra, sent) in [
            (json!({"organization": "org-1"}), Some("org-1")),
            (
                json!({"organization": "org-1", "default_headers": {"openai-organization": "org-2"}}),
                Some("org-2"),
            ),
            (json!({"organization": ""}), None),
            (json!({"organization": null}), None),
        ] {
            let mut settings = ModelSettings::new("gpt", ModelKind::OpenAiCompatible, "gpt-x");
            settings.extra = extra.as_object().unwrap().clone();
            let headers = Defaults::of(&settings).unwrap().headers(None).unwrap();
            let header = headers.get("openai-organization").map(|value| value.to_str().unwrap());
            assert_eq!(header, sent, "{extra}");
            assert_eq!(parameters(&settings, None), Map::new(), "{extra}");
        }
    }

    #[test]
    fn an_organization_that_cannot_be_sent_is_named() {
        for (organization, problem) in [
            (json!("org-1\n"), "`organization` has a character that cannot be sent in a header"),
            (json!(1), "`organization` must be a text"),
        ] {
            let mut settings = ModelSettings::new("gpt", ModelKind::OpenAiCompatible, "gpt-x");
            settings.extra.insert("organization".into(), organization);
            assert_eq!(Defaults::of(&settings).err().as_deref(), Some(problem));
        }
    }

    #[test]
    fn a_query_is_hidden_as_it_is_written_and_as_it_is_sent() {
        let mut settings = ModelSettings::new("gpt", ModelKind::OpenAiCompatible, "gpt-x");
        settings.extra.insert(DEFAULT_QUERY.to_owned(), json!({"token": "a/b c+d"}));
        let defaults = Defaults::of(&settings).unwrap();
        let endpoint = defaults.at("https://host/v1/chat/completions".parse().unwrap());
        let shown = defaults.hidden(&endpoint).from("/v1?token=a%2Fb+c%2Bd: no token a/b c+d");
        assert_eq!(shown, "/v1?token=***: no token ***");
    }
}
