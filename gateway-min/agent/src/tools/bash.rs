//! `bash`: commands on the machine the gateway runs on.
//!
//! This is not a sandbox: a command can do whatever the gateway's user can. It therefore exists only if
//! `sandbox.allow_host_bash` is set. Commands do not see the gateway's environment, which may contain keys, but what
//! `sandbox.environment` names.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde::Deserialize;
use serde_json::{Value, json};
use threadkeep_config::Secret;
use threadkeep_processes::ProcessGroup;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use super::output::HeadAndTail;
use super::workspace::Workspace;
use super::{Tool, ToolContext, ToolError, ToolOutput, ToolSettings, ToolSpec, ToolStatus, blocking, parse};

/// How long to keep reading after a command has ended and its process group was killed. Only a process that left the
/// group can still hold the output open, and it is not waited for.
const DRAIN_TIME: Duration = Duration::from_secs(1);
const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin";

pub(super) struct Bash {
    timeout: Duration,
    max_chars: usize,
    environment: Arc<BTreeMap<String, Secret>>,
}

impl Bash {
    pub(super) fn new(settings: &ToolSettings) -> Self {
        Self {
            timeout: settings.bash_command_timeout,
            max_chars: settings.bash_output_max_chars,
            environment: Arc::clone(&settings.environment),
        }
    }
}

#[derive(Deserialize)]
struct Args {
    command: String,
}

#[async_trait]
impl Tool for Bash {
    fn spec(&self) -> ToolSpec {
        ToolSpec {
            name: "bash".to_owned(),
            description: format!(
                "Runs a bash command in the working directory and returns its output. It has no \
                 terminal and no input, and is stopped after {} seconds. Processes that it leaves in its \
                 process group are stopped too.",
                self.timeout.as_secs()
            ),
            parameters: json!({
                "type": "object",
                "required": ["command"],
                "properties": {"command": {"type": "string", "description": "The command."}},
            }),
        }
    }

    fn output_max_chars(&self) -> usize {
        self.max_chars
    }

    async fn call(&self, context: &ToolContext, args: Value) -> Result<ToolOutput, ToolError> {
        let Args { command } = parse(args)?;
        let root = context.root.clone();
        let root = blocking(move |_| Ok(Workspace::open(&root)?.root().to_owned())).await?;
        let (mut child, group) = spawn(&command, &root, &self.environment)
            .map_err(|error| ToolError::Failed(format!("cannot start the command: {error}")))?;
        let mut output = HeadAndTail::new(self.max_chars.saturating_sub(ENDING_CHARS));
        let status = self.watch(&mut child, group, &mut output).await;
        Ok(result(output.into_text(), status?, self.timeout))
    }
}

impl Bash {
    /// Collects output until the command and its process group have ended, or its time is up. `None` if its time is up.
    async fn watch(
        &self,
        child: &mut Child,
        group: ProcessGroup,
        output: &mut HeadAndTail,
    ) -> Result<Option<ExitStatus>, ToolError> {
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let mut reading = std::pin::pin!(collect(stdout, stderr, output));
        let mut ended = std::pin::pin!(timeout(self.timeout, child.wait()));
        let mut all_read = false;
        let status = loop {
            tokio::select! {
                status = &mut ended => break status,
                () = &mut reading, if !all_read => all_read = true,
            }
        };
        drop(group);
        if !all_read {
            let _ = timeout(DRAIN_TIME, reading).await;
        }
        match status {
            Ok(Ok(status)) => Ok(Some(status)),
            Ok(Err(error)) => Err(ToolError::Failed(format!("cannot wait for the command: {error}"))),
            Err(_) => Ok(None),
        }
    }
}

fn spawn(
    command: &str,
    directory: &Path,
    environment: &BTreeMap<String, Secret>,
) -> std::io::Result<(Child, ProcessGroup)> {
    ProcessGroup::spawn(
        Command::new("bash")
            .arg("-c")
            .arg(command)
            .current_dir(directory)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_else(|| DEFAULT_PATH.into()))
            // The user's real home may contain keys, too.
            .env("HOME", directory)
            .env("LANG", "C.UTF-8")
            .envs(environment.iter().map(|(name, value)| (name, value.expose())))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped()),
    )
}

