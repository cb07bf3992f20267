//! Test summaries in the end of an output.

use std::sync::LazyLock;

use regex::Regex;

use crate::bounds::first;

/// How much of a line a detail shows, in characters.
const SHOWN_CHARS: usize = 100;

/// What the end of an output says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Summary {
    /// Tests failed, in this line.
    Failed(String),
    /// Tests passed, in this line, and none failed.
    Passed(String),
    /// Neither, or no test ran.
    None,
}

const PASS: &str = r"(?i)\b0*[1-9][0-9]*\s+passed\b|^\s*OK\s*$|\btest result: ok\b|^ok\s+\w|\bBUILD SUCCESS(?:FUL)?\b|\ball tests passed\b";
const FAIL: &str = r"(?i)\b0*[1-9][0-9]*\s+failed\b|\b0*[1-9][0-9]*\s+errors?\b|^FAILED|^ERROR\s+\S|\btest result: FAILED\b|^FAIL\s+\S|\bBUILD FAILURE\b";
const NO_TESTS: &str = r"(?i)\b0+\s+passed\b|\[no test files\]|\[no tests to run\]|\bRan 0 tests\b";

/// The summary in `tail`. Its first line may be the rest of a longer one if `is_cut`: `10 failed` would read `0 failed`.
pub(super) fn of(tail: &str, is_cut: bool) -> Summary {
    let [pass, fail, no_tests] = patterns();
    let tail = without_colours(tail);
    let lines: Vec<&str> = tail.lines().skip(usize::from(is_cut)).collect();
    let find = |pattern: &Regex| lines.iter().find(|line| pattern.is_match(line));
    let shown = |line: &&str| first(line.trim(), SHOWN_CHARS).to_owned();
    if let Some(line) = find(fail) {
        return Summary::Failed(shown(line));
    }
    match find(pass) {
        Some(line) if find(no_tests).is_none() => Summary::Passed(shown(line)),
        _ => Summary::None,
    }
}

/// Whether a command line could print something that looks like a summary, as `cd '3 passed'` does when it fails.
pub(super) fn resembles(text: &str) -> bool {
    patterns()[0].is_match(text)
}

fn patterns() -> &'static [Regex; 3] {
    #[allow(clippy::unwrap_used, reason = "constant patterns")]
    static PATTERNS: LazyLock<[Regex; 3]> =
        LazyLock::new(|| [PASS, FAIL, NO_TESTS].map(|pattern| Regex::new(pattern).unwrap()));
    &PATTERNS
}

fn without_colours(text: &str) -> String {
    #[allow(clippy::unwrap_used, reason = "a constant pattern")]
    static COLOUR: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\x1b\[[0-9;]*[A-Za-z]").unwrap());
    COLOUR.replace_all(text, "").into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(text: &str) -> &'static str {
        match of(text, false) {
            Summary::Failed(_) => "failed",
            Summary::Passed(_) => "passed",
            Summary::None => "none",
        }
    }

    #[test]
    fn passing_shapes_are_recognised() {
        for text in [
            "===== 3 passed in 0.12s =====",
            "Tests: 3 passed, 3 total",
            "..\nRan 2 tests in 0.1s\n\nOK",
            "test result: ok. 3 passed; 0 failed; 0 ignored",
            "ok  \tgithub.com/a/b\t0.01s",
            "[INFO] BUILD SUCCESS",
            "BUILD SUCCESSFUL in 3s",
            "All tests passed!",
            "\u{1b}[32m\u{1b}[1m3 passed\u{1b}[0m",
            "10 passed, 0 errors, 0 failed",
        ] {
            assert_eq!(kind(text), "passed", "{text}");
        }
    }

    /// Scenario 26.
    #[test]
    fn failing_shapes_win_over_passing_ones() {
        for text in [
            "1 failed, 3 passed",
            "3 passed, 2 errors",
            "1 error in 0.1s\n3 passed",
            "FAILED tests/a.py::x\n3 passed",
            "ERROR tests/a.py\n3 passed",
            "test result: FAILED. 3 passed; 1 failed",
            "ok  \ta\t0.1s\nFAIL\tb\t0.1s",
            "BUILD FAILURE",
            "\u{1b}[31m1 failed\u{1b}[0m, \u{1b}[32m3 passed\u{1b}[0m",
        ] {
            assert_eq!(kind(text), "failed", "{text}");
        }
    }

    /// Scenario 26.
    #[test]
    fn no_test_is_no_passing_test() {
        for text in [
            "",
            "done",
            "0 passed",
            "00 passed",
            "test result: ok. 0 passed; 0 failed",
            "ok  \ta\t0.1s\n?   \tb\t[no test files]",
            "ok  \ta\t0.1s [no tests to run]",
            "Ran 0 tests in 0.000s\n\nOK",
            "passed",
            "not OK",
            "book shop",
            "no tests ran",
        ] {
            assert_eq!(kind(text), "none", "{text}");
        }
    }

    #[test]
    fn a_line_whose_beginning_is_missing_is_not_read() {
        assert_eq!(of("0 failed, 3 passed", true), Summary::None);
        assert_eq!(of("0 failed\n3 passed", true), Summary::Passed("3 passed".to_owned()));
    }
}
