//! Locates the project root, the state directory and the configuration file.

use std::io;
use std::path::{Path, PathBuf};

use super::environment::Environment;
use super::error::{ConfigError, Origin};
use super::trust::{Prints, UserDirs};
use super::{LoadOptions, SourceFile};

/// Names the configuration file.
pub const CONFIG_PATH_VARIABLE: &str = "SVC_CONFIG_PATH";
/// Names the project root, which holds `config.yaml` and `.env`; defaults to the working directory.
pub const PROJECT_ROOT_VARIABLE: &str = "SVC_PROJECT_ROOT";
/// Names the state directory; defaults to `.svc` in the project root.
pub const STATE_DIR_VARIABLE: &str = "SVC_HOME";

pub(super) const CONFIG_FILE: &str = "config.yaml";
pub(super) const DOT_ENV_FILE: &str = ".env";
const STATE_DIR: &str = ".svc";

/// The directories and variables used for loading, determined once.
#[derive(Debug, Clone)]
pub(super) struct Location {
    /// The project root. Relative paths of the configuration resolve against it.
    pub(super) root: PathBuf,
    /// Where the process keeps its data.
    pub(super) state_dir: PathBuf,
    /// The given variables, plus those of the root's `.env`.
    pub(super) environment: Environment,
    /// Files that are not used because their directory is not trusted.
    pub(super) withheld: Vec<PathBuf>,
    named: Option<(PathBuf, Origin)>,
    /// The files that may be read, as they are trusted; `None` for any.
    trusted: Option<Prints>,
}

impl Location {
    /// Determines the root, reads its `.env`, then reads the other variables (so `.env` may set them).
    pub(super) fn of(options: &LoadOptions) -> Result<Self, ConfigError> {
        let mut environment = options.environment.clone();
        let root = environment
            .non_empty(PROJECT_ROOT_VARIABLE)
            .map_or_else(|| options.working_dir.clone(), |root| options.working_dir.join(root));
        environment.add_dot_env(&root.join(DOT_ENV_FILE))?;
        let state_dir = root.join(STATE_DIR);
        Ok(Self::with(options, root, state_dir, environment))
    }

    /// The location for a program that is started in any directory: files of the working directory count only if the
    /// user trusts it. Otherwise their own directories take its place, unless they name a configuration file.
    pub(super) fn trusted(options: &LoadOptions) -> Result<Self, ConfigError> {
        let mut environment = options.environment.clone();
        if environment.non_empty(PROJECT_ROOT_VARIABLE).is_some() {
            return Self::of(options);
        }
        let (here, user) = (&options.working_dir, UserDirs::of(&environment));
        let names_file =
            options.config_path.is_some() || environment.non_empty(CONFIG_PATH_VARIABLE).is_some();
        if let Ok(user) = &user
            && let Some(files) = user.trusted(here)?
        {
            if let Some(text) = files.dot_env {
                environment.add_dot_env_text(&here.join(DOT_ENV_FILE), &text)?;
            }
            let location = Self::with(options, here.clone(), here.join(STATE_DIR), environment);
            // What the user names is trusted anyway; what the directory's `.env` names is one of its files.
            return Ok(Self { trusted: Some(files.prints).filter(|_| !names_file), ..location });
        }
        let existing = |names: &[&str]| {
            let paths = names.iter().map(|name| here.join(name));
            paths.filter(|path| path.symlink_metadata().is_ok()).collect()
        };
        if names_file {
            let location = Self::with(options, here.clone(), here.join(STATE_DIR), environment);
            return Ok(Self { withheld: existing(&[DOT_ENV_FILE]), ..location });
        }
        let user = user?;
        environment.add_dot_env(&user.config.join(DOT_ENV_FILE))?;
        let location = Self::with(options, user.config.clone(), user.state.clone(), environment);
        Ok(Self { withheld: existing(&[CONFIG_FILE, DOT_ENV_FILE, STATE_DIR]), ..location })
    }

    /// Relative paths in variables and in the argument resolve against the working directory.
    fn with(options: &LoadOptions, root: PathBuf, state_dir: PathBuf, environment: Environment) -> Self {
        let here = |path: &Path| options.working_dir.join(path);
        let state_dir =
            environment.non_empty(STATE_DIR_VARIABLE).map_or(state_dir, |dir| here(Path::new(dir)));
        let named = match (&options.config_path, environment.non_empty(CONFIG_PATH_VARIABLE)) {
            (Some(path), _) => Some((here(path), Origin::Argument)),
            (None, Some(path)) => Some((here(Path::new(path)), Origin::Environment)),
            (None, None) => None,
        };
        Self { root, state_dir, environment, withheld: Vec::new(), named, trusted: None }
    }

    /// Reads a configuration file.
    ///
    /// # Errors
    /// [`ConfigError::Unreadable`], and [`ConfigError::Untrusted`] if it is not what was trusted.
    pub(super) fn read(&self, path: PathBuf) -> Result<SourceFile, ConfigError> {
        let file = SourceFile::read(path)?;
        match &self.trusted {
            Some(trusted) if !trusted.match_file(&self.root, &file.path, file.text.as_bytes()) => {
                Err(ConfigError::Untrusted { path: file.path })
            }
            _ => Ok(file),
        }
    }

    /// The current configuration file: the named one, else the root's `config.yaml`, else none. The root's may be one
    /// that cannot be read.
    ///
    /// # Errors
    /// [`ConfigError::Missing`] if the named file is missing.
    pub(super) fn config_file(&self) -> Result<Option<PathBuf>, ConfigError> {
        match &self.named {
            Some((path, _)) if path.is_file() => Ok(Some(path.clone())),
            Some((path, origin)) => Err(ConfigError::Missing { path: path.clone(), origin: *origin }),
            None => Ok(Some(self.default_file()).filter(|path| is_there(path))),
        }
    }

