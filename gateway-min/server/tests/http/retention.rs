//! The gateway deletes no checkpoint by itself: it only offers operators the commands.

use std::collections::BTreeSet;
use std::path::Path;

use crate::support::{Gateway, MODES, Setup, id};

async fn checkpoints(gateway: &Gateway) -> BTreeSet<String> {
    gateway.history("t").await.iter().map(|entry| id(entry).to_owned()).collect()
}

#[tokio::test]
async fn no_turn_read_or_restart_deletes_a_checkpoint() {
    for mode in MODES {
        let mut gateway = Setup::on("sqlite", mode).start().await;
        gateway.create("t").await;
        let mut seen = checkpoints(&gateway).await;
        assert_eq!(seen.len(), 1, "the first checkpoint of a thread");
        for turn in 1..=20 {
            gateway.ask("t", &format!("question {turn}")).await;
            let now = checkpoints(&gateway).await;
            assert!(now.is_superset(&seen), "turn {turn} in {mode} deleted {:?}", seen.difference(&now));
            assert_eq!(now.len(), 1 + 3 * turn, "input, answer and duration note");
            seen = now;
            if turn % 7 == 0 {
                gateway = gateway.reopen(mode).await;
            }
        }
        let rows = gateway.rows().await;
        for _ in 0..3 {
            gateway.state("t").await;
            assert_eq!(checkpoints(&gateway).await, seen);
        }
        assert_eq!(gateway.rows().await, rows, "reading changes no row");
    }
}

/// Outside the operator commands, no code names an operation that deletes checkpoints.
#[test]
fn only_the_operators_commands_name_a_deletion() {
    fn look(dir: &Path, found: &mut Vec<String>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                if !path.ends_with("tests") {
                    look(&path, found);
                }
            } else if path.ends_with("tests.rs") {
                // Tests rewrite threads as they need them.
            } else if path.ends_with("metrics/saver.rs") {
                // It forwards what others call.
            } else if path.ends_with("http/prune.rs") {
                // The operation that a client calls by this name.
            } else if path.ends_with("http/page/storage.rs") {
                // What a person asks for on the page, after having seen what goes.
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                let text = text.split("#[cfg(test)]").next().unwrap();
                let names = [
                    "enforce(",
                    "plan_retention",
                    "prune(",
                    "plan_prune",
                    "delete_for_runs",
                    "rewrite_thread(",
                ];
                let named = names.iter().filter(|name| text.contains(**name));
                found.extend(named.map(|name| format!("{}: {name}", path.display())));
            }
        }
    }
    let mut found = Vec::new();
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    for gateway_crate in std::fs::read_dir(crates).unwrap() {
        let path = gateway_crate.unwrap().path();
        if path.join("src").is_dir() && !path.ends_with("ops") {
            look(&path.join("src"), &mut found);
        }
    }
    assert_eq!(found, Vec::<String>::new());
}
