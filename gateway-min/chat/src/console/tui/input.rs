//! The input line.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::text::graphemes;

/// Shown in place of a line break.
const BREAK: &str = "\u{23ce}";
/// Shown in place of a tab.
const TAB: &str = "\u{21e5}";
/// How many characters are looked at for a column: more than one combine, but a text may be a million characters long.
const CHARS_PER_COLUMN: usize = 16;

/// A text and the cursor's position in it.
#[derive(Debug, Default)]
pub(super) struct Input {
    text: String,
    /// In bytes, at a character boundary.
    cursor: usize,
}

impl Input {
    /// Returns and clears the text.
    pub(super) fn take(&mut self) -> String {
        self.cursor = 0;
        std::mem::take(&mut self.text)
    }

    /// Inserts a text at the cursor.
    pub(super) fn insert(&mut self, text: &str) {
        let text: String = text.replace("\r\n", "\n").replace('\r', "\n");
        let text: String = text.chars().filter(|c| matches!(c, '\n' | '\t') || !c.is_control()).collect();
        self.text.insert_str(self.cursor, &text);
        self.cursor += text.len();
    }

    /// Edits the text; `false` if the key is not an editing key.
    pub(super) fn key(&mut self, key: KeyEvent) -> bool {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Enter if key.modifiers.contains(KeyModifiers::ALT) => self.insert("\n"),
            KeyCode::Char('u') if control => {
                self.text.drain(..self.cursor);
                self.cursor = 0;
            }
            KeyCode::Char('w') if control => {
                let before = self.text[..self.cursor].trim_end();
                let from = before
                    .rfind(char::is_whitespace)
                    .map_or(0, |at| at + before[at..].chars().next().map_or(0, char::len_utf8));
                self.text.drain(from..self.cursor);
                self.cursor = from;
            }
            KeyCode::Char('a') if control => self.cursor = 0,
            KeyCode::Char('e') if control => self.cursor = self.text.len(),
            KeyCode::Char(_) if control => return false,
            KeyCode::Char(character) => self.insert(character.encode_utf8(&mut [0; 4])),
            KeyCode::Backspace => {
                let from = self.before();
                self.text.drain(from..self.cursor);
                self.cursor = from;
            }
            KeyCode::Delete => {
                let to = self.after();
                self.text.drain(self.cursor..to);
            }
            KeyCode::Left => self.cursor = self.before(),
            KeyCode::Right => self.cursor = self.after(),
            KeyCode::Home => self.cursor = 0,
            KeyCode::End => self.cursor = self.text.len(),
            _ => return false,
        }
        true
    }

    fn before(&self) -> usize {
        self.text[..self.cursor].char_indices().next_back().map_or(0, |(at, _)| at)
    }

    fn after(&self) -> usize {
        self.cursor + self.text[self.cursor..].chars().next().map_or(0, char::len_utf8)
    }

    /// The part of the text around the cursor that fits into `columns`, and the cursor's column.
    pub(super) fn shown(&self, columns: usize) -> (String, usize) {
        let (before, after) = self.text.split_at(self.cursor);
        let most = columns.max(1) * CHARS_PER_COLUMN;
        let before = before.char_indices().rev().nth(most).map_or(before, |(at, _)| &before[at..]);
        let after = after.char_indices().nth(most).map_or(after, |(at, _)| &after[..at]);
        let left = graphemes(&visible(before));
        let (mut from, mut taken) = (left.len(), 0);
        while from > 0 && taken + left[from - 1].1 < columns.max(1) {
            from -= 1;
            taken += left[from].1;
        }
        let mut text: String = left[from..].iter().map(|(part, _)| part.as_str()).collect();
        let mut total = taken;
        for (part, more) in graphemes(&visible(after)) {
            total += more;
            if total > columns {
                break;
            }
            text.push_str(&part);
        }
        (text, taken)
    }
}

/// A text on one line.
fn visible(text: &str) -> String {
    text.replace('\n', BREAK).replace('\t', TAB)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    fn written(keys: &[(KeyCode, KeyModifiers)]) -> Input {
        let mut input = Input::default();
        for (code, modifiers) in keys {
            input.key(KeyEvent::new(*code, *modifiers));
        }
        input
    }

    #[test]
    fn a_line_is_edited_at_the_cursor() {
        let plain = |code| (code, KeyModifiers::NONE);
        let control = |character| (KeyCode::Char(character), KeyModifiers::CONTROL);
        let mut input =
            written(&["g", "r", "\u{fc}", "n"].map(|c| plain(KeyCode::Char(c.chars().next().unwrap()))));
        for (key, text, cursor) in [
            (plain(KeyCode::Left), "gr\u{fc}n", 4),
            (plain(KeyCode::Backspace), "grn", 2),
            (plain(KeyCode::Char('\u{65e5}')), "gr\u{65e5}n", 5),
            (plain(KeyCode::Delete), "gr\u{65e5}", 5),
            (plain(KeyCode::Delete), "gr\u{65e5}", 5),
            (plain(KeyCode::Home), "gr\u{65e5}", 0),
            (plain(KeyCode::Backspace), "gr\u{65e5}", 0),
            (plain(KeyCode::End), "gr\u{65e5}", 5),
            (plain(KeyCode::Char(' ')), "gr\u{65e5} ", 6),
            (plain(KeyCode::Char('x')), "gr\u{65e5} x", 7),
            (control('w'), "gr\u{65e5} ", 6),
            (control('w'), "", 0),
        ] {
            input.key(KeyEvent::new(key.0, key.1));
            assert_eq!((&*input.text, input.cursor), (text, cursor), "{key:?}");
        }
        input.insert("one\r\ntwo\u{1b}");
        assert_eq!(input.take(), "one\ntwo");
        assert_eq!((input.cursor, input.take()), (0, String::new()));
    }

    #[test]
    fn a_pasted_text_keeps_its_tabs() {
        let mut input = Input::default();
        input.insert("a:\r\n\tb\tc");
        assert_eq!(input.shown(40), ("a:\u{23ce}\u{21e5}b\u{21e5}c".to_owned(), 7));
        assert_eq!(input.take(), "a:\n\tb\tc");
    }

    #[test]
    fn a_long_text_is_shown_without_a_look_at_all_of_it() {
        let mut input = Input::default();
        input.insert(&"x".repeat(1_000_000));
        let begun = Instant::now();
        for (cursor, shown) in [(1_000_000, 9), (500_000, 10), (0, 10)] {
            input.cursor = cursor;
            assert_eq!(input.shown(10), ("x".repeat(shown), cursor.min(9)));
        }
        // Not a measure of speed: moving the rest for each character left out takes longer.
        assert!(begun.elapsed() < Duration::from_mins(2), "{:?}", begun.elapsed());
    }

    #[test]
    fn the_cursor_is_always_in_what_is_shown() {
        let mut input = Input::default();
        input.insert("\u{65e5}\u{672c}\u{8a9e}abc\ndef");
        assert_eq!(input.shown(40), ("\u{65e5}\u{672c}\u{8a9e}abc\u{23ce}def".to_owned(), 13));
        assert_eq!(input.shown(5), ("\u{23ce}def".to_owned(), 4));
        input.cursor = 0;
        assert_eq!(input.shown(5), ("\u{65e5}\u{672c}".to_owned(), 0));
        for columns in 0..20 {
            for cursor in [0, 3, 6, 9, 10, 14, 17] {
                input.cursor = cursor.min(input.text.len());
                if input.text.is_char_boundary(input.cursor) {
                    assert!(input.shown(columns).1 < columns.max(1), "{columns} {cursor}");
                }
            }
        }
    }
}
