//! Parses YAML into a value tree.

use std::path::Path;

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
