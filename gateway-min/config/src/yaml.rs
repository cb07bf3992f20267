//! Parses YAML into a value tree.

use std::fmt;
use std::path::Path;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::{Map, Value};

use super::error::ConfigError;

/// Parses the text of a configuration file. An empty file is an empty mapping.
///
/// Only `true` and `false` are booleans here: `on`, `yes` and the like stay strings, which boolean keys also accept. A
/// duplicate key is an error. Error details never quote the file's content beyond a key.
pub(super) fn parse(text: &str, path: &Path) -> Result<Map<String, Value>, ConfigError> {
    let options = serde_saphyr::options! { strict_booleans: true, with_snippet: false };
    match serde_saphyr::from_str_with_options(text, options) {
        Ok(Value::Object(sections)) => Ok(sections),
        Ok(Value::Null) => Ok(Map::new()),
        Ok(_) => Err(ConfigError::NotAMapping { path: path.to_owned() }),
        Err(error) => Err(ConfigError::Syntax { path: path.to_owned(), detail: error.to_string() }),
    }
}

/// The names in `subagents.custom_agents` in the order of the file, which [`parse`] does not keep; none if that is no
/// mapping.
pub(super) fn custom_agents(text: &str) -> Vec<String> {
    #[derive(serde::Deserialize)]
    struct File {
        subagents: Option<Section>,
    }
    #[derive(serde::Deserialize)]
    struct Section {
        custom_agents: Option<Names>,
    }
    let options = serde_saphyr::options! { strict_booleans: true, with_snippet: false };
    let file = serde_saphyr::from_str_with_options::<File>(text, options).ok();
    file.and_then(|file| file.subagents?.custom_agents).map(|Names(names)| names).unwrap_or_default()
}

/// The keys of a mapping, in their order.
struct Names(Vec<String>);

impl<'de> Deserialize<'de> for Names {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Keys;
        impl<'de> Visitor<'de> for Keys {
            type Value = Names;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a mapping")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Names, A::Error> {
                let mut names = Vec::new();
                while let Some((name, IgnoredAny)) = map.next_entry()? {
                    names.push(name);
                }
                Ok(Names(names))
            }
        }
        deserializer.deserialize_map(Keys)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parsed(text: &str) -> Result<Map<String, Value>, ConfigError> {
        parse(text, Path::new("config.yaml"))
    }

    #[test]
    fn scalars_keep_their_types_and_only_true_and_false_are_booleans() {
        let tree = parsed(
            "a: true\nb: yes\nc: \"10\"\nd: 10\ne: 0.5\nf: ~\ng: [on, 1]\nh: {1: x}\ni: 1.10.0\nj: &x p\nk: *x\n",
        );
        assert_eq!(
            Value::Object(tree.unwrap()),
            json!({
                "a": true, "b": "yes", "c": "10", "d": 10, "e": 0.5, "f": null, "g": ["on", 1],
                "h": {"1": "x"}, "i": "1.10.0", "j": "p", "k": "p",
            })
        );
    }

    #[test]
    fn an_empty_file_is_an_empty_mapping() {
        for text in ["", "# only a comment\n", "---\n", "null\n"] {
            assert_eq!(parsed(text).unwrap(), Map::new(), "{text:?}");
        }
    }

    #[test]
    fn custom_agents_keep_their_order() {
        let text = "models: [{name: a}]\nsubagents:\n  timeout_seconds: 5\n  custom_agents:\n    zed: {description: d}\n    \
                    1: {tools: [x]}\n    alpha:\nother: 1\n";
        assert_eq!(custom_agents(text), ["zed", "1", "alpha"]);
        for text in [
            "",
            "subagents:",
            "subagents: {custom_agents: }",
            "subagents: {custom_agents: [a]}",
            "subagents: 5",
        ] {
            assert_eq!(custom_agents(text), Vec::<String>::new(), "{text}");
        }
    }

    #[test]
    fn a_top_level_list_or_scalar_is_refused() {
        for text in ["- a\n", "word\n", "5\n"] {
            assert!(matches!(parsed(text), Err(ConfigError::NotAMapping { .. })), "{text:?}");
        }
    }

    #[test]
    fn syntax_errors_say_where_and_never_quote_values() {
        for text in [
            "models:\n  - api_key: \"sk-hidden\n",
            "api_key: sk-hidden\napi_key: sk-hidden\n",
            "a: sk-hidden\n  b: sk-hidden\n",
            "a: [sk-hidden, }\n",
            "a: sk-hidden\n---\nb: 1\n",
            "a: *sk-unknown\n",
        ] {
            let error = parsed(text).unwrap_err();
            let shown = format!("{error} {error:?}");
            assert!(matches!(error, ConfigError::Syntax { .. }), "{shown}");
            assert!(shown.contains("line"), "{shown}");
            assert!(!shown.contains("sk-hidden"), "{shown}");
        }
    }
}
