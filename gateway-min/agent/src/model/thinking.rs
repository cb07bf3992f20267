//! Reasoning within a text: many servers of open models do not separate it, so an answer begins with it.

/// The tags around it.
const TAGS: [&str; 3] = ["think", "thinking", "thought"];

/// `text` without the reasoning with which it begins. That has no end if the answer was cut off in it, and no beginning
/// if the opening tag is a part of the model's prompt.
pub(crate) fn without_thinking(text: &str) -> &str {
    let mut rest = TAGS.iter().find_map(|tag| after_closing(text, tag)).unwrap_or(text);
    while let Some(after) = TAGS.iter().find_map(|tag| after_whole(rest, tag)) {
        rest = after;
    }
    rest
}

/// What follows reasoning that begins with its tag.
fn after_whole<'a>(text: &'a str, tag: &str) -> Option<&'a str> {
    let begun = text.trim_start().strip_prefix(format!("<{tag}>").as_str())?;
    Some(begun.split_once(format!("</{tag}>").as_str()).map_or("", |(_, after)| after))
}

/// What follows reasoning of which only the end has a tag, at the end of a line: others only mention it.
fn after_closing<'a>(text: &'a str, tag: &str) -> Option<&'a str> {
    let (before, after) = text.split_once(format!("</{tag}>").as_str())?;
    let ends_line = after.is_empty() || after.starts_with(['\n', '\r']);
    (ends_line && !before.contains(format!("<{tag}>").as_str())).then_some(after)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasoning_at_the_beginning_of_a_text_is_no_part_of_it() {
        for (text, rest) in [
            ("<think>\nHm.\n</think>\n\nYes", "\n\nYes"),
            (" <think>Hm.</think>Yes", "Yes"),
            ("<thought>a</thought> <thinking>b</thinking>Yes", "Yes"),
            ("<think>Hm, </thought>", ""),
            ("Hm.\n</think>\n\nYes", "\n\nYes"),
            ("Hm.</think>", ""),
            ("Yes", "Yes"),
            ("The tag </think> ends it", "The tag </think> ends it"),
            (
                "Put it between <think> and </think>\nand go on",
                "Put it between <think> and </think>\nand go on",
            ),
            ("<thinker>Yes", "<thinker>Yes"),
            ("", ""),
        ] {
            assert_eq!(without_thinking(text), rest, "{text}");
        }
    }
}
