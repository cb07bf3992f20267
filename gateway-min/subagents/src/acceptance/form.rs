//! The canonical forms of a criterion (service reference, "Acceptance criteria"). Only they decide what a criterion is
//! about: a text that only looks like one of them is undecidable, and touches nothing.

use std::sync::LazyLock;

use regex::Regex;

use super::Family;

/// What a criterion asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form<'a> {
    /// Something about a file.
    File { path: &'a str, want: Want },
    /// A command that ran the tests, which passed.
    TestsPassed { command: &'a str },
    /// Anything else.
    Undecidable,
}

/// What is asked of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Want {
    Exists,
    NonEmpty,
    Written,
}

impl<'a> Form<'a> {
    /// The form of `criterion`, by its whole text, in upper or lower case.
    pub(super) fn of(criterion: &'a str) -> Self {
        #[allow(clippy::unwrap_used, reason = "constant patterns")]
        static FORMS: LazyLock<[Regex; 4]> = LazyLock::new(|| {
            // A command may have several lines, a path may not.
            [
                r"(?i)^file:[ \t]*(\S|\S.*\S)[ \t]+exists$",
                r"(?i)^file:[ \t]*(\S|\S.*\S)[ \t]+non-empty$",
                r"(?i)^file_written:[ \t]*(\S|\S.*\S)$",
                r"(?i)^tests_passed:[ \t]*((?s)\S|\S.*\S)$",
            ]
            .map(|pattern| Regex::new(pattern).unwrap())
        });
        let [exists, non_empty, written, tests_passed] = &*FORMS;
        let of = |form: &Regex| form.captures(criterion)?.get(1).map(|found| found.as_str());
        if let Some(path) = of(exists) {
            Self::File { path, want: Want::Exists }
        } else if let Some(path) = of(non_empty) {
            Self::File { path, want: Want::NonEmpty }
        } else if let Some(path) = of(written) {
            Self::File { path, want: Want::Written }
        } else if let Some(command) = of(tests_passed) {
            Self::TestsPassed { command }
        } else {
            Self::Undecidable
        }
    }

    pub(super) fn family(self) -> Family {
        match self {
            Self::File { want: Want::Exists, .. } => Family::FileExists,
            Self::File { want: Want::NonEmpty, .. } => Family::FileNonEmpty,
            Self::File { want: Want::Written, .. } => Family::FileWritten,
            Self::TestsPassed { .. } => Family::TestsPassed,
            Self::Undecidable => Family::Undecidable,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_four_forms_are_recognised_by_their_whole_text() {
        let file = |path, want| Form::File { path, want };
        for (criterion, form) in [
            ("file:a.txt exists", file("a.txt", Want::Exists)),
            ("FILE:A.txt Exists", file("A.txt", Want::Exists)),
            ("file:my notes.md non-empty", file("my notes.md", Want::NonEmpty)),
            ("file:exists exists", file("exists", Want::Exists)),
            ("file_written:out/a.txt", file("out/a.txt", Want::Written)),
            ("tests_passed:cargo test", Form::TestsPassed { command: "cargo test" }),
            ("Tests_Passed: pytest -q", Form::TestsPassed { command: "pytest -q" }),
            ("tests_passed:cd a\npytest", Form::TestsPassed { command: "cd a\npytest" }),
        ] {
            assert_eq!(Form::of(criterion), form, "{criterion}");
        }
    }

    /// Scenario 23 and bug 32.
    #[test]
    fn what_only_looks_like_a_form_is_undecidable() {
        for criterion in [
            "file:a.json json-valid",
            "file:a",
            "file: exists",
            "file:a\nb exists",
            "file : a exists",
            "files:a exists",
            "the file:a exists",
            "file:a exists.",
            "file:a is non-empty!",
            "file_written:",
            "file-written:a",
            "tests_passed:",
            "tests passed: pytest",
            "be concise",
        ] {
            assert_eq!(Form::of(criterion), Form::Undecidable, "{criterion}");
        }
    }
}
