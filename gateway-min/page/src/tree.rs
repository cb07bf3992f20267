//! The tree of checkpoints, drawn row by row: newest first, a column for each line of descent.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use maud::{Markup, html};

/// The pixels of a column, and of a row.
const COLUMN: usize = 14;
const ROW: usize = 32;
/// The column of all lines that are further to the right: a row has a line for each branch that is open there, of which a thread
/// may have any number.
const OTHERS: usize = 50;

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

/// What is drawn of a tree, and what is counted in all of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tree {
    /// The rows that are shown.
    pub(crate) rows: Vec<Row>,
    /// How many checkpoints have several children.
    pub(crate) forks: usize,
    /// From how many the head does not descend.
    pub(crate) abandoned: usize,
}

/// What the columns wait for, from the newest row down.
#[derive(Default)]
struct Columns {
    /// The checkpoint that each waits for, and whether the line that comes from above is the head's.
    waiting: Vec<Option<(usize, bool)>>,
    /// Those that wait for nothing.
    free: BTreeSet<usize>,
    /// Those that wait for a checkpoint.
    of: HashMap<usize, Vec<usize>>,
}

impl Columns {
    /// Lets a line end in its checkpoint.
    fn end(&mut self, column: usize) -> bool {
        self.free.insert(column);
        self.waiting[column].take().is_some_and(|(_, is_main)| is_main)
    }

    /// The first free column, which waits for nothing yet.
    fn first_free(&mut self) -> usize {
        self.free.pop_first().unwrap_or_else(|| {
            self.waiting.push(None);
            self.waiting.len() - 1
        })
    }

    /// Begins a line to a checkpoint, if there is one.
    fn begin(&mut self, column: usize, to: Option<(usize, bool)>) {
        self.waiting[column] = to;
        match to {
            Some((wanted, _)) => self.of.entry(wanted).or_default().push(column),
            None => _ = self.free.insert(column),
        }
    }

    /// Every line, and whether it is the head's.
    fn lines(&self) -> impl Iterator<Item = (usize, bool)> {
        let lines = self.waiting.iter().enumerate();
        lines.filter_map(|(column, line)| line.map(|(_, is_main)| (column, is_main)))
    }
}

/// The lines as they are drawn, given from left to right: those in [`OTHERS`] are one.
fn drawn(lines: impl Iterator<Item = (usize, bool)>) -> Vec<(usize, bool)> {
    let mut drawn: Vec<(usize, bool)> = Vec::new();
    for (column, is_main) in lines {
        if drawn.last().is_some_and(|(last, _)| *last == OTHERS) {
            break;
        }
        drawn.push((column.min(OTHERS), is_main));
    }
    drawn
}

/// The tree of nodes that are in the order of their ids, newest first, with the rows of this range. The first node is the head.
pub(crate) fn tree(nodes: &[Node], shown: &Range<usize>) -> Tree {
    let known: HashMap<&str, usize> =
        nodes.iter().enumerate().map(|(at, node)| (node.id.as_str(), at)).collect();
    // A parent is older than its child; anything else is not followed, so that this ends.
    let parent = |at: usize| {
        let parent = nodes[at].parent.as_deref().and_then(|parent| known.get(parent).copied());
        parent.filter(|parent| *parent > at)
    };
    let mut is_main = vec![false; nodes.len()];
    let mut next = (!nodes.is_empty()).then_some(0);
    while let Some(at) = next {
        is_main[at] = true;
        next = parent(at);
    }
    let mut columns = Columns::default();
    let mut tree =
        Tree { rows: Vec::new(), forks: 0, abandoned: is_main.iter().filter(|is_main| !**is_main).count() };
    for (at, node) in nodes.iter().enumerate() {
        let mut arriving = columns.of.remove(&at).unwrap_or_default();
        arriving.sort_unstable();
        let children = arriving.len();
        tree.forks += usize::from(children > 1);
        let lines: Vec<(usize, bool)> =
            arriving.into_iter().map(|column| (column, columns.end(column))).collect();
        let column = match lines.first() {
            Some((column, _)) => *column,
            None => columns.first_free(),
        };
        columns.free.remove(&column);
        let above = parent(at);
        if shown.contains(&at) {
            let (here, arriving) = (column.min(OTHERS), drawn(lines.into_iter()));
            tree.rows.push(Row {
                column: here,
                is_main: is_main[at],
                children,
                is_cut: node.parent.is_some() && above.is_none(),
                arriving: arriving
                    .into_iter()
                    .map(|(from, is_main)| Stroke { from, to: here, is_main })
                    .collect(),
                passing: drawn(columns.lines())
                    .into_iter()
                    .map(|(at, is_main)| Stroke { from: at, to: at, is_main })
                    .collect(),
                leaves: above.is_some(),
            });
        }
        columns.begin(column, above.map(|parent| (parent, is_main[at])));
    }
    tree
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

    fn rows(nodes: &[Node]) -> Vec<Row> {
        tree(nodes, &(0..nodes.len())).rows
    }

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
        assert_eq!(
            rows(&nodes).iter().map(|row| (row.column, row.is_cut)).collect::<Vec<_>>(),
            [(0, false), (0, true), (0, false), (0, false)]
        );
    }

    /// Anybody who may talk on a thread may fork it as often as they like.
    #[test]
    fn a_row_has_as_many_strokes_however_many_branches_are_open() {
        let leaf = |at: usize| Node { id: format!("leaf {at}"), parent: Some("root".to_owned()) };
        let nodes: Vec<Node> =
            (0..20_000).map(leaf).chain([Node { id: "root".to_owned(), parent: None }]).collect();
        let last = nodes.len() - 1;
        let tree = tree(&nodes, &(last - 100..last + 1));
        assert_eq!((tree.forks, tree.abandoned, tree.rows.len()), (1, last - 1, 101));
        assert!(tree.rows.iter().all(|row| row.width() <= OTHERS + 1));
        assert!(tree.rows.iter().all(|row| row.passing.len() + row.arriving.len() <= OTHERS + 1));
        let root = &tree.rows[100];
        assert_eq!((root.column, root.children, root.arriving.len()), (0, last, OTHERS + 1));
    }

    /// A damaged thread may have any parents.
    #[test]
    fn a_circle_ends() {
        assert_eq!(drawn(&[("b", "b"), ("a", "b")]).len(), 2);
    }

    #[test]
    fn a_picture_has_a_place_for_each_column() {
        let nodes = [("c", "a"), ("b", "a"), ("a", "")].map(|(id, parent)| Node {
            id: id.to_owned(),
            parent: Some(parent.to_owned()).filter(|p| !p.is_empty()),
        });
        let picture = rows(&nodes)[2].draw(2, "snapshot").into_string();
        assert!(picture.contains("viewBox=\"0 0 32 32\"") && picture.contains("<rect"), "{picture}");
        assert_eq!(picture.matches("<path").count(), 2, "two lines arrive: {picture}");
    }
}
