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
mod tests {
    use super::super::testing::Project;
    use super::super::{ConfigHandle, LoadOptions};
    use super::*;

    const HOSTILE: &str = "sandbox: {use: local, allow_host_bash: true}\n";

    /// A checkout with this configuration, and the home directory of its user.
    struct HostileCheckout {
        checkout: Project,
        home: tempfile::TempDir,
    }

    impl HostileCheckout {
        fn new() -> Self {
            let checkout = Project::with_config(HOSTILE);
            checkout.write(".env", "STOLEN=1\n");
            Self { checkout, home: tempfile::tempdir().unwrap() }
        }

        fn options(&self, variables: &[(&str, &str)]) -> LoadOptions {
            let home = [("HOME", self.home.path().to_str().unwrap())];
            self.checkout.options(&[&home, variables].concat())
        }

        fn user(&self) -> UserDirs {
            UserDirs::of(&self.options(&[]).environment).unwrap()
        }

        fn open(options: &LoadOptions) -> ConfigHandle {
            ConfigHandle::open_trusted(options).unwrap()
        }

        /// Whether a configuration found in the checkout is that of the checkout.
        fn is_used(&self) -> bool {
            Self::open(&self.options(&[])).current().sandbox.allow_host_bash
        }
    }

    fn withheld(handle: &ConfigHandle) -> Vec<&str> {
        handle.withheld().iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect()
    }

    #[test]
    fn a_directory_is_used_only_after_its_user_trusted_it() {
        let place = HostileCheckout::new();
        std::fs::create_dir(place.checkout.path(".svc")).unwrap();
        let handle = HostileCheckout::open(&place.options(&[]));
        let config = handle.current();
        assert!(!config.sandbox.allow_host_bash);
        assert_eq!(config.models, [crate::Model::demo()]);
        assert_eq!(config.state_dir, place.home.path().join(".local/state/threadkeep"));
        assert_eq!(handle.environment().get("STOLEN"), None);
        assert_eq!(withheld(&handle), ["config.yaml", ".env", ".svc"]);

        assert_eq!(place.user().trust(&place.checkout.root).unwrap(), [".env", "config.yaml"]);
        let handle = HostileCheckout::open(&place.options(&[]));
        let config = handle.current();
        assert!(config.sandbox.allow_host_bash);
        assert_eq!(config.state_dir, place.checkout.path(".svc"));
        assert_eq!(handle.environment().get("STOLEN"), Some("1"));
        assert!(handle.withheld().is_empty());

        assert!(place.user().distrust(&place.checkout.root).unwrap());
        assert!(!place.is_used());
        assert!(!place.user().distrust(&place.checkout.root).unwrap());
    }

    #[test]
    fn any_change_of_its_files_takes_the_trust_away() {
        for (file, text) in [("config.yaml", "title: {max_words: 3}\n"), (".env", "STOLEN=2\n")] {
            let place = HostileCheckout::new();
            place.user().trust(&place.checkout.root).unwrap();
            assert!(place.is_used());
            place.checkout.write(file, text);
            assert_eq!(
                withheld(&HostileCheckout::open(&place.options(&[]))),
                ["config.yaml", ".env"],
                "{file}"
            );
            place.checkout.write(file, if file == ".env" { "STOLEN=1\n" } else { HOSTILE });
            assert!(place.is_used());
            std::fs::remove_file(place.checkout.path(file)).unwrap();
            assert!(!withheld(&HostileCheckout::open(&place.options(&[]))).is_empty(), "{file} was removed");
        }
        let place = HostileCheckout::new();
        std::fs::remove_file(place.checkout.path(".env")).unwrap();
        place.user().trust(&place.checkout.root).unwrap();
        place.checkout.write(".env", "STOLEN=1\n");
        assert!(!place.is_used(), ".env was added");
    }

