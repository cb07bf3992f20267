//! Cuts texts to what records and ledgers hold.

/// The maximum length of a text in metadata and ledgers, in characters.
pub const MAX_CHARS: usize = 2_000;
const HEAD_CHARS: usize = 1_333;
const TAIL_CHARS: usize = 662;
const OMISSION: &str = "\n...\n";

/// `text` without the space around it; of a text longer than [`MAX_CHARS`], its beginning and its end.
pub fn bounded(text: &str) -> String {
    let text = text.trim();
    let count = text.chars().count();
    if count <= MAX_CHARS {
        return text.to_owned();
    }
    let (head, tail) = (text.chars().take(HEAD_CHARS), text.chars().skip(count - TAIL_CHARS));
    head.chain(OMISSION.chars()).chain(tail).collect()
}

/// The first `max` characters.
pub fn first(text: &str, max: usize) -> &str {
    text.char_indices().nth(max).map_or(text, |(end, _)| &text[..end])
}

/// The last `max` characters.
pub fn last(text: &str, max: usize) -> &str {
    let Some(skipped) = text.chars().count().checked_sub(max).filter(|skipped| *skipped > 0) else {
        return text;
    };
    text.char_indices().nth(skipped).map_or("", |(start, _)| &text[start..])
}

/// `text` on one line, with single spaces.
pub fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Scenario 8.
    #[test]
    fn a_result_of_2001_characters_keeps_1333_and_662() {
        let text = |count: usize| ('a'..='z').cycle().take(count).collect::<String>();
        assert_eq!(bounded(&format!("  {}\n", text(2_000))), text(2_000));
        let long = text(2_001);
        assert_eq!(bounded(&long), format!("{}\n...\n{}", &long[..1_333], &long[2_001 - 662..]));
        assert_eq!(bounded(&long).chars().count(), 2_000);
    }

    #[test]
    fn cuts_count_characters_and_not_bytes() {
        let text = "\u{e9}\u{4e2d}a";
        assert_eq!((first(text, 2), first(text, 3), first(text, 9)), ("\u{e9}\u{4e2d}", text, text));
        assert_eq!(
            (last(text, 2), last(text, 3), last(text, 9), last(text, 0)),
            ("\u{4e2d}a", text, text, "")
        );
        assert_eq!(one_line(" a\n\tb \u{2028} c"), "a b c");
    }

    proptest! {
        #[test]
        fn a_bounded_text_is_never_too_long_and_bounding_again_changes_nothing(text in "(?s).{0,3000}") {
            let once = bounded(&text);
            prop_assert!(once.chars().count() <= MAX_CHARS);
            prop_assert_eq!(bounded(&once), once);
        }
    }
}
