//! Starts the program, hands its input on, and ends everything when the program or the gateway ends.

use std::ffi::OsString;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{ChildStdin, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, getpid, pidfd_open, set_child_subreaper, waitid,
};
use rustix::stdio::dup2_stdout;

use super::descendants::{reap, signal_all};
use super::{KILL_AFTER, TERM_AFTER};

/// How long to wait before looking again whether processes that were killed are gone.
const LOOK_AGAIN: Duration = Duration::from_millis(5);
/// How often to look, which takes a second: the kernel may hold a process. Not a time, as this process may not be
/// scheduled that long, and what is started while it looks for the first time must be killed too.
const LOOKS: u32 = 200;
/// The exit code if the program cannot be started, as of a shell.
const CANNOT_START: u8 = 126;

/// Runs `command` and returns when it and everything that it started is gone.
pub(super) fn guard(command: &[OsString]) -> ExitCode {
    match start(command) {
        Ok((process, id)) => {
            let code = watch(&process, id);
            ExitCode::from(code)
        }
        Err(error) => {
            let name = command.first().map(|name| name.to_string_lossy()).unwrap_or_default();
            // The gateway reads it.
            let _ = writeln!(std::io::stderr(), "cannot start '{name}': {error}");
            ExitCode::from(CANNOT_START)
        }
    }
}

/// Starts the program in a process group of its own, and a thread that hands its input on.
fn start(command: &[OsString]) -> std::io::Result<(OwnedFd, Pid)> {
    // From now on a process that loses its parent becomes a child of this one.
    set_child_subreaper(Some(getpid()))?;
    let (program, args) =
        command.split_first().ok_or_else(|| std::io::Error::other("no program is named"))?;
    let mut child = Command::new(program)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::inherit())
        .stderr(Stdio::inherit())
        .process_group(0)
        .spawn()?;
    // The program's output ends when the program closes it.
    dup2_stdout(std::fs::File::options().write(true).open("/dev/null")?)?;
    if let Some(input) = child.stdin.take() {
        std::thread::Builder::new().spawn(move || hand_on(input))?;
    }
    let id = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let id = id.ok_or_else(|| std::io::Error::other("it has no process id"))?;
    Ok((pidfd_open(id, PidfdFlags::empty())?, id))
}

fn hand_on(mut input: ChildStdin) {
    let (mut gateway, mut buffer) = (std::io::stdin().lock(), vec![0; 64 * 1024]);
    while let Ok(count @ 1..) = gateway.read(&mut buffer) {
        if input.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
}

/// Waits for the end of the program or of its input, and ends what is left. Returns the program's exit code, or 128 and
/// the signal that ended it.
fn watch(process: &OwnedFd, id: Pid) -> u8 {
    let stdin = std::io::stdin();
    if !ended(process, Some(stdin.as_fd()), None) && !ended(process, None, Some(TERM_AFTER)) {
        signal_all(Signal::TERM);
        let deadline = Instant::now() + KILL_AFTER;
        while Instant::now() < deadline && signal_all(Signal::CONT) > 0 {
            std::thread::sleep(LOOK_AGAIN);
        }
    }
    let code = code(id);
    for _ in 0..LOOKS {
        if signal_all(Signal::KILL) == 0 {
            break;
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    reap();
    code
}

/// Waits until the program has ended, or the other side of its input, or the time is up. Returns whether the program has.
fn ended(process: &OwnedFd, input: Option<BorrowedFd<'_>>, time: Option<Duration>) -> bool {
    let time = time.and_then(|time| Timespec::try_from(time).ok());
    let mut sources = vec![PollFd::new(process, PollFlags::IN)];
    // The end of the other side is reported without being asked for, whatever is still to be read.
    sources.extend(input.map(|input| PollFd::from_borrowed_fd(input, PollFlags::empty())));
    loop {
        match poll(&mut sources, time.as_ref()) {
            Err(rustix::io::Errno::INTR) => {}
            _ => return !sources[0].revents().is_empty(),
        }
    }
}

/// How the program ended; 0 if it has not.
fn code(id: Pid) -> u8 {
    let ended =
        waitid(WaitId::Pid(id), WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT);
    let Ok(Some(status)) = ended else { return 0 };
    let code = status.exit_status().or(status.terminating_signal().map(|signal| 128 + signal)).unwrap_or(0);
    u8::try_from(code & 0xff).unwrap_or(u8::MAX)
}
