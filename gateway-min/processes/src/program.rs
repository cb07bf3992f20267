//! What is to be started, and where it is found.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use threadkeep_config::Secret;

const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin";

/// What a program sees of the gateway's environment. Everything else may contain keys.
const PASSED_ON: [&str; 5] = ["HOME", "USER", "LANG", "LC_ALL", "TMPDIR"];

/// A program to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// Its name, which is looked up in `PATH`, or its path.
    pub command: String,
    /// Its arguments.
    pub args: Vec<String>,
    /// Its environment, besides `PATH`, `HOME`, `USER`, `LANG`, `LC_ALL` and `TMPDIR` of the gateway, which it can replace.
    pub env: BTreeMap<String, Secret>,
    /// Its working directory.
    pub directory: PathBuf,
}

/// Why a program was not started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// It is not installed.
    #[error("the command '{0}' was not found on PATH. Install it, or set `command` to its full path")]
    NotFound(String),
    /// There is no such file, or it is not a program.
    #[error("'{0}' is not a file that can be executed. Check `command`")]
    NotExecutable(String),
    /// The operating system refused.
    #[error("cannot start '{command}': {source}")]
    Failed {
        /// The command.
        command: String,
        /// The operating system's error.
        source: std::io::Error,
    },
}

impl Program {
    /// The file of the command, with the `PATH` that the program sees.
    ///
    /// # Errors
    /// [`SpawnError::NotFound`], [`SpawnError::NotExecutable`].
    pub fn resolved(&self) -> Result<PathBuf, SpawnError> {
        let command = Path::new(&self.command);
        if self.command.contains('/') {
            let absolute = std::path::absolute(command).unwrap_or_else(|_| command.to_owned());
            return if is_executable(&absolute) {
                Ok(absolute)
            } else {
                Err(SpawnError::NotExecutable(self.command.clone()))
            };
        }
        std::env::split_paths(&self.path())
            .filter(|directory| directory.is_absolute())
            .map(|directory| directory.join(command))
            .find(|file| is_executable(file))
            .ok_or_else(|| SpawnError::NotFound(self.command.clone()))
    }

    fn path(&self) -> OsString {
        match self.env.get("PATH") {
            Some(path) => path.expose().into(),
            None => std::env::var_os("PATH").unwrap_or_else(|| DEFAULT_PATH.into()),
        }
    }

    /// Its whole environment.
    pub(crate) fn environment(&self) -> impl Iterator<Item = (OsString, OsString)> + '_ {
        let passed_on = PASSED_ON.into_iter().filter_map(|name| Some((name.into(), std::env::var_os(name)?)));
        let own = self.env.iter().map(|(name, value)| (name.into(), value.expose().into()));
        passed_on.chain([("PATH".into(), self.path())]).chain(own)
    }
}

fn is_executable(file: &Path) -> bool {
    file.metadata().is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(command: &str) -> Program {
        Program { command: command.to_owned(), args: vec![], env: BTreeMap::new(), directory: "/".into() }
    }

    #[test]
    fn a_command_is_found_on_path_or_by_its_path() {
        assert!(program("sh").resolved().unwrap().is_absolute());
        assert_eq!(program("/bin/sh").resolved().unwrap(), Path::new("/bin/sh"));
        let error = program("no-such-program").resolved().unwrap_err().to_string();
        assert!(error.starts_with("the command 'no-such-program' was not found on PATH. "), "{error}");
        let text = tempfile::NamedTempFile::new().unwrap();
        for file in [text.path().to_str().unwrap(), "/etc", "./no/such/program"] {
            let error = program(file).resolved().unwrap_err().to_string();
            assert!(error.starts_with(&format!("'{file}' is not a file that can be executed. ")), "{error}");
        }
    }

    #[test]
    fn the_path_of_the_program_decides_and_never_the_working_directory() {
        let with_path =
            |path: &str| Program { env: [("PATH".into(), Secret::new(path))].into(), ..program("sh") };
        assert!(with_path("/bin").resolved().is_ok());
        for path in ["", ".", "bin", "/nonexistent"] {
            assert!(with_path(path).resolved().is_err(), "{path}");
        }
    }

    #[test]
    fn the_environment_has_no_keys_of_the_gateway() {
        let own = Program { env: [("KEY".into(), Secret::new("its own"))].into(), ..program("sh") };
        let names: Vec<OsString> = own.environment().map(|(name, _)| name).collect();
        assert!(names.contains(&"PATH".into()) && names.contains(&"KEY".into()));
        // Cargo sets it for tests, as an operator sets keys for a gateway.
        assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some());
        assert!(!names.contains(&"CARGO_MANIFEST_DIR".into()), "{names:?}");
    }
}
