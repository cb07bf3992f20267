use proptest::prelude::*;

use super::*;

fn execution(command: &str, status: ExecutionStatus, output: &str) -> BashExecution {
    BashExecution {
        message_id: "m".to_owned(),
        tool_call_id: "c".to_owned(),
        tool_name: "bash".to_owned(),
        command: command.to_owned(),
        command_truncated: false,
        output_tail: output.to_owned(),
        status,
        status_marker: Some(
            if status == ExecutionStatus::Success { "exit code 0" } else { "exit code 1" }.to_owned(),
        ),
        shell_persistent: Some(false),
    }
}

fn passed(command: &str) -> BashExecution {
    execution(command, ExecutionStatus::Success, "..\n3 passed in 0.1s\n")
}

fn failed(command: &str) -> BashExecution {
    execution(command, ExecutionStatus::Error, "1 failed\n[exit code 1]")
}

/// `holds`, or the reason why not.
fn verdict(criterion: &str, executions: &[BashExecution]) -> String {
    match check(criterion, executions) {
        Finding::Holds(_) => "holds".to_owned(),
        Finding::DoesNotHold(why) => format!("does not hold: {why}"),
        Finding::Unchecked(why) => why,
    }
}

fn holds(criterion: &str, command: &str) -> bool {
    verdict(criterion, &[passed(command)]) == "holds"
}

#[track_caller]
fn all_hold(criterion: &str, commands: &[&str]) {
    for command in commands {
        assert_eq!(verdict(criterion, &[passed(command)]), "holds", "{criterion} by {command}");
    }
}

#[track_caller]
fn none_holds(criterion: &str, commands: &[&str]) {
    for command in commands {
        let found = check(criterion, &[passed(command)]);
        assert!(matches!(found, Finding::Unchecked(_)), "{criterion} by {command}: {found:?}");
    }
}

/// Scenario 24.
#[test]
fn an_exact_run_with_a_summary_holds_and_the_newest_decides() {
    assert_eq!(verdict("pytest tests", &[]), NO_CANDIDATE);
    assert_eq!(verdict("pytest tests", &[passed("pytest tests")]), "holds");
    let (good, bad) = (passed("pytest tests"), failed("pytest tests"));
    assert_eq!(verdict("pytest tests", &[bad.clone(), good.clone()]), "holds");
    assert_eq!(
        verdict("pytest tests", &[good.clone(), bad]),
        "does not hold: the command failed: exit code 1"
    );
    let others = [good.clone(), passed("ls tests"), failed("pytest other"), passed("cat pytest.ini")];
    assert_eq!(verdict("pytest tests", &others), "holds", "other commands do not count");
    assert_eq!(verdict("pytest tests", &[good, passed("pytest -k x tests")]), UNPROVEN);
}

/// Scenario 25.
#[test]
fn what_may_not_be_the_run_is_unverified() {
    none_holds(
        "pytest tests/a.py",
        &[
            "echo pytest tests/a.py",
            "echo 'pytest tests/a.py'; echo '3 passed'",
            "# pytest tests/a.py\necho '3 passed'",
            "pytest -k x tests/a.py",
            "pytest tests/a.py -k x",
            "pytest tests/a.py -m slow",
            "pytest tests/a.py --lf",
            "pytest tests/a.py --collect-only",
            "pytest tests/a.py -c other.ini",
            "pytest tests/a.py -p no:x",
            "pytest tests/a.py --ignore=tests",
            "pytest tests/a.py --ignore tests/a.py",
            "pytest tests/a.py --deselect tests/a.py::test_x",
            "pytest tests/a.py > log; cat log",
            "pytest tests/a.py 2>&1",
            "pytest tests/a.py < in",
            "pytest tests/a.py; echo '3 passed'",
            "pytest tests/a.py | tail -3",
            "pytest tests/a.py |& tee log",
            "pytest tests/a.py &",
            "pytest tests/a.py & wait",
            "pytest tests/a.py || true",
            "X=1 pytest tests/a.py",
            "export X=1; pytest tests/a.py",
            "X=1; pytest tests/a.py",
            "pytest $X tests/a.py",
            "pytest $X",
            "$X tests/a.py",
            "pytest tests/a.py `x`",
            "pytest tests/a.py *.py",
            "cd ../x && pytest tests/a.py",
            "cd /tmp && pytest tests/a.py",
            "source x && pytest tests/a.py",
            "echo hi && pytest tests/a.py",
            "false || pytest tests/a.py",
            "false && pytest tests/a.py || echo '3 passed'",
            "bash -c 'pytest tests/a.py'",
            "timeout 60 pytest tests/a.py",
            "if false; then pytest tests/a.py; fi",
            "false && (pytest tests/a.py); echo '3 passed'",
            "pytest() { echo '3 passed'; }; pytest tests/a.py",
            "alias pytest=true; pytest tests/a.py",
            "set -n; pytest tests/a.py",
            "exit 0; pytest tests/a.py",
            "pytest tests/b.py",
            "pytest tests/a.pyc",
            "pytest --cov tests/a.py",
            "pytest tests/a.py @args.py",
            "pytest tests/a.py -- -k",
            "python -m pytest tests/a.py",
            "cat x | pytest tests/a.py",
        ],
    );
    none_holds("pytest", &["pytest tests/a.py", "pytest --ignore=x", "pytest --deselect x", "pytest -- x"]);
}

