//! A Postgres primary and its standby.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::Result;
use crate::postgres::{USER, execute_blocking, initialize, is_ready, programs, query_blocking};
use crate::supervisor::Supervisor;
use crate::tools::{Port, Tool, User, find, free_port, password, run};

/// Ends a server and its sessions at once.
const CRASH: &str = "QUIT";
const PATIENCE: Duration = Duration::from_mins(10);
const PAUSE: Duration = Duration::from_millis(5);
/// The primary's sender to the standby. Those to the program that copied the files may end later than that program.
const SENDER: &str = "pg_stat_replication WHERE application_name <> 'pg_basebackup'";
/// The lines of each server's log in a report.
const LOG_LINES: usize = 60;

const SETTINGS: &str = "
wal_level = replica
hot_standby = on
max_wal_senders = 8
wal_keep_size = 256MB
wal_retrieve_retry_interval = 50ms
wal_receiver_status_interval = 1
wal_sender_timeout = 0
shared_buffers = 16MB
";

/// How the primary treats its standby.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replication {
    /// A commit is acknowledged once the standby has it on the disk.
    Synchronous,
    /// A commit is acknowledged before the standby has it.
    Asynchronous,
}

/// Two private servers on the loopback interface: a primary, and a standby that follows it.
pub struct Cluster {
    nodes: [Node; 2],
    primary: Mutex<usize>,
    password: String,
    basebackup: PathBuf,
}

struct Node {
    supervisor: Supervisor,
    user: User,
    directory: PathBuf,
    port: Port,
}

impl Cluster {
    /// Starts both, and waits until the standby follows.
    ///
    /// # Errors
    /// If they cannot be started; the text says why, or what to install.
    pub fn start(replication: Replication) -> Result<Self> {
        let programs = programs()?;
        let [basebackup] = find([Tool { name: "pg_basebackup", package: "postgresql" }])?;
        let (user, password) = (User::for_servers()?, password());
        let names = if replication == Replication::Synchronous { "*" } else { "" };
        let settings = format!("{SETTINGS}synchronous_standby_names = '{names}'\n");
        let first = user.directory()?;
        let port = free_port()?;
        initialize(&programs, user, first.path(), &password, &settings)?;
        let node = |directory: tempfile::TempDir, port: Port| -> Result<Node> {
            let path = directory.path().to_owned();
            let args = ["-D", "data", "-c", &format!("port={}", port.number)];
            let supervisor = Supervisor::new(user, directory, CRASH, &programs[1], &args)?;
            Ok(Node { supervisor, user, directory: path, port })
        };
        let first = node(first, port)?;
        first.start()?;
        let second = node(user.directory()?, free_port()?)?;
        let cluster = Self { nodes: [first, second], primary: Mutex::new(0), password, basebackup };
        cluster.rebuild()?;
        Ok(cluster)
    }

    fn primary_index(&self) -> usize {
        *self.primary.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn primary(&self) -> &Node {
        &self.nodes[self.primary_index()]
    }

    fn standby(&self) -> &Node {
        &self.nodes[1 - self.primary_index()]
    }

    /// The URL of a database with both servers in it, for the one that is the primary.
    pub fn url(&self, database: &str) -> String {
        let [a, b] = &self.nodes;
        format!(
            "postgres://{USER}:{}@127.0.0.1:{},127.0.0.1:{}/{database}?target_session_attrs=read-write",
            self.password, a.port.number, b.port.number
        )
    }

    fn node_url(&self, node: &Node, database: &str) -> String {
        format!("postgres://{USER}:{}@127.0.0.1:{}/{database}", self.password, node.port.number)
    }

    /// The URL of a database on the server that is the primary now.
    pub fn primary_url(&self, database: &str) -> String {
        self.node_url(self.primary(), database)
    }

    /// The URL of a database on the server that is the standby now.
    pub fn standby_url(&self, database: &str) -> String {
        self.node_url(self.standby(), database)
    }

    /// Runs a statement on the primary, as a superuser.
    ///
    /// # Errors
    /// Those of the server.
    pub fn execute(&self, statement: &str) -> Result<()> {
        execute_blocking(&self.primary_url("postgres"), statement)
    }

    /// Ends the primary without notice; its files stay.
    ///
    /// # Errors
    /// If it cannot be ended.
    pub fn crash_primary(&self) -> Result<()> {
        self.primary().stop()
    }

    /// Kills every process of the primary.
    ///
    /// # Errors
    /// If it cannot be ended.
    pub fn kill_primary(&self) -> Result<()> {
        self.primary().signal(Signal::KILL)?;
        self.primary().supervisor.stop()
    }

    /// Starts the primary again after [`Self::crash_primary`], without a failover.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn resume_primary(&self) -> Result<()> {
        self.primary().start()
    }

