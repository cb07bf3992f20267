//! Numbers, sizes and texts for people.

use std::fmt::Write as _;

use maud::{Markup, html};

/// The maximum characters of one text in a page.
const SHOWN_CHARS: usize = 16_000;

/// The beginning of a text that may be long.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Excerpt {
    /// What is shown.
    pub shown: String,
    /// The bytes of the whole text, if not all is shown.
    pub whole: Option<usize>,
}

impl Excerpt {
    /// The beginning of `text`.
    pub fn of(text: &str) -> Self {
        match text.char_indices().nth(SHOWN_CHARS) {
            None => Self { shown: text.to_owned(), whole: None },
            Some((end, _)) => Self { shown: text[..end].to_owned(), whole: Some(text.len()) },
        }
    }

    /// Whether there is nothing to show.
    pub fn is_empty(&self) -> bool {
        self.shown.trim().is_empty()
    }
}

/// A number of bytes with a unit.
pub fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["kB", "MB", "GB", "TB"];
    if bytes < 1000 {
        return format!("{bytes} B");
    }
    let (mut tenths, mut unit) = (bytes / 100, 0);
    while tenths >= 10_000 && unit + 1 < UNITS.len() {
        (tenths, unit) = (tenths / 1000, unit + 1);
    }
    match tenths {
        0..100 => format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit]),
        _ => format!("{} {}", tenths / 10, UNITS[unit]),
    }
}

/// A number with its thousands apart.
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A number of things: `one` is the word for one of them.
pub fn things(number: u64, one: &str) -> String {
    format!("{} {one}{}", count(number), if number == 1 { "" } else { "s" })
}

/// A duration in seconds.
pub fn seconds(seconds: u64) -> String {
    match seconds {
        0 => "under 1 s".to_owned(),
        1..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
    }
}

/// Whether nothing of a text is seen: it is empty, or of spaces and of characters without a width.
pub(crate) fn is_blank(text: &str) -> bool {
    text.chars().all(|c| {
        c.is_whitespace()
            || c.is_control()
            || matches!(
                c,
                '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{180e}' | '\u{200b}'..='\u{200f}'
                    | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{2800}' | '\u{3164}'
                    | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{e0000}'..='\u{e0fff}'
            )
    })
}

/// A text as one segment of a path.
pub(crate) fn segment(text: &str) -> String {
    let mut path = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) {
            path.push(char::from(byte));
        } else {
            // Writing to a string does not fail.
            let _ = write!(path, "%{byte:02X}");
        }
    }
    path
}

/// A text of a person or a model. Nothing in it is markup, except that lines between fences are shown as code. Its
/// direction is its own, so that marks for writing from right to left do not reach what is around it.
pub(crate) fn prose(excerpt: &Excerpt, whole: &str) -> Markup {
    html! {
        @for (is_code, part) in parts(&excerpt.shown) {
            @if is_code { pre.code dir="auto" tabindex="0" { (part) } }
            @else { div.text dir="auto" { (part) } }
        }
        (rest(excerpt, whole))
    }
}

/// A text of a program, as it is.
pub(crate) fn verbatim(excerpt: &Excerpt, whole: &str) -> Markup {
    html! {
        pre.code dir="auto" tabindex="0" { (excerpt.shown) }
        (rest(excerpt, whole))
    }
}

/// The link to the whole of a text that is cut.
fn rest(excerpt: &Excerpt, whole: &str) -> Markup {
    html! {
        @if let Some(size) = excerpt.whole {
            p.cut { "Cut here. " a href=(whole) { "Show all " (bytes(size as u64)) } }
        }
    }
}

/// The parts of a text, and whether each is code.
fn parts(text: &str) -> Vec<(bool, &str)> {
    let (mut parts, mut start, mut at, mut in_code) = (Vec::new(), 0, 0, false);
    for line in text.split_inclusive('\n') {
        if line.trim_start().starts_with("```") {
            parts.push((in_code, &text[start..at]));
            (in_code, start) = (!in_code, at + line.len());
        }
        at += line.len();
    }
    parts.push((in_code, &text[start..]));
    parts.retain(|(_, part)| !part.trim().is_empty());
    parts.iter().map(|(is_code, part)| (*is_code, part.trim_matches('\n'))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        for (number, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1.0 kB"),
            (1_049, "1.0 kB"),
            (9_999, "9.9 kB"),
            (10_000, "10 kB"),
            (999_999, "999 kB"),
            (1_000_000, "1.0 MB"),
            (1_500_000_000, "1.5 GB"),
            (u64::MAX, "18446744 TB"),
        ] {
            assert_eq!(bytes(number), text);
        }
        assert_eq!([0, 1, 1000].map(|number| things(number, "run")), ["0 runs", "1 run", "1,000 runs"]);
        assert_eq!([0, 999, 1000, 1_234_567].map(count), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!(
            [0, 59, 60, 3599, 3600].map(seconds),
            ["under 1 s", "59 s", "1 min 0 s", "59 min 59 s", "1 h 0 min"]
        );
    }

    #[test]
    fn a_text_of_characters_without_a_width_is_blank() {
        for text in ["", " \n", "\u{200b}", "\u{feff} \u{2060}", "\u{202e}\u{3164}\u{fe0f}"] {
            assert!(is_blank(text), "{text:?}");
        }
        for text in ["a", "\u{200b}a", "\u{1f468}\u{200d}\u{1f469}", "."] {
            assert!(!is_blank(text), "{text:?}");
        }
    }

    #[test]
    fn a_segment_has_no_character_of_a_path() {
        assert_eq!(segment("a-b_c.9~"), "a-b_c.9~");
        assert_eq!(segment("../a b?c#d%\"é"), "..%2Fa%20b%3Fc%23d%25%22%C3%A9");
    }

    #[test]
    fn code_is_what_is_between_fences() {
        assert_eq!(parts("a\n```rust\nlet b;\n```\nc"), [(false, "a"), (true, "let b;"), (false, "c")]);
        assert_eq!(parts("```\nopen"), [(true, "open")]);
        assert_eq!(parts("no ``` fence"), [(false, "no ``` fence")]);
        assert_eq!(parts(" \n"), []);
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        let long = "é".repeat(SHOWN_CHARS + 1);
        let cut = Excerpt::of(&long);
        assert_eq!((cut.shown.chars().count(), cut.whole), (SHOWN_CHARS, Some(long.len())));
        let fits = &long[2..];
        assert_eq!(Excerpt::of(fits), Excerpt { shown: fits.to_owned(), whole: None });
    }

    #[test]
    fn markup_in_a_text_is_text() {
        let hostile = Excerpt::of("<script>alert(1)</script>\n```\n</pre><img src=x onerror=alert(2)>\n```");
        let page = prose(&hostile, "\"><b>").into_string() + &verbatim(&hostile, "").into_string();
        assert!(!page.contains("<script") && !page.contains("<img") && !page.contains("<b>"), "{page}");
        assert!(page.contains("&lt;script&gt;alert(1)&lt;/script&gt;"), "{page}");
    }
}
