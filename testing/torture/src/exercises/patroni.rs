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
    round.args(["1", "--untimed"]).stdin(Stdio::null()).stderr(Stdio::inherit());
    let done = round.output().await.context("scripts/patroni.py does not start")?;
    let said = String::from_utf8_lossy(&done.stdout);
    ensure!(done.status.success(), "scripts/patroni.py: {}\n{said}", done.status);
    turn.tally.add("rounds", 1);
    turn.tally.add("acknowledged turns", acknowledged(&said).context("no turns were counted")?);
    Ok(())
}

/// The count in what the script prints at its end.
fn acknowledged(said: &str) -> Option<usize> {
    said.lines().find_map(|line| line.split_once(" turns acknowledged")?.0.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_acknowledged_turns_are_read_from_the_output_of_the_script() {
        let said = "crash: 2.6 s, load 1\n338 turns acknowledged, not acknowledged: {}, 0 wrong\n";
        assert_eq!(acknowledged(said), Some(338));
        assert_eq!(acknowledged("crash: 2.6 s, load 1\n"), None);
    }
}
