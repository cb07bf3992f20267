//! The commands that errors and results name: on the same store, and quoted for a shell, so that they can be carried
//! out as they are printed.

use std::path::Path;

use super::output::one_line;

/// What another command needs to work on the same store.
#[derive(Debug, Clone, Default)]
pub(crate) struct SameStore {
    /// The flag that names the configuration, after a space.
    config: String,
    /// The flag that names the store, after a space.
    store: String,
}

impl SameStore {
    /// That of a command with these flags. A password is left out, because the text may be kept in a log.
    pub(crate) fn of(config: Option<&Path>, sqlite: Option<&Path>, postgres: Option<&str>) -> Self {
        let flag = |name: &str, path: &Path| format!(" {}", option(name, &path.to_string_lossy()));
        let config = config.map(|path| flag("--config", path)).unwrap_or_default();
        let store = match (sqlite, postgres) {
            (Some(path), _) => flag("--sqlite", path),
            (None, Some(address)) => match without_password(address) {
                Some(address) => format!(" {}", option("--postgres", &address)),
                None => " --postgres URL".to_owned(),
            },
            (None, None) => String::new(),
        };
        Self { config, store }
    }

    /// A command with these words.
    pub(crate) fn command(&self, words: &str) -> String {
        one_line(&format!("`threadkeep {words}{}{}`", self.config, self.store))
    }

    /// A command with these words and this argument.
    pub(crate) fn command_on(&self, words: &str, argument: &str) -> String {
        let (config, store) = (&self.config, &self.store);
        one_line(&if argument.starts_with('-') {
            format!("`threadkeep {words}{config}{store} -- {}`", quoted(argument))
        } else {
            format!("`threadkeep {words} {}{config}{store}`", quoted(argument))
        })
    }

    /// The command that creates the configured stores.
    pub(crate) fn setup(&self) -> String {
        one_line(&format!("`threadkeep setup{}`", self.config))
    }
}

/// A flag with its value, for a shell: nothing in the value is a command, or another flag.
pub fn option(name: &str, value: &str) -> String {
    let between = if value.starts_with('-') { '=' } else { ' ' };
    format!("{name}{between}{}", quoted(value))
}

/// One word for a shell.
fn quoted(word: &str) -> String {
    let is_plain = |char: char| char.is_ascii_alphanumeric() || "_-./:@%+,=".contains(char);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// The address without its password; `None` if there may be one where it is not looked for.
fn without_password(address: &str) -> Option<String> {
    let shown = match address.split_once("://") {
        Some((scheme, place)) => match place.split_once('@') {
            Some((user, place)) => {
                let user = user.split_once(':').map_or(user, |(user, _)| user);
                format!("{scheme}://{user}@{place}")
            }
            None => address.to_owned(),
        },
        None => address.to_owned(),
    };
    // A parameter, whose name may be written with escapes; or a password with an `@` that is not escaped.
    let parameters = shown.split_once('?').map_or("", |(_, parameters)| parameters);
    let may_have_one =
        shown.to_lowercase().contains("pass") || parameters.contains('%') || shown.matches('@').count() > 1;
    (!may_have_one).then_some(shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sqlite(path: &str) -> SameStore {
        SameStore::of(None, Some(Path::new(path)), None)
    }

    #[test]
    fn a_command_names_the_store_that_was_named() {
        let none = SameStore::of(None, None, None);
        assert_eq!(none.command("threads list"), "`threadkeep threads list`");
        assert_eq!(none.setup(), "`threadkeep setup`");
        let config = SameStore::of(Some(Path::new("my gateway/config.yaml")), None, None);
        assert_eq!(config.command("vacuum"), "`threadkeep vacuum --config 'my gateway/config.yaml'`");
        assert_eq!(config.setup(), "`threadkeep setup --config 'my gateway/config.yaml'`");
        let file = sqlite("/var/lib/svc/checkpoints.db");
        assert_eq!(
            file.command_on("threads show", "t"),
            "`threadkeep threads show t --sqlite /var/lib/svc/checkpoints.db`"
        );
        assert_eq!(file.setup(), "`threadkeep setup`", "it creates the configured store");
    }

    #[test]
    fn words_are_quoted_for_a_shell() {
        for (word, shell) in [
            ("a-b_c./:@%+,=1", "a-b_c./:@%+,=1"),
            ("", "''"),
            ("a b", "'a b'"),
            ("$(rm) `x` \"y\"", "'$(rm) `x` \"y\"'"),
            ("it's", r"'it'\''s'"),
            ("~/x", "'~/x'"),
            ("é", "'é'"),
        ] {
            assert_eq!(quoted(word), shell);
        }
        assert_eq!(option("--thread", "a b"), "--thread 'a b'");
        assert_eq!(option("--thread", "-x"), "--thread=-x", "no flag");
        assert_eq!(
            sqlite("x").command_on("threads show", "-x"),
            "`threadkeep threads show --sqlite x -- -x`"
        );
        assert_eq!(sqlite("a\u{1b}[2Jb").command("vacuum"), "`threadkeep vacuum --sqlite 'a.[2Jb'`");
    }

    #[test]
    fn a_password_is_never_printed() {
        for (address, flag) in [
            ("postgres://ann:hunter2@h:5433/d", "postgres://ann@h:5433/d"),
            ("postgresql://ann@h/d?sslmode=require", "'postgresql://ann@h/d?sslmode=require'"),
            ("postgres://h/d", "postgres://h/d"),
            ("host=h user=ann dbname=d", "'host=h user=ann dbname=d'"),
            ("postgres://ann:hun@ter2@h/d", "URL"),
            ("postgres://ann:hun/ter2@h/d", "postgres://ann@h/d"),
            ("postgres://ann@h/d?password=hunter2", "URL"),
            ("postgres://ann@h/d?p%61ssword=hunter2", "URL"),
            ("host=h user=ann PASSWORD='hunter2'", "URL"),
        ] {
            let command = SameStore::of(None, None, Some(address)).command("vacuum");
            assert_eq!(command, format!("`threadkeep vacuum --postgres {flag}`"), "{address}");
            assert!(!command.contains("hunter2") && !command.contains("ter2"), "{address}");
        }
    }
}
