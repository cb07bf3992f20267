//! The tree of checkpoints, drawn row by row: newest first, a column for each line of descent.

use std::collections::HashMap;

use maud::{Markup, html};

/// The pixels of a column, and of a row.
const COLUMN: usize = 14;
const ROW: usize = 32;

/// A checkpoint in the tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Its id.
    pub id: String,
    /// Its parent's.
    pub parent: Option<String>,
}

/// A stroke of a row: from one column to another, and whether it belongs to the head's line of descent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stroke {
    from: usize,
    to: usize,
    is_main: bool,
}

/// How one checkpoint is drawn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Row {
    column: usize,
    /// Whether the head descends from it.
    pub(crate) is_main: bool,
    /// How many children it has.
    pub(crate) children: usize,
    /// Whether it has a parent that is not there.
    pub(crate) is_cut: bool,
    /// From the top to this checkpoint.
    arriving: Vec<Stroke>,
    /// From the top to the bottom.
    passing: Vec<Stroke>,
    /// From this checkpoint to the bottom.
    leaves: bool,
}

/// The rows of nodes that are in the order of their ids, newest first. The first one is the head.
pub(crate) fn rows(nodes: &[Node]) -> Vec<Row> {
    let known: HashMap<&str, usize> =
        nodes.iter().enumerate().map(|(at, node)| (node.id.as_str(), at)).collect();
    let parent = |node: &Node| node.parent.as_deref().and_then(|parent| known.get(parent).copied());
    let mut is_main = vec![false; nodes.len()];
    let mut next = (!nodes.is_empty()).then_some(0);
    while let Some(at) = next {
        is_main[at] = true;
        // A parent is older than its child; anything else is not followed, so that this ends.
        next = parent(&nodes[at]).filter(|parent| *parent > at);
    }
    // What each column waits for: a checkpoint, and whether the line that comes from above is the head's.
    let mut columns: Vec<Option<(usize, bool)>> = Vec::new();
    let mut rows = Vec::with_capacity(nodes.len());
    for (at, node) in nodes.iter().enumerate() {
        let waits = |column: &Option<(usize, bool)>| column.is_some_and(|(wanted, _)| wanted == at);
        let free = columns.iter().position(Option::is_none).unwrap_or(columns.len());
        let column = columns.iter().position(waits).unwrap_or(free);
        if column == columns.len() {
            columns.push(None);
        }
        let (mut arriving, mut passing) = (Vec::new(), Vec::new());
        for (from, waiting) in columns.iter_mut().enumerate() {
            let Some((wanted, is_main)) = *waiting else { continue };
            if wanted == at {
                arriving.push(Stroke { from, to: column, is_main });
                *waiting = None;
            } else {
                passing.push(Stroke { from, to: from, is_main });
            }
        }
        let above = parent(node).filter(|parent| *parent > at);
        columns[column] = above.map(|parent| (parent, is_main[at]));
        while columns.last().is_some_and(Option::is_none) {
            columns.pop();
        }
        rows.push(Row {
            column,
            is_main: is_main[at],
            children: arriving.len(),
            is_cut: node.parent.is_some() && above.is_none(),
            arriving,
            passing,
            leaves: above.is_some(),
        });
    }
    rows
}

impl Row {
    /// The columns that it needs.
    pub(crate) fn width(&self) -> usize {
        let strokes = self.arriving.iter().chain(&self.passing).map(|stroke| stroke.from.max(stroke.to));
        strokes.chain([self.column]).max().unwrap_or(0) + 1
    }

    /// Draws the row as a picture that is `columns` wide.
    pub(crate) fn draw(&self, columns: usize, kind: &str) -> Markup {
        let (x, middle) = (|column: usize| column * COLUMN + COLUMN / 2 + 2, ROW / 2);
        let class = |is_main: bool| if is_main { "line main" } else { "line" };
        let here = x(self.column);
        let width = columns * COLUMN + 4;
        html! {
            svg.lanes width=(width) height=(ROW) viewBox={ "0 0 " (width) " " (ROW) } aria-hidden="true" {
                @for stroke in &self.passing { path class=(class(stroke.is_main)) d={ "M" (x(stroke.from)) " 0V" (ROW) } {} }
                @for stroke in &self.arriving {
                    path class=(class(stroke.is_main))
                        d={ "M" (x(stroke.from)) " 0C" (x(stroke.from)) " " (middle - 4) " " (here) " 6 " (here) " " (middle) } {}
                }
                @if self.leaves { path class=(class(self.is_main)) d={ "M" (here) " " (middle) "V" (ROW) } {} }
                @if self.is_cut { path.line.cut d={ "M" (here) " " (middle) "V" (ROW) } {} }
                @match kind {
                    "snapshot" => rect class={ "node " (class(self.is_main)) } x=(here - 5) y=(middle - 5) width="10" height="10" rx="1.5" {},
                    "note" => circle class={ "node small " (class(self.is_main)) } cx=(here) cy=(middle) r="2.5" {},
                    _ => circle class={ "node " (class(self.is_main)) } cx=(here) cy=(middle) r="4.5" {},
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(nodes: &[(&str, &str)]) -> Vec<(usize, bool, usize, usize)> {
        let node = |(id, parent): &(&str, &str)| Node {
            id: (*id).to_owned(),
            parent: Some((*parent).to_owned()).filter(|parent| !parent.is_empty()),
        };
        let nodes: Vec<Node> = nodes.iter().map(node).collect();
        rows(&nodes).iter().map(|row| (row.column, row.is_main, row.children, row.width())).collect()
    }

    #[test]
    fn a_line_has_one_column() {
        assert_eq!(
            drawn(&[("c", "b"), ("b", "a"), ("a", "")]),
            [(0, true, 0, 1), (0, true, 1, 1), (0, true, 1, 1)]
        );
        assert_eq!(drawn(&[]), []);
    }

    #[test]
    fn branches_meet_at_their_fork() {
        // d and e fork from b; c is abandoned below a.
        let tree = [("e", "b"), ("d", "b"), ("c", "a"), ("b", "a"), ("a", "")];
        assert_eq!(
            drawn(&tree),
            [(0, true, 0, 1), (1, false, 0, 2), (2, false, 0, 3), (0, true, 2, 3), (0, true, 2, 3)]
        );
    }

    #[test]
    fn a_column_is_used_again_and_a_missing_parent_is_marked() {
        let node =
            |id: &str, parent: Option<&str>| Node { id: id.to_owned(), parent: parent.map(str::to_owned) };
        let nodes = [node("d", None), node("c", Some("gone")), node("b", Some("a")), node("a", None)];
        let rows = rows(&nodes);
        assert_eq!(
            rows.iter().map(|row| (row.column, row.is_cut)).collect::<Vec<_>>(),
            [(0, false), (0, true), (0, false), (0, false)]
        );
    }

    /// A damaged thread may have any parents.
    #[test]
    fn a_circle_ends() {
        assert_eq!(drawn(&[("b", "b"), ("a", "b")]).len(), 2);
    }

    #[test]
    fn a_picture_has_a_place_for_each_column() {
        let tree = [("c", "a"), ("b", "a"), ("a", "")];
        let nodes = tree.map(|(id, parent)| Node {
            id: id.to_owned(),
            parent: Some(parent.to_owned()).filter(|p| !p.is_empty()),
        });
        let picture = rows(&nodes)[2].draw(2, "snapshot").into_string();
        assert!(picture.contains("viewBox=\"0 0 32 32\"") && picture.contains("<rect"), "{picture}");
        assert_eq!(picture.matches("<path").count(), 2, "two lines arrive: {picture}");
    }
}
