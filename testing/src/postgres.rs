//! Postgres.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio_postgres::NoTls;
use url::Url;

use crate::Result;
use crate::supervisor::Supervisor;
use crate::tools::{Tool, User, find, free_port, password, run};

const USER: &str = "threadkeep";
/// Ends the server and its sessions at once, without flushing anything. After a KILL, sessions would linger.
const CRASH: &str = "QUIT";

const SETTINGS: &str = "
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
max_connections = 200
shared_buffers = 64MB
fsync = off
full_page_writes = off
log_min_messages = warning
ssl = on
ssl_cert_file = 'server.crt'
ssl_key_file = 'server.key'
";

/// For a server that is measured: it keeps what it acknowledged whatever happens, as servers do.
const FLUSHING: &str = "
shared_buffers = 128MB
fsync = on
full_page_writes = on
";

const CERTIFICATE: &str = "
[req]
distinguished_name = name
x509_extensions = server
prompt = no
[name]
CN = localhost
[server]
basicConstraints = critical, CA:FALSE
subjectAltName = DNS:localhost, IP:127.0.0.1
";

/// A Postgres server.
pub struct Postgres {
    url: Url,
    private: Option<Private>,
}

struct Private {
    supervisor: Supervisor,
    data: PathBuf,
}

impl Postgres {
    /// The server at a URL; its user must be allowed to create databases.
    pub(crate) fn at(url: &str) -> Result<Self> {
        Ok(Self { url: Url::parse(url)?, private: None })
    }

    /// Starts a private server: passwords and TLS, on a port of the loopback interface.
    ///
    /// # Errors
    /// If it cannot be started; the text says why, or what to install.
    pub fn start() -> Result<Self> {
        Self::start_with("")
    }

    /// Starts a private server that flushes every commit to the disk, for measurements.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_flushing() -> Result<Self> {
        Self::start_with(FLUSHING)
    }

    fn start_with(more: &str) -> Result<Self> {
        let tool = |name| Tool { name, package: "postgresql" };
        let [initdb, postgres, openssl] =
            find([tool("initdb"), tool("postgres"), Tool { name: "openssl", package: "openssl" }])?;
        let user = User::for_servers()?;
        let directory = user.directory()?;
        let (path, password) = (directory.path(), password());
        let data = path.join("data");
        user.write(&path.join("password"), &password)?;
        run(user.command(&initdb, path).arg("--no-sync").arg("--no-instructions").args([
            "--encoding=UTF8",
            "--locale=C",
            "--auth=password",
            "--pwfile=password",
            "--pgdata=data",
            "--username",
            USER,
        ]))?;
        user.write(&path.join("certificate.conf"), CERTIFICATE)?;
        run(user.command(&openssl, path).args(["req", "-x509", "-nodes", "-days", "2"]).args([
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-config",
            "certificate.conf",
            "-keyout",
            "data/server.key",
            "-out",
            "data/server.crt",
        ]))?;
        let port = free_port()?;
        let settings =
            fs::read_to_string(data.join("postgresql.conf"))? + SETTINGS + more + &format!("port = {port}\n");
        user.write(&data.join("postgresql.conf"), &settings)?;

        let url = Url::parse(&format!("postgres://{USER}:{password}@127.0.0.1:{port}/postgres"))?;
        let supervisor = Supervisor::new(user, directory, CRASH, &postgres, &["-D", "data"])?;
        let server = Self { url, private: Some(Private { supervisor, data }) };
        server.resume()?;
        Ok(server)
    }

    /// The URL of a database of this server, for a user who may do everything.
    pub fn url(&self, database: &str) -> String {
        in_database(&self.url, database)
    }

    /// The certificate (PEM) that a client has to trust to use TLS.
    ///
    /// # Errors
    /// If the server is not private.
    pub fn certificate(&self) -> Result<PathBuf> {
        Ok(self.private()?.data.join("server.crt"))
    }

    /// Ends the server without notice, as a power cut would that spares the disk.
    ///
    /// # Errors
    /// If the server is not private.
    pub fn crash(&self) -> Result<()> {
        self.private()?.supervisor.stop()
    }

    /// Starts the server again after [`Self::crash`], on the same port.
    ///
    /// # Errors
    /// If the server is not private or does not come up.
    pub fn resume(&self) -> Result<()> {
        let Private { supervisor, data } = self.private()?;
        let pid = data.join("postmaster.pid");
        supervisor.start(|| is_ready(&pid))
    }

    fn private(&self) -> Result<&Private> {
        self.private.as_ref().ok_or_else(|| "this needs a private server: Postgres::start()".into())
    }

    /// A new, empty database, dropped with the handle.
    ///
    /// # Errors
    /// If it cannot be created.
    pub async fn database(&self) -> Result<Database> {
        let name = format!("threadkeep_{}", uuid::Uuid::new_v4().simple());
        execute(self.url.as_str(), &format!("CREATE DATABASE {name}")).await?;
        Ok(Database { url: self.url(&name), admin: self.url.to_string(), name })
    }
}

/// Whether the last line of the file in which the server tells its state says so.
fn is_ready(pid: &Path) -> bool {
    fs::read_to_string(pid).is_ok_and(|text| text.lines().nth(7).is_some_and(|state| state.trim() == "ready"))
}

/// A database for one case; dropped with this handle, its sessions ended.
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

    /// Its URL, for a user who may do everything.
    pub fn url(&self) -> &str {
        &self.url
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let (admin, drop) =
            (self.admin.clone(), format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.name));
        // A runtime cannot be blocked from within, hence the thread. The server may be gone; then so is the database.
        let dropping = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(execute(&admin, &drop))
        });
        let _whatever_happened = dropping.join();
    }
}

async fn execute(url: &str, statement: &str) -> Result<()> {
    let mut config: tokio_postgres::Config = url.parse()?;
    let (client, connection) = config.connect_timeout(Duration::from_secs(10)).connect(NoTls).await?;
    let connection = tokio::spawn(connection);
    let done = client.batch_execute(statement).await;
    drop(client);
    connection.await??;
    Ok(done?)
}

/// The same server, another database.
pub(crate) fn in_database(server: &Url, database: &str) -> String {
    let mut url = server.clone();
    url.set_path(database);
    url.to_string()
}

impl Postgres {
    /// What PgBouncer needs to know of the server.
    pub(crate) fn server(&self) -> &Url {
        &self.url
    }
}
