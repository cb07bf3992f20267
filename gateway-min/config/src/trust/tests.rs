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
        assert_eq!(withheld(&HostileCheckout::open(&place.options(&[]))), ["config.yaml", ".env"], "{file}");
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
    let mode =
        |path: &str| std::fs::metadata(place.home.path().join(path)).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(".config/threadkeep/trusted.json"), 0o600);
    assert_eq!(mode(".config/threadkeep"), 0o700);
}