    /// The configuration file's path unless one is named.
    pub(super) fn default_file(&self) -> PathBuf {
        self.root.join(CONFIG_FILE)
    }
}

/// Whether there is something with this name. Without a configuration the defaults apply, so a link to nothing, or the
/// directory that a container gets in the place of a file that its host lacks, is an error and not the same as nothing.
pub(super) fn is_there(path: &Path) -> bool {
    !path.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::Config;
    use super::*;

    /// A working directory with `config.yaml`, `other/config.yaml` and `named.yaml`.
    fn tree() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("other")).unwrap();
        for file in ["config.yaml", "other/config.yaml", "named.yaml", "argument.yaml"] {
            fs::write(dir.path().join(file), "").unwrap();
        }
        dir
    }

    fn locate(dir: &Path, argument: Option<&str>, variables: &[(&str, &str)]) -> Location {
        let options = LoadOptions {
            config_path: argument.map(PathBuf::from),
            environment: variables.iter().copied().collect(),
            working_dir: dir.to_owned(),
        };
        Location::of(&options).unwrap()
    }

    fn found(dir: &Path, argument: Option<&str>, variables: &[(&str, &str)]) -> Option<PathBuf> {
        locate(dir, argument, variables).config_file().unwrap()
    }

    #[test]
    fn the_argument_beats_the_variable_beats_the_root() {
        let dir = tree();
        let at = |file: &str| Some(dir.path().join(file));
        let named = (CONFIG_PATH_VARIABLE, "named.yaml");
        let root = (PROJECT_ROOT_VARIABLE, "other");
        assert_eq!(found(dir.path(), Some("argument.yaml"), &[named, root]), at("argument.yaml"));
        assert_eq!(found(dir.path(), None, &[named, root]), at("named.yaml"));
        assert_eq!(found(dir.path(), None, &[root]), at("other/config.yaml"));
        assert_eq!(found(dir.path(), None, &[]), at("config.yaml"));
        assert_eq!(found(dir.path(), None, &[(CONFIG_PATH_VARIABLE, "")]), at("config.yaml"));
    }

    #[test]
    fn no_file_at_all_is_none_and_appears_later() {
        let dir = tempfile::tempdir().unwrap();
        let location = locate(dir.path(), None, &[]);
        assert_eq!(location.config_file().unwrap(), None);
        fs::write(dir.path().join("config.yaml"), "").unwrap();
        assert_eq!(location.config_file().unwrap(), Some(dir.path().join("config.yaml")));
    }

    #[test]
    fn a_named_but_missing_file_is_an_error_that_names_it() {
        let dir = tree();
        for (argument, variables, origin) in [
            (Some("gone.yaml"), vec![], "the argument"),
            (None, vec![(CONFIG_PATH_VARIABLE, "gone.yaml")], "SVC_CONFIG_PATH"),
        ] {
            let error = locate(dir.path(), argument, &variables).config_file().unwrap_err().to_string();
            assert!(error.contains(&dir.path().join("gone.yaml").display().to_string()), "{error}");
            assert!(error.contains(origin), "{error}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn what_cannot_be_read_in_the_place_of_a_file_does_not_count_as_none() {
        for name in [CONFIG_FILE, DOT_ENV_FILE] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join(name);
            let options = LoadOptions {
                config_path: None,
                environment: Environment::default(),
                working_dir: dir.path().to_owned(),
            };
            Config::load(&options).unwrap();
            let refused = || Config::load(&options).unwrap_err().to_string();
            std::os::unix::fs::symlink("gone", &path).unwrap();
            assert!(refused().starts_with(&format!("cannot read {}", path.display())), "{}", refused());
            fs::remove_file(&path).unwrap();
            fs::create_dir(&path).unwrap();
            assert!(refused().starts_with(&format!("cannot read {}", path.display())), "{}", refused());
        }
    }

    #[test]
    fn a_directory_is_not_a_configuration_file() {
        let dir = tree();
        assert!(locate(dir.path(), Some("other"), &[]).config_file().is_err());
    }

    #[test]
    fn dot_env_of_the_root_may_name_the_file_and_the_state_directory() {
        let dir = tree();
        fs::write(dir.path().join("other/.env"), "SVC_CONFIG_PATH=named.yaml\nSVC_HOME=state\n").unwrap();
        fs::write(dir.path().join(".env"), "SVC_CONFIG_PATH=argument.yaml\n").unwrap();
        let location = locate(dir.path(), None, &[(PROJECT_ROOT_VARIABLE, "other")]);
        assert_eq!(location.config_file().unwrap(), Some(dir.path().join("named.yaml")));
        assert_eq!(location.state_dir, dir.path().join("state"));
    }

    #[test]
    fn the_state_directory_is_the_variable_or_in_the_root() {
        let dir = tree();
        assert_eq!(locate(dir.path(), None, &[]).state_dir, dir.path().join(".svc"));
        let other = locate(dir.path(), None, &[(PROJECT_ROOT_VARIABLE, "other")]);
        assert_eq!((other.root, other.state_dir), (dir.path().join("other"), dir.path().join("other/.svc")));
        let home = locate(dir.path(), None, &[(STATE_DIR_VARIABLE, "/var/lib/x")]);
        assert_eq!(home.state_dir, PathBuf::from("/var/lib/x"));
    }
}
