//! A browser, controlled over WebDriver.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tempfile::TempDir;

use crate::Result;
use crate::tools::{Tool, find};

/// What Chromium needs to run as any user, without a screen, and without asking any other host.
const ARGUMENTS: [&str; 10] = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    // Shared memory is small in containers.
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
];
/// What the driver prints before its port.
const STARTED: &str = "started successfully on port ";

/// Chromium's driver. It and its browsers end when this is dropped.
#[derive(Debug)]
pub struct Browser {
    driver: Child,
    port: u16,
    directory: TempDir,
    arguments: Vec<String>,
}

impl Browser {
    /// Starts the driver on a loopback port. Its browsers start with a profile of their own.
    ///
    /// # Errors
    /// If it cannot start; the text says why, or what to install.
    pub fn start() -> Result<Self> {
        let tools = [
            Tool { name: "chromium", package: "chromium" },
            Tool { name: "chromedriver", package: "chromium-driver" },
        ];
        let [_, driver] = find(tools)?;
        let directory = TempDir::new()?;
        let mut driver = Command::new(driver)
            .arg("--port=0")
            .env("TMPDIR", directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        let mut lines = BufReader::new(driver.stdout.take().ok_or("the driver has no output")?).lines();
        let port = lines.by_ref().map_while(std::io::Result::ok).find_map(|line| {
            let (_, port) = line.split_once(STARTED)?;
            port.trim_end_matches('.').parse().ok()
        });
        // Later output must not fill the pipe.
        std::thread::spawn(move || lines.for_each(drop));
        let profile = format!("--user-data-dir={}", directory.path().join("profile").display());
        let arguments = ARGUMENTS.iter().map(|argument| (*argument).to_owned()).chain([profile]).collect();
        let mut browser = Self { driver, port: 0, directory, arguments };
        browser.port = port.ok_or("chromedriver ended before it served")?;
        Ok(browser)
    }

    /// Where the driver listens.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// The arguments that a session must give to Chromium.
    pub fn arguments(&self) -> &[String] {
        &self.arguments
    }

    /// A directory for files of the test, removed with the browser.
    pub fn directory(&self) -> &std::path::Path {
        self.directory.path()
    }

    /// Asks the driver to end its browsers, and itself.
    fn shut_down(&self) -> std::io::Result<()> {
        let mut driver = TcpStream::connect(("127.0.0.1", self.port))?;
        driver.set_read_timeout(Some(Duration::from_secs(10)))?;
        driver.write_all(b"GET /shutdown HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        driver.read_to_end(&mut Vec::new()).map(|_| ())
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // It may be gone already; what is left of its group then ends by a signal.
        let _ = self.shut_down();
        if let Some(group) = i32::try_from(self.driver.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.driver.wait();
    }
}
