//! The body of a fuzz target: the text of a configuration file.
#![allow(clippy::expect_used, reason = "a fuzz target fails by panicking")]

use std::path::PathBuf;

use super::{Config, Environment, LoadOptions, Location, SourceFile};

/// A value that is only in the environment.
const HIDDEN: &str = "sk-of-the-environment";

/// Reads any bytes as a configuration file. Values from the environment must not be shown anywhere.
pub fn config(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    // It does not exist, so no other file is read.
    let nowhere = PathBuf::from("/nonexistent/1/2/3/4/5/6");
    let environment: Environment = [("SECRET", HIDDEN), ("NUMBER", "7")].into_iter().collect();
    let options = LoadOptions { config_path: None, environment, working_dir: nowhere.clone() };
    let location = Location::of(&options).expect("there is nothing to be read");
    let source = SourceFile { path: nowhere.join("config.yaml"), text: text.to_owned() };
    let shown = match Config::build(&location, Some(&source)) {
        Ok((config, warnings)) => {
            assert!(!config.models.is_empty(), "a configuration without a model");
            assert!(config.snapshot_frequency() > 0, "a cadence of 0");
            format!("{config:?} {warnings:?}")
        }
        Err(error) => format!("{error} {error:?}"),
    };
    assert!(!shown.contains(HIDDEN), "a value of the environment is shown: {shown}");
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_corpus_of_configurations_is_harmless() {
        for input in threadkeep_testing::corpus("config").unwrap() {
            super::config(&input);
        }
    }
}
