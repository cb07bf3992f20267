//! Where two values first differ, in words: a failed case shows that place, not two whole checkpoints.

use std::fmt::Debug;
use std::iter::Peekable;
use std::str::Lines;

/// The longest line that is shown of a value, in characters.
const WIDTH: usize = 300;

/// The first place at which two values that are not equal differ, and what each has there. The place is made of the names
/// of fields, keys of maps and indexes of lists.
pub(crate) fn difference(got: &dyn Debug, expected: &dyn Debug) -> String {
    let (got, expected) = (format!("{got:#?}"), format!("{expected:#?}"));
    let mut path = Path::default();
    let (mut ours, mut theirs) = (got.lines().peekable(), expected.lines().peekable());
    while let (Some(our), Some(their)) = (ours.peek(), theirs.peek()) {
        if our != their {
            break;
        }
        path.pass(our);
        ours.next();
        theirs.next();
    }
    if ours.peek().is_none() && theirs.peek().is_none() {
        return format!("\n    got and expected are printed alike, and differ: {}", cut(got.trim()));
    }
    let at = path.at(ours.peek().or(theirs.peek()).copied());
    let at = if at.is_empty() { String::new() } else { format!("\n    at       {at}") };
    format!("{at}\n    got      {}\n    expected {}", shown(&mut ours), shown(&mut theirs))
}

/// What is left of a value, on one line.
fn shown(lines: &mut Peekable<Lines<'_>>) -> String {
    let Some(first) = lines.next() else { return "nothing more".to_owned() };
    let depth = indentation(first);
    let mut text = first.trim().to_owned();
    if is_end(&text) {
        return "nothing more".to_owned();
    }
    for line in lines {
        if indentation(line) < depth || (indentation(line) == depth && !is_end(line.trim())) {
            break;
        }
        text.push(' ');
        text.push_str(line.trim());
        if indentation(line) == depth || text.len() > 4 * WIDTH {
            break;
        }
    }
    cut(text.trim_end_matches(','))
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(WIDTH) {
        Some((end, _)) => format!("{} ...", &text[..end]),
        None => text.to_owned(),
    }
}

fn indentation(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// Whether a line only ends what an earlier one opened.
fn is_end(line: &str) -> bool {
    line.starts_with(['}', ')', ']'])
}

/// The way to a line of a value that is printed over several lines.
#[derive(Default)]
struct Path<'a> {
    /// What is open: the indentation of the line that opened it, its name, and for a list the number of its elements so far.
    open: Vec<(usize, &'a str, Option<usize>)>,
}

impl<'a> Path<'a> {
    fn pass(&mut self, line: &'a str) {
        let depth = indentation(line);
        self.open.retain(|(at, _, _)| *at < depth);
        let text = line.trim();
        if is_end(text) {
            return;
        }
        if text.ends_with(['{', '(', '[']) {
            let name = self.named(text).unwrap_or_default();
            self.open.push((depth, name, text.ends_with('[').then_some(0)));
        } else {
            self.count();
        }
    }

    /// The name of a field or key, and for an element of a list its number.
    fn named(&mut self, text: &'a str) -> Option<&'a str> {
        self.count();
        text.split_once(": ").map(|(name, _)| name)
    }

    fn count(&mut self) {
        if let Some((_, _, Some(elements))) = self.open.last_mut() {
            *elements += 1;
        }
    }

    /// The place of the line that comes next.
    fn at(mut self, line: Option<&'a str>) -> String {
        let depth = line.map_or(0, indentation);
        self.open.retain(|(at, _, _)| *at < depth);
        let mut parts = Vec::new();
        let last = self.open.len();
        for (number, (_, name, elements)) in self.open.iter().enumerate() {
            if !name.is_empty() {
                parts.push((*name).to_owned());
            }
            if let Some(elements) = elements {
                // The element that is open counts already; one that is next does not.
                let index = if number + 1 < last { elements.saturating_sub(1) } else { *elements };
                parts.push(format!("[{index}]"));
            }
        }
        if let Some((name, _)) = line.and_then(|line| line.trim().split_once(": ")) {
            parts.push(name.to_owned());
        }
        parts.join(".").replace(".[", "[")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::difference;

    #[derive(Debug)]
    #[allow(dead_code, reason = "they are printed")]
    struct Outer {
        name: &'static str,
        lists: BTreeMap<&'static str, Vec<Option<u32>>>,
    }

    fn outer(first: &[Option<u32>], second: &[Option<u32>]) -> Outer {
        Outer { name: "n", lists: [("a", first.to_vec()), ("b", second.to_vec())].into() }
    }

    #[test]
    fn the_first_difference_is_named_by_its_place() {
        let got = outer(&[Some(1), None], &[Some(2), Some(3)]);
        let text = difference(&got, &outer(&[Some(1), None], &[Some(2), None]));
        assert_eq!(text, "\n    at       lists.\"b\"[1]\n    got      Some( 3, )\n    expected None");
        let text = difference(&got, &outer(&[Some(1), None], &[Some(2)]));
        assert_eq!(text, "\n    at       lists.\"b\"[1]\n    got      Some( 3, )\n    expected nothing more");
        let text = difference(&got, &outer(&[Some(1), None], &[Some(4), Some(3)]));
        assert_eq!(text, "\n    at       lists.\"b\"[0]\n    got      2\n    expected 4");
        let other = Outer { name: "m", ..outer(&[], &[]) };
        let text = difference(&got, &other);
        assert_eq!(text, "\n    at       name\n    got      name: \"n\"\n    expected name: \"m\"");
        assert_eq!(difference(&1, &2), "\n    got      1\n    expected 2");
    }

    #[test]
    fn what_is_shown_is_short() {
        let text = difference(&f64::NAN, &f64::NAN);
        assert_eq!(text, "\n    got and expected are printed alike, and differ: NaN");
        let text = difference(&vec!["x".repeat(9_000)], &vec!["y".repeat(9_000)]);
        assert!(text.len() < 800, "{}", text.len());
    }
}
