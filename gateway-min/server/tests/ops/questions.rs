//! What commands ask before they delete, at a pseudo-terminal of the test.

#![cfg(unix)]

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use threadkeep::mode::ChannelMode;

use super::store::{Store, TALK, command};

/// Longer than anything takes on a busy machine.
const PATIENCE: Duration = Duration::from_mins(10);

/// A terminal at which a command asks; its results go elsewhere.
struct Terminal {
    child: Child,
    keyboard: File,
    screen: Receiver<String>,
    seen: String,
}

impl Terminal {
    fn open(store: &Store, args: &[&str]) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
        let line = File::options().read(true).write(true).open(name).unwrap();
        let path = store.path().display().to_string();
        let child = command(&[args, &["--sqlite", &path]].concat())
            .stdin(Stdio::from(line.try_clone().unwrap()))
            .stdout(Stdio::piped())
            .stderr(Stdio::from(line))
            .spawn()
            .unwrap();
        let mut output = File::from(master.try_clone().unwrap());
        let (sender, screen) = channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(read @ 1..) = output.read(&mut buffer) {
                let text = String::from_utf8_lossy(&buffer[..read]).into_owned();
                if sender.send(text).is_err() {
                    return;
                }
            }
        });
        Self { child, keyboard: File::from(master), screen, seen: String::new() }
    }

    /// Waits until this is on the screen.
    fn until(&mut self, text: &str) {
        while !self.seen.contains(text) {
            let more = self.screen.recv_timeout(PATIENCE);
            self.seen.push_str(&more.unwrap_or_else(|error| panic!("no '{text}': {error}: {}", self.seen)));
        }
    }

    /// The exit code, and the results.
    fn ended(mut self) -> (Option<i32>, String) {
        let mut results = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut results).unwrap();
        (self.child.wait().unwrap().code(), results)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// A pass in batches goes on until nothing is left, so the first batch is not what is asked about.
#[tokio::test]
async fn a_question_counts_what_all_passes_remove() {
    for args in [
        &["prune", "apply", "--thread", TALK, "--keep", "latest", "--batch", "4"][..],
        &["retention", "apply", "--thread", TALK, "--leaf-sibling-branches", "--until-done"],
    ] {
        let store = Store::new(ChannelMode::Full).await;
        let before = store.image(TALK).await;
        let mut terminal = Terminal::open(&store, args);
        terminal.until("[y/N]");
        let seen = terminal.seen.clone();
        terminal.keyboard.write_all(b"n\n").unwrap();
        let (code, results) = terminal.ended();
        assert_eq!((code, results.as_str()), (Some(4), ""), "{args:?}");
        assert!(store.image(TALK).await == before, "{args:?}");

        let applied = store.run(&[args, &["--yes", "--json"]].concat()).json();
        let removed = applied[0]["removed"].as_array().unwrap().len();
        assert!(removed > 4, "{args:?}: more than one pass removes");
        let asked = format!("Remove {removed} of {} checkpoints", before.checkpoints.len());
        assert!(seen.contains(&asked), "{args:?}: {removed} were removed: {seen}");
    }
}

/// Nothing was changed yet, so there is nothing that has to be finished first.
#[tokio::test]
async fn an_interrupted_question_ends_the_command() {
    let store = Store::new(ChannelMode::Full).await;
    let before = store.image(TALK).await;
    let args = ["prune", "apply", "--all", "--keep", "latest"];
    for signal in [Signal::INT, Signal::TERM] {
        let mut terminal = Terminal::open(&store, &args);
        terminal.until("[y/N]");
        let pid = Pid::from_raw(i32::try_from(terminal.child.id()).unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
        let (code, results) = terminal.ended();
        assert_eq!((code, results.as_str()), (Some(130), ""), "{signal:?}");
        assert!(store.image(TALK).await == before, "{signal:?}");
    }
}

#[tokio::test]
async fn only_yes_is_a_yes() {
    let store = Store::new(ChannelMode::Full).await;
    let before = store.image(TALK).await;
    let args = ["prune", "apply", "--all", "--keep", "latest"];
    for (answer, expected) in [("maybe\n", 4), ("\n", 4), ("yes\n", 0)] {
        let mut terminal = Terminal::open(&store, &args);
        terminal.until("[y/N]");
        assert!(store.image(TALK).await == before, "{answer}");
        terminal.keyboard.write_all(answer.as_bytes()).unwrap();
        let (code, results) = terminal.ended();
        assert_eq!(code, Some(expected), "{answer}: {results}");
        assert_eq!(store.image(TALK).await == before, expected == 4, "{answer}");
    }
}
