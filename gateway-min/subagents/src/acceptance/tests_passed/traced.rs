//! Check 11: command lines against the matcher, each really run in bash with a traced stand-in for the test runner.
//!
//! The stand-in logs what it would test. A line that `holds` must have made it test at least what the criterion's own
//! command makes it test; a line that runs nothing must not hold.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Output};

use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use super::*;

/// Logs its name, an option that narrows what it tests, and each target, one line a run; then does what the file `mode`
/// says: it passes, passes without saying so, or fails.
///
/// It knows the options of the runners by itself, so that it does not repeat the matcher's mistakes.
const STAND_IN: &str = r#"#!/bin/bash
name=${0##*/}
only=; targets=; excluded=; env_x="X=${X-}"
if [ "$name" = python3 ]; then
    [ "$1 $2" = "-m pytest" ] || { echo "python3 ran something else"; exit 0; }
    name=python3-pytest; shift 2
fi
if [ "$name" = cargo ]; then [ "$1" = test ] || { echo "built"; exit 0; }; shift; fi
if [ "$name" = go ]; then [ "$1" = test ] || { echo "built"; exit 0; }; shift; fi
if [ "$name" = make ]; then name="make $*"; set --; fi
while [ $# -gt 0 ]; do
    case "$name $1" in
        *" -v" | *" -vv" | *" -q" | *" -x" | *" -s" | *" -xvs" | *" -ra" | *" --verbose" | *" --tb="* | *" --cov="*) ;;
        *" --nocapture" | *" --no-fail-fast" | "cargo --" | "go -count=1" | *" --color=yes" | *" -failfast") ;;
        *pytest" --tb" | *pytest" -n" | *pytest" --maxfail" | *pytest" --durations") shift ;;
        *pytest" --cov") case "${2-}" in -* | "") ;; *) shift ;; esac ;;
        *pytest" --ignore="*) excluded="$excluded ${1#*=}" ;;
        *pytest" --ignore") excluded="$excluded ${2-}"; shift ;;
        *pytest" --deselect") excluded="$excluded ${2%%::*}"; shift ;;
        *pytest" "-*) only="$only $1 ${2-}"; shift $(($# > 1 ? 1 : 0)) ;;
        *" "-*) only="$only $1" ;;
        cargo*) only="$only $1" ;;
        *) targets="$targets $1" ;;
    esac
    shift
done
for e in $excluded; do
    [ -n "$targets" ] || only="$only without $e"
    left=
    for t in $targets; do
        case "$e" in "$t"?*) only="$only without $e" ;; esac
        case "$t" in "$e"*) ;; *) left="$left $t" ;; esac
    done
    [ -n "$left" ] || only="$only nothing"
    targets=$left
done
echo "$name|$env_x|$only|$targets" >> "@bin/trace"
read -r mode < "@bin/mode"
case "$mode" in
    passing) echo "3 passed in 0.01s" ;;
    silent) ;;
    failing) echo "1 failed in 0.01s"; exit 1 ;;
esac
"#;

/// What one run of the stand-in tested.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Traced {
    /// The program, its environment, and what narrows the selection.
    how: String,
    targets: BTreeSet<String>,
}

impl Traced {
    fn read(line: &str) -> Self {
        let (how, targets) = line.rsplit_once('|').unwrap();
        Self { how: how.to_owned(), targets: targets.split_whitespace().map(str::to_owned).collect() }
    }

    /// Whether it tested everything that `wanted` did.
    fn covers(&self, wanted: &Self) -> bool {
        let all = self.targets.is_empty() || !wanted.targets.is_empty();
        self.how == wanted.how && all && wanted.targets.is_subset(&self.targets)
    }
}

/// A thread's directory with stand-ins for the runners, on the path and in it.
struct FakeRunners(tempfile::TempDir);