/// Reads both streams to their ends, in order of arrival.
async fn collect(
    stdout: Option<impl AsyncRead + Unpin>,
    stderr: Option<impl AsyncRead + Unpin>,
    output: &mut HeadAndTail,
) {
    let (mut stdout, mut stderr) = (stdout, stderr);
    let (mut out, mut err) = (vec![0; 8192], vec![0; 8192]);
    while stdout.is_some() || stderr.is_some() {
        tokio::select! {
            count = read(&mut stdout, &mut out) => match count {
                0 => stdout = None,
                count => output.push(&out[..count]),
            },
            count = read(&mut stderr, &mut err) => match count {
                0 => stderr = None,
                count => output.push(&err[..count]),
            },
        }
    }
}

/// Reads available data; 0 at the end or after an error. Without a stream, waits forever.
async fn read(stream: &mut Option<impl AsyncRead + Unpin>, buffer: &mut [u8]) -> usize {
    match stream {
        Some(stream) => stream.read(buffer).await.unwrap_or_default(),
        None => std::future::pending().await,
    }
}

/// Space reserved for the line about how the command ended.
const ENDING_CHARS: usize = 80;

fn result(mut text: String, status: Option<ExitStatus>, limit: Duration) -> ToolOutput {
    let ending = match status {
        None => Some(format!("[stopped after {} seconds]", limit.as_secs_f64())),
        Some(status) => match (status.code(), status.signal()) {
            (Some(0), _) => None,
            (Some(code), _) => Some(format!("[exit code {code}]")),
            (None, signal) => Some(format!("[killed by signal {}]", signal.unwrap_or_default())),
        },
    };
    if let Some(ending) = ending {
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        text.push_str(&ending);
    } else if text.is_empty() {
        text.push_str("(no output)");
    }
    ToolOutput {
        status: if status.is_some() { ToolStatus::Success } else { ToolStatus::Error },
        artifact: json!({"exit_code": status.and_then(|status| status.code())}),
        ..ToolOutput::text(text)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::OpenOptionsExt;
    use std::path::PathBuf;

    use super::*;

    struct Folder(tempfile::TempDir);

    impl Folder {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn context(&self) -> ToolContext {
            ToolContext::new("t", "r", self.0.path())
        }

        async fn run(&self, command: &str) -> ToolOutput {
            self.run_with(&ToolSettings::default(), command).await
        }

        async fn run_with(&self, settings: &ToolSettings, command: &str) -> ToolOutput {
            Bash::new(settings).call(&self.context(), json!({"command": command})).await.unwrap()
        }

        /// A pipe that commands write to and tests read. The reader sees its end when the last process that had it open
        /// dies.
        fn pipe(&self) -> PathBuf {
            let path = self.0.path().join("pipe");
            rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
            path
        }
    }

    /// Waits until a writer has opened the pipe and all writers are gone.
    async fn end_of(pipe: PathBuf) {
        let reading = tokio::task::spawn_blocking(move || std::fs::read(pipe));
        let read = timeout(Duration::from_mins(10), reading).await.expect("a process is still alive");
        read.unwrap().unwrap();
    }

    /// Whether a process has the pipe open for writing.
    fn has_writer(pipe: &Path) -> bool {
        let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let opened = std::fs::OpenOptions::new().read(true).custom_flags(flags).open(pipe);
        std::io::Read::read(&mut opened.unwrap(), &mut [0]).is_err()
    }

    #[tokio::test]
    async fn it_returns_both_outputs_and_the_exit_code() {
        let place = Folder::new();
        let output = place.run("echo out; echo err >&2").await;
        let mut lines: Vec<&str> = output.content.lines().collect();
        lines.sort_unstable();
        assert_eq!(lines, ["err", "out"]);
        assert_eq!((output.status, output.artifact), (ToolStatus::Success, json!({"exit_code": 0})));

        let output = place.run("printf hm; exit 3").await;
        assert_eq!(output.content, "hm\n[exit code 3]");
        assert_eq!((output.status, output.artifact), (ToolStatus::Success, json!({"exit_code": 3})));

        assert_eq!(place.run("true").await.content, "(no output)");
        assert_eq!(place.run("kill -9 $$").await.content, "[killed by signal 9]");
    }

    #[tokio::test]
    async fn it_runs_in_the_directory_and_without_input() {
        let place = Folder::new();
        place.run("echo hello > made.txt; cat").await;
        assert_eq!(std::fs::read_to_string(place.0.path().join("made.txt")).unwrap(), "hello\n");
    }

    #[tokio::test]
    async fn it_sees_nothing_of_the_environment_but_the_path() {
        // bash sets the last three itself.
        let known = ["HOME", "LANG", "PATH", "PWD", "SHLVL", "_"];
        assert!(std::env::vars().any(|(name, _)| !known.contains(&name.as_str())), "nothing to hide");
        let place = Folder::new();
        let output = place.run("env").await;
        let names: Vec<&str> =
            output.content.lines().filter_map(|line| Some(line.split_once('=')?.0)).collect();
        assert!(names.contains(&"PATH") && names.iter().all(|name| known.contains(name)), "{names:?}");
        let home = place.0.path().canonicalize().unwrap();
        assert_eq!(place.run("echo -n $HOME").await.content, home.display().to_string());
    }

    #[tokio::test]
    async fn it_sees_what_the_configuration_gives_it() {
        let environment = [("TOKEN", "t 1"), ("LANG", "C"), ("MAX_SHELL_SESSIONS", "4")];
        let environment = environment.map(|(name, value)| (name.to_owned(), Secret::new(value)));
        let settings = ToolSettings { environment: Arc::new(environment.into()), ..ToolSettings::default() };
        let output = Folder::new().run_with(&settings, "echo -n $TOKEN, $LANG, $MAX_SHELL_SESSIONS").await;
        assert_eq!(output.content, "t 1, C, 4");
    }

    #[tokio::test]
    async fn long_output_keeps_its_beginning_and_end_within_the_limit() {
        let settings = ToolSettings { bash_output_max_chars: 1000, ..ToolSettings::default() };
        let output = Folder::new().run_with(&settings, "echo first; seq 100000; echo last; exit 7").await;
        assert!(output.content.chars().count() <= 1000);
        assert!(output.content.starts_with("first\n1\n2\n"), "{}", output.content);
        assert!(output.content.ends_with("100000\nlast\n[exit code 7]"), "{}", output.content);
        assert!(output.content.contains("bytes omitted]"), "{}", output.content);
    }

    #[tokio::test]
    async fn a_command_beyond_its_time_is_killed() {
        let place = Folder::new();
        let pipe = place.pipe();
        let settings =
            ToolSettings { bash_command_timeout: Duration::from_millis(300), ..ToolSettings::default() };
        let output = place.run_with(&settings, "exec 3<>pipe; echo begun; sleep 1000").await;
        assert!(output.content.ends_with("[stopped after 0.3 seconds]"), "{}", output.content);
        assert_eq!((output.status, output.artifact), (ToolStatus::Error, json!({"exit_code": null})));
        // A killed process closes its files shortly after the kill.
        let closed = async {
            while has_writer(&pipe) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(Duration::from_mins(10), closed).await.expect("the command is still alive");
    }

    #[tokio::test]
    async fn what_a_command_leaves_in_the_background_is_killed() {
        let place = Folder::new();
        let pipe = place.pipe();
        // If the background process were not killed, the call would wait for the end of its output.
        let (output, ()) = tokio::join!(place.run("exec 3>pipe; sleep 1000 & echo done"), end_of(pipe));
        assert_eq!(output.content, "done\n");
    }

    #[tokio::test]
    async fn dropping_the_call_kills_the_command_with_all_it_started() {
        let place = Folder::new();
        let pipe = place.pipe();
        let context = place.context();
        let call = tokio::spawn(async move {
            let command = json!({"command": "exec 3>pipe; echo begun >&3; sleep 1000 & sleep 1000"});
            Bash::new(&ToolSettings::default()).call(&context, command).await
        });
        let opened = tokio::task::spawn_blocking(move || {
            let mut pipe = std::fs::File::open(pipe).unwrap();
            let mut begun = [0; 6];
            std::io::Read::read_exact(&mut pipe, &mut begun).unwrap();
            pipe
        });
        let mut pipe = timeout(Duration::from_mins(10), opened).await.unwrap().unwrap();
        call.abort();
        assert!(call.await.unwrap_err().is_cancelled());
        let rest =
            tokio::task::spawn_blocking(move || std::io::Read::read_to_end(&mut pipe, &mut Vec::new()));
        let rest = timeout(Duration::from_mins(10), rest).await.expect("a process is still alive");
        assert_eq!(rest.unwrap().unwrap(), 0);
    }
}
