//! Draws the lineage of a namespace as a tree: the head's line straight down, side branches indented.

use std::collections::HashMap;

use threadkeep::deletion::Lineage;
use threadkeep::id::{CheckpointId, Namespace};
use threadkeep::saver::LocalKey;

/// Draws the checkpoints of a namespace, labelled by `label`, parents above their children. A checkpoint whose parent
/// is missing starts its own tree.
pub(crate) fn draw(
    lineage: &Lineage<'_>,
    namespace: &Namespace,
    label: impl Fn(&LocalKey) -> String,
) -> Vec<String> {
    let image = lineage.image();
    let places: Vec<&LocalKey> = image.checkpoints.keys().filter(|place| place.0 == *namespace).collect();
    // The newest checkpoint that each one leads to; children have greater ids than their parents.
    let mut leads_to: HashMap<CheckpointId, CheckpointId> = HashMap::new();
    for place in places.iter().rev() {
        let children = lineage.children(place).iter();
        let newest = children.filter_map(|child| leads_to.get(&child.checkpoint.id)).max().copied();
        leads_to.insert(place.1, newest.unwrap_or(place.1));
    }
    let roots =
        places.iter().filter(|place| lineage.get(place).is_none_or(|tuple| lineage.parent(tuple).is_none()));
    let mut open: Vec<(LocalKey, String, &str)> =
        roots.rev().map(|place| ((*place).clone(), String::new(), "")).collect();
    let mut lines = Vec::with_capacity(places.len());
    while let Some((place, prefix, branch)) = open.pop() {
        lines.push(format!("{prefix}{branch}● {}", label(&place)));
        // From the second branch on, indent under the line it forks from.
        let prefix = if branch.is_empty() { prefix } else { format!("{prefix}│ ") };
        let mut children: Vec<LocalKey> = lineage
            .children(&place)
            .iter()
            .map(|child| (child.namespace.clone(), child.checkpoint.id))
            .collect();
        children.sort_by_key(|child| leads_to.get(&child.1).copied());
        if let Some(straight) = children.pop() {
            open.push((straight, prefix.clone(), ""));
        }
        for side in children.into_iter().rev() {
            open.push((side, prefix.clone(), "├─"));
        }
    }
    lines
}