impl FakeRunners {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for folder in ["bin", "t/sub/sub", "t/tests", "t/.venv/bin"] {
            fs::create_dir_all(dir.path().join(folder)).unwrap();
        }
        let stand_in = dir.path().join("bin/pytest");
        fs::write(&stand_in, STAND_IN.replace("@bin", dir.path().join("bin").to_str().unwrap())).unwrap();
        fs::set_permissions(&stand_in, fs::Permissions::from_mode(0o755)).unwrap();
        for name in [
            "bin/cargo",
            "bin/go",
            "bin/make",
            "bin/python3",
            "t/pytest",
            "t/sub/pytest",
            "t/.venv/bin/pytest",
        ] {
            std::os::unix::fs::symlink(&stand_in, dir.path().join(name)).unwrap();
        }
        for file in ["tests/a.py", "tests/b.py", "sub/a.py", "x"] {
            fs::write(dir.path().join("t").join(file), "").unwrap();
        }
        Self(dir)
    }

    /// Runs a line as the tool `bash` does, with runners in this mode, and returns what it left and what they traced.
    fn run(&self, line: &str, mode: &str) -> (Output, Vec<Traced>) {
        let at = |path: &str| self.0.path().join(path);
        fs::write(at("bin/mode"), format!("{mode}\n")).unwrap();
        let _ = fs::remove_file(at("bin/trace"));
        let path = format!("{}:/usr/bin:/bin", at("bin").display());
        let output = Command::new("bash")
            .args(["-c", line])
            .current_dir(at("t"))
            .env_clear()
            .env("PATH", path)
            .stdin(std::process::Stdio::null())
            .output()
            .unwrap();
        let trace = fs::read_to_string(at("bin/trace")).unwrap_or_default();
        (output, trace.lines().map(Traced::read).collect())
    }
}

fn execution(line: &str, output: &Output) -> BashExecution {
    let text = [output.stdout.as_slice(), output.stderr.as_slice()].concat();
    let status = if output.status.success() { ExecutionStatus::Success } else { ExecutionStatus::Error };
    let output_tail = String::from_utf8_lossy(&text).into_owned();
    BashExecution { output_tail, status, ..successful(line) }
}

fn successful(line: &str) -> BashExecution {
    BashExecution {
        message_id: "m".to_owned(),
        tool_call_id: "c".to_owned(),
        tool_name: "bash".to_owned(),
        command: line.to_owned(),
        command_truncated: false,
        output_tail: String::new(),
        status: ExecutionStatus::Success,
        status_marker: None,
        shell_persistent: Some(false),
    }
}

const CRITERIA: [&str; 11] = [
    "pytest",
    "pytest tests/a.py",
    "pytest -k fast tests/a.py",
    "./pytest tests/a.py",
    "python3 -m pytest tests/a.py",
    "X=1 pytest tests/a.py",
    "cargo test",
    "go test ./sub",
    "make test",
    "make test; pytest tests/a.py",
    "make test && pytest tests/a.py",
];

/// Lines around a criterion's command `@`.
const AROUND: [&str; 44] = [
    "@",
    " @ ;",
    "@ # all",
    "@ -v",
    "@ -q -x",
    "@ --tb=short",
    "@ --tb short",
    "@ -- --nocapture",
    "@ extra.py",
    "@ tests/b.py",
    "@ -k slow",
    "@ --ignore=tests/a.py",
    "@ --ignore=tests/b.py",
    "@ --deselect tests/b.py::x",
    "@ --collect-only",
    "@ > log; cat log",
    "@ 2>&1",
    "@ | tail -1",
    "@ && echo '3 passed'",
    "@; echo '3 passed'",
    "@ || echo '3 passed'",
    "@ &",
    "@ & wait",
    "cd sub && @",
    "cd sub; @",
    "cd sub\n@",
    "cd sub && cd sub && @",
    "cd none && @",
    "cd none; @",
    "cd none || @",
    "cd '3 passed'; @",
    "cd .. && @",
    "X=2 @",
    "export X=2; @",
    "true && @",
    "false && @; echo '3 passed'",
    "false && @ || echo '3 passed'",
    "true || @; echo '3 passed'",
    "echo '@'; echo '3 passed'",
    "# @\necho '3 passed'",
    "echo '3 passed' | @",
    "bash -c '@'",
    "exit 0; @",
    "echo() { builtin echo '3 passed'; }; echo @",
];

/// Lines that look like a criterion's without being one around it.
const OTHERS: [&str; 20] = [
    "pytest --cov tests/a.py",
    "pytest -v tests/a.py tests/b.py",
    "pytest tests/b.py tests/a.py",
    "pytest -k fast -k slow tests/a.py",
    "pytest -v -k fast tests/a.py",
    "pytest -k -v fast tests/a.py",
    ".venv/bin/pytest tests/a.py",
    "./sub/../pytest tests/a.py",
    "go test -v ./sub",
    "go test ./tests -v ./sub",
    "cargo test -v -- --nocapture",
    "cargo test a",
    "cargo build; cargo test",
    "make -n test",
    "cd none && make test; pytest tests/a.py",
    "make test && cd sub; pytest tests/a.py",
    "false && make test; pytest tests/a.py",
    "cd sub && make test && pytest tests/a.py",
    "pytest $Y tests/a.py",
    "PYTEST_ADDOPTS=-kfast pytest tests/a.py",
];

