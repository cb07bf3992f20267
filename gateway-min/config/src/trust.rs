//! Which directories may configure the programs of this user.
//!
//! A configuration decides which programs run and where keys are sent. A program that is started in any directory, such
//! as `threadkeep chat` in a checkout of somebody else's repository, must therefore not use what it finds there, until
//! its user said once that the directory is trusted. What is remembered is the directory's path and the content of its
//! files, so that an edited file has to be trusted again.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use threadkeep_files as files;

use super::environment::Environment;
use super::error::ConfigError;
use super::find::{CONFIG_FILE, CONFIG_PATH_VARIABLE, DOT_ENV_FILE};

/// The maximum size of a file that can be trusted.
const MAX_BYTES: u64 = 16 << 20;
/// The directory of this program in those of the user.
const PROGRAM: &str = "threadkeep";
const TRUST_FILE: &str = "trusted.json";
/// Only its owner may change what is trusted.
const MODE: u32 = 0o600;

/// The directories of this user.
#[derive(Debug, Clone)]
pub struct UserDirs {
    /// Their own configuration: `threadkeep` in `$XDG_CONFIG_HOME` or `~/.config`.
    pub config: PathBuf,
    /// Their own data: `threadkeep` in `$XDG_STATE_HOME` or `~/.local/state`.
    pub state: PathBuf,
}

/// The files of a directory that configure a program, by name, with the hashes of their contents: `config.yaml`, `.env`,
/// and the configuration that this `.env` names.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct Prints(BTreeMap<String, String>);

/// What is used of a directory.
#[derive(Debug)]
pub(super) struct DirectoryFiles {
    pub(super) prints: Prints,
    /// The content of its `.env`.
    pub(super) dot_env: Option<Vec<u8>>,
}

/// The content of the file with the trusted directories.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    /// By canonical path.
    directories: BTreeMap<PathBuf, Prints>,
}

impl UserDirs {
    /// Those that the variables name.
    ///
    /// # Errors
    /// [`ConfigError::NoHome`].
    pub fn of(environment: &Environment) -> Result<Self, ConfigError> {
        let home = environment.non_empty("HOME").map(PathBuf::from);
        let directory = |variable, below: &str| {
            let named = environment.non_empty(variable).map(PathBuf::from).filter(|path| path.is_absolute());
            let directory = named.or_else(|| Some(home.as_ref()?.join(below)));
            directory.map(|directory| directory.join(PROGRAM)).ok_or(ConfigError::NoHome)
        };
        Ok(Self {
            config: directory("XDG_CONFIG_HOME", ".config")?,
            state: directory("XDG_STATE_HOME", ".local/state")?,
        })
    }

    /// The files of `directory`, if this user trusts it with them as they are. Blocks.
    ///
    /// # Errors
    /// [`ConfigError::Unreadable`] for one of them or the list of trusted directories.
    pub(super) fn trusted(&self, directory: &Path) -> Result<Option<DirectoryFiles>, ConfigError> {
        let Ok(canonical) = directory.canonicalize() else { return Ok(None) };
        let Some(known) = self.read()?.directories.remove(&canonical) else { return Ok(None) };
        let mut files = DirectoryFiles::of(directory)?;
        // A file that nobody trusted must not choose what is read next.
        if files.prints.0.iter().any(|(name, print)| known.0.get(name) != Some(print)) {
            return Ok(None);
        }
        files.add_named(directory)?;
        Ok(Some(files).filter(|files| files.prints == known))
    }

    /// Trusts `directory` with its current files, whose names are returned. Blocks.
    ///
    /// # Errors
    /// [`ConfigError::Unreadable`] for one of them or the list of trusted directories.
    pub fn trust(&self, directory: &Path) -> Result<Vec<String>, ConfigError> {
        let mut files = DirectoryFiles::of(directory)?;
        files.add_named(directory)?;
        let names = files.prints.0.keys().cloned().collect();
        self.change(directory, |directories, directory| {
            directories.insert(directory, files.prints);
        })?;
        Ok(names)
    }