    /// Stops every process of the primary where it is; the kernel still answers on its sockets.
    ///
    /// # Errors
    /// If there is no such process.
    pub fn freeze_primary(&self) -> Result<()> {
        self.primary().signal(Signal::STOP)
    }

    /// The same with the standby.
    ///
    /// # Errors
    /// As [`Self::freeze_primary`].
    pub fn freeze_standby(&self) -> Result<()> {
        self.standby().signal(Signal::STOP)
    }

    /// Lets the standby go on.
    ///
    /// # Errors
    /// As [`Self::freeze_primary`].
    pub fn thaw_standby(&self) -> Result<()> {
        self.standby().signal(Signal::CONT)
    }

    /// Sends nothing more to the standby, until the primary is killed. A standby that is frozen receives on: its kernel
    /// keeps what comes for it.
    ///
    /// # Errors
    /// If nothing is sent at all.
    pub fn hold_replication(&self) -> Result<()> {
        let query = format!("SELECT pid::text FROM {SENDER}");
        send(query_blocking(&self.primary_url("postgres"), &query)?.parse()?, Signal::STOP)
    }

    /// Lets the old primary go on that was frozen before a failover: it believes to be the primary still.
    ///
    /// # Errors
    /// As [`Self::freeze_primary`].
    pub fn thaw_old_primary(&self) -> Result<()> {
        self.standby().signal(Signal::CONT)
    }

    /// Makes the standby the primary, and waits until it is. The old primary has to be ended or frozen.
    ///
    /// # Errors
    /// If it cannot be promoted.
    pub fn promote(&self) -> Result<()> {
        let url = self.standby_url("postgres");
        let mut last = String::new();
        let promoted = until("the standby is promoted", || {
            let recovering = query_blocking(&url, "SELECT pg_is_in_recovery()::text");
            // A promotion may be carried out after the wait for it ended, and a server that is no standby refuses another.
            if recovering.as_ref().is_ok_and(|found| found == "false") {
                return true;
            }
            let asked = execute_blocking(&url, "SELECT pg_promote(true, 60)");
            last = format!("in recovery: {recovering:?}; the request: {asked:?}");
            false
        });
        promoted.map_err(|error| format!("{error}; {last}\n{}", self.report()))?;
        *self.primary.lock().unwrap_or_else(std::sync::PoisonError::into_inner) ^= 1;
        Ok(())
    }

    /// Makes the other server a standby with the files of the primary, and waits until it follows.
    ///
    /// # Errors
    /// If it cannot be built or does not follow.
    pub fn rebuild(&self) -> Result<()> {
        let node = self.standby();
        node.stop()?;
        let data = node.directory.join("data");
        // A session that the server started in the moment when it was killed may still write there.
        until("the old files are removed", || !data.exists() || fs::remove_dir_all(&data).is_ok())?;
        run(node.user.command(&self.basebackup, &node.directory).args([
            "--pgdata=data",
            "--write-recovery-conf",
            "--wal-method=stream",
            "--checkpoint=fast",
            "--no-sync",
            "--dbname",
            &self.primary_url("postgres"),
        ]))?;
        node.start()?;
        self.wait_for_standby()
    }

    /// Waits until the standby follows the primary.
    ///
    /// # Errors
    /// If it does not.
    pub fn wait_for_standby(&self) -> Result<()> {
        let url = self.primary_url("postgres");
        let query = format!(
            "SELECT count(*)::text FROM {SENDER} AND state = 'streaming'
             AND (sync_state = 'sync' OR current_setting('synchronous_standby_names') = '')"
        );
        until("the standby follows", || query_blocking(&url, &query).is_ok_and(|found| found == "1"))
            .map_err(|error| format!("{error}\n{}", self.report()).into())
    }

