//! PgBouncer in transaction mode.

use std::net::TcpStream;

use url::Url;

use crate::Result;
use crate::postgres::{Database, Postgres, in_database};
use crate::supervisor::Supervisor;
use crate::tools::{Port, Tool, User, find, free_port};

/// A PgBouncer that assigns a server connection to a client for one transaction at a time.
pub struct PgBouncer {
    url: Url,
    /// Stops the server when this process ends; `None` for one that somebody else started.
    supervisor: Option<Supervisor>,
    _port: Option<Port>,
}

impl PgBouncer {
    /// The pooler at a URL.
    pub(crate) fn at(url: &str) -> Result<Self> {
        Ok(Self { url: Url::parse(url)?, supervisor: None, _port: None })
    }

    /// Starts a private one in front of `postgres`. It ends when it is dropped.
    ///
    /// # Errors
    /// If it is not installed, or does not start.
    pub fn start(postgres: &Postgres) -> Result<Self> {
        let [pgbouncer] = find([Tool { name: "pgbouncer", package: "pgbouncer" }])?;
        let user = User::for_servers()?;
        let directory = user.directory()?;
        let path = directory.path();
        let server = postgres.server();
        let (host, port) = (server.host_str().unwrap_or("127.0.0.1"), server.port().unwrap_or(5432));
        let (name, password) = (server.username(), server.password().unwrap_or_default());
        user.write(&path.join("users"), &format!("\"{name}\" \"{password}\"\n"))?;
        let listen = free_port()?;
        let settings = format!(
            "[databases]\n* = host={host} port={port}\n\
             [pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {listen}\nunix_socket_dir =\n\
             auth_type = plain\nauth_file = {path}/users\npool_mode = transaction\n\
             max_client_conn = 1000\ndefault_pool_size = 6\nserver_idle_timeout = 5\n\
             logfile = {path}/log\nlog_connections = 0\nlog_disconnections = 0\n",
            listen = listen.number,
            path = path.display()
        );
        user.write(&path.join("settings"), &settings)?;

        let supervisor = Supervisor::new(user, directory, "KILL", &pgbouncer, &["-q", "settings"])?;
        let mut url = server.clone();
        url.set_host(Some("127.0.0.1"))?;
        url.set_port(Some(listen.number)).map_err(|()| "a URL without a port")?;
        let pooler = Self { url, supervisor: Some(supervisor), _port: Some(listen) };
        pooler.resume()?;
        Ok(pooler)
    }

    /// Ends the pooler without warning.
    ///
    /// # Errors
    /// If it is not private.
    pub fn crash(&self) -> Result<()> {
        self.private()?.stop()
    }

    /// Starts it again after [`Self::crash`], on the same port.
    ///
    /// # Errors
    /// If it is not private or does not come up.
    pub fn resume(&self) -> Result<()> {
        let listen = self.url.port().ok_or("a URL without a port")?;
        self.private()?.start(|| TcpStream::connect(("127.0.0.1", listen)).is_ok())
    }

    fn private(&self) -> Result<&Supervisor> {
        self.supervisor.as_ref().ok_or_else(|| "this needs a private pooler: PgBouncer::start()".into())
    }

    /// The URL of a database of its server.
    pub fn url(&self, database: &Database) -> String {
        in_database(&self.url, database.name())
    }
}
