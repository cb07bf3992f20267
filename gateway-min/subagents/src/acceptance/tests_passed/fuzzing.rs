//! The body of a fuzz target: a command line that a subagent's model wrote, and the criterion that it is compared with.

use super::matching::{self, Match};
use super::shell;

/// A criterion and, after a NUL, the line that ran. Accepts any bytes and must not panic: the words of a line are found in
/// it in order, and a line is never something else than itself.
pub(crate) fn command_line(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (criterion, executed) = text.split_once('\0').unwrap_or((&text, &text));
    for line in [criterion, executed] {
        let Some(parsed) = shell::parse(line) else { continue };
        let mut rest = line;
        for word in parsed.commands.iter().flat_map(|command| &command.words) {
            let at = rest.find(&word.raw);
            assert!(at.is_some(), "{word:?} is not in {rest:?}");
            rest = &rest[at.unwrap_or_default() + word.raw.len()..];
        }
        if !parsed.commands.is_empty() {
            assert_ne!(matching::compare(line, line, true), Match::No, "{line:?} compared with itself");
        }
    }
    for succeeded in [true, false] {
        let found = matching::compare(criterion, executed, succeeded);
        // A line that was not understood is the criterion's if it is the same text, and not otherwise.
        if matches!(found, Match::Yes { .. }) && shell::parse(executed).is_none() {
            let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            assert_eq!(words(criterion), words(executed));
        }
    }
}