#[test]
fn a_truncated_command_and_a_shared_shell_are_unverified() {
    let run = passed("pytest tests");
    let truncated = BashExecution { command_truncated: true, ..run.clone() };
    assert_eq!(verdict("pytest tests", &[truncated]), TRUNCATED);
    for shell_persistent in [Some(true), None] {
        let shared = BashExecution { shell_persistent, ..run.clone() };
        assert_eq!(verdict("pytest tests", &[shared]), SHARED_SHELL);
    }
}

/// Scenario 26.
#[test]
fn the_summary_decides_after_the_exit_code() {
    let with = |status, output: &str| verdict("pytest", &[execution("pytest", status, output)]);
    let success = |output: &str| with(ExecutionStatus::Success, output);
    for none in ["", "0 passed", "ok  \ta\t0.1s\n? b [no test files]", "collected 3 items"] {
        assert_eq!(success(none), NO_SUMMARY, "{none}");
    }
    assert_eq!(success("3 passed, 1 failed"), "does not hold: failing test summary: 3 passed, 1 failed");
    assert_eq!(with(ExecutionStatus::Error, "3 passed"), "does not hold: the command failed: exit code 1");
    let redirected = execution("pytest > log", ExecutionStatus::Error, "");
    assert_eq!(verdict("pytest", &[redirected]), "does not hold: the command failed: exit code 1");
}

#[test]
fn what_cannot_change_the_selection_may_be_added() {
    all_hold(
        "pytest tests/a.py",
        &[
            "pytest tests/a.py",
            "  pytest   tests/a.py ;",
            "pytest 'tests/a.py' # all of them",
            "pytest -v tests/a.py",
            "pytest -vv -x --tb=short -ra tests/a.py -n 4",
            "pytest --tb short --maxfail 1 tests/a.py",
            "pytest --cov=src --cov-report term tests/a.py",
            "pytest tests/a.py --cov",
            "pytest tests/a.py tests/b.py",
            "pytest tests/a.py --ignore=tests/b.py",
            "pytest tests/a.py --deselect tests/b.py::test_x",
            ".venv/bin/pytest tests/a.py",
            "cd sub && pytest tests/a.py",
            "cd sub; pytest tests/a.py",
            "cd sub\npytest tests/a.py",
            "cd a && cd b && pytest tests/a.py",
            "cd sub | pytest tests/a.py",
        ],
    );
    all_hold(
        "cargo test",
        &["cargo test -v", "cargo test --no-fail-fast -- --nocapture", "cargo test -- --test-threads=1"],
    );
    none_holds(
        "cargo test",
        &[
            "cargo test foo",
            "cargo test -- foo",
            "cargo test --lib",
            "cargo test -- --skip x",
            "cargo +x test",
        ],
    );
    none_holds("cargo test --lib", &["cargo test -- --lib"]);
    all_hold("go test ./b", &["go test -v ./b", "go test ./b -v", "go test -count=1 ./b"]);
    none_holds(
        "go test ./b",
        &["go test ./a -v ./b", "go test -count=0 ./b", "go test ./b -run X", "go test -short ./b"],
    );
    none_holds("go test ./a ./b", &["go test ./a -v ./b"]);
    all_hold("npx jest a.test.js", &["npx jest --coverage a.test.js b.test.js", "npx jest -i a.test.js"]);
    none_holds("npx jest a.test.js", &["npx jest -t name a.test.js", "npx jest --bail a.test.js"]);
    all_hold(
        "python3 -m pytest tests/a.py -q",
        &["python3 -m pytest tests/a.py -q", "python3 -m pytest -x tests/a.py -q"],
    );
    none_holds(
        "python3 -m pytest tests/a.py",
        &["python3 -O -m pytest tests/a.py", "python3 -m pytest -O tests/a.py"],
    );
    none_holds("make test", &["make -n test", "make test -k", "make test other", "make TEST=1 test"]);
    all_hold("make test", &["make test", "cd sub && make test"]);
}

