//! Test runners whose command lines are known: which extra arguments cannot change what they test.

use std::sync::LazyLock;

use regex::Regex;

use super::shell::Word;

/// A runner, and where its own arguments start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Runner {
    kind: Kind,
    /// How many words name it, as in `python -m pytest`.
    pub(super) prefix: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Pytest,
    Unittest,
    Cargo,
    Go,
    Jest,
    Vitest,
}

/// What an extra argument does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Extra<'a> {
    /// Nothing to the selection; it has this number of words.
    Harmless(usize),
    /// It leaves this out; it has this number of words.
    Excludes(Exclusion<'a>, usize),
    /// It names more to test.
    Target,
    /// Something, or nothing that is known.
    Unknown,
}

/// What an argument leaves out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Exclusion<'a> {
    /// A file or a directory.
    Path(&'a str),
    /// Tests whose id starts with this.
    Id(&'a str),
}

/// Flags of a runner: those without a value, those with one (attached by `=` or as the next word), and those whose value
/// may be missing, which are harmless only if no word follows that could be taken for it.
struct Flags {
    plain: &'static [&'static str],
    valued: &'static [&'static str],
    optional: &'static [&'static str],
    /// Further spellings: short flags run together, and attached values.
    pattern: &'static str,
}

const PYTEST: Flags = Flags {
    plain: &[
        "--verbose",
        "--quiet",
        "--exitfirst",
        "--showlocals",
        "--no-header",
        "--full-trace",
        "--disable-warnings",
        "--disable-pytest-warnings",
        "--no-cov",
        "--cov-branch",
        "--cov-append",
    ],
    valued: &[
        "--tb",
        "--color",
        "--durations",
        "--durations-min",
        "--maxfail",
        "--capture",
        "--numprocesses",
        "-n",
        "--cov-report",
        "--junitxml",
        "--junit-xml",
    ],
    optional: &["--cov"],
    pattern: r"^(?:-[vqxsl]+|-r[A-Za-z]+|-n(?:[0-9]+|auto|logical)|--cov=.+)$",
};
const UNITTEST: Flags = Flags {
    plain: &["--verbose", "--quiet", "--buffer", "--failfast"],
    valued: &[],
    optional: &[],
    pattern: r"^-[vqbf]$",
};
const CARGO: Flags = Flags {
    plain: &["--verbose", "--quiet", "--no-fail-fast", "--locked", "--offline", "--frozen"],
    valued: &["--jobs", "-j", "--color"],
    optional: &[],
    pattern: r"^(?:-v+|-q|-j[0-9]+)$",
};
/// Of the test program that `cargo test` runs, after `--`.
const LIBTEST: Flags = Flags {
    plain: &["--nocapture", "--no-capture", "--show-output", "--quiet"],
    valued: &["--test-threads", "--color"],
    optional: &[],
    pattern: r"^-q$",
};
const GO: Flags = Flags {
    plain: &["-v", "-failfast", "-cover"],
    valued: &["-p", "-parallel", "-timeout", "-coverprofile", "-covermode"],
    optional: &[],
    pattern: r"^-count=0*[1-9][0-9]*$",
};
const JEST: Flags = Flags {
    plain: &[
        "--verbose",
        "--silent",
        "--ci",
        "--runInBand",
        "-i",
        "--colors",
        "--no-colors",
        "--no-color",
        "--coverage",
        "--forceExit",
        "--detectOpenHandles",
    ],
    valued: &[],
    optional: &["--bail"],
    pattern: r"^(?:--maxWorkers=.+|--bail=[0-9]+)$",
};
const VITEST: Flags = Flags {
    plain: &[],
    valued: &[],
    optional: &["--silent", "--no-color", "--coverage"],
    pattern: r"^--reporter=(?:default|verbose|dot)$",
};

impl Runner {
    /// The runner that these words start, if it is one that is known; `program` is the first one's name.
    pub(super) fn of(program: &str, arguments: &[Word]) -> Option<Self> {
        let word = |at: usize| arguments.get(at).map_or("", |word| word.value.as_str());
        let runs = |kind, prefix| Some(Self { kind, prefix });
        let is_python = program.strip_prefix("python").is_some_and(|version| {
            version.is_empty() || version.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.')
        });
        match (program, word(0), word(1)) {
            ("pytest" | "py.test", ..) => runs(Kind::Pytest, 0),
            (_, "-m", "pytest") if is_python => runs(Kind::Pytest, 2),
            ("uv" | "poetry" | "pipenv", "run", "pytest") => runs(Kind::Pytest, 2),
            (_, "-m", "unittest") if is_python => runs(Kind::Unittest, 2),
            ("cargo", "test", _) => runs(Kind::Cargo, 1),
            ("go", "test", _) => runs(Kind::Go, 1),
            ("jest", ..) => runs(Kind::Jest, 0),
            ("npx", "jest", _) => runs(Kind::Jest, 1),
            ("vitest", "run", _) => runs(Kind::Vitest, 1),
            ("npx", "vitest", "run") => runs(Kind::Vitest, 2),
            _ => None,
        }
    }