    /// Trusts `directory` no longer; `false` if it was not trusted. Blocks.
    ///
    /// # Errors
    /// [`ConfigError::Unreadable`] for the list of trusted directories.
    pub fn distrust(&self, directory: &Path) -> Result<bool, ConfigError> {
        self.change(directory, |directories, directory| directories.remove(&directory).is_some())
    }

    /// Changes the list under a lock against other processes.
    fn change<T>(
        &self,
        directory: &Path,
        change: impl FnOnce(&mut BTreeMap<PathBuf, Prints>, PathBuf) -> T,
    ) -> Result<T, ConfigError> {
        let canonical = directory.canonicalize();
        let canonical =
            canonical.map_err(|source| ConfigError::Unreadable { path: directory.to_owned(), source })?;
        let unwritable = |source| ConfigError::Unwritable { path: self.trust_file(), source };
        files::create_private_dir(&self.config).map_err(unwritable)?;
        // A separate lock file: the list is replaced, and a lock on it would stay with the old one.
        let lock = File::create(self.trust_file().with_added_extension("lock")).map_err(unwritable)?;
        lock.lock().map_err(unwritable)?;
        let mut content = self.read()?;
        let changed = change(&mut content.directories, canonical);
        let text = serde_json::to_vec_pretty(&content).map_err(|error| unwritable(error.into()))?;
        files::replace(&self.trust_file(), &text, MODE).map_err(unwritable)?;
        Ok(changed)
    }

    fn read(&self) -> Result<Content, ConfigError> {
        let path = self.trust_file();
        let unreadable = |source| ConfigError::Unreadable { path: path.clone(), source };
        match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).map_err(|error| unreadable(error.into())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Content::default()),
            Err(error) => Err(unreadable(error)),
        }
    }

    fn trust_file(&self) -> PathBuf {
        self.config.join(TRUST_FILE)
    }
}

impl DirectoryFiles {
    /// `config.yaml` and `.env`.
    fn of(directory: &Path) -> Result<Self, ConfigError> {
        let mut files = Self { prints: Prints::default(), dot_env: None };
        files.add(directory, CONFIG_FILE)?;
        files.dot_env = files.add(directory, DOT_ENV_FILE)?;
        Ok(files)
    }

    /// Adds the configuration that the `.env` names.
    fn add_named(&mut self, directory: &Path) -> Result<(), ConfigError> {
        let mut variables = Environment::default();
        if let Some(text) = &self.dot_env {
            // A broken entry ends it here, and is an error when the file is used.
            let _ = variables.add_dot_env_text(&directory.join(DOT_ENV_FILE), text);
        }
        if let Some(named) = variables.non_empty(CONFIG_PATH_VARIABLE) {
            self.add(directory, named)?;
        }
        Ok(())
    }

    /// Adds a file, if it exists, and returns its content.
    fn add(&mut self, directory: &Path, name: &str) -> Result<Option<Vec<u8>>, ConfigError> {
        let path = directory.join(name);
        let unreadable = |source| ConfigError::Unreadable { path: path.clone(), source };
        // Opening a pipe would wait for a writer.
        if !path.is_file() {
            return Ok(None);
        }
        let mut content = Vec::new();
        let file = File::open(&path).map_err(unreadable)?;
        file.take(MAX_BYTES + 1).read_to_end(&mut content).map_err(unreadable)?;
        if content.len() as u64 > MAX_BYTES {
            return Err(unreadable(io::Error::other(format!("it is larger than {MAX_BYTES} bytes"))));
        }
        self.prints.0.insert(name.to_owned(), print(&content));
        Ok(Some(content))
    }
}

impl Prints {
    /// Whether the file at `path` is one of those of `directory`, and has this content.
    pub(super) fn match_file(&self, directory: &Path, path: &Path, content: &[u8]) -> bool {
        let print = print(content);
        self.0.iter().any(|(name, known)| directory.join(name) == path && *known == print)
    }
}

fn print(content: &[u8]) -> String {
    blake3::hash(content).to_hex().to_string()
}

#[cfg(test)]
mod tests;
