//! Long threads: what a command holds and reads must not grow faster than its thread.

use std::fs::File;
use std::process::Stdio;
use std::time::Duration;

use super::store::{OTHER, Store, TALK, command};

/// Runs a command, which must succeed, and returns the most memory that it had at a time, in bytes.
fn peak(store: &Store, args: &[&str]) -> u64 {
    let log = store.file("log");
    let path = store.path().display().to_string();
    let mut child = command(&[args, &["--sqlite", &path]].concat())
        .stdin(Stdio::null())
        .stdout(File::create(&log).unwrap())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    let mut most = 0;
    loop {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kilobytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        most = most.max(kilobytes.unwrap_or_default() * 1024);
        if let Some(status) = child.try_wait().unwrap() {
            assert!(status.success(), "{args:?}: {}", std::fs::read_to_string(&log).unwrap());
            return most;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A thread four times as long takes at most about four times as much. With maps that are written out for each
/// checkpoint it would be sixteen times.
#[tokio::test]
async fn the_memory_of_commands_grows_with_the_thread_and_not_with_its_square() {
    const TURNS: usize = 350;
    let (short, long) = (Store::long(TURNS).await, Store::long(4 * TURNS).await);
    let file = |store: &Store| store.file("talk.ndjson");
    let (a, b) = (file(&short), file(&long));
    let base = peak(&short, &["threads", "list"]);
    for (args_short, args_long) in [
        (vec!["export", "--thread", TALK, "--out", &a], vec!["export", "--thread", TALK, "--out", &b]),
        (vec!["import", &a, "--as", OTHER], vec!["import", &b, "--as", OTHER]),
        (vec!["threads", "show", TALK], vec!["threads", "show", TALK]),
        (
            vec!["prune", "plan", "--all", "--keep", "last:2"],
            vec!["prune", "plan", "--all", "--keep", "last:2"],
        ),
    ] {
        let little = peak(&short, &args_short).saturating_sub(base);
        let much = peak(&long, &args_long);
        assert!(much > 0, "{args_long:?}: its memory cannot be read");
        let much = much.saturating_sub(base);
        // Allocators keep some of what is freed.
        assert!(much <= 6 * little + (24 << 20), "{args_short:?}: {little} bytes more, then {much}");
    }
    let size = |file: &str| std::fs::metadata(file).unwrap().len();
    assert!(size(&b) < 5 * size(&a), "{} bytes, then {}", size(&a), size(&b));
    let (image, copy) = (long.image(TALK).await, long.image(OTHER).await);
    assert_eq!(image.checkpoints.len(), copy.checkpoints.len());
}
