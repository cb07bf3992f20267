//! Commands of tests, and what they are carried out on.

use std::path::Path;
use std::sync::{Arc, Mutex};

use clap::{Command as Clap, FromArgMatches as _};
use serde_json::{Map, json};
use threadkeep::id::ThreadId;
use threadkeep::metadata::Source;
use threadkeep::saver::Saver as _;
use threadkeep::step::{Durability, StepWriter};
use threadkeep_storage::Stores;

use super::store::{BUSY, Busy, accessor};
use crate::error::OpsError;
use crate::*;

/// Four supersteps on each of the threads a, b and c.
pub(super) async fn filled() -> Busy {
    let busy = Busy::default();
    let accessor = accessor(&busy);
    for thread in ["a", BUSY, "c"] {
        let mut writer = StepWriter::open(&accessor, &ThreadId::from(thread), None).await.unwrap();
        for number in 0..4 {
            let task = writer.start_task(&"model".into(), 0);
            let write = writer
                .write("messages", json!([{"role": "user", "content": format!("{number}")}]), false)
                .unwrap();
            writer.finish_task(task, vec![write], Durability::WithCommit).await.unwrap();
            writer.commit(Source::Loop, vec![], Map::new()).await.unwrap();
        }
    }
    busy
}

/// The exit of a command on this store, without records.
pub(super) async fn run_on(store: &Busy, arguments: &[&str]) -> Exit {
    let home = tempfile::tempdir().unwrap();
    match carried_out(store, home.path(), "memory", arguments).await.0 {
        Ok(exit) => exit,
        Err(error) => error.exit(),
    }
}

/// What became of a command on this store, whose records are in this directory, and what it printed.
pub(super) async fn carried_out(
    store: &Busy,
    home: &Path,
    backend: &str,
    arguments: &[&str],
) -> (Result<Exit, OpsError>, String) {
    let file = home.join("config.yaml");
    let database = json!({"backend": backend, "sqlite_dir": home});
    std::fs::write(&file, json!({"config_version": 49, "database": database}).to_string()).unwrap();
    let file = file.display().to_string();
    let matches = OpsCommand::augment_subcommands(Clap::new("threadkeep"))
        .get_matches_from([&["threadkeep"], arguments, &["--config", &file]].concat());
    let command = OpsCommand::from_arg_matches(&matches).unwrap();
    let printed = Printed::default();
    let mut out = Out::to(printed.clone());
    let result = command.0.carry_out(&Stores::with_saver(store.clone()), &mut out).await;
    out.show().unwrap();
    let text = String::from_utf8(printed.0.lock().unwrap().clone()).unwrap();
    (result, text)
}

/// What a command prints.
#[derive(Clone, Default)]
struct Printed(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Printed {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

pub(super) async fn lengths(store: &Busy) -> Vec<usize> {
    let mut lengths = Vec::new();
    for thread in ["a", BUSY, "c"] {
        lengths.push(store.read_thread(&ThreadId::from(thread)).await.unwrap().checkpoints.len());
    }
    lengths
}
