//! Postgres.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use tokio_postgres::error::SqlState;
use tokio_postgres::{NoTls, SimpleQueryMessage};
use url::Url;

use crate::certificate::{self, OPENSSL};
use crate::container::{Container, Image};
use crate::supervisor::Supervisor;
use crate::tools::{Port, Tool, User, find, free_port, password, run};
use crate::{BoxError, Result};

pub(crate) const USER: &str = "threadkeep";
/// Ends the server and its sessions at once, without flushing. After SIGKILL, sessions would linger.
const CRASH: &str = "QUIT";

const SETTINGS: &str = "
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
max_connections = 200
authentication_timeout = 10s
shared_buffers = 64MB
fsync = off
full_page_writes = off
log_min_messages = warning
ssl = on
ssl_cert_file = 'server.crt'
ssl_key_file = 'server.key'
";

/// For benchmarks: a server that keeps what it acknowledged, as in production. Without TLS, for all clients the same: the
/// raw store that others are compared with does not use it. Its tables grow within a minute as others do in months, so it
/// looks every second whether the statistics of one are out of date, and not every minute.
const FLUSHING: &str = "
ssl = off
autovacuum_naptime = 1s
shared_buffers = 128MB
fsync = on
full_page_writes = on
";

/// A Postgres server.
pub struct Postgres {
    url: Url,
    private: Option<Private>,
    // Stops the server when this process ends.
    _container: Option<Container>,
}

struct Private {
    supervisor: Supervisor,
    data: PathBuf,
    _port: Port,
}

impl Postgres {
    /// The server at a URL; its user needs the right to create databases.
    pub(crate) fn at(url: &str) -> Result<Self> {
        Ok(Self { url: Url::parse(url)?, private: None, _container: None })
    }

    /// Starts a private server with passwords and TLS, on a loopback port.
    ///
    /// # Errors
    /// If it cannot start; the text says why, or what to install.
    pub fn start() -> Result<Self> {
        match programs() {
            Ok(programs) => Self::private_one(&programs, ""),
            Err(missing) => Self::in_container(missing),
        }
    }

    /// Starts a private server that flushes every commit, for benchmarks.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_flushing() -> Result<Self> {
        Self::private_one(&programs()?, FLUSHING)
    }

    /// A server without TLS, which cannot be crashed.
    fn in_container(missing: BoxError) -> Result<Self> {
        let (port, password) = (free_port()?, password());
        let image = Image {
            name: "postgres",
            tag: "17",
            ports: (5432, port.number),
            environment: &[
                ("POSTGRES_USER", USER),
                ("POSTGRES_PASSWORD", &password),
                ("POSTGRES_DB", "postgres"),
                ("POSTGRES_INITDB_ARGS", "--data-checksums"),
            ],
            arguments: &["-c", "fsync=off", "-c", "full_page_writes=off", "-c", "max_connections=200"],
        };
        let url = Url::parse(&format!("postgres://{USER}:{password}@127.0.0.1:{}/postgres", port.number))?;
        let container = image.start(missing, || execute_blocking(url.as_str(), "SELECT 1").is_ok())?;
        Ok(Self { url, private: None, _container: Some(container) })
    }

    fn private_one(programs: &[PathBuf; 3], more: &str) -> Result<Self> {
        let user = User::for_servers()?;
        let directory = user.directory()?;
        let (path, password) = (directory.path(), password());
        let (data, port) = (path.join("data"), free_port()?);
        initialize(programs, user, path, &password, &format!("{more}port = {}\n", port.number))?;

        let url = Url::parse(&format!("postgres://{USER}:{password}@127.0.0.1:{}/postgres", port.number))?;
        let supervisor = Supervisor::new(user, directory, CRASH, &programs[1], &["-D", "data"])?;
        let private = Private { supervisor, data, _port: port };
        let server = Self { url, private: Some(private), _container: None };
        server.resume()?;
        Ok(server)
    }

    /// The URL of a database of this server, for a superuser.
    pub fn url(&self, database: &str) -> String {
        in_database(&self.url, database)
    }

    /// The certificate (PEM) that a client must trust to use TLS.
    ///
    /// # Errors
    /// If the server is not private.
    pub fn certificate(&self) -> Result<PathBuf> {
        Ok(self.private()?.data.join("server.crt"))
    }

    /// The data directory.
    ///
    /// # Errors
    /// If the server is not private.
    pub fn data(&self) -> Result<&Path> {
        Ok(&self.private()?.data)
    }

    /// Ends the server without warning, as a power cut would, but without loss on disk.
    ///
    /// # Errors
    /// If the server is not private.
    pub fn crash(&self) -> Result<()> {
        self.private()?.supervisor.stop()
    }

    /// Ends the server in order, as a restart by its operator does: transactions are rolled back, connections closed.
    ///
    /// # Errors
    /// If the server is not private.
    pub fn shut_down(&self) -> Result<()> {
        self.private()?.supervisor.stop_with("INT")
    }

    /// Starts the server again after [`Self::crash`] or [`Self::shut_down`], on the same port.
    ///
    /// # Errors
    /// If the server is not private or does not come up.
    pub fn resume(&self) -> Result<()> {
        let Private { supervisor, data, .. } = self.private()?;
        let pid = data.join("postmaster.pid");
        supervisor.start(|| is_ready(&pid))
    }

    fn private(&self) -> Result<&Private> {
        self.private.as_ref().ok_or_else(|| "this needs a private server: Postgres::start()".into())
    }

    /// Creates an empty database, which is dropped with the handle.
    ///
    /// # Errors
    /// If it cannot be created.
    pub async fn database(&self) -> Result<Database> {
        let name = format!("threadkeep_{}", uuid::Uuid::new_v4().simple());
        // A database that is in use is not copied: the server gives it five seconds. Its own vacuum may be in template1,
        // and be late there; nothing is ever in template0.
        execute(self.url.as_str(), &format!("CREATE DATABASE {name} TEMPLATE template0")).await?;
        Ok(Database { url: self.url(&name), admin: self.url.to_string(), name })
    }
}

