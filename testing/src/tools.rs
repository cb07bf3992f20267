//! Finds and installs programs, and picks the user that servers run as.

use std::env::{self, VarError};
use std::fs;
use std::net::{TcpListener, UdpSocket};
use std::ops::Range;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::Result;

/// A program and the package that installs it.
pub(crate) struct Tool {
    pub(crate) name: &'static str,
    pub(crate) package: &'static str,
}

/// The value of an environment variable that is set and not empty.
pub(crate) fn variable(name: &str) -> Result<Option<String>> {
    match env::var(name) {
        Ok(value) => Ok(Some(value).filter(|value| !value.is_empty())),
        Err(VarError::NotPresent) => Ok(None),
        Err(error) => Err(format!("{name}: {error}").into()),
    }
}

/// The paths of these programs, which are installed if missing.
pub(crate) fn find<const N: usize>(tools: [Tool; N]) -> Result<[PathBuf; N]> {
    if tools.iter().any(|tool| look_up(tool.name).is_none()) {
        install(&tools)?;
    }
    let mut found = Vec::with_capacity(N);
    for tool in &tools {
        let path = look_up(tool.name);
        found.push(path.ok_or_else(|| format!("{} is missing: install {}", tool.name, tool.package))?);
    }
    found.try_into().map_err(|_| "as many paths as tools".into())
}

/// The path of a program.
pub(crate) fn look_up(name: &str) -> Option<PathBuf> {
    let mut places: Vec<PathBuf> =
        env::var_os("PATH").map(|path| env::split_paths(&path).collect()).unwrap_or_default();
    places.extend(["/usr/sbin".into(), "/usr/local/sbin".into()]);
    let mut postgres: Vec<(u32, PathBuf)> = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let version = entry.file_name().to_str()?.parse().ok()?;
            Some((version, entry.path().join("bin")))
        })
        .collect();
    postgres.sort();
    // Newest version first.
    places.extend(postgres.into_iter().rev().map(|(_, bin)| bin));
    let runs = |path: &PathBuf| {
        fs::metadata(path).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
    };
    places.into_iter().map(|place| place.join(name)).find(runs)
}

fn install(tools: &[Tool]) -> Result<()> {
    let missing = tools.iter().filter(|tool| look_up(tool.name).is_none());
    let mut packages: Vec<&str> = missing.map(|tool| tool.package).collect();
    packages.dedup();
    let output = Command::new("/bin/sh")
        .args(["-c", include_str!("install.sh"), "install"])
        .args(&packages)
        .output()?;
    if output.status.success() {
        return Ok(());
    }
    let reason = String::from_utf8_lossy(&output.stderr);
    Err(format!("install {} first (automatic installation failed: {})", packages.join(", "), reason.trim())
        .into())
}

/// The user that servers run as.
#[derive(Debug, Clone, Copy)]
pub(crate) struct User {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

impl User {
    /// The user who runs the tests.
    pub(crate) fn ourselves() -> Self {
        let (uid, gid) = (rustix::process::getuid(), rustix::process::getgid());
        Self { uid: uid.as_raw(), gid: gid.as_raw() }
    }

    /// The current user; `postgres` or `nobody` if that is root, because servers refuse root.
    pub(crate) fn for_servers() -> Result<Self> {
        if !rustix::process::getuid().is_root() {
            return Ok(Self::ourselves());
        }
        let users = fs::read_to_string("/etc/passwd")?;
        let user = |name: &str| {
            users.lines().find_map(|line| {
                let mut fields = line.split(':');
                let named = fields.next()? == name;
                let (uid, gid) = (fields.nth(1)?.parse().ok()?, fields.next()?.parse().ok()?);
                named.then_some(Self { uid, gid })
            })
        };
        let found = user("postgres").or_else(|| user("nobody"));
        found.ok_or_else(|| "tests that run as root need a user postgres or nobody for their servers".into())
    }

    /// A directory that belongs to the user, removed with the handle.
    pub(crate) fn directory(self) -> Result<TempDir> {
        let directory = tempfile::Builder::new().prefix("threadkeep-").tempdir()?;
        self.owns(directory.path())?;
        Ok(directory)
    }

    /// Writes a file that only the user may read.
    pub(crate) fn write(self, path: &Path, text: &str) -> Result<()> {
        fs::write(path, text)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        self.owns(path)
    }

    fn owns(self, path: &Path) -> Result<()> {
        if rustix::process::getuid().is_root() {
            chown(path, Some(self.uid), Some(self.gid))?;
        }
        Ok(())
    }

    /// A command that runs as the user, in `directory`.
    pub(crate) fn command(self, program: &Path, directory: &Path) -> Command {
        let mut command = Command::new(program);
        command.current_dir(directory).env("LC_ALL", "C").env("HOME", directory);
        if rustix::process::getuid().is_root() {
            command.uid(self.uid).gid(self.gid);
        }
        command
    }
}

/// Runs a command to its end.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let output = command.output()?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(format!("{}: {}: {}", command.get_program().display(), output.status, text.trim()).into())
}

/// Ports that systems give to no outgoing connection: such a connection could take the port before the server does, or while the
/// server is down. A client that tries to reach a server that is down could even be connected to itself.
const PORTS: Range<u16> = 15_000..32_000;

/// A port for a server. No other test gets it before this is dropped: the server listens only once its files are
/// written, and not while it is down.
#[derive(Debug)]
pub(crate) struct Port {
    pub(crate) number: u16,
    /// The port of this number for UDP, on which no server of the tests listens.
    _reserved: UdpSocket,
}

impl Port {
    /// The port, unless a test has it or somebody listens on it.
    fn reserve(number: u16) -> Option<Self> {
        let reserved = UdpSocket::bind(("127.0.0.1", number)).ok()?;
        let is_free = TcpListener::bind(("127.0.0.1", number)).is_ok();
        is_free.then_some(Self { number, _reserved: reserved })
    }
}

/// A port without a listener, chosen at random.
pub(crate) fn free_port() -> Result<Port> {
    for _ in 0..100 {
        let [high, low, ..] = uuid::Uuid::new_v4().into_bytes();
        let number = PORTS.start + u16::from_be_bytes([high, low]) % (PORTS.end - PORTS.start);
        if let Some(port) = Port::reserve(number) {
            return Ok(port);
        }
    }
    Err(format!("no free port between {} and {}", PORTS.start, PORTS.end).into())
}

/// A password for a short-lived server.
pub(crate) fn password() -> String {
    uuid::Uuid::new_v4().simple().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_free_port_is_in_the_range_for_servers_and_can_be_bound() {
        let port = free_port().unwrap();
        assert!(PORTS.contains(&port.number), "{port:?}");
        let ours = TcpListener::bind(("127.0.0.1", port.number)).unwrap();
        assert_eq!(ours.local_addr().unwrap().port(), port.number);
    }

    #[test]
    fn a_port_whose_server_does_not_listen_yet_is_given_to_nobody_else() {
        let port = free_port().unwrap();
        assert!(Port::reserve(port.number).is_none(), "{port:?}");
    }
}
