//! The commands that set up a gateway (keys, the configuration file, where it may listen), and the console.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test.

#[path = "commands/chat.rs"]
mod chat;
#[cfg(unix)]
#[path = "commands/delegation.rs"]
mod delegation;
#[cfg(unix)]
#[path = "commands/tui.rs"]
mod tui;

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use tempfile::TempDir;
use threadkeep_testing::unconfigured;

fn command(dir: &Path, arguments: &[&str]) -> Command {
    let mut command = unconfigured(env!("CARGO_BIN_EXE_threadkeep"));
    command.current_dir(dir).args(arguments).env("SVC_HOME", dir.join("state"));
    command
}

/// Runs a command to its end: exit code, stdout, stderr.
fn ran(dir: &Path, arguments: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command(dir, arguments).output().unwrap();
    (status.code().unwrap(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

/// A gateway that serves; killed when dropped.
struct Serving {
    child: Child,
    /// What it had printed when it began to serve.
    said: String,
    base: String,
}

impl Serving {
    fn start(dir: &Path, arguments: &[&str]) -> Self {
        let arguments = [&["serve", "--port", "0"], arguments].concat();
        let mut child = command(dir, &arguments).stderr(Stdio::piped()).spawn().unwrap();
        let mut reader = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        let base = loop {
            let before = said.len();
            assert_ne!(reader.read_line(&mut said).unwrap(), 0, "it ended before it served: {said}");
            if let Some((_, rest)) = said[before..].split_once("serving on ") {
                break rest.split([',', ' ']).next().unwrap().to_owned();
            }
        };
        // Later output must not fill the pipe.
        std::thread::spawn(move || reader.read_to_end(&mut Vec::new()));
        Self { child, said, base }
    }

    async fn status(&self, headers: &[(&str, &str)]) -> u16 {
        rustls::crypto::ring::default_provider().install_default().ok();
        let base = self.base.replace("0.0.0.0", "127.0.0.1");
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let mut request = client.get(format!("{base}/api/models"));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.send().await.unwrap().status().as_u16()
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn with_config(text: &str) -> TempDir {
    let dir = TempDir::new().unwrap();
    std::fs::write(dir.path().join("config.yaml"), text).unwrap();
    dir
}

#[tokio::test]
async fn a_key_is_made_listed_used_and_revoked_while_the_gateway_runs() {
    let dir = with_config("config_version: 49\ndatabase: {backend: memory}\nauth: {enabled: true}\n");
    let gateway = Serving::start(dir.path(), &[]);
    assert!(gateway.said.contains("no API key yet"), "{}", gateway.said);
    assert_eq!(gateway.status(&[]).await, 401);

    let (code, key, said) = ran(dir.path(), &["keys", "create", "--user", "ann", "--role", "admin"]);
    let key = key.trim_end();
    assert_eq!(code, 0, "{said}");
    assert!(key.starts_with("tk_") && said.contains("ann") && said.contains("admin"), "{key} {said}");
    assert_eq!(gateway.status(&[("x-api-key", key)]).await, 200);
    assert_eq!(gateway.status(&[("authorization", &format!("Bearer {key}"))]).await, 200);

    let id = key.split('_').nth(1).unwrap();
    let (code, listed, _) = ran(dir.path(), &["keys", "list"]);
    assert_eq!(code, 0);
    assert!(listed.contains(id) && listed.contains("ann") && listed.contains("admin"), "{listed}");
    let (_, json, _) = ran(dir.path(), &["keys", "list", "--json"]);
    let record: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(
        (&record["id"], &record["user"], &record["role"]),
        (&id.into(), &"ann".into(), &"admin".into())
    );
    let secret = key.split('_').nth(2).unwrap();
    assert!(!listed.contains(secret) && !json.contains(secret));

    let (code, said, _) = ran(dir.path(), &["keys", "revoke", id]);
    assert_eq!((code, said.trim_end()), (0, format!("revoked key {id} of ann").as_str()));
    assert_eq!(gateway.status(&[("x-api-key", key)]).await, 401);
    let (code, _, said) = ran(dir.path(), &["keys", "revoke", id]);
    assert!(code == 1 && said.contains(id) && said.contains("keys list"), "{said}");
    assert_eq!(ran(dir.path(), &["keys", "create", "--user", "a b"]).0, 1);
    assert_eq!(ran(dir.path(), &["keys", "create", "--user", "a", "--role", "king"]).0, 2);
}

#[tokio::test]
async fn other_addresses_are_listened_to_only_with_keys_or_if_the_operator_says_so() {
    let dir = with_config("config_version: 49\ndatabase: {backend: sqlite}\n");
    for host in ["0.0.0.0", "::"] {
        let (code, _, said) = ran(dir.path(), &["serve", "--host", host, "--port", "0"]);
        assert_eq!(code, 1, "{said}");
        for part in ["--allow-unauthenticated", "auth.allow_unauthenticated", "auth.enabled", "keys create"] {
            assert!(said.contains(part), "{part}: {said}");
        }
    }
    assert!(!dir.path().join("state").exists(), "refused before anything was opened");

    let elsewhere = [("host", "agents.example")];
    let local = Serving::start(dir.path(), &[]);
    assert_eq!((local.status(&[]).await, local.status(&elsewhere).await), (200, 403));
    drop(local);
    let open = Serving::start(dir.path(), &["--host", "0.0.0.0", "--allow-unauthenticated"]);
    assert!(open.said.contains("WARN"), "{}", open.said);
    assert_eq!((open.status(&[]).await, open.status(&elsewhere).await), (200, 200));
    drop(open);
    std::fs::write(
        dir.path().join("config.yaml"),
        "config_version: 49\nauth: {allow_unauthenticated: true}\n",
    )
    .unwrap();
    assert_eq!(Serving::start(dir.path(), &["--host", "0.0.0.0"]).status(&elsewhere).await, 200);
    std::fs::write(dir.path().join("config.yaml"), "config_version: 49\nauth: {enabled: true}\n").unwrap();
    let keyed = Serving::start(dir.path(), &["--host", "0.0.0.0"]);
    assert_eq!((keyed.status(&[]).await, keyed.status(&elsewhere).await), (401, 401));
}

#[tokio::test]
async fn the_env_file_says_where_to_listen_if_the_command_line_does_not() {
    let dir = with_config("config_version: 49\ndatabase: {backend: memory}\n");
    let variables = "GATEWAY_HOST=0.0.0.0\nGATEWAY_PORT=1\nGATEWAY_ALLOW_UNAUTHENTICATED=true\n";
    std::fs::write(dir.path().join(".env"), variables).unwrap();
    let open = Serving::start(dir.path(), &[]);
    assert!(open.base.starts_with("http://0.0.0.0:"), "{}", open.base);
    assert_eq!(open.status(&[("host", "agents.example")]).await, 200);
    drop(open);
    let local = Serving::start(dir.path(), &["--host", "127.0.0.1"]);
    assert!(local.base.starts_with("http://127.0.0.1:"), "{}", local.base);
}

/// Kubernetes sets the variable in each container beside a service of the name `gateway`.
#[test]
fn the_address_of_a_service_is_not_taken_for_the_port() {
    let dir = with_config("config_version: 49\ndatabase: {checkpoint_channel_mode: sideways}\n");
    let mut serve = command(dir.path(), &["serve"]);
    let output = serve.env("GATEWAY_PORT", "tcp://10.96.0.7:8001").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && said.contains("checkpoint_channel_mode"), "{said}");
}

#[test]
fn a_configuration_is_upgraded_once() {
    let old = "# mine\nconfig_version: 26\ndatabase:\n  checkpoint_delta_snapshot_frequency: 1000  # slow\n";
    let dir = with_config(old);
    let file = dir.path().join("config.yaml");
    let (code, said, _) = ran(dir.path(), &["config", "upgrade"]);
    assert_eq!(code, 0, "{said}");
    for part in [
        "version 26 -> 49",
        "added database.checkpoint_channel_mode",
        "added auth",
        "config.yaml.bak",
        "moved",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let new = std::fs::read_to_string(&file).unwrap();
    let head =
        "# mine\nconfig_version: 49\ndatabase:\n  checkpoint_delta:\n    snapshot_frequency: 1000  # slow\n";
    assert!(new.starts_with(head), "{new}");
    assert_eq!(std::fs::read_to_string(dir.path().join("config.yaml.bak")).unwrap(), old);
    let (code, said, _) = ran(dir.path(), &["config", "upgrade"]);
    assert_eq!((code, said.as_str()), (0, "OK config.yaml is already up to date (version 49).\n"));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), new);

    std::fs::write(&file, "models: [\n").unwrap();
    let (code, _, said) = ran(dir.path(), &["config", "upgrade"]);
    assert!(code == 1 && said.contains("is not valid YAML"), "{said}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "models: [\n");
}