    /// Waits until the standby has received everything that the primary has written.
    ///
    /// # Errors
    /// If it does not.
    pub fn wait_until_standby_has_everything(&self) -> Result<()> {
        let url = self.primary_url("postgres");
        let query =
            format!("SELECT count(*)::text FROM {SENDER} AND flush_lsn >= pg_current_wal_insert_lsn()");
        until("the standby has everything", || query_blocking(&url, &query).is_ok_and(|found| found == "1"))
            .map_err(|error| format!("{error}\n{}", self.report()).into())
    }

    /// What both servers do: their processes with their states, and the ends of their logs. The servers and their files
    /// are gone once a test has failed.
    pub fn report(&self) -> String {
        let part = |role: &str, node: &Node| {
            let log = fs::read_to_string(node.directory.join("log")).unwrap_or_default();
            let lines: Vec<_> = log.lines().collect();
            let end = lines[lines.len().saturating_sub(LOG_LINES)..].join("\n");
            format!("{role}, port {}\n{}the end of its log:\n{end}\n", node.port.number, node.processes())
        };
        part("primary", self.primary()) + &part("standby", self.standby())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for node in &self.nodes {
            // One that is frozen would never end.
            let _it_may_be_gone = node.signal(Signal::CONT);
        }
    }
}

impl Node {
    fn pid_file(&self) -> PathBuf {
        self.directory.join("data/postmaster.pid")
    }

    /// A line for each process: its number, its state as in `ps`, its title.
    fn processes(&self) -> String {
        // The file stays when a server is killed.
        let server = fs::read_to_string(self.pid_file())
            .ok()
            .and_then(|text| text.lines().next()?.trim().parse::<i32>().ok());
        let line = |pid: i32| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            let state = stat.rsplit_once(") ")?.1.split(' ').next()?.to_owned();
            let title = fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
            Some(format!("{pid} {state} {}\n", title.replace('\0', " ").trim()))
        };
        let children = server.map_or_else(Vec::new, |server| children(server).unwrap_or_default());
        let lines: String = server.into_iter().chain(children).filter_map(line).collect();
        if lines.is_empty() { "no process\n".to_owned() } else { lines }
    }

    fn start(&self) -> Result<()> {
        let pid = self.pid_file();
        self.supervisor.start(|| is_ready(&pid))
    }

    fn stop(&self) -> Result<()> {
        let _it_may_be_gone = self.signal(Signal::CONT);
        self.supervisor.stop()
    }

    /// Sends a signal to the server and all its sessions.
    fn signal(&self, signal: Signal) -> Result<()> {
        let text = fs::read_to_string(self.pid_file())?;
        let server: i32 = text.lines().next().unwrap_or_default().trim().parse()?;
        // Once it has ended, nothing says any more which were its sessions, and one that stands still would stay for ever.
        let before = children(server)?;
        // The server first: it must not notice the end of the others, and must not restart them.
        send(server, signal)?;
        for child in before.into_iter().chain(children(server)?) {
            let _it_may_be_gone = send(child, signal);
        }
        Ok(())
    }
}

fn send(pid: i32, signal: Signal) -> Result<()> {
    Ok(kill_process(Pid::from_raw(pid).ok_or("a process has a number")?, signal)?)
}

/// The processes that a process has started.
fn children(parent: i32) -> Result<Vec<i32>> {
    let of_parent = |path: &Path| {
        let stat = fs::read_to_string(path.join("stat")).ok()?;
        // The name, in parentheses, may hold anything; the state and the parent follow it.
        stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse::<i32>().ok()
    };
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let pid = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok());
        found.extend(pid.filter(|_| of_parent(&entry.path()) == Some(parent)));
    }
    Ok(found)
}

fn until(what: &str, mut holds: impl FnMut() -> bool) -> Result<()> {
    let started = Instant::now();
    while !holds() {
        if started.elapsed() > PATIENCE {
            return Err(format!("not within {PATIENCE:?}: {what}").into());
        }
        thread::sleep(PAUSE);
    }
    Ok(())
}
