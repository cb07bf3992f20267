//! `$VAR`: values from the environment.
//!
//! A string that begins with `$` is replaced as a whole; everything after the `$` is the variable's name. There are no
//! braces, no embedded form, no default and no escape. Mapping values and list items are replaced at any depth, keys
//! never. The result is always a string.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::environment::Environment;
use super::error::ConfigError;
use super::secret::{MASK, is_secret_path};

/// The variable that each value came from, by dotted key path.
pub(super) type FromEnvironment = BTreeMap<String, String>;

/// Replaces every `$VAR` in the tree and returns which values were replaced.
///
/// # Errors
/// [`ConfigError::UnsetVariable`] for the first variable that is not set. An empty variable is fine.
pub(super) fn interpolate(
    sections: &mut Map<String, Value>,
    environment: &Environment,
) -> Result<FromEnvironment, ConfigError> {
    let mut replaced = FromEnvironment::new();
    for (key, value) in sections {
        visit(value, key.clone(), environment, &mut replaced)?;
    }
    Ok(replaced)
}

fn visit(
    value: &mut Value,
    path: String,
    environment: &Environment,
    replaced: &mut FromEnvironment,
) -> Result<(), ConfigError> {
    match value {
        Value::String(text) => {
            let Some(variable) = text.strip_prefix('$') else { return Ok(()) };
            let Some(found) = environment.get(variable) else {
                return Err(ConfigError::UnsetVariable { variable: shown(variable, &path), key: path });
            };
            replaced.insert(path, variable.to_owned());
            *text = found.to_owned();
        }
        Value::Array(items) => {
            for (index, item) in items.iter_mut().enumerate() {
                visit(item, indexed(&path, index), environment, replaced)?;
            }
        }
        Value::Object(map) => {
            for (key, item) in map {
                visit(item, joined(&path, key), environment, replaced)?;
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
    Ok(())
}

/// The path of a key in the mapping at `path`.
pub(super) fn joined(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

/// The path of an item in the list at `path`.
pub(super) fn indexed(path: &str, index: usize) -> String {
    format!("{path}[{index}]")
}

/// The variable's name for an error, also in braces. A password that happens to begin with `$` is not a valid name, and
/// is masked.
fn shown(variable: &str, path: &str) -> String {
    let name = variable.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')).unwrap_or(variable);
    let is_name = name.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_');
    if is_name || !is_secret_path(path) { variable.to_owned() } else { MASK.to_owned() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::models::ModelKind;
    use crate::testing::Project;

    fn run(tree: &Value, variables: &[(&str, &str)]) -> Result<(Value, FromEnvironment), ConfigError> {
        let Value::Object(mut sections) = tree.clone() else { panic!("a mapping") };
        let replaced = interpolate(&mut sections, &variables.iter().copied().collect())?;
        Ok((Value::Object(sections), replaced))
    }

    #[test]
    fn whole_values_are_replaced_at_any_depth_and_keys_are_not() {
        let tree = json!({
            "a": "$X",
            "$X": "kept",
            "list": ["$X", "x$X", "${X}", {"$Y": "$EMPTY"}],
            "n": 1, "t": true, "z": null,
        });
        // Braces have no meaning: the name is everything after the dollar sign.
        let (after, replaced) = run(&tree, &[("X", "10"), ("EMPTY", ""), ("{X}", "braces")]).unwrap();
        assert_eq!(
            after,
            json!({
                "a": "10",
                "$X": "kept",
                "list": ["10", "x$X", "braces", {"$Y": ""}],
                "n": 1, "t": true, "z": null,
            })
        );
        let paths: Vec<&str> = replaced.keys().map(String::as_str).collect();
        assert_eq!(paths, ["a", "list[0]", "list[2]", "list[3].$Y"]);
        assert_eq!(replaced["a"], "X");
    }

    #[test]
    fn a_replacement_is_not_interpolated_again() {
        let (after, _) = run(&json!({"a": "$X"}), &[("X", "$Y"), ("Y", "no")]).unwrap();
        assert_eq!(after, json!({"a": "$Y"}));
    }

    #[test]
    fn an_unset_variable_is_an_error_in_the_reference_words() {
        let error = run(&json!({"models": [{"api_key": "$NO_SUCH"}]}), &[]).unwrap_err().to_string();
        assert!(
            error.starts_with("Environment variable NO_SUCH not found for config value $NO_SUCH"),
            "{error}"
        );
        assert!(error.contains("models[0].api_key"), "{error}");
    }

    /// An empty path of skills would be the project root, with every file in it.
    #[test]
    fn an_empty_variable_leaves_out_what_may_be_left_out() {
        let yaml = "\
skills: {path: $EMPTY}
summarization: {summary_prompt: $EMPTY}
acp_agents: {a: {command: c, description: d, model: $EMPTY}}
models:
  - {name: m, use: openai, model: x, base_url: $EMPTY, api_base: \"http://h/v1\"}
  - {name: n, use: openai, model: x, base_url: $EMPTY}
  - {name: s, use: scripted, model: s, script: $EMPTY}
";
        let config = Project::with_config(yaml).load_with(&[("EMPTY", "")]).unwrap().config;
        assert_eq!((config.skills.path, config.summarization.summary_prompt), (None, None));
        assert_eq!(config.acp_agents["a"].model, None);
        let addresses = [0, 1].map(|at| config.models[at].base_url.as_deref());
        assert_eq!(addresses, [Some("http://h/v1"), None]);
        assert_eq!(config.models[2].kind, ModelKind::Scripted { script: None });
    }

    #[test]
    fn a_lone_dollar_and_an_attempted_escape_or_default_are_names_too() {
        for (value, name) in [("$", ""), ("$$X", "$X"), ("$X:-1", "X:-1"), ("$X and more", "X and more")] {
            let error = run(&json!({"a": value}), &[("X", "1")]).unwrap_err();
            let ConfigError::UnsetVariable { variable, key } = error else { panic!("{error}") };
            assert_eq!((variable.as_str(), key.as_str()), (name, "a"));
        }
    }

    #[test]
    fn a_variable_in_braces_is_named_with_how_to_write_it() {
        let error = run(&json!({"models": [{"api_key": "${NO_SUCH}"}]}), &[]).unwrap_err().to_string();
        assert!(error.contains("${NO_SUCH}") && error.contains("without braces"), "{error}");
        let error = run(&json!({"a": {"password": "${ecret-1}"}}), &[]).unwrap_err().to_string();
        assert!(!error.contains("ecret-1"), "{error}");
        let error = run(&json!({"a": "$NO_SUCH"}), &[]).unwrap_err().to_string();
        assert!(error.contains("`.env`") && !error.contains("braces"), "{error}");
    }

    #[test]
    fn a_secret_that_begins_with_a_dollar_sign_is_not_shown() {
        let error = run(&json!({"a": {"password": "$ecret-1"}}), &[]).unwrap_err();
        let shown = format!("{error} {error:?}");
        assert!(!shown.contains("ecret-1"), "{shown}");
        assert!(shown.contains("a.password"), "{shown}");
    }

    /// Any tree whose strings come from `text`.
    fn trees(text: impl Strategy<Value = String> + Clone + 'static) -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            text.prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<bool>().prop_map(Value::from),
            Just(Value::Null),
        ];
        let tree = leaf.prop_recursive(3, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map("[$a-z]{1,3}", inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        });
        prop::collection::btree_map("[$a-z]{1,3}", tree, 0..4)
            .prop_map(|map| Value::Object(map.into_iter().collect()))
    }

    proptest! {
        #[test]
        fn texts_without_a_leading_dollar_are_never_touched(tree in trees("([^$].*)?")) {
            let (after, replaced) = run(&tree, &[]).unwrap();
            prop_assert_eq!(after, tree);
            prop_assert!(replaced.is_empty());
        }

        #[test]
        fn every_variable_leaf_and_nothing_else_changes(tree in trees("\\$X|[a-z]{0,3}")) {
            let (after, replaced) = run(&tree, &[("X", "value")]).unwrap();
            let expected = tree.to_string().matches(":\"$X\"").count()
                + tree.to_string().matches("[\"$X\"").count()
                + tree.to_string().matches(",\"$X\"").count();
            // In the text, a key after a comma looks like a list item, so do not count those.
            let keys = tree.to_string().matches(",\"$X\":").count();
            prop_assert_eq!(replaced.len(), expected - keys);
            let undone = after.to_string().replace("\"value\"", "\"$X\"");
            prop_assert_eq!(undone, tree.to_string());
        }
    }
}