#[test]
fn flags_whose_values_are_unknown_do_not_make_a_target() {
    // The path is the value of `-c`, so the criterion is bare, and another path narrows it.
    none_holds("pytest -c cfg/x.ini", &["pytest -c cfg/x.ini tests/a.py"]);
    none_holds("pytest -k x", &["pytest -k -v x", "pytest -k x tests/a.py"]);
    all_hold("pytest -k x", &["pytest -k x", "pytest -v -k x -q"]);
}

/// Bug 27.
#[test]
fn programs_and_joints_are_compared_exactly() {
    all_hold("./pytest a.py", &["./pytest a.py", "././pytest a.py"]);
    none_holds(
        "./pytest a.py",
        &["pytest a.py", "/usr/bin/pytest a.py", "../pytest a.py", "sub/../pytest a.py"],
    );
    none_holds("pytest", &["../pytest", "cd x\n|| pytest", "cd x || pytest", "cd x &\npytest"]);
    assert_eq!(
        verdict("pytest", &[failed("cd x || pytest")]),
        "does not hold: the command failed: exit code 1",
        "it failed, so both ran"
    );
    assert_eq!(verdict("pytest", &[failed("cd x && pytest")]), UNPROVEN, "perhaps only `cd` ran");
    assert_eq!(verdict("pytest", &[failed("cd x\n|| pytest")]), UNPROVEN, "a syntax error of bash");
    assert_eq!(verdict("pytest", &[failed("exit 1; pytest")]), UNPROVEN);
}

#[test]
fn criteria_of_several_commands_keep_their_joints() {
    all_hold("make && pytest", &["make && pytest", "cd sub && make && pytest"]);
    none_holds(
        "make && pytest",
        &["make; pytest", "make || pytest", "make | pytest", "make && pytest && echo", "pytest"],
    );
    all_hold("make; pytest", &["make; pytest", "make && pytest", "make\npytest"]);
    none_holds("make; pytest", &["cd sub && make; pytest", "make || pytest"]);
    none_holds("make && true; pytest", &["make && true; pytest"]);
    all_hold("X=1 pytest", &["X=1 pytest", "X=0 X=1 pytest"]);
    none_holds("X=1 pytest", &["pytest", "X=2 pytest", "X=1 Y=1 pytest", "export X=1; pytest"]);
    all_hold("pytest tests/*.py", &["pytest tests/*.py", "pytest -v tests/*.py"]);
    none_holds("pytest tests/*.py", &["pytest 'tests/*.py'"]);
}

#[test]
fn a_line_that_is_not_understood_matches_only_itself() {
    let criterion = "for d in a b; do (cd $d && pytest) || exit 1; done";
    assert!(!holds(criterion, criterion), "what a line with `|` prints is not known");
    let criterion = "(cd a; pytest)";
    assert!(holds(criterion, criterion) && holds(criterion, "(cd a;  pytest) "));
    assert!(!holds(criterion, "(cd b; pytest)") && !holds(criterion, "cd a; pytest"));
    assert!(!holds("(pytest 'a b')", "(pytest 'a  b')"), "space in quotes matters");
}

#[test]
fn exclusions_that_may_overlap_are_unverified() {
    all_hold(
        "pytest tests/unit",
        &["pytest tests/unit --ignore=tests/slow", "pytest --ignore docs tests/unit"],
    );
    none_holds(
        "pytest tests/unit",
        &[
            "pytest tests/unit --ignore=tests/unit/a.py",
            "pytest tests/unit --ignore=./tests/unit/a.py",
            "pytest tests/unit --ignore=/w/tests/unit",
            "pytest tests/unit --ignore=tests",
            "pytest tests/unit --ignore-glob=x",
            "pytest tests/unit --deselect a.py::x",
        ],
    );
    none_holds(
        "pytest sub/a.py",
        &["pytest sub/a.py --deselect a.py::x", "pytest sub/a.py --deselect sub/a"],
    );
}

proptest! {
    /// The comparison is total, and whatever is put around a command, `echo` does not run it.
    #[test]
    fn comparing_never_panics(
        criterion in r#"(pytest|cargo|test|a\.py|-k|[a-z'"\\;&|<>()$#`= \n-]){0,12}"#,
        command in r#"(pytest|cargo|test|a\.py|-k|[a-z'"\\;&|<>()$#`= \n-]){0,24}"#,
    ) {
        check(&criterion, &[passed(&command), failed(&command)]);
    }

    /// A criterion's own text holds only if it is plain, and never when something follows it.
    #[test]
    fn what_follows_a_run_hides_it(words in prop::collection::vec("[a-z./:-]{1,8}", 1..5), after in "[a-z]{1,5}") {
        let command = words.join(" ");
        let follows = format!("{command}; {after}");
        if words.join(" ") != after {
            prop_assert!(!holds(&command, &follows) || command == after, "{}", follows);
        }
    }
}
