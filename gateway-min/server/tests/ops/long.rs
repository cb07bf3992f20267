//! Long threads: what a command holds and reads must not grow faster than its thread.

use std::io::{PipeReader, PipeWriter, Read as _, Write as _};
use std::process::Stdio;
use std::time::Duration;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::store::{OTHER, Store, TALK, command};

/// How many looks in a row, a millisecond apart, find a process that waits as it was.
const STILL: usize = 100;

/// Runs a command, which must succeed, and returns the most memory that it had at a time, in bytes. Nobody reads what
/// it prints at its end until it waits for that: however late this looks, it does not end before.
fn peak(store: &Store, args: &[&str]) -> u64 {
    let (printed, full) = full_pipe();
    let path = store.path().display().to_string();
    let mut child = command(&[args, &["--sqlite", &path]].concat())
        .stdin(Stdio::null())
        .stdout(full)
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    let (mut printed, mut reading) = (Some(printed), None);
    let (mut most, mut before, mut still) = (0, None, 0);
    let status = loop {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kilobytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        most = most.max(kilobytes.unwrap_or_default() * 1024);
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        let now = asleep(child.id());
        still = if now.is_some() && now == before { still + 1 } else { 0 };
        before = now;
        if still >= STILL
            && let Some(printed) = printed.take()
        {
            reading = Some(std::thread::spawn(|| all(printed)));
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    let text = printed.map(all).or_else(|| reading.map(|reading| reading.join().unwrap()));
    assert!(status.success(), "{args:?}: {}", text.unwrap_or_default().trim());
    most
}

/// A pipe with no room: a process that prints into it waits until somebody reads.
fn full_pipe() -> (PipeReader, PipeWriter) {
    let (reader, mut writer) = std::io::pipe().unwrap();
    let flags = fcntl_getfl(&writer).unwrap();
    fcntl_setfl(&writer, flags | OFlags::NONBLOCK).unwrap();
    while let Ok(1..) = writer.write(&[b'\n'; 4096]) {}
    fcntl_setfl(&writer, flags).unwrap();
    (reader, writer)
}

/// What is printed into a pipe until its writers have ended.
fn all(mut printed: PipeReader) -> String {
    let mut text = String::new();
    printed.read_to_string(&mut text).unwrap();
    text
}

/// What the system says of each thread of a process, if all of them sleep.
fn asleep(process: u32) -> Option<Vec<String>> {
    let threads = std::fs::read_dir(format!("/proc/{process}/task")).ok()?;
    let of_each = threads.map(|thread| {
        let stat = std::fs::read_to_string(thread.ok()?.path().join("stat")).ok()?;
        // The name of the program, in brackets, may hold spaces.
        let (_, stat) = stat.rsplit_once(") ")?;
        stat.starts_with('S').then(|| stat.to_owned())
    });
    of_each.collect()
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
        assert!(args_long[0] != "export" || much <= 200 << 20, "{args_long:?}: {much} bytes");
        let much = much.saturating_sub(base);
        // Allocators keep some of what is freed.
        assert!(much <= 6 * little + (24 << 20), "{args_short:?}: {little} bytes more, then {much}");
    }
    let size = |file: &str| std::fs::metadata(file).unwrap().len();
    assert!(size(&b) < 5 * size(&a), "{} bytes, then {}", size(&a), size(&b));
    let (image, copy) = (long.image(TALK).await, long.image(OTHER).await);
    assert_eq!(image.checkpoints.len(), copy.checkpoints.len());
}
