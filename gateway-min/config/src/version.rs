//! The version of the configuration's schema, and the warning about an old file (service reference,
//! "Versioning").

use std::fs;
use std::path::Path;

use serde_json::{Map, Value};

use super::node::Report;
use super::yaml;

/// The schema version of this build and of the example file it ships.
pub const CONFIG_VERSION: i64 = 49;
/// The key that states a file's version.
pub const CONFIG_VERSION_KEY: &str = "config_version";
/// The file that states the latest version, searched next to the configuration and above it.
pub const EXAMPLE_FILE: &str = "config.example.yaml";

/// How many directories above the configuration's own are searched for the example file.
const PARENTS_SEARCHED: usize = 5;

/// The version a file states. 0 if it is missing or not an integer, including a `$VAR`, because the version is read
/// before variables are replaced.
pub fn stated_version(sections: &Map<String, Value>) -> i64 {
    sections.get(CONFIG_VERSION_KEY).and_then(Value::as_i64).unwrap_or(0)
}

/// The text logged on each load of a file older than the example.
pub fn outdated_warning(version: i64, latest: i64) -> String {
    format!(
        "Your config.yaml (version {version}) is outdated; the latest version is {latest}. \
         Run `make config-upgrade` to merge new fields into your config."
    )
}

/// Warns if the example file near the configuration is newer. Without a readable example file there is no warning.
pub(super) fn check(sections: &Map<String, Value>, config_file: &Path, report: &Report) {
    let Some(latest) = latest_version(config_file) else { return };
    let version = stated_version(sections);
    if version < latest {
        report.warn(outdated_warning(version, latest));
    }
}

fn latest_version(config_file: &Path) -> Option<i64> {
    let directories = config_file.parent()?.ancestors().take(1 + PARENTS_SEARCHED);
    let example = directories.map(|dir| dir.join(EXAMPLE_FILE)).find(|path| path.is_file())?;
    let text = fs::read_to_string(&example).ok()?;
    Some(stated_version(&yaml::parse(&text, &example).ok()?))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use serde_json::json;

    use super::*;

    fn stated(value: &Value) -> i64 {
        stated_version(json!({ "config_version": value }).as_object().unwrap())
    }

    #[test]
    fn a_version_that_is_missing_or_no_integer_is_zero() {
        assert_eq!(stated_version(&Map::new()), 0);
        for value in [json!("49"), json!("$VERSION"), json!(true), json!(49.5), json!(null), json!([49])] {
            assert_eq!(stated(&value), 0, "{value}");
        }
        assert_eq!(stated(&json!(27)), 27);
    }

    /// The warnings for a file of `version` in a directory `depth` below the example file's.
    fn warnings(example: Option<&str>, depth: usize, version: i64) -> Vec<String> {
        let dir = tempfile::tempdir().unwrap();
        if let Some(example) = example {
            fs::write(dir.path().join(EXAMPLE_FILE), example).unwrap();
        }
        let below: PathBuf = (0..depth).map(|level| format!("d{level}")).collect();
        let report = Report::default();
        let sections = json!({ "config_version": version });
        check(sections.as_object().unwrap(), &dir.path().join(below).join("config.yaml"), &report);
        report.finish(None).unwrap()
    }

    #[test]
    fn an_older_file_is_told_both_versions_and_the_command() {
        assert_eq!(
            warnings(Some("config_version: 49\n"), 0, 26),
            ["Your config.yaml (version 26) is outdated; the latest version is 49. \
              Run `make config-upgrade` to merge new fields into your config."]
        );
    }

    #[test]
    fn an_equal_or_newer_file_is_not_warned_about() {
        assert!(warnings(Some("config_version: 49\n"), 0, 49).is_empty());
        assert!(warnings(Some("config_version: 49\n"), 0, 50).is_empty());
    }

    #[test]
    fn the_example_is_searched_in_five_parents_and_no_further() {
        assert_eq!(warnings(Some("config_version: 49\n"), 5, 1).len(), 1);
        assert!(warnings(Some("config_version: 49\n"), 6, 1).is_empty());
    }

    #[test]
    fn the_nearest_example_counts() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("below")).unwrap();
        fs::write(dir.path().join(EXAMPLE_FILE), "config_version: 99\n").unwrap();
        fs::write(dir.path().join("below").join(EXAMPLE_FILE), "config_version: 7\n").unwrap();
        assert_eq!(latest_version(&dir.path().join("below/config.yaml")), Some(7));
    }

    #[test]
    fn no_example_or_a_broken_one_means_no_warning() {
        // Deep enough that the search does not leave the test's own directory.
        assert!(warnings(None, 6, 0).is_empty());
        for example in [": : :", "- 49\n", "config_version: x\n"] {
            assert!(warnings(Some(example), 0, 0).is_empty(), "{example:?}");
        }
    }
}
