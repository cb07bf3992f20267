#![doc = include_str!("../README.md")]

mod browser;
mod certificate;
mod cluster;
mod container;
mod corpus;
mod dropped;
mod log;
mod pgbouncer;
mod postgres;
pub mod proxy;
mod redis;
mod supervisor;
mod tools;

use std::ffi::OsStr;
use std::process::Command;
use std::sync::{Mutex, OnceLock, PoisonError};

pub use browser::Browser;
pub use cluster::{Cluster, Replication};
pub use corpus::corpus;
pub use dropped::DropAfter;
pub use log::Log;
pub use pgbouncer::PgBouncer;
pub use postgres::{Database, Postgres};
pub use redis::Redis;

/// Any error of a server that does not start or does not answer.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// The result of everything here.
pub type Result<T, E = BoxError> = std::result::Result<T, E>;

/// The Postgres of this test process: `THREADKEEP_POSTGRES_TEST_URL` if that is set, else a private one.
///
/// # Errors
/// If there is no server and none can be started; the text says what to install.
pub fn postgres() -> Result<&'static Postgres> {
    static SHARED: Shared<Postgres> = Shared::new();
    SHARED.get_or_start(|| match tools::variable("THREADKEEP_POSTGRES_TEST_URL")? {
        Some(url) => Postgres::at(&url),
        None => Postgres::start(),
    })
}

/// The PgBouncer of this test process, in transaction mode in front of [`postgres`]: `THREADKEEP_PGBOUNCER_TEST_URL` if
/// that is set, else a private one.
///
/// # Errors
/// As [`postgres`].
pub fn pgbouncer() -> Result<&'static PgBouncer> {
    static SHARED: Shared<PgBouncer> = Shared::new();
    SHARED.get_or_start(|| match tools::variable("THREADKEEP_PGBOUNCER_TEST_URL")? {
        Some(url) => PgBouncer::at(&url),
        None => PgBouncer::start(postgres()?),
    })
}

/// The Redis of this test process: `THREADKEEP_REDIS_TEST_URL` if that is set, else a private one. Tests share its keys, so each
/// uses a prefix of its own.
///
/// # Errors
/// As [`postgres`].
pub fn redis() -> Result<&'static Redis> {
    static SHARED: Shared<Redis> = Shared::new();
    SHARED.get_or_start(|| match tools::variable("THREADKEEP_REDIS_TEST_URL")? {
        Some(url) => Ok(Redis::at(&url)),
        None => Redis::start(),
    })
}

/// A command that runs a program of the gateway. What the environment of this machine sets for one does not count.
pub fn unconfigured(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        let starts = ["SVC_", "GATEWAY_", "OTEL_", "RUST_LOG"];
        if starts.iter().any(|start| name.as_encoded_bytes().starts_with(start.as_bytes())) {
            command.env_remove(name);
        }
    }
    command
}

/// Finds Patroni and etcd, which `scripts/patroni.py` starts; what is missing is installed.
///
/// # Errors
/// If that is not possible; the text says what to install.
pub fn find_patroni() -> Result<()> {
    use tools::Tool;
    let initdb = Tool { name: "initdb", package: "postgresql" };
    let patroni = Tool { name: "patroni", package: "patroni" };
    tools::find([initdb, patroni, Tool { name: "etcd", package: "etcd-server" }]).map(drop)
}

/// A server that is started once per process. A failure is not cached: the next test tries again.
struct Shared<T> {
    starting: Mutex<()>,
    server: OnceLock<T>,
}

impl<T> Shared<T> {
    const fn new() -> Self {
        Self { starting: Mutex::new(()), server: OnceLock::new() }
    }

    fn get_or_start(&self, start: impl FnOnce() -> Result<T>) -> Result<&T> {
        let _one_at_a_time = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(server) = self.server.get() {
            return Ok(server);
        }
        let server = start()?;
        Ok(self.server.get_or_init(|| server))
    }
}
