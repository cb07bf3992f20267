//! What a process uses: CPU, memory, bytes written. Linux only; elsewhere the numbers are 0.

use std::fs;
use std::path::Path;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// CPU time of all threads of this process.
pub fn cpu() -> Duration {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec.try_into().unwrap_or_default(), now.tv_nsec.try_into().unwrap_or_default())
}

/// Resident memory of this process, in bytes.
pub fn resident() -> u64 {
    kilobytes("/proc/self/status", "VmRSS:")
}

/// Peak resident memory of this process, in bytes.
pub fn peak() -> u64 {
    kilobytes("/proc/self/status", "VmHWM:")
}

/// Sets the peak of this process's memory to what it has now.
pub fn reset_peak() {
    // Where it is not possible, the peak is that of the process's whole life.
    let _ = fs::write("/proc/self/clear_refs", "5");
}

/// Bytes that this process made dirty in files.
pub fn written() -> u64 {
    field("/proc/self/io", "write_bytes:")
}

fn kilobytes(file: &str, name: &str) -> u64 {
    field(file, name) << 10
}

fn field(file: &str, name: &str) -> u64 {
    let text = fs::read_to_string(file).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or_default()
}

/// Another process on this machine.
#[derive(Debug, Clone, Copy)]
pub struct Process {
    pid: u32,
}

impl Process {
    /// The process with this id.
    pub fn of(pid: u32) -> Self {
        Self { pid }
    }

    /// CPU time of all its threads, including those that have ended.
    pub fn cpu(self) -> Duration {
        ticks(self.pid, OWN)
    }

    /// The system calls with which it has read and written, files and sockets.
    pub fn calls(self) -> u64 {
        let file = format!("/proc/{}/io", self.pid);
        field(&file, "syscr:") + field(&file, "syscw:")
    }

    /// Bytes that it has read, from files and sockets.
    pub fn read(self) -> u64 {
        field(&format!("/proc/{}/io", self.pid), "rchar:")
    }

    /// Whether it has ended, and only its figures are left.
    pub fn has_ended(self) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X']))
    }

    /// How often its running threads have waited for something.
    pub fn waits(self) -> u64 {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid)).into_iter().flatten().flatten();
        let status = tasks.map(|task| task.path().join("status").display().to_string());
        status.map(|status| field(&status, "voluntary_ctxt_switches:")).sum()
    }

    /// Its resident memory, in bytes.
    pub fn resident(self) -> u64 {
        kilobytes(&format!("/proc/{}/status", self.pid), "VmRSS:")
    }

    /// Its peak resident memory, in bytes.
    pub fn peak(self) -> u64 {
        kilobytes(&format!("/proc/{}/status", self.pid), "VmHWM:")
    }
}

/// The processes of a Postgres server on this machine.
#[derive(Debug, Clone, Copy)]
pub struct Server {
    postmaster: u32,
}

impl Server {
    /// The server that the session with this process id belongs to; `None` if it is not on this machine.
    pub fn of_session(pid: u32) -> Option<Self> {
        parent(pid).map(|postmaster| Self { postmaster })
    }

    /// CPU time of all its processes, including those that have ended, such as those of closed sessions.
    pub fn cpu(&self) -> Duration {
        let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let ours = pids.filter(|pid| *pid == self.postmaster || parent(*pid) == Some(self.postmaster));
        let ended = ticks(self.postmaster, ENDED_CHILDREN);
        ended + ours.map(scheduled).sum::<Duration>()
    }
}

/// Where the time of a process in user mode is in its `stat`, counted after its name; that in the kernel follows.
const OWN: usize = 11;
/// The same of its children that have ended and for which it has waited.
const ENDED_CHILDREN: usize = 13;

fn ticks(pid: u32, place: usize) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let ticks: u64 = stat.rsplit_once(") ").map_or(0, |(_, rest)| {
        rest.split(' ').skip(place).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum()
    });
    Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second())
}

fn parent(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")).ok()?;
    // The preceding name is in brackets and may contain any character.
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

fn scheduled(pid: u32) -> Duration {
    let text =
        fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("schedstat")).unwrap_or_default();
    Duration::from_nanos(text.split(' ').next().and_then(|nanos| nanos.parse().ok()).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Instant;

    use super::*;

    #[test]
    fn work_takes_cpu_and_memory() {
        let before = cpu();
        let block: Vec<u64> = (0..4_000_000).collect();
        let resident = resident();
        // Other tests of this process may have needed more before.
        assert!(cpu() > before && resident > 16 << 20 && peak() >= resident);
        assert_eq!(block.len(), 4_000_000);
    }

    #[test]
    fn another_process_is_measured_as_this_one_is() {
        let own = Process::of(std::process::id());
        let (began, mut sum) = (cpu(), 0_u64);
        while cpu() < began + Duration::from_millis(50) {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        // A tick is 10 ms.
        assert!(own.cpu() + Duration::from_millis(20) >= began + Duration::from_millis(50));
        // In this order: other tests of this process need more meanwhile.
        let resident = own.resident();
        assert!(own.peak() >= resident && resident > 1 << 20);
        assert_eq!((Process::of(u32::MAX).cpu(), Process::of(u32::MAX).peak()), (Duration::ZERO, 0));
    }

    #[test]
    fn the_processes_of_a_server_are_its_parent_and_what_that_started() {
        let own = Server::of_session(std::process::id()).unwrap();
        assert_ne!(own.postmaster, std::process::id());
        assert!(own.cpu() > Duration::ZERO);
        assert!(Server::of_session(u32::MAX).is_none());
    }

    #[test]
    fn what_a_process_of_a_server_did_counts_after_it_has_ended() {
        let own = Server { postmaster: std::process::id() };
        let mut child = Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        let (process, began) = (Process::of(child.id()), Instant::now());
        let much = Duration::from_millis(300);
        while process.cpu() < much && began.elapsed() < Duration::from_mins(5) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let (worked, before) = (process.cpu(), own.cpu());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(worked >= much, "{worked:?}");
        // Two figures in ticks of 10 ms.
        assert!(own.cpu() + Duration::from_millis(50) >= before, "{before:?}");
    }
}
