//! How much memory an import takes. Alone in its program, so that nothing else counts.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test.

use std::fs::{self, File};
use std::io::BufWriter;

use clap::{Command, FromArgMatches as _, Subcommand as _};
use serde_json::json;
use threadkeep::checkpoint::{ChannelEntry, Checkpoint, CheckpointTuple, Stored, TaskWrites, Write};
use threadkeep::id::{IdSource, Namespace, ThreadId, Version};
use threadkeep::metadata::{Metadata, Source as MadeBy};
use threadkeep::value::ChannelValue;
use threadkeep_ops::archive::{Source, Writer};
use threadkeep_ops::{Exit, OpsCommand, run};
use threadkeep_storage::Stores;

const CHECKPOINTS: u64 = 3_000;
/// The bytes of a checkpoint that no other one has.
const BYTES: usize = 32 << 10;
/// Far less than the thread has: what is remembered of it, 16 MB of elements, a part of it, and what SQLite keeps.
const MAX_GROWTH: u64 = 76 << 20;

/// The most memory that this process has had since the last reset, in bytes.
fn peak() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// A text that does not get shorter when it is packed.
fn noise(number: u64) -> String {
    let mut random = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        char::from(b' ' + 1 + u8::try_from(random % 90).unwrap_or_default())
    };
    std::iter::repeat_with(next).map(|c| if matches!(c, '"' | '\\') { 'x' } else { c }).take(BYTES).collect()
}

/// Writes a thread that has about 100 MB.
fn write(path: &std::path::Path) -> u64 {
    let (ids, thread) = (IdSource::default(), ThreadId::from("t"));
    let source = Source { program: "x".to_owned(), saver: "x".to_owned() };
    let mut writer =
        Writer::begin(&thread, source, None, BufWriter::new(File::create(path).unwrap())).unwrap();
    let (mut parent, mut applied) = (None, None);
    for number in 0..CHECKPOINTS {
        let id = ids.checkpoint_after(parent);
        let value = ChannelValue::from_json(&noise(number).into()).unwrap();
        let version = Version { counter: number + 1, random: number };
        let entry = ChannelEntry { version, stored: Stored::Value(value.clone()) };
        let task = ids.task();
        let write = Write { channel: "title".into(), value, overwrite: false };
        let checkpoint = Checkpoint {
            id,
            channels: [("title".into(), entry)].into(),
            next: Vec::new(),
            applied: applied.into_iter().collect(),
        };
        let tuple = CheckpointTuple {
            thread: thread.clone(),
            namespace: Namespace::root(),
            checkpoint,
            parent,
            metadata: Metadata::new(MadeBy::Loop, 1),
            writes: vec![TaskWrites { task, node: "model".into(), index: 0, writes: vec![write] }],
        };
        writer.checkpoint(&tuple).unwrap();
        (parent, applied) = (Some(id), Some(task));
    }
    writer.end().unwrap().bytes
}

async fn carried_out(arguments: &[&str]) {
    let matches = OpsCommand::augment_subcommands(Command::new("threadkeep"))
        .get_matches_from([&["threadkeep"], arguments].concat());
    let command = OpsCommand::from_arg_matches(&matches).unwrap();
    assert_eq!(run(&command, &Stores::default()).await, Exit::Done);
}

#[tokio::test]
async fn an_import_takes_far_less_memory_than_the_thread() {
    let folder = tempfile::tempdir().unwrap();
    let (file, config) = (folder.path().join("t.ndjson"), folder.path().join("config.yaml"));
    let bytes = write(&file);
    assert!(bytes > MAX_GROWTH + (16 << 20), "{bytes} bytes");
    let database = json!({"backend": "sqlite", "sqlite_dir": folder.path().join("data")});
    fs::write(&config, json!({"config_version": 49, "database": database}).to_string()).unwrap();
    let (file, config) = (file.display().to_string(), config.display().to_string());
    carried_out(&["setup", "--config", &config]).await;
    // Sets the peak to what is there now.
    fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = peak();
    carried_out(&["import", &file, "--config", &config]).await;
    let growth = peak() - before;
    println!("{growth} bytes for a file of {bytes}");
    assert!(growth <= MAX_GROWTH, "{growth} bytes for a file of {bytes}");
}