/// Whether the last runs are the wanted ones, or more of the same.
fn cover(traced: &[Traced], wanted: &[Traced]) -> bool {
    let last = traced.len().checked_sub(wanted.len()).map(|from| &traced[from..]);
    last.is_some_and(|last| last.iter().zip(wanted).all(|(run, wanted)| run.covers(wanted)))
}

/// Runs a line in each mode; how often it holds, or a description of a run for which it should not.
fn held(place: &FakeRunners, criterion: &str, own: &[Traced], line: &str) -> Result<usize, String> {
    let mut held = 0;
    // Whatever a line says, it does not hold if its tests did not report that they passed.
    for mode in ["passing", "silent", "failing"] {
        let (output, traced) = place.run(line, mode);
        if !matches!(check(criterion, &[execution(line, &output)]), Finding::Holds(_)) {
            continue;
        }
        held += 1;
        if mode != "passing" || !output.status.success() || !cover(&traced, own) {
            return Err(format!("{criterion:?} by {line:?}, {mode}: {traced:?}"));
        }
    }
    Ok(held)
}

#[test]
fn no_line_that_holds_ran_anything_less_than_the_criterion() {
    let place = FakeRunners::new();
    let (mut lines, mut holding, mut wrong) = (0, 0, Vec::new());
    for criterion in CRITERIA {
        let (output, own) = place.run(criterion, "passing");
        assert!(output.status.success() && !own.is_empty(), "{criterion}");
        let around = AROUND.iter().map(|around| around.replace('@', criterion));
        for line in around.chain(OTHERS.map(str::to_owned)) {
            lines += 1;
            match held(&place, criterion, &own, &line) {
                Ok(count) => holding += count,
                Err(why) => wrong.push(why),
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(lines >= 200 && holding >= 60, "{holding} of {lines} hold");
}

/// Words that are put into a criterion's command at random.
const WORDS: [&str; 66] = [
    "pytest",
    "tests/a.py",
    "tests/b.py",
    "./tests/a.py",
    "'tests/a.py'",
    "tests/*",
    "-v",
    "-q",
    "-x",
    "-k",
    "fast",
    "--tb",
    "short",
    "--tb=short",
    "--maxfail",
    "-n",
    "1",
    "--cov",
    "--cov=x",
    "--ignore",
    "--ignore=tests/a.py",
    "--ignore=tests/b.py",
    "--deselect",
    "tests/b.py::x",
    "--",
    "@x",
    ";",
    "&&",
    "||",
    "|",
    "&",
    "\n",
    "!",
    "(",
    ")",
    "{",
    "}",
    "if",
    "then",
    "fi",
    ">",
    "<",
    "2>&1",
    "log",
    "x",
    "#",
    "\"",
    "\\",
    "$X",
    "X=1",
    "X=2",
    "export",
    "cd",
    "sub",
    "cd sub &&",
    "cd sub;",
    "cd none;",
    "cd .",
    "exit 0;",
    "true",
    "false",
    "echo",
    "'3 passed'",
    "; echo '3 passed'",
    "|| echo '3 passed'",
    "python3 -m",
];

#[test]
fn so_with_lines_that_chance_makes() {
    let place = FakeRunners::new();
    let own = CRITERIA.map(|criterion| place.run(criterion, "passing").1);
    let holding = std::cell::Cell::new(0);
    let words = prop::collection::vec((any::<prop::sample::Index>(), prop::sample::select(&WORDS[..])), 0..5);
    let config = ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() };
    let checked = TestRunner::new(config).run(&(0..CRITERIA.len(), words), |(at, words)| {
        let mut line: Vec<&str> = CRITERIA[at].split(' ').collect();
        for (place, word) in words {
            line.insert(place.index(line.len() + 1), word);
        }
        let line = line.join(" ");
        // Only what could hold is worth running.
        let promising = BashExecution { output_tail: "3 passed".to_owned(), ..successful(&line) };
        if matches!(check(CRITERIA[at], &[promising]), Finding::Holds(_)) {
            let count = held(&place, CRITERIA[at], &own[at], &line).map_err(TestCaseError::fail)?;
            holding.set(holding.get() + count);
        }
        Ok(())
    });
    checked.unwrap();
    assert!(holding.get() >= 30, "only {} of them hold", holding.get());
}