/// The programs of a server: `initdb`, `postgres`, and `openssl` for its certificate.
pub(crate) fn programs() -> Result<[PathBuf; 3]> {
    let tool = |name| Tool { name, package: "postgresql" };
    find([tool("initdb"), tool("postgres"), OPENSSL])
}

/// Creates the files of a server in the subdirectory `data`, with these settings after those of every test.
pub(crate) fn initialize(
    [initdb, _, openssl]: &[PathBuf; 3],
    user: User,
    path: &Path,
    password: &str,
    settings: &str,
) -> Result<()> {
    let data = path.join("data");
    user.write(&path.join("password"), password)?;
    run(user.command(initdb, path).arg("--no-sync").arg("--no-instructions").args([
        "--data-checksums",
        "--encoding=UTF8",
        "--locale=C",
        "--auth=password",
        "--pwfile=password",
        "--pgdata=data",
        "--username",
        USER,
    ]))?;
    certificate::make(user, openssl, path, "data/server")?;
    let settings = fs::read_to_string(data.join("postgresql.conf"))? + SETTINGS + settings;
    user.write(&data.join("postgresql.conf"), &settings)
}

/// Whether the last line of the pid file, where the server writes its status, says "ready".
pub(crate) fn is_ready(pid: &Path) -> bool {
    fs::read_to_string(pid).is_ok_and(|text| text.lines().nth(7).is_some_and(|state| state.trim() == "ready"))
}

/// A database for one case. Dropping it ends its sessions and drops the database.
pub struct Database {
    name: String,
    url: String,
    admin: String,
}

impl Database {
    /// The name of the database.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its URL, for a superuser.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Runs statements as a superuser; returns the text in the first column of the first row, empty if there is none.
    ///
    /// # Errors
    /// Those of the server.
    pub async fn ask(&self, statements: &str) -> Result<String> {
        query(&self.url, statements).await
    }

    /// Waits until one of its sessions waits for a lock.
    ///
    /// # Errors
    /// If it cannot be asked.
    pub async fn blocked(&self) -> Result<()> {
        let waits =
            "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()";
        while query(&self.url, waits).await?.is_empty() {}
        Ok(())
    }

    /// Waits until the clients with this `application_name` have no session in it. A session carries out what it has
    /// received, although its client was killed meanwhile.
    ///
    /// # Errors
    /// If it cannot be asked.
    pub async fn left_by(&self, clients: &str) -> Result<()> {
        let sessions = format!(
            "SELECT 1 FROM pg_stat_activity
             WHERE application_name = '{clients}' AND datname = current_database()"
        );
        while !query(&self.url, &sessions).await?.is_empty() {}
        Ok(())
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let drop = format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.name);
        let (admin, (done, dropped)) = (self.admin.clone(), mpsc::channel());
        std::thread::spawn(move || {
            let is_used = |error: BoxError| {
                let refused = error.downcast_ref::<tokio_postgres::Error>();
                refused.and_then(tokio_postgres::Error::code) == Some(&SqlState::OBJECT_IN_USE)
            };
            for _ in 0..DROPS {
                // The server may be gone; then so is the database.
                if !execute_blocking(&admin, &drop).is_err_and(is_used) {
                    break;
                }
            }
            let _nobody_waits = done.send(());
        });
        // The server waits for connections that have not logged in yet. Those of this test's runtime cannot while this
        // waits, so it must not wait for the server.
        let _too_late = dropped.recv_timeout(DROPPING);
    }
}

/// How often a database is dropped whose sessions do not end: the server gives them five seconds, and on a busy machine
/// they may get no core for longer.
const DROPS: u32 = 60;

/// How long a test waits until its database is gone.
const DROPPING: Duration = Duration::from_millis(200);

pub(crate) fn execute_blocking(url: &str, statement: &str) -> Result<()> {
    query_blocking(url, statement).map(|_| ())
}

/// The text in the first column of the first row; empty if there is none.
pub(crate) fn query_blocking(url: &str, statement: &str) -> Result<String> {
    let (url, statement) = (url.to_owned(), statement.to_owned());
    // A runtime cannot be blocked from within, hence the thread.
    let executing = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(query(&url, &statement))
    });
    executing.join().map_err(|_| "the statement panicked")?
}

async fn execute(url: &str, statement: &str) -> Result<()> {
    query(url, statement).await.map(|_| ())
}

async fn query(url: &str, statement: &str) -> Result<String> {
    let mut config: tokio_postgres::Config = url.parse()?;
    let (client, connection) = config.connect_timeout(Duration::from_mins(10)).connect(NoTls).await?;
    let connection = tokio::spawn(connection);
    let done = client.simple_query(statement).await;
    drop(client);
    connection.await??;
    Ok(done?
        .into_iter()
        .find_map(|message| match message {
            SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
            _ => None,
        })
        .unwrap_or_default())
}

/// The URL of another database on the same server.
pub(crate) fn in_database(server: &Url, database: &str) -> String {
    let mut url = server.clone();
    url.set_path(database);
    url.to_string()
}

impl Postgres {
    /// The server's URL, for PgBouncer's configuration.
    pub(crate) fn server(&self) -> &Url {
        &self.url
    }
}
