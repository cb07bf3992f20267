//! Programs that do not want to end. Each holds a pipe open, as does whatever it starts: the pipe ends when the last of
//! them is gone.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, mknodat};
use rustix::process::{Pid, Signal, kill_process};
use threadkeep_config::Secret;
use threadkeep_processes::{Guard, Guarded, Program, SpawnError};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{ChildStdin, ChildStdout};

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_mins(10);

fn guard() -> Guard {
    Guard::program(env!("CARGO_BIN_EXE_threadkeep-guard"))
}

struct Scene {
    folder: tempfile::TempDir,
    pipe: File,
}

impl Scene {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("held");
        mknodat(CWD, &path, FileType::Fifo, 0o600.into(), 0).unwrap();
        // A reader that does not wait for the writers to come.
        let pipe = File::options().read(true).custom_flags(0o4000).open(&path).unwrap();
        Self { folder, pipe }
    }

    /// Runs `script` with the pipe open as descriptor 9; it must say `ready`.
    async fn start(&self, script: &str) -> (Guarded, ChildStdin, ChildStdout) {
        let program = shell(self.folder.path(), &format!("exec 9>held; {script}"));
        let (guarded, stdin, mut stdout) = guard().spawn(&program).unwrap();
        let mut ready = [0; 6];
        tokio::time::timeout(PATIENCE, stdout.read_exact(&mut ready)).await.unwrap().unwrap();
        assert_eq!(&ready, b"ready\n");
        (guarded, stdin, stdout)
    }

    /// Whether nobody holds the pipe.
    fn is_empty(&mut self) -> bool {
        // Fails with `WouldBlock` while a writer lives.
        self.pipe.read_to_end(&mut Vec::new()).is_ok()
    }

    /// Waits until nobody holds the pipe.
    async fn until_empty(&mut self) {
        let empty = async {
            while !self.is_empty() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, empty).await.expect("a process is left");
    }

    /// Asserts that nobody holds the pipe after an end that began here.
    async fn assert_empty(&mut self, begun: Instant) {
        // A guard waits for what it has killed for a second: on a busy machine that may be too short.
        assert!(self.is_empty() || begun.elapsed() >= Duration::from_secs(1), "a process is left");
        self.until_empty().await;
    }

    /// Ends it, and asserts that nobody holds the pipe.
    async fn end(&mut self, guarded: Guarded, stdin: ChildStdin) {
        let begun = Instant::now();
        guarded.end(stdin).await;
        self.assert_empty(begun).await;
    }
}

/// How a program ended. A busy machine may take longer than is waited once.
async fn code(guarded: &mut Guarded) -> Option<i32> {
    let ended = async {
        loop {
            if let Some(status) = guarded.ended().await {
                return status.code();
            }
        }
    };
    tokio::time::timeout(PATIENCE, ended).await.unwrap()
}

fn shell(directory: &Path, script: &str) -> Program {
    Program {
        command: "sh".into(),
        args: vec!["-c".into(), script.into()],
        env: BTreeMap::new(),
        directory: directory.to_owned(),
    }
}

const DEAF: &str = "trap '' TERM HUP INT;";

#[tokio::test]
async fn nothing_outlives_the_end_of_the_input() {
    for script in [
        // Ends by itself.
        "echo ready; cat >/dev/null",
        // Does not read.
        "echo ready; sleep 1000",
        // Ignores what can be ignored.
        &format!("{DEAF} echo ready; while :; do sleep 1000; done"),
        // A daemon, as by a double fork: in a session of its own, whose parent has ended.
        &format!("({DEAF} setsid sh -c '{DEAF} (sleep 1000 &) ; sleep 1000' &) ; echo ready; cat >/dev/null"),
        // Ends its own process group, which the guard is not part of.
        "trap '' TERM; kill -TERM 0; echo ready; sleep 1000",
        // Stopped, together with what it starts.
        "sleep 1000 & kill -STOP $!; echo ready; kill -STOP $$",
    ] {
        let mut scene = Scene::new();
        let (guarded, stdin, _stdout) = scene.start(script).await;
        scene.end(guarded, stdin).await;
    }
}

/// Its guard is not scheduled for longer than is waited for it.
#[tokio::test]
async fn a_guard_that_is_late_ends_its_program_nevertheless() {
    let mut scene = Scene::new();
    let late =
        format!("{DEAF} echo $PPID > guard; kill -STOP $PPID; echo ready; while :; do sleep 1000; done");
    let (guarded, stdin, _stdout) = scene.start(&late).await;
    let id = std::fs::read_to_string(scene.folder.path().join("guard")).unwrap();
    guarded.end(stdin).await;
    assert!(!scene.is_empty(), "its guard has stopped");
    kill_process(Pid::from_raw(id.trim().parse().unwrap()).unwrap(), Signal::CONT).unwrap();
    scene.until_empty().await;
}