    /// A program that follows its configuration must not take an edit that nobody trusted.
    #[test]
    fn an_edit_while_it_is_followed_is_not_used_until_it_is_trusted() {
        let place = HostileCheckout::new();
        place.checkout.write("config.yaml", "title: {max_words: 3}\n");
        place.user().trust(&place.checkout.root).unwrap();
        let handle = HostileCheckout::open(&place.options(&[]));
        assert_eq!(handle.current().title.max_words, 3);
        place
            .checkout
            .write("config.yaml", "title: {max_words: 4}\nsandbox: {use: local, allow_host_bash: true}\n");
        let config = handle.current();
        assert_eq!((config.title.max_words, config.sandbox.allow_host_bash), (3, false));
        let error = handle.last_error().unwrap().to_string();
        assert!(error.contains("threadkeep config trust"), "{error}");

        let place = HostileCheckout::new();
        std::fs::remove_file(place.checkout.path("config.yaml")).unwrap();
        place.user().trust(&place.checkout.root).unwrap();
        let handle = HostileCheckout::open(&place.options(&[]));
        place.checkout.write("config.yaml", HOSTILE);
        assert!(!handle.current().sandbox.allow_host_bash, "a file that was not there");
    }

    /// A configuration that the directory's own `.env` names is one of its files.
    #[test]
    fn a_file_that_the_env_of_a_directory_names_is_trusted_as_it_is_too() {
        let harmless = "title: {max_words: 3}\n";
        let place = HostileCheckout::new();
        place.checkout.write(".env", "SVC_CONFIG_PATH=other.yaml\n");
        place.checkout.write("other.yaml", harmless);
        let trusted = place.user().trust(&place.checkout.root).unwrap();
        assert_eq!(trusted, [".env", "config.yaml", "other.yaml"]);
        let handle = HostileCheckout::open(&place.options(&[]));
        assert_eq!(handle.current().title.max_words, 3);
        assert!(!place.is_used());

        place.checkout.write("other.yaml", HOSTILE);
        assert!(!handle.current().sandbox.allow_host_bash, "an edit while it is followed");
        let error = handle.last_error().unwrap().to_string();
        assert!(error.contains("other.yaml changed after it was trusted"), "{error}");
        assert!(!place.is_used(), "an edit between two starts");
        assert_eq!(withheld(&HostileCheckout::open(&place.options(&[]))), ["config.yaml", ".env"]);
        place.user().trust(&place.checkout.root).unwrap();
        assert!(place.is_used());

        // What the user names instead is theirs.
        place.checkout.write("other.yaml", harmless);
        place.user().trust(&place.checkout.root).unwrap();
        let named = place.options(&[("SVC_CONFIG_PATH", "config.yaml")]);
        assert!(HostileCheckout::open(&named).current().sandbox.allow_host_bash);
    }

    #[test]
    fn a_named_file_that_appears_or_goes_after_the_trust_takes_it_away() {
        let place = HostileCheckout::new();
        place.checkout.write(".env", "SVC_CONFIG_PATH=other.yaml\n");
        place.user().trust(&place.checkout.root).unwrap();
        place.checkout.write("other.yaml", HOSTILE);
        assert!(!place.is_used(), "it appeared");
        place.user().trust(&place.checkout.root).unwrap();
        assert!(place.is_used());
        std::fs::remove_file(place.checkout.path("other.yaml")).unwrap();
        assert!(!place.is_used(), "it was removed");
        assert!(!withheld(&HostileCheckout::open(&place.options(&[]))).is_empty());
    }

    #[test]
    fn what_the_user_names_is_trusted_and_what_lies_beside_it_is_not() {
        let place = HostileCheckout::new();
        for (path, variables) in
            [(Some("config.yaml"), &[][..]), (None, &[("SVC_CONFIG_PATH", "config.yaml")][..])]
        {
            let options = LoadOptions { config_path: path.map(PathBuf::from), ..place.options(variables) };
            let handle = HostileCheckout::open(&options);
            assert!(handle.current().sandbox.allow_host_bash);
            assert_eq!(handle.current().state_dir, place.checkout.path(".svc"));
            assert_eq!(handle.environment().get("STOLEN"), None);
            assert_eq!(withheld(&handle), [".env"]);
        }
        let root = place.checkout.root.to_str().unwrap();
        let handle = HostileCheckout::open(&place.options(&[("SVC_PROJECT_ROOT", root)]));
        assert!(handle.current().sandbox.allow_host_bash, "the user named the directory");
        assert_eq!(handle.environment().get("STOLEN"), Some("1"));
    }

