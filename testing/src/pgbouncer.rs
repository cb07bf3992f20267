//! PgBouncer in transaction mode.

use std::net::TcpStream;

use url::Url;

use crate::Result;
use crate::postgres::{Database, Postgres, in_database};
use crate::supervisor::Supervisor;
use crate::tools::{Tool, User, find, free_port};

/// A PgBouncer that assigns a server connection to a client for one transaction at a time.
pub struct PgBouncer {
    url: Url,
    // Stops the server when this process ends.
    _supervisor: Option<Supervisor>,
}

impl PgBouncer {
    /// The pooler at a URL.
    pub(crate) fn at(url: &str) -> Result<Self> {
        Ok(Self { url: Url::parse(url)?, _supervisor: None })
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
            path = path.display()
        );
        user.write(&path.join("settings"), &settings)?;

        let supervisor = Supervisor::new(user, directory, "KILL", &pgbouncer, &["-q", "settings"])?;
        supervisor.start(|| TcpStream::connect(("127.0.0.1", listen)).is_ok())?;
        let mut url = server.clone();
        url.set_host(Some("127.0.0.1"))?;
        url.set_port(Some(listen)).map_err(|()| "a URL without a port")?;
        Ok(Self { url, _supervisor: Some(supervisor) })
    }

    /// The URL of a database of its server.
    pub fn url(&self, database: &Database) -> String {
        in_database(&self.url, database.name())
    }
}
