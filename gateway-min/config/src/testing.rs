//! A project directory for tests, and a capture of the log.

use std::fs;
use std::path::{Path, PathBuf};

use threadkeep_testing::Log;

use super::{Config, ConfigError, LoadOptions, Loaded};

/// A private project root. It is nested deep enough that the search for an example file stays inside.
pub(super) struct Project {
    _dir: tempfile::TempDir,
    pub(super) root: PathBuf,
}

impl Project {
    pub(super) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("1/2/3/4/5/6");
        fs::create_dir_all(&root).unwrap();
        Self { _dir: dir, root }
    }

    pub(super) fn with_config(yaml: &str) -> Self {
        let project = Self::new();
        project.write("config.yaml", yaml);
        project
    }

    pub(super) fn path(&self, file: &str) -> PathBuf {
        self.root.join(file)
    }

    pub(super) fn write(&self, file: &str, content: &str) {
        fs::write(self.path(file), content).unwrap();
    }

    pub(super) fn options(&self, variables: &[(&str, &str)]) -> LoadOptions {
        LoadOptions {
            config_path: None,
            environment: variables.iter().copied().collect(),
            working_dir: self.root.clone(),
        }
    }

    pub(super) fn load_with(&self, variables: &[(&str, &str)]) -> Result<Loaded, ConfigError> {
        Config::load(&self.options(variables))
    }
}

/// Loads a file with this content, without environment variables.
pub(super) fn load(yaml: &str) -> Result<Loaded, ConfigError> {
    Project::with_config(yaml).load_with(&[])
}

/// The text of the error that this content causes.
pub(super) fn load_error(yaml: &str) -> String {
    match load(yaml) {
        Ok(loaded) => panic!("{yaml:?} was accepted: {loaded:?}"),
        Err(error) => error.to_string(),
    }
}

/// What `action` logs, one line per event.
pub(super) fn logged<T>(action: impl FnOnce() -> T) -> (T, String) {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(log.clone()).finish();
    let value = tracing::subscriber::with_default(subscriber, action);
    (value, log.text())
}

/// The example file of this repository.
pub(super) fn shipped_example() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../config.example.yaml"))
}
