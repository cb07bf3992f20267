//! The processes below this one, and their end.

use std::collections::HashMap;
use std::fs;
use std::os::fd::OwnedFd;

use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, getpid, pidfd_open, pidfd_send_signal, wait};

/// A process below this one: its id, and its parent's.
struct Descendant {
    id: i32,
    parent: i32,
}

/// Sends `signal` to every process below this one. Returns how many there were; those that have ended and were not waited
/// for do not count.
pub(super) fn signal_all(signal: Signal) -> usize {
    reap();
    let all = descendants();
    for one in &all {
        // What has this parent now is what was found: an id is not given to another process before the parent waits.
        if let Some(process) = open(one.id)
            && parent_of(one.id) == Some(one.parent)
        {
            let _ = pidfd_send_signal(process, signal);
        }
    }
    all.len()
}

/// Waits for children that have ended, without blocking.
pub(super) fn reap() {
    while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
}

fn open(id: i32) -> Option<OwnedFd> {
    pidfd_open(Pid::from_raw(id)?, PidfdFlags::empty()).ok()
}

/// The living processes below this one.
fn descendants() -> Vec<Descendant> {
    let own = getpid().as_raw_nonzero().get();
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        if let Some(id) = entry.file_name().to_str().and_then(|name| name.parse().ok())
            && let Some(parent) = parent_of(id)
        {
            children.entry(parent).or_default().push(id);
        }
    }
    let (mut found, mut ahead) = (Vec::new(), vec![own]);
    while let Some(parent) = ahead.pop() {
        for id in children.remove(&parent).unwrap_or_default() {
            found.push(Descendant { id, parent });
            ahead.push(id);
        }
    }
    found
}

/// The parent of a process that lives.
fn parent_of(id: i32) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    // The name, in parentheses, may contain anything.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    if state == "X" {
        return None;
    }
    fields.next()?.parse().ok()
}
