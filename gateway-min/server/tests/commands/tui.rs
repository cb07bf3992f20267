//! The terminal UI in a process, at a pseudo-terminal of the test.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use tempfile::TempDir;

use super::chat::{chat, configure, in_mode};

/// Longer than anything takes on a busy machine.
const PATIENCE: Duration = Duration::from_mins(10);

/// A terminal that runs the UI; killed when dropped.
struct Terminal {
    child: Child,
    keyboard: File,
    /// Kept open, so that its modes can be inspected.
    line: OwnedFd,
    screen: Receiver<Vec<u8>>,
    seen: String,
}

impl Terminal {
    fn open(dir: &TempDir, arguments: &[&str]) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        tcsetwinsize(&master, Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
        let line = File::options().read(true).write(true).open(name).unwrap();
        let end = || Stdio::from(line.try_clone().unwrap());
        let mut command = chat(dir, arguments);
        let child = command.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        let mut output = File::from(master.try_clone().unwrap());
        let (sender, screen) = channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(read @ 1..) = output.read(&mut buffer) {
                if sender.send(buffer[..read].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self { child, keyboard: File::from(master), line: line.into(), screen, seen: String::new() }
    }

    fn write(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until this is written to the terminal. Words only: cells that are already blank are not written.
    fn until(&mut self, word: &str) {
        self.until_after("", word);
    }

    /// The same, after another word was. The status line is shorter while a turn is at work: `leaves` is written when
    /// it has ended.
    fn until_after(&mut self, first: &str, word: &str) {
        while !self.seen.find(first).is_some_and(|at| self.seen[at..].contains(word)) {
            let more = self.screen.recv_timeout(PATIENCE);
            let more = more.unwrap_or_else(|error| panic!("no '{word}': {error}: {}", self.seen));
            self.seen.push_str(&String::from_utf8_lossy(&more));
        }
    }

    /// Waits for the end of the process; the terminal must be as before.
    fn ended(mut self) -> ExitStatus {
        self.until("\u{1b}[?1049l");
        let status = self.child.wait().unwrap();
        let modes = tcgetattr(&self.line).unwrap().local_modes;
        assert!(modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG), "{modes:?}");
        for (taken, given_back) in [("\u{1b}[?1049h", "\u{1b}[?1049l"), ("\u{1b}[?2004h", "\u{1b}[?2004l")] {
            let places = (self.seen.rfind(taken), self.seen.rfind(given_back));
            assert!(places.0.is_some() && places.0 < places.1, "{}", self.seen);
        }
        status
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

#[test]
fn a_conversation_at_a_terminal_and_the_terminal_afterwards() {
    let dir = in_mode("full");
    let mut terminal = Terminal::open(&dir, &["one word"]);
    // Leaving before the turn has ended would stop it, and its answer might not be stored.
    terminal.until_after("All-together.", "leaves");
    terminal.write("/tools\r");
    terminal.until("read_file:");
    terminal.write("/quit\r");
    assert_eq!(terminal.ended().code(), Some(0));

    let mut again = Terminal::open(&dir, &["--continue", "--tui"]);
    again.until("All-together.");
    again.write("\u{3}");
    assert_eq!(again.ended().code(), Some(0), "Ctrl-C leaves if there is no turn");
}

#[test]
fn a_signal_in_the_middle_of_a_turn_gives_the_terminal_back() {
    let dir = in_mode("delta");
    let mut terminal = Terminal::open(&dir, &["--tui", "hang"]);
    terminal.until("working...");
    let process = Pid::from_child(&terminal.child);
    kill_process(process, Signal::TERM).unwrap();
    assert_eq!(terminal.ended().code(), Some(0));
}

/// The line of a delegation changes in place, from its dispatch to its end.
#[test]
fn a_delegation_is_one_line_that_follows_the_subagent() {
    let dir = in_mode("full");
    let task = serde_json::json!({"name": "task", "id": "c", "args":
        {"prompt": "Count the files here", "subagent_type": "general-purpose", "description": "counting-files"}});
    let script = serde_json::json!({"rules": [
        {"when": {"caller": "subagent"}, "answers": [
            {"text": "Looking-around.", "tool_calls": [{"name": "ls"}], "usage": {"input_tokens": 30, "output_tokens": 1}},
            {"text": "None-at-all.", "usage": {"input_tokens": 40, "output_tokens": 6}},
        ]},
        {"answers": [{"text": "", "tool_calls": [task]}, {"text": "Counted."}]},
    ]});
    std::fs::write(dir.path().join("script.json"), script.to_string()).unwrap();
    let mut terminal = Terminal::open(&dir, &["--tui", "--subagents", "count"]);
    for word in ["counting-files", "completed,", "77", "at-all.", "Counted."] {
        terminal.until(word);
    }
    terminal.until_after("Counted.", "leaves");
    terminal.write("/tools\r");
    terminal.until("task:");
    terminal.write("/continue\r");
    terminal.until("nothing");
    terminal.write("/quit\r");
    assert_eq!(terminal.ended().code(), Some(0));
}

#[test]
fn what_is_wrong_at_the_start_is_said_on_a_terminal_as_it_was() {
    let dir = in_mode("full");
    let mut terminal = Terminal::open(&dir, &["--continue"]);
    terminal.until("there is no thread to continue");
    assert_eq!(terminal.child.wait().unwrap().code(), Some(1));
    assert!(!terminal.seen.contains("\u{1b}[?1049h"), "{}", terminal.seen);
}

#[test]
fn a_refused_thread_is_told_and_the_ui_goes_on() {
    let dir = in_mode("delta");
    assert!(chat(&dir, &["--print", "one word"]).output().unwrap().status.success());
    configure(&dir, "full");
    let mut terminal = Terminal::open(&dir, &["--continue"]);
    terminal.until("materialize");
    terminal.write("one word\r");
    terminal.until("All-together.");
    terminal.write("\u{4}");
    assert_eq!(terminal.ended().code(), Some(0));
}

/// OSC 52 sets the clipboard, and C1 characters are short forms of escape sequences.
#[test]
fn a_printed_answer_cannot_command_the_terminal() {
    const HOSTILE: &str = "\u{1b}]52;c;ZXZpbA==\u{7}clip\u{9b}2Jped";
    let dir = in_mode("full");
    let rules = serde_json::json!({"rules": [{"answers": [{"text": HOSTILE}]}]});
    std::fs::write(dir.path().join("script.json"), rules.to_string()).unwrap();
    for (arguments, shown) in
        [(&["--print", "hi"][..], "]52;c;ZXZpbA==clip2Jped"), (&["--json", "hi"], "clip\\u009b2Jped")]
    {
        let mut terminal = Terminal::open(&dir, arguments);
        terminal.until(shown);
        assert!(!terminal.seen.contains(['\u{1b}', '\u{7}', '\u{9b}']), "{:?}", terminal.seen);
        let piped = chat(&dir, arguments).output().unwrap();
        let piped = String::from_utf8(piped.stdout).unwrap();
        assert!(piped.contains("clip\u{9b}2Jped"), "a pipe gets the exact text");
    }
}
