//! `auth`: who may use the gateway.

use std::path::{Path, PathBuf};

use crate::find::Location;
use crate::node::Node;

/// `auth`, read once at start; the keys themselves follow their file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Auth {
    /// Whether requests need an API key; default false.
    pub enabled: bool,
    /// The file with the keys' hashes; default `api-keys.json` in the state directory. A relative path resolves against
    /// the project root.
    pub keys_file: PathBuf,
    /// Whether to serve other machines, under any host name, without keys; default false.
    pub allow_unauthenticated: bool,
}

impl Auth {
    /// The defaults for this state directory.
    pub fn at(state_dir: &Path) -> Self {
        Self { enabled: false, keys_file: state_dir.join("api-keys.json"), allow_unauthenticated: false }
    }

    pub(crate) fn read(root: &Node<'_>, location: &Location) -> Self {
        let (node, default) = (root.section("auth"), Self::at(&location.state_dir));
        let named = node.given_text("keys_file");
        Self {
            enabled: node.bool("enabled", default.enabled),
            keys_file: named.map_or(default.keys_file, |path| location.root.join(path)),
            allow_unauthenticated: node.bool("allow_unauthenticated", default.allow_unauthenticated),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::{Project, load_error};

    #[test]
    fn it_is_off_by_default_and_its_keys_are_in_the_state_directory() {
        for yaml in ["", "auth:\n", "auth: {keys_file: \"\"}\n"] {
            let auth = Project::with_config(yaml).load_with(&[("SVC_HOME", "/state")]).unwrap().config.auth;
            assert!(!auth.enabled && !auth.allow_unauthenticated);
            assert_eq!(auth.keys_file, std::path::Path::new("/state/api-keys.json"));
        }
    }

    #[test]
    fn it_is_read_and_checked() {
        let project = Project::with_config(
            "auth: {enabled: $ON, keys_file: secret/keys.json, allow_unauthenticated: true}\n",
        );
        let auth = project.load_with(&[("ON", "true")]).unwrap().config.auth;
        assert!(auth.enabled && auth.allow_unauthenticated);
        assert_eq!(auth.keys_file, project.path("secret/keys.json"));
        let error = load_error("auth: {enabled: maybe, keys_file: 5}\n");
        assert!(error.contains("auth.enabled: must be true or false"), "{error}");
        assert!(error.contains("auth.keys_file: must be a string"), "{error}");
    }
}
