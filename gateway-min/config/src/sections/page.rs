//! `page`: the page for browsers.

use crate::node::Node;

/// `page`, read once at start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// Whether the gateway serves a page for browsers at `/`; default true.
    pub enabled: bool,
}

impl Default for Page {
    fn default() -> Self {
        Self { enabled: true }
    }
}

impl Page {
    pub(crate) fn read(root: &Node<'_>) -> Self {
        let (node, default) = (root.section("page"), Self::default());
        Self { enabled: node.bool("enabled", default.enabled) }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::{assert_refused, read};
    use super::*;

    #[test]
    fn it_is_on_unless_it_is_switched_off() {
        for tree in [json!({}), json!({"page": null})] {
            assert!(read(&tree, Page::read).unwrap().enabled);
        }
        assert!(!read(&json!({"page": {"enabled": false}}), Page::read).unwrap().enabled);
        assert_refused("page", &[(json!({"enabled": 3}), "enabled")], Page::read);
    }
}
