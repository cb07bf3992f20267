//! Cuts output to what may go into a conversation.

/// `text` if it has at most `max_chars` characters, else its beginning and a notice, together at most that long (or
/// only the notice if not even that fits).
pub(super) fn cut(text: String, max_chars: usize) -> String {
    // Every character has at least one byte, so there is no need to count.
    if text.len() <= max_chars {
        return text;
    }
    let total = text.chars().count();
    if total <= max_chars {
        return text;
    }
    let notice = format!("\n[output cut: it has {total} characters, the limit is {max_chars}]");
    let kept = max_chars.saturating_sub(notice.chars().count());
    text.chars().take(kept).chain(notice.chars()).collect()
}

/// Collects bytes, keeping the first and the last ones if there are too many.
pub struct HeadAndTail {
    head: Vec<u8>,
    tail: std::collections::VecDeque<u8>,
    half: usize,
    dropped: usize,
}

impl HeadAndTail {
    /// Keeps enough bytes that the text has at most `max_chars` characters, including the notice.
    pub fn new(max_chars: usize) -> Self {
        /// Space reserved for the notice.
        const NOTICE_CHARS: usize = 80;
        let half = max_chars.saturating_sub(NOTICE_CHARS) / 2;
        Self { head: Vec::new(), tail: std::collections::VecDeque::new(), half, dropped: 0 }
    }

    /// Adds bytes at the end.
    pub fn push(&mut self, bytes: &[u8]) {
        let (head, rest) = bytes.split_at(bytes.len().min(self.half - self.head.len()));
        self.head.extend_from_slice(head);
        self.tail.extend(rest);
        let excess = self.tail.len().saturating_sub(self.half);
        self.tail.drain(..excess);
        self.dropped += excess;
    }

    /// The text, with a notice in place of what was dropped. Invalid UTF-8 becomes U+FFFD, but nothing is shown of a
    /// character of which a part was dropped.
    pub fn into_text(mut self) -> String {
        let tail = self.tail.make_contiguous();
        if self.dropped == 0 {
            self.head.extend_from_slice(tail);
            return String::from_utf8_lossy(&self.head).into_owned();
        }
        let (begun, rest) = (begun(&self.head), rest(tail));
        self.head.truncate(self.head.len() - begun);
        format!(
            "{}\n[output cut: {} bytes omitted]\n{}",
            String::from_utf8_lossy(&self.head),
            self.dropped + begun + rest,
            String::from_utf8_lossy(&tail[rest..])
        )
    }
}

/// How many bytes at the end begin a character that goes on after them.
fn begun(bytes: &[u8]) -> usize {
    let end = bytes.utf8_chunks().last().map_or(&[][..], |chunk| chunk.invalid());
    let goes_on = std::str::from_utf8(end).is_err_and(|error| error.error_len().is_none());
    if goes_on { end.len() } else { 0 }
}

/// How many bytes at the beginning may end a character that began before them.
fn rest(bytes: &[u8]) -> usize {
    bytes.iter().take(3).take_while(|byte| matches!(byte, 0x80..=0xbf)).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn cut_leaves_text_within_the_limit_alone_and_says_what_it_cut() {
        assert_eq!(cut("\u{e9}".repeat(100), 100), "\u{e9}".repeat(100));
        let result = cut("\u{e9}".repeat(101), 100);
        assert_eq!(result.chars().count(), 100);
        assert!(result.starts_with('\u{e9}'), "{result}");
        assert!(result.ends_with("[output cut: it has 101 characters, the limit is 100]"), "{result}");
        assert!(cut("x".repeat(50), 5).starts_with("\n[output cut"));
    }

    #[test]
    fn head_and_tail_leaves_out_the_middle() {
        let mut kept = HeadAndTail::new(100);
        for byte in b'a'..=b'z' {
            kept.push(&[byte]);
        }
        assert_eq!(kept.into_text(), "abcdefghij\n[output cut: 6 bytes omitted]\nqrstuvwxyz");
    }

    #[test]
    fn nothing_is_left_of_a_character_within_which_the_middle_begins_or_ends() {
        for before in 0..4 {
            let whole = "x".repeat(before) + &"\u{1f600}".repeat(20);
            let mut kept = HeadAndTail::new(100);
            kept.push(whole.as_bytes());
            let text = kept.into_text();
            let (head, omitted) = text.split_once("\n[output cut: ").unwrap();
            let (omitted, tail) = omitted.split_once(" bytes omitted]\n").unwrap();
            assert!(whole.starts_with(head) && whole.ends_with(tail), "{text}");
            assert_eq!(head.len() + omitted.parse::<usize>().unwrap() + tail.len(), whole.len(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn head_and_tail_is_the_same_for_any_split_and_never_too_long(
            bytes in prop::collection::vec(any::<u8>(), 0..400),
            size in 1usize..50,
            max in 80usize..300,
        ) {
            let (mut whole, mut parts) = (HeadAndTail::new(max), HeadAndTail::new(max));
            whole.push(&bytes);
            bytes.chunks(size).for_each(|part| parts.push(part));
            let text = whole.into_text();
            prop_assert_eq!(&text, &parts.into_text());
            prop_assert!(text.chars().count() <= max, "{} > {max}", text.chars().count());
            if bytes.len() <= (max - 80) / 2 * 2 {
                prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
            }
        }
    }
}
