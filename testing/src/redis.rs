//! Redis.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::certificate::{self, OPENSSL};
use crate::container::{Container, Image};
use crate::supervisor::Supervisor;
use crate::tools::{Port, Tool, User, find, free_port, password};
use crate::{BoxError, Result};

/// A Redis server without persistence.
pub struct Redis {
    url: String,
    private: Option<Private>,
    // Stops the server when this process ends.
    _container: Option<Container>,
}

struct Private {
    supervisor: Supervisor,
    port: Port,
    _tls_port: Port,
    tls_url: String,
    certificate: PathBuf,
}

impl Redis {
    /// The server at a URL.
    pub(crate) fn at(url: &str) -> Self {
        Self { url: url.to_owned(), private: None, _container: None }
    }

    /// Starts a private server with a password on a loopback port, and with TLS on another.
    ///
    /// # Errors
    /// If it cannot start; the text says why, or what to install.
    pub fn start() -> Result<Self> {
        match find([Tool { name: "redis-server", package: "redis-server" }, OPENSSL]) {
            Ok([redis, openssl]) => Self::private_one(&redis, &openssl),
            Err(missing) => Self::in_container(missing),
        }
    }

    /// A server with a password but no TLS; it cannot be crashed.
    fn in_container(missing: BoxError) -> Result<Self> {
        let (port, password) = (free_port()?, password());
        let image = Image {
            name: "redis",
            tag: "7",
            ports: (6379, port.number),
            environment: &[],
            arguments: &["redis-server", "--requirepass", &password, "--save", ""],
        };
        let container = image.start(missing, || answers(port.number).unwrap_or(false))?;
        let url = format!("redis://:{password}@127.0.0.1:{}/0", port.number);
        Ok(Self { url, private: None, _container: Some(container) })
    }

    fn private_one(redis: &Path, openssl: &Path) -> Result<Self> {
        let user = User::for_servers()?;
        let directory = user.directory()?;
        let (port, tls_port, password) = (free_port()?, free_port()?, password());
        certificate::make(user, openssl, directory.path(), "server")?;
        let settings = format!(
            "bind 127.0.0.1\nport {}\nrequirepass {password}\nsave \"\"\nappendonly no\ndaemonize no\n\
             tls-port {}\ntls-cert-file server.crt\ntls-key-file server.key\n\
             tls-ca-cert-file server.crt\ntls-auth-clients no\n",
            port.number, tls_port.number
        );
        user.write(&directory.path().join("settings"), &settings)?;
        let certificate = directory.path().join("server.crt");
        let supervisor = Supervisor::new(user, directory, "KILL", redis, &["settings"])?;
        let url = format!("redis://:{password}@127.0.0.1:{}/0", port.number);
        let tls_url = format!("rediss://:{password}@127.0.0.1:{}/0", tls_port.number);
        let private = Private { supervisor, port, _tls_port: tls_port, tls_url, certificate };
        let server = Self { url, private: Some(private), _container: None };
        server.resume()?;
        Ok(server)
    }

    /// The URL of the server.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The server's TLS URL.
    ///
    /// # Errors
    /// If the server is not private.
    pub fn tls_url(&self) -> Result<&str> {
        Ok(&self.private()?.tls_url)
    }

    /// The certificate (PEM) that a client must trust to use TLS.
    ///
    /// # Errors
    /// If the server is not private.
    pub fn certificate(&self) -> Result<&Path> {
        Ok(&self.private()?.certificate)
    }

    /// Ends the server without warning; its data is lost.
    ///
    /// # Errors
    /// If the server is not private.
    pub fn crash(&self) -> Result<()> {
        self.private()?.supervisor.stop()
    }

    /// Starts the server again after [`Self::crash`], empty, on the same port.
    ///
    /// # Errors
    /// If the server is not private or does not come up.
    pub fn resume(&self) -> Result<()> {
        let Private { supervisor, port, .. } = self.private()?;
        supervisor.start(|| answers(port.number).unwrap_or(false))
    }

    fn private(&self) -> Result<&Private> {
        self.private.as_ref().ok_or_else(|| "this needs a private server: Redis::start()".into())
    }
}

/// Whether the server answers. Asking for a password counts as an answer, still loading does not.
fn answers(port: u16) -> std::io::Result<bool> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(Duration::from_secs(1)))?;
    stream.write_all(b"PING\r\n")?;
    let mut answer = [0; 7];
    stream.read_exact(&mut answer)?;
    Ok(answer.starts_with(b"+PONG") || answer.starts_with(b"-NOAUTH"))
}
