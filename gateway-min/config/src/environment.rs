//! The environment variables as a value, so that loading neither reads nor changes those of the process.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::Path;

use super::error::ConfigError;
use super::find::is_there;

/// A set of environment variables. `Debug` shows only their number, because they hold secrets.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Environment(BTreeMap<String, String>);

impl Environment {
    /// The variables of this process, without those whose name or value is not UTF-8.
    pub fn of_process() -> Self {
        let variables = std::env::vars_os();
        Self(variables.filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?))).collect())
    }

    /// The value of a variable, which may be empty.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// The value of a variable; an empty one counts as not set.
    pub fn non_empty(&self, name: &str) -> Option<&str> {
        self.get(name).filter(|value| !value.is_empty())
    }

    /// Adds the variables of a `.env` file. Variables that are already set, even to an empty value, keep their value; a
    /// missing file adds nothing.
    ///
    /// # Errors
    /// [`ConfigError::Unreadable`], or [`ConfigError::BadDotEnv`] for an entry that is not `NAME=value`.
    pub(super) fn add_dot_env(&mut self, path: &Path) -> Result<(), ConfigError> {
        match std::fs::read(path) {
            Ok(text) => self.add_dot_env_text(path, &text),
            Err(error) if error.kind() == io::ErrorKind::NotFound && !is_there(path) => Ok(()),
            Err(source) => Err(ConfigError::Unreadable { path: path.to_owned(), source }),
        }
    }

    /// Adds the variables of the `.env` file at `path`, whose content is `text`.
    pub(super) fn add_dot_env_text(&mut self, path: &Path, text: &[u8]) -> Result<(), ConfigError> {
        let unreadable = |source| ConfigError::Unreadable { path: path.to_owned(), source };
        // Editors of Windows begin a file with this mark.
        let text = text.strip_prefix("\u{feff}".as_bytes()).unwrap_or(text);
        // A space at the end of a file without a last line break would be taken for a value that goes on.
        let text = io::Read::chain(text, "\n".as_bytes());
        for (index, entry) in dotenvy::from_read_iter(text).enumerate() {
            let (name, value) = match entry {
                Ok(entry) => entry,
                Err(dotenvy::Error::Io(source)) => return Err(unreadable(source)),
                Err(_) => return Err(ConfigError::BadDotEnv { path: path.to_owned(), entry: index + 1 }),
            };
            self.0.entry(name).or_insert(value);
        }
        Ok(())
    }
}

impl<K: Into<String>, V: Into<String>> FromIterator<(K, V)> for Environment {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(variables: I) -> Self {
        Self(variables.into_iter().map(|(name, value)| (name.into(), value.into())).collect())
    }
}

impl fmt::Debug for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Environment({} variables)", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dot_env(content: &str, mut environment: Environment) -> Result<Environment, ConfigError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(".env");
        std::fs::write(&path, content).unwrap();
        environment.add_dot_env(&path).map(|()| environment)
    }

    #[test]
    fn dot_env_fills_gaps_and_never_overrides() {
        let before = Environment::from_iter([("SET", "process"), ("EMPTY", "")]);
        let after = dot_env("# comment\nSET=file\nEMPTY=file\nexport NEW=\"two words\"\n", before).unwrap();
        assert_eq!(after, Environment::from_iter([("SET", "process"), ("EMPTY", ""), ("NEW", "two words")]));
    }

    #[test]
    fn dot_env_may_begin_with_a_byte_order_mark_and_have_line_breaks_of_windows() {
        let after = dot_env("\u{feff}KEY='a$b #c'\r\nNEXT=d\r\n", Environment::default()).unwrap();
        assert_eq!(after, Environment::from_iter([("KEY", "a$b #c"), ("NEXT", "d")]));
    }

    #[test]
    fn dot_env_may_end_with_a_space() {
        let after = dot_env("KEY=sk-1 ", Environment::default()).unwrap();
        assert_eq!(after, Environment::from_iter([("KEY", "sk-1")]));
    }

    #[test]
    fn dot_env_does_not_touch_the_process() {
        let name = "SVC_TEST_ONLY_IN_DOT_ENV";
        let after = dot_env(&format!("{name}=1\n"), Environment::default()).unwrap();
        assert_eq!(after.get(name), Some("1"));
        assert_eq!(std::env::var_os(name), None);
    }

    #[test]
    fn a_missing_dot_env_is_no_error() {
        let dir = tempfile::tempdir().unwrap();
        let mut environment = Environment::default();
        environment.add_dot_env(&dir.path().join(".env")).unwrap();
        assert_eq!(environment, Environment::default());
    }

    #[test]
    fn a_bad_dot_env_entry_is_named_by_number_and_not_shown() {
        let error = dot_env("# keys\nGOOD=1\nbad secret-in-line\n", Environment::default()).unwrap_err();
        let text = format!("{error} {error:?}");
        assert!(matches!(error, ConfigError::BadDotEnv { entry: 2, .. }), "{text}");
        assert!(!text.contains("secret-in-line"), "{text}");
    }

    #[test]
    fn an_unreadable_dot_env_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join(".env")).unwrap();
        let error = Environment::default().add_dot_env(&dir.path().join(".env")).unwrap_err();
        assert!(matches!(error, ConfigError::Unreadable { .. }), "{error:?}");
    }

    #[test]
    fn the_process_environment_is_read_and_never_shown() {
        let environment = Environment::of_process();
        assert_eq!(environment.get("PATH"), std::env::var("PATH").ok().as_deref());
        let shown = format!("{:?}", Environment::from_iter([("API_KEY", "sk-1")]));
        assert_eq!(shown, "Environment(1 variables)");
    }

    #[test]
    fn an_empty_variable_counts_as_unset_only_where_asked() {
        let environment = Environment::from_iter([("EMPTY", "")]);
        assert_eq!((environment.get("EMPTY"), environment.non_empty("EMPTY")), (Some(""), None));
    }
}
