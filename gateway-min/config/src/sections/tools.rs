//! `tools` and `tool_groups`: which tools agents have. Read live.

use std::collections::HashSet;

use crate::node::Node;

/// The built-in tools: those that `tools` may name.
pub const BUILTIN_TOOLS: [&str; 8] =
    ["bash", "ls", "glob", "grep", "read_file", "write_file", "str_replace", "ask_clarification"];

/// One entry of `tools`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tool {
    /// One of [`BUILTIN_TOOLS`]; unique.
    pub name: String,
    /// The group it belongs to.
    pub group: Option<String>,
}

/// One entry of `tool_groups`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolGroup {
    /// The group's name; unique.
    pub name: String,
}

/// The error for an empty list.
const NO_TOOLS: &str = "an empty list would leave agents without any tool, which is not supported; remove the key for the \
     built-in set";

/// The configured tools; `None` if the section is missing, which means the built-in set. An empty list, which would
/// mean no tools, is refused.
pub(crate) fn read_tools(root: &Node<'_>) -> Option<Vec<Tool>> {
    root.value("tools")?;
    let nodes = root.items("tools");
    if root.value("tools").is_some_and(|value| value.as_array().is_some_and(Vec::is_empty)) {
        root.problem("tools", NO_TOOLS);
    }
    let tools: Vec<Tool> = nodes.iter().map(read_tool).collect();
    refuse_duplicates(nodes.iter().zip(tools.iter().map(|tool| tool.name.as_str())));
    Some(tools)
}

fn read_tool(node: &Node<'_>) -> Tool {
    let (name, group, class) = (node.required_text("name"), node.text("group"), node.required_text("use"));
    if !class.is_empty() && !BUILTIN_TOOLS.contains(&class.as_str()) {
        let known = BUILTIN_TOOLS.join(", ");
        node.problem(
            "use",
            format!(
                "there is no built-in tool {}; there are {known}. For others, see mcp_servers",
                node.shown("use")
            ),
        );
    } else if !class.is_empty() && !name.is_empty() && name != class {
        node.problem("name", format!("a built-in tool cannot have another name: write {class}, as in `use`"));
    }
    refuse_others(
        node,
        &["name", "group", "use"],
        "a built-in tool has no such setting; see sandbox for its limits",
    );
    Tool { name, group }
}

/// The groups whose tools agents have; an empty list, which is the default, means all groups.
pub(crate) fn read_tool_groups(root: &Node<'_>) -> Vec<ToolGroup> {
    let nodes = root.items("tool_groups");
    let groups = nodes.iter().map(|node| {
        refuse_others(node, &["name"], "a group has a name and nothing else");
        ToolGroup { name: node.required_text("name") }
    });
    let groups: Vec<ToolGroup> = groups.collect();
    refuse_duplicates(nodes.iter().zip(groups.iter().map(|group| group.name.as_str())));
    groups
}

/// Refuses groups that no tool has: nobody would notice that they are misspelt.
pub(crate) fn check_groups<'a>(root: &Node<'_>, groups: &[ToolGroup], used: impl Iterator<Item = &'a str>) {
    let used: HashSet<&str> = used.collect();
    for (node, group) in root.items("tool_groups").iter().zip(groups) {
        if !group.name.is_empty() && !used.contains(group.name.as_str()) {
            let text = "no entry of tools and no server of mcp_servers has this group; remove it, or correct its name";
            node.problem("name", text);
        }
    }
}

fn refuse_others(node: &Node<'_>, known: &[&str], why: &str) {
    for key in node.rest(known).as_map().keys() {
        node.problem(key, why);
    }
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
    fn no_section_is_everything_and_an_empty_list_of_tools_is_refused() {
        assert_eq!(read(&json!({}), read_tools).unwrap(), None);
        assert_eq!(read(&json!({"tools": null}), read_tools).unwrap(), None);
        assert!(read(&json!({"tools": []}), read_tools).unwrap_err().contains(NO_TOOLS));
        for none in [json!({}), json!({"tool_groups": []}), json!({"tool_groups": null})] {
            assert_eq!(read(&none, read_tool_groups).unwrap(), []);
        }
    }

    #[test]
    fn entries_are_read() {
        let tree = json!({
            "tools": [{"name": "bash", "group": "shell", "use": "bash"}, {"name": "ls", "use": "ls"}],
            "tool_groups": [{"name": "shell"}],
        });
        let tool =
            |name: &str, group: Option<&str>| Tool { name: name.into(), group: group.map(str::to_owned) };
        let tools = read(&tree, read_tools).unwrap().unwrap();
        assert_eq!(tools, [tool("bash", Some("shell")), tool("ls", None)]);
        let groups = read(&tree, read_tool_groups).unwrap();
        assert_eq!(groups, [ToolGroup { name: "shell".into() }]);
    }

    #[test]
    fn what_has_no_effect_is_a_problem() {
        let tree = json!({
            "tools": [
                {"name": "ls", "use": "ls"}, {"name": "ls", "use": "ls"}, {}, "b", {"name": "list", "use": "ls"},
                {"name": "web_search", "use": "some.module:web_search"}, {"name": "glob", "use": "glob", "x": 1},
            ],
            "tool_groups": [{"name": "g"}, {"name": "g"}, {"name": "h", "y": 2}],
        });
        let tools = read(&tree, read_tools).unwrap_err();
        for problem in [
            "[1].name: another entry",
            "[2].name: is required",
            "[2].use: is required",
            "[3]: must be",
            "[4].name: a built-in tool cannot have another name: write ls",
            "[5].use: there is no built-in tool \"some.module:web_search\"; there are bash, ls, ",
            "[6].x: a built-in tool has no such setting",
        ] {
            assert!(tools.contains(&format!("tools{problem}")), "{problem}: {tools}");
        }
        let groups = read(&tree, read_tool_groups).unwrap_err();
        assert!(groups.contains("tool_groups[1].name: another entry is also called \"g\""), "{groups}");
        assert!(groups.contains("tool_groups[2].y: a group has a name and nothing else"), "{groups}");
    }
}
