//! `tools` and `tool_groups`: which tools an agent may use. Read live.

use std::collections::HashSet;

use crate::node::Node;
use crate::secret::FreeForm;

/// One entry of `tools`.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    /// The name by which the model calls it; unique.
    pub name: String,
    /// The group it belongs to.
    pub group: Option<String>,
    /// The `use` key: what implements it.
    pub class: String,
    /// All other keys, for the tool.
    pub options: FreeForm,
}

/// One entry of `tool_groups`.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolGroup {
    /// The group's name; unique.
    pub name: String,
    /// All other keys.
    pub options: FreeForm,
}

/// The error for an empty list.
const NO_TOOLS: &str = "an empty list would leave agents without any tool, which is not supported yet; remove the key for \
     the built-in set";

/// The configured tools; `None` if the section is missing, which means the built-in set. An empty list, which would
/// mean no tools, is refused.
pub(crate) fn read_tools(root: &Node<'_>) -> Option<Vec<Tool>> {
    root.value("tools")?;
    let nodes = root.items("tools");
    if root.value("tools").is_some_and(|value| value.as_array().is_some_and(Vec::is_empty)) {
        root.problem("tools", NO_TOOLS);
    }
    let tools = nodes.iter().map(|node| Tool {
        name: node.required_text("name"),
        group: node.text("group"),
        class: node.required_text("use"),
        options: node.rest(&["name", "group", "use"]),
    });
    let tools: Vec<Tool> = tools.collect();
    refuse_duplicates(nodes.iter().zip(tools.iter().map(|tool| tool.name.as_str())));
    Some(tools)
}

/// The configured groups.
pub(crate) fn read_tool_groups(root: &Node<'_>) -> Vec<ToolGroup> {
    let nodes = root.items("tool_groups");
    let groups = nodes
        .iter()
        .map(|node| ToolGroup { name: node.required_text("name"), options: node.rest(&["name"]) });
    let groups: Vec<ToolGroup> = groups.collect();
    refuse_duplicates(nodes.iter().zip(groups.iter().map(|group| group.name.as_str())));
    groups
}

fn refuse_duplicates<'a>(named: impl Iterator<Item = (&'a Node<'a>, &'a str)>) {
    let mut names = HashSet::new();
    for (node, name) in named {
        if !name.is_empty() && !names.insert(name) {
            node.problem(
                "name",
                format!("another entry is also called {}; names must be unique", node.shown("name")),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::read;
    use super::*;

    #[test]
    fn no_section_is_the_built_in_set_and_an_empty_list_is_refused() {
        assert_eq!(read(&json!({}), read_tools).unwrap(), None);
        assert_eq!(read(&json!({"tools": null}), read_tools).unwrap(), None);
        assert!(read(&json!({"tools": []}), read_tools).unwrap_err().contains(NO_TOOLS));
        assert_eq!(read(&json!({}), read_tool_groups).unwrap(), vec![]);
    }

    #[test]
    fn entries_are_read_and_other_keys_are_handed_on() {
        let tree = json!({
            "tools": [{"name": "bash", "group": "shell", "use": "bash", "x": 1}, {"name": "ls", "use": "ls"}],
            "tool_groups": [{"name": "shell", "y": 2}],
        });
        let tools = read(&tree, read_tools).unwrap().unwrap();
        assert_eq!((tools[0].name.as_str(), tools[0].class.as_str()), ("bash", "bash"));
        assert_eq!((tools[0].group.as_deref(), tools[1].group.as_deref()), (Some("shell"), None));
        assert_eq!(tools[0].options.get("x"), Some(&json!(1)));
        assert!(tools[1].options.is_empty());
        let groups = read(&tree, read_tool_groups).unwrap();
        assert_eq!((groups[0].name.as_str(), groups[0].options.get("y")), ("shell", Some(&json!(2))));
    }

    #[test]
    fn incomplete_and_repeated_entries_are_problems() {
        let tree = json!({
            "tools": [{"name": "a", "use": "x"}, {"name": "a", "use": "y"}, {}, "b"],
            "tool_groups": [{"name": "g"}, {"name": "g"}],
        });
        let tools = read(&tree, read_tools).unwrap_err();
        for problem in
            ["[1].name: another entry", "[2].name: is required", "[2].use: is required", "[3]: must be"]
        {
            assert!(tools.contains(&format!("tools{problem}")), "{tools}");
        }
        let groups = read(&tree, read_tool_groups).unwrap_err();
        assert!(groups.contains("tool_groups[1].name: another entry is also called \"g\""), "{groups}");
    }
}
