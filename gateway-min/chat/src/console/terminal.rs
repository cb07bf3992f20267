//! Text for a terminal that is not ours to draw on.

use std::borrow::Cow;
use std::fmt::Write as _;

/// A text without the control characters that a terminal would obey: what a model or a tool wrote must not set the
/// clipboard, rename the window or hide other text. Line breaks and tabs stay.
pub(super) fn harmless(text: &str) -> Cow<'_, str> {
    let obeyed = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if !text.contains(obeyed) {
        return text.into();
    }
    text.chars().filter(|c| !obeyed(*c)).collect::<String>().into()
}

/// A JSON text of the same meaning without such characters, most of which JSON escapes anyway.
pub(super) fn harmless_json(text: &str) -> Cow<'_, str> {
    if !text.contains(char::is_control) {
        return text.into();
    }
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() {
            // Writing to a text cannot fail.
            let _ = write!(escaped, "\\u{:04x}", u32::from(c));
        } else {
            escaped.push(c);
        }
    }
    escaped.into()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_left_out() {
        assert_eq!(harmless("a\u{1b}]52;c;ZXZpbA==\u{7}b\u{9b}31m\r\n\tc\u{7f}"), "a]52;c;ZXZpbA==b31m\n\tc");
        assert!(matches!(harmless("gr\u{fc}n\n\u{1f980}"), Cow::Borrowed(_)));
    }

    #[test]
    fn json_keeps_its_meaning() {
        let value = json!({"text": "a\u{1b}[2J\u{9b}31m\u{7f}\u{85}z\n"});
        let text = value.to_string();
        assert!(text.contains('\u{9b}'), "JSON leaves it as it is");
        let shown = harmless_json(&text);
        assert!(!shown.contains(char::is_control), "{shown:?}");
        assert_eq!(serde_json::from_str::<Value>(&shown).unwrap(), value);
    }
}