    /// Whether an extra flag between two words that are not flags changes what the second one is.
    pub(super) fn ends_targets_at_a_flag(self) -> bool {
        self.kind == Kind::Go
    }

    /// What the extra argument `words[at]` does.
    pub(super) fn extra(self, words: &[Word], at: usize) -> Extra<'_> {
        let word = &words[at];
        let text = word.value.as_str();
        if word.is_doubtful || word.is_glob {
            return Extra::Unknown;
        }
        let after_dashes = words[..at].iter().any(|word| word.value == "--");
        if self.kind == Kind::Cargo && text == "--" && !after_dashes {
            return Extra::Harmless(1);
        }
        if after_dashes && self.kind != Kind::Cargo {
            return Extra::Unknown;
        }
        if !text.starts_with('-') {
            return match self.kind {
                // A name selects tests; a package after a flag is an argument of the tests.
                Kind::Cargo | Kind::Go => Extra::Unknown,
                // A file with arguments.
                Kind::Pytest if text.starts_with('@') => Extra::Unknown,
                _ => Extra::Target,
            };
        }
        if self.kind == Kind::Pytest
            && let Some(excludes) = pytest_exclusion(words, at)
        {
            return excludes;
        }
        self.flags(after_dashes).extra(words, at)
    }

    /// Whether the flag `text` has no value, so that the next word is not its.
    pub(super) fn is_plain_flag(self, text: &str) -> bool {
        let flags = self.flags(false);
        flags.plain.contains(&text) || (self.matches(text) && !flags.valued.contains(&text))
    }

    fn flags(self, after_dashes: bool) -> &'static Flags {
        match self.kind {
            Kind::Pytest => &PYTEST,
            Kind::Unittest => &UNITTEST,
            Kind::Cargo if after_dashes => &LIBTEST,
            Kind::Cargo => &CARGO,
            Kind::Go => &GO,
            Kind::Jest => &JEST,
            Kind::Vitest => &VITEST,
        }
    }

    fn matches(self, text: &str) -> bool {
        self.flags(false).matches(text)
    }
}

impl Flags {
    fn matches(&self, text: &str) -> bool {
        #[allow(clippy::unwrap_used, reason = "constant patterns")]
        static PATTERNS: LazyLock<Vec<(&str, Regex)>> = LazyLock::new(|| {
            let all = [&PYTEST, &UNITTEST, &CARGO, &LIBTEST, &GO, &JEST, &VITEST];
            all.map(|flags| (flags.pattern, Regex::new(flags.pattern).unwrap())).into()
        });
        PATTERNS.iter().any(|(pattern, regex)| *pattern == self.pattern && regex.is_match(text))
    }

    fn extra(&self, words: &[Word], at: usize) -> Extra<'_> {
        let text = words[at].value.as_str();
        let next = words.get(at + 1);
        if self.plain.contains(&text) || self.matches(text) {
            return Extra::Harmless(1);
        }
        if self.valued.contains(&text) {
            let value =
                next.filter(|next| !next.value.starts_with('-') && !next.is_doubtful && !next.is_glob);
            return value.map_or(Extra::Unknown, |_| Extra::Harmless(2));
        }
        if self.optional.contains(&text) {
            let alone = next.is_none_or(|next| next.value.starts_with('-') && next.value != "--");
            return if alone { Extra::Harmless(1) } else { Extra::Unknown };
        }
        match text.split_once('=') {
            Some((name, value)) if self.valued.contains(&name) && !value.is_empty() => Extra::Harmless(1),
            _ => Extra::Unknown,
        }
    }
}

fn pytest_exclusion(words: &[Word], at: usize) -> Option<Extra<'_>> {
    let text = words[at].value.as_str();
    let (name, attached) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
    if !matches!(name, "--ignore" | "--deselect") {
        return None;
    }
    let plain = |word: &&Word| !word.is_doubtful && !word.is_glob && !word.value.starts_with('-');
    let (value, count) = match attached {
        Some(value) => (value, 1),
        None => match words.get(at + 1).filter(plain) {
            Some(word) => (word.value.as_str(), 2),
            None => return Some(Extra::Unknown),
        },
    };
    let exclusion = if name == "--ignore" { Exclusion::Path(value) } else { Exclusion::Id(value) };
    Some(Extra::Excludes(exclusion, count))
}
