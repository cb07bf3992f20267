//! Three servers under Patroni with etcd, two gateways and clients that stream: a round of `scripts/patroni.py`.

use std::path::Path;
use std::process::Stdio;

use anyhow::{Context as _, ensure};
use threadkeep_testing::find_patroni;
use tokio::process::Command;

use crate::exercise::{About, NotTried, Turn};

/// What it tries, and what each run of it does.
pub const ABOUT: About = About {
    what: "three servers under Patroni: a crash, a switchover, a lost machine, under two gateways",
    needs: &["rounds", "acknowledged turns"],
};

/// Plays a round.
///
/// # Errors
/// An acknowledged turn that is missing or there twice; [`NotTried`] if Patroni or etcd is not there.
pub async fn run(turn: Turn) -> anyhow::Result<()> {
    let found = tokio::task::spawn_blocking(find_patroni).await?;
    found.map_err(|missing| NotTried(missing.to_string()))?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/patroni.py");
    let mut round = Command::new(script);
    // How long it takes says nothing on a busy machine.
    round.args(["1", "--untimed"]);
    let said = output(round).await.context("scripts/patroni.py")?;
    turn.tally.add("rounds", 1);
    turn.tally.add("acknowledged turns", acknowledged(&said).context("no turns were counted")?);
    Ok(())
}

/// What a program prints. If it fails, all of its output is in the error: it gives the reason on its standard error.
async fn output(mut program: Command) -> anyhow::Result<String> {
    let done = program.stdin(Stdio::null()).output().await.context("it does not start")?;
    let said = String::from_utf8_lossy(&done.stdout).into_owned();
    let errors = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "{}\n{said}{errors}", done.status);
    Ok(said)
}

/// The count in what the script prints at its end.
fn acknowledged(said: &str) -> Option<usize> {
    said.lines().find_map(|line| line.split_once(" turns acknowledged")?.0.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_round_that_fails_gives_its_reason() {
        let mut round = Command::new("sh");
        round.args(["-c", "echo crash; echo no etcd >&2; exit 1"]);
        let error = output(round).await.unwrap_err().to_string();
        assert!(error.contains("\ncrash\nno etcd\n"), "{error}");
    }

    #[test]
    fn the_acknowledged_turns_are_read_from_the_output_of_the_script() {
        let said = "crash: 2.6 s, load 1\n338 turns acknowledged, not acknowledged: {}, 0 wrong\n";
        assert_eq!(acknowledged(said), Some(338));
        assert_eq!(acknowledged("crash: 2.6 s, load 1\n"), None);
    }
}