    #[test]
    fn the_users_own_configuration_takes_the_place_of_the_directorys() {
        let place = HostileCheckout::new();
        let own = place.home.path().join(".config/threadkeep");
        std::fs::create_dir_all(&own).unwrap();
        std::fs::write(own.join("config.yaml"), "title: {max_words: $WORDS}\n").unwrap();
        std::fs::write(own.join(".env"), "WORDS=2\n").unwrap();
        let config = HostileCheckout::open(&place.options(&[])).current();
        assert_eq!((config.title.max_words, config.sandbox.allow_host_bash), (2, false));
        let state = HostileCheckout::open(&place.options(&[("SVC_HOME", "/state")])).current();
        assert_eq!(state.state_dir, Path::new("/state"), "the user named it");
    }

    #[test]
    fn who_has_no_home_can_still_name_a_file() {
        let place = HostileCheckout::new();
        let named = [("SVC_CONFIG_PATH", "config.yaml")];
        let handle = ConfigHandle::open_trusted(&place.checkout.options(&named)).unwrap();
        assert!(handle.current().sandbox.allow_host_bash);
        let error = ConfigHandle::open_trusted(&place.checkout.options(&[])).unwrap_err();
        assert!(matches!(error, ConfigError::NoHome), "{error}");
        // Not every command that needs one can name a file.
        assert!(error.to_string().ends_with("; set HOME"), "{error}");
    }

    /// A file of a directory that nobody trusts is not even read.
    #[test]
    fn a_broken_or_huge_file_of_an_untrusted_directory_changes_nothing() {
        let place = HostileCheckout::new();
        place.checkout.write(".env", "BROKEN LINE\n");
        let huge = File::create(place.checkout.path("config.yaml")).unwrap();
        huge.set_len(MAX_BYTES + 1).unwrap();
        assert!(!place.is_used());
        assert!(matches!(
            place.user().trust(&place.checkout.root),
            Err(ConfigError::Unreadable { path, .. }) if path.ends_with("config.yaml")
        ));
    }

    #[test]
    fn a_directory_without_files_needs_no_trust_and_a_user_without_home_gets_an_error() {
        let place = HostileCheckout { checkout: Project::new(), home: tempfile::tempdir().unwrap() };
        let handle = HostileCheckout::open(&place.options(&[]));
        assert!(handle.withheld().is_empty());
        assert_eq!(handle.current().state_dir, place.home.path().join(".local/state/threadkeep"));
        let error = UserDirs::of(&Environment::default()).unwrap_err().to_string();
        assert!(error.contains("HOME"), "{error}");
        let xdg = Environment::from_iter([("XDG_CONFIG_HOME", "/c"), ("XDG_STATE_HOME", "/s")]);
        let user = UserDirs::of(&xdg).unwrap();
        assert_eq!((user.config, user.state), ("/c/threadkeep".into(), "/s/threadkeep".into()));
    }

    /// None takes back what another one has written.
    #[test]
    fn directories_trusted_at_once_are_all_kept() {
        let place = HostileCheckout::new();
        let directories: Vec<_> = (0..8).map(|_| tempfile::tempdir().unwrap()).collect();
        std::thread::scope(|scope| {
            for directory in &directories {
                scope.spawn(|| place.user().trust(directory.path()).unwrap());
            }
        });
        for directory in &directories {
            assert!(place.user().trusted(directory.path()).unwrap().is_some());
        }
    }

    #[cfg(unix)]
    #[test]
    fn the_list_is_its_owners_alone() {
        use std::os::unix::fs::PermissionsExt as _;
        let place = HostileCheckout::new();
        place.user().trust(&place.checkout.root).unwrap();
        let mode = |path: &str| {
            std::fs::metadata(place.home.path().join(path)).unwrap().permissions().mode() & 0o777
        };
        assert_eq!(mode(".config/threadkeep/trusted.json"), 0o600);
        assert_eq!(mode(".config/threadkeep"), 0o700);
    }
}