#[tokio::test]
async fn a_full_pipe_does_not_keep_the_guard_from_seeing_the_end() {
    let mut scene = Scene::new();
    let (guarded, mut stdin, _stdout) = scene.start("echo ready; sleep 1000").await;
    let more_than_the_pipes = vec![b'x'; 4 * 1024 * 1024];
    let written =
        tokio::time::timeout(Duration::from_millis(300), stdin.write_all(&more_than_the_pipes)).await;
    assert!(written.is_err(), "the pipes took it all");
    scene.end(guarded, stdin).await;
}

#[tokio::test]
async fn what_a_program_leaves_behind_ends_with_it() {
    let mut scene = Scene::new();
    let begun = Instant::now();
    let (mut guarded, _stdin, _stdout) = scene
        .start(&format!("(setsid sh -c '{DEAF} sleep 1000' &); echo oops >&2; echo ready; exit 7"))
        .await;
    assert_eq!(code(&mut guarded).await, Some(7));
    assert_eq!(guarded.said(), "oops");
    scene.assert_empty(begun).await;
}

/// A process that forks as fast as it can, and ignores signals.
#[tokio::test]
async fn a_program_that_forks_all_the_time_is_ended() {
    let mut scene = Scene::new();
    let forking = format!("{DEAF} echo ready; while :; do (setsid sleep 1000 &); done");
    let (guarded, stdin, _stdout) = scene.start(&forking).await;
    scene.end(guarded, stdin).await;
}

#[tokio::test]
async fn dropping_it_ends_it_too() {
    let scene = Scene::new();
    let (guarded, stdin, mut stdout) = scene.start("echo ready; sleep 1000").await;
    drop((guarded, stdin));
    let mut rest = Vec::new();
    tokio::time::timeout(PATIENCE, stdout.read_to_end(&mut rest)).await.unwrap().unwrap();
}

#[tokio::test]
async fn input_and_output_pass_and_a_signal_becomes_an_exit_code() {
    let folder = tempfile::tempdir().unwrap();
    let (mut guarded, mut stdin, mut stdout) =
        guard().spawn(&shell(folder.path(), "cat; kill -KILL $$")).unwrap();
    let sent: Vec<u8> = (0..=255).cycle().take(300_000).collect();
    let mut received = vec![0; sent.len()];
    // All has come back before the input ends: from then on the guard gives the program less than a second.
    let (written, read) = tokio::join!(stdin.write_all(&sent), stdout.read_exact(&mut received));
    written.unwrap();
    read.unwrap();
    assert_eq!(received, sent);
    drop(stdin);
    let mut rest = Vec::new();
    stdout.read_to_end(&mut rest).await.unwrap();
    assert!(rest.is_empty(), "{} bytes more", rest.len());
    let code = code(&mut guarded).await;
    // The guard ends it if it is slower than it may be.
    assert!(matches!(code, Some(137 | 143 | 0)), "{code:?}");
}

/// Its memory is the gateway's concern, so only the end of what it says is kept.
#[tokio::test]
async fn what_is_said_is_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let script = "head -c 3000000 /dev/zero | tr '\\0' x >&2; echo the end >&2; exit 1";
    let (mut guarded, _stdin, _stdout) = guard().spawn(&shell(folder.path(), script)).unwrap();
    assert_eq!(code(&mut guarded).await, Some(1));
    let said = guarded.said();
    assert!(said.ends_with("xxthe end") && said.len() <= 2_000, "{} bytes: {said}", said.len());
}

#[tokio::test]
async fn what_cannot_be_started_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let missing = Program { command: "no-such-program".into(), ..shell(folder.path(), "") };
    assert!(matches!(guard().spawn(&missing), Err(SpawnError::NotFound(_))));
    let text = folder.path().join("text");
    File::options().write(true).create_new(true).mode(0o700).open(&text).unwrap();
    std::fs::write(&text, "#!/no/such/interpreter\n").unwrap();
    let broken = Program { command: text.display().to_string(), ..shell(folder.path(), "") };
    let (mut guarded, _stdin, _stdout) = guard().spawn(&broken).unwrap();
    assert_eq!(code(&mut guarded).await, Some(126));
    assert!(
        guarded.said().starts_with(&format!("cannot start '{}': ", text.display())),
        "{}",
        guarded.said()
    );
}

#[tokio::test]
async fn a_program_sees_what_its_configuration_names_and_no_more() {
    let folder = tempfile::tempdir().unwrap();
    let env = [("TOKEN".to_owned(), Secret::new("sk-1"))].into();
    let program = Program { env, ..shell(folder.path(), "cat /proc/$PPID/environ /proc/self/environ") };
    let (_guarded, _stdin, mut stdout) = guard().spawn(&program).unwrap();
    let mut seen = String::new();
    stdout.read_to_string(&mut seen).await.unwrap();
    assert!(seen.contains("TOKEN=sk-1") && seen.contains("PATH="), "{seen}");
    assert!(!seen.contains("CARGO"), "{seen}");
}
