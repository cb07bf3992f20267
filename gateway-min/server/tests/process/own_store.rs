//! A program on a saver of its own: the example `own_store`, as its users see it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value as Json, json};

use super::{Gateway, command, configured, texts};

/// The program, which cargo builds with the tests of the package.
fn program() -> PathBuf {
    let folder = Path::new(env!("CARGO_BIN_EXE_threadkeep")).parent().unwrap();
    let program = folder.join("examples/own_store");
    assert!(program.is_file(), "build it first: cargo build -p threadkeep-gateway --example own_store");
    program
}

/// What the usual program's command is in this directory, of the other program.
fn own(dir: &Path, arguments: &[&str]) -> Command {
    let usual = command(dir);
    let mut own = Command::new(program());
    own.current_dir(dir).args(arguments);
    for (name, value) in usual.get_envs() {
        match value {
            Some(value) => own.env(name, value),
            None => own.env_remove(name),
        };
    }
    own
}

fn done(output: Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    String::from_utf8(output.stdout).unwrap()
}

fn serve(dir: &Path) -> Gateway {
    Gateway::start_by(&mut own(dir, &["serve", "--port", "0"]))
}

#[tokio::test]
async fn a_program_on_a_saver_of_its_own_serves_survives_kill_9_and_has_the_commands() {
    for mode in ["full", "delta"] {
        let dir = configured(mode);
        let gateway = serve(dir.path());
        gateway.post("/api/threads", json!({"thread_id": "t"})).await;
        gateway.ask("one").await;
        gateway.hang("hang").await;
        gateway.signal("-9");
        drop(gateway);
        let mut gateway = serve(dir.path());
        let values = gateway.ask("two").await;
        assert_eq!(texts(&values), ["one", "You said: one", "hang", "two", "You said: two"], "{mode}");
        gateway.signal("-TERM");
        assert!(gateway.child.wait().unwrap().success());

        let run = |arguments: &[&str]| own(dir.path(), arguments).output().unwrap();
        let listed = done(run(&["threads", "list", "--json"]));
        assert!(listed.contains(r#""thread":"t""#), "{listed}");
        done(run(&["verify", "--all"]));
        let before: Json =
            serde_json::from_str(&done(run(&["state", "get", "--thread", "t", "--json"]))).unwrap();
        done(run(&["prune", "apply", "--all", "--keep", "last:2", "--boundary", "fresh-snapshot", "--yes"]));
        let other = if mode == "full" { "delta" } else { "full" };
        done(run(&["convert", "--all", "--to", other]));
        done(run(&["verify", "--all"]));
        let after: Json =
            serde_json::from_str(&done(run(&["state", "get", "--thread", "t", "--json"]))).unwrap();
        assert_eq!(after["values"], before["values"], "{mode}");
        done(run(&["export", "--all", "--out", "exported"]));
        done(run(&["vacuum"]));
        let refused = run(&["backup", "--out", "copy.db"]);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains("threadkeep export --all --out DIR"), "{said}");
        let answer = done(run(&["chat", "--config", "config.yaml", "--print", "three"]));
        assert_eq!(answer.trim(), "You said: three");
        // The usual store was not made.
        let data = dir.path().join("state/data");
        assert!(data.join("checkpoints.redb").is_file() && !data.join("checkpoints.db").exists());
    }
}
