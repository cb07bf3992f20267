//! `skills`: instructions for agents, in files. Read live.

use std::path::PathBuf;

use crate::node::Node;

/// `skills`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Skills {
    /// The directory of the files; relative to the project root. `None`, and a directory that does not exist, mean no
    /// skills.
    pub path: Option<PathBuf>,
}

impl Skills {
    pub(crate) fn read(root: &Node<'_>) -> Self {
        Self { path: root.section("skills").nonempty_text("path").map(PathBuf::from) }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::read;
    use super::*;

    #[test]
    fn there_are_no_skills_unless_a_directory_is_named() {
        for tree in [json!({}), json!({"skills": null}), json!({"skills": {"path": null}})] {
            assert_eq!(read(&tree, Skills::read).unwrap().path, None);
        }
        let tree = json!({"skills": {"path": "instructions"}});
        assert_eq!(read(&tree, Skills::read).unwrap().path, Some("instructions".into()));
    }
}
