//! Text on the screen: removing control characters, and breaking lines.

use ratatui::style::Style;
use ratatui::text::Span;

/// A text without control characters, which a terminal would interpret. Line breaks stay, tabs become spaces.
pub(super) fn clean(text: &str) -> String {
    let text = text.replace('\t', "    ");
    text.chars().filter(|c| *c == '\n' || !c.is_control()).collect()
}

/// The columns that a text takes on the screen.
pub(super) fn width(text: &str) -> usize {
    Span::raw(text).width()
}

/// The grapheme clusters of a line, each with its width.
pub(super) fn graphemes(line: &str) -> Vec<(String, usize)> {
    let span = Span::raw(line);
    let parts = span.styled_graphemes(Style::default());
    parts.map(|part| (part.symbol.to_owned(), width(part.symbol))).collect()
}

/// Breaks a cleaned text into lines of at most `limit` columns, between words if possible.
pub(super) fn wrap(text: &str, limit: usize) -> Vec<String> {
    let mut lines = Vec::new();
    for paragraph in text.split('\n') {
        let (mut line, mut taken, mut space) = (String::new(), 0, None);
        let mut broken = false;
        for (part, columns) in graphemes(paragraph) {
            while taken > 0 && taken + columns > limit {
                // A word moves to the next line as a whole, unless it already fills this one.
                let word = match space.take() {
                    Some(at) if part != " " => line.split_off(at).trim_start_matches(' ').to_owned(),
                    _ => String::new(),
                };
                taken = width(&word);
                lines.push(std::mem::replace(&mut line, word));
                broken = true;
            }
            if part == " " {
                // Spaces at a line break are dropped.
                if broken && line.is_empty() {
                    continue;
                }
                space = Some(line.len());
            }
            line.push_str(&part);
            taken += columns;
        }
        lines.push(line);
    }
    lines
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lines_break_between_words_and_wide_characters_take_two_columns() {
        assert_eq!(wrap("one two three", 7), ["one two", "three"]);
        assert_eq!(wrap("one\n\ntwo", 9), ["one", "", "two"]);
        assert_eq!(wrap("abcdefgh", 3), ["abc", "def", "gh"]);
        assert_eq!(wrap("日本語のテキスト", 6), ["日本語", "のテキ", "スト"]);
        assert_eq!(wrap("ab 日本", 5), ["ab", "日本"]);
        assert_eq!(wrap("e\u{301}e\u{301}e\u{301}", 2), ["e\u{301}e\u{301}", "e\u{301}"]);
        assert_eq!(wrap("", 5), [""]);
    }

    #[test]
    fn what_a_terminal_would_obey_is_left_out() {
        assert_eq!(clean("a\u{1b}[2Jb\r\n\tc\u{7}\u{9b}d"), "a[2Jb\n    cd");
    }

    proptest! {
        #[test]
        fn no_line_is_too_long_and_no_word_is_lost(text in "[a-z 日é]{0,60}", limit in 2usize..20) {
            let lines = wrap(&text, limit);
            for line in &lines {
                prop_assert!(width(line) <= limit, "{line:?}");
            }
            let solid = |text: &str| text.replace(' ', "");
            prop_assert_eq!(solid(&lines.concat()), solid(&text));
        }
    }
}
