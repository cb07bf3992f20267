//! The scripts that `make` starts, with stand-ins for the programs that they start.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

/// Lists the tests whose names contain its last argument, as a test program does; and succeeds where it runs nothing.
const CARGO: &str = r#"#!/bin/sh
for last; do :; done
case "$*" in
    *"fuzz list"*) printf '%s\n' config value ;;
    *" --list "*)
        printf '%s: test\n' chaos::three_gateways_keep chaos::two_gateways_keep materialize | grep -F -- "$last"
        exit 0
        ;;
    *) echo "cargo ran $*" ;;
esac
"#;

const SUCCEEDS: &str = "#!/bin/sh\necho nightly\n";

/// Creates environments whose pip runs, in place of what is there, and says so.
const PYTHON: &str = r#"#!/bin/sh
[ "$*" != "-c import ensurepip" ] || exit 0
for last; do :; done
rm -rf "$last"
mkdir -p "$last/bin"
printf '#!/bin/sh\n' > "$last/bin/pip"
chmod +x "$last/bin/pip"
echo created
"#;

/// The interpreter of an environment, which installs its pip.
const GIVES_PIP: &str = r#"#!/bin/sh
[ "$*" = "-m ensurepip --default-pip" ] || exit 1
folder=${0%/*}
printf '#!/bin/sh\n' > "$folder/pip"
chmod +x "$folder/pip"
"#;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Writes a program. Another process does: one that this process has open for writing cannot be started, and a child of
/// another test may keep it open for a moment.
fn program(path: &Path, text: &str) {
    let write = r#"printf %s "$2" > "$1" && chmod +x "$1""#;
    let written = Command::new("sh").args(["-c", write, "sh"]).arg(path).arg(text).status().unwrap();
    assert!(written.success());
}

/// A folder with stand-ins.
fn programs() -> TempDir {
    let folder = TempDir::new().unwrap();
    for (name, text) in [("cargo", CARGO), ("rustup", SUCCEEDS), ("cargo-fuzz", SUCCEEDS)] {
        program(&folder.path().join(name), text);
    }
    folder
}

/// Runs a program with the stand-ins of a folder, and nothing of the `make` that runs this test.
fn run(folder: &Path, program: &str, arguments: &[&str]) -> Output {
    let path = std::env::var("PATH").unwrap();
    let mut command = Command::new(program);
    command.current_dir(root()).args(arguments).env("PATH", format!("{}:{path}", folder.display()));
    for name in ["MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL"] {
        command.env_remove(name);
    }
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_name_that_nothing_has_is_an_error_that_lists_the_names() {
    let folder = programs();
    let cases: [(&[&str], &str); 5] = [
        (&["chaos", "ONLY=typo"], "chaos::three_gateways_keep\nchaos::two_gateways_keep\n"),
        (&["page-test", "ARGS=three_gateways typo"], "chaos::two_gateways_keep\nmaterialize\n"),
        (&["bench-criterion", "FILTER=typo"], "chaos::two_gateways_keep\nmaterialize\n"),
        // Its test has another name now.
        (&["batches-torture"], "chaos::two_gateways_keep\nmaterialize\n"),
        (&["fuzz", "TARGETS=value typo"], "config\nvalue\n"),
    ];
    for (arguments, there) in cases {
        let done = run(folder.path(), "make", arguments);
        let (printed, said) = (text(&done.stdout), text(&done.stderr));
        assert!(!done.status.success() && said.contains(there), "{arguments:?}: {said}");
        assert!(!printed.contains("cargo ran") && !printed.contains("=="), "{arguments:?}: {printed}");
    }
    let done = run(folder.path(), "env", &["STORES=sqlite typo", "scripts/langgraph-tests.sh", "python"]);
    let said = text(&done.stderr);
    assert!(!done.status.success() && said.contains("typo; there are: sqlite postgres"), "{said}");
}

#[test]
fn names_that_there_are_choose_what_runs() {
    let folder = programs();
    let cases: [(&[&str], &str); 5] = [
        (&["chaos"], "--test process -- chaos:: --nocapture --test-threads 1"),
        (&["chaos", "ONLY=two_gateways"], "-- chaos::two_gateways --nocapture --test-threads 1"),
        (&["page-test"], "--test page --"),
        (&["page-test", "ARGS=two_gateways keep --nocapture"], "-- two_gateways keep --nocapture"),
        (&["bench-criterion", "FILTER=materialize"], "-p threadkeep-benches -- materialize"),
    ];
    for (arguments, ran) in cases {
        let done = run(folder.path(), "make", arguments);
        let printed = text(&done.stdout);
        assert!(done.status.success(), "{arguments:?}: {}", text(&done.stderr));
        let found = printed.lines().any(|line| line.starts_with("cargo ran") && line.ends_with(ran));
        assert!(found, "{arguments:?}: {printed}");
    }
}

#[test]
fn an_environment_whose_pip_does_not_run_is_created_again() {
    let folder = TempDir::new().unwrap();
    let (python, venv) = (folder.path().join("python"), folder.path().join("venv"));
    program(&python, PYTHON);
    let create = || {
        let (python, venv) = (format!("PYTHON={}", python.display()), venv.display().to_string());
        let done = run(folder.path(), "env", &[&python, "scripts/venv.sh", &venv]);
        assert!(done.status.success(), "{}", text(&done.stderr));
        text(&done.stdout)
    };
    let pip = venv.join("bin/pip");
    assert_eq!((create(), create()), ("created\n".to_owned(), String::new()));
    // An interrupted creation.
    fs::remove_file(&pip).unwrap();
    assert_eq!((create(), create()), ("created\n".to_owned(), String::new()));
    // The interpreter went away with an upgrade.
    program(&pip, "#!/nowhere/python3\n");
    assert_eq!((create(), create()), ("created\n".to_owned(), String::new()));
    // Another program made it, without pip: what is in it stays.
    fs::remove_file(&pip).unwrap();
    let own = venv.join("own");
    fs::write(&own, "").unwrap();
    program(&venv.join("bin/python"), GIVES_PIP);
    assert_eq!((create(), create()), (String::new(), String::new()));
    assert!(own.exists() && pip.exists());
}
