//! Lifecycle hooks that are commands of the configuration (`subagent_runtime.hooks`).

use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Value as Json, json};
use threadkeep_config::{Hidden, HookCommand};
use threadkeep_processes::ProcessGroup;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, Command};

use super::{HookStore, LifecycleHooks, TaskConclusion, TaskInfo};

/// How much of what a command writes to its standard error is logged, in bytes. The rest is read and dropped.
const SAID_MAX: usize = 2_000;
/// How long to keep reading after the command has ended and its process group was killed. Only a process that left the
/// group can still hold the output open.
const DRAIN_TIME: Duration = Duration::from_millis(100);
const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin";

/// A command that is run for each notification.
pub(super) struct CommandHook {
    command: HookCommand,
}

/// How a command ended.
#[derive(Debug)]
struct Ran {
    status: ExitStatus,
    /// The beginning of its standard error, without the values of its environment.
    said: String,
}

impl CommandHook {
    pub(super) fn new(command: HookCommand) -> Self {
        Self { command }
    }

    /// Runs the command. What it does, or that it cannot be run, changes nothing for the task.
    async fn notify(&self, info: &TaskInfo, notification: &Json) {
        let (program, task_id) = (&self.command.program, &info.task_id);
        match self.run(notification).await {
            Ok(Ran { status, .. }) if status.success() => {}
            Ok(Ran { status, said }) => {
                tracing::warn!(task_id, program, %status, said, "a lifecycle hook's command failed");
            }
            Err(error) => tracing::warn!(task_id, program, %error, "a lifecycle hook's command was not run"),
        }
    }

    /// Runs the command to its end and kills what it leaves. Dropping the future kills all of it.
    async fn run(&self, notification: &Json) -> std::io::Result<Ran> {
        let (mut child, group) = self.spawn()?;
        let (stdin, stderr) = (child.stdin.take(), child.stderr.take());
        let line = format!("{notification}\n");
        let told = async {
            if let Some(mut stdin) = stdin {
                // A command need not read it.
                let _ = stdin.write_all(line.as_bytes()).await;
            }
        };
        let mut said = Vec::new();
        let status = {
            let mut talking = std::pin::pin!(async { tokio::join!(told, read(stderr, &mut said)) });
            let mut all_read = false;
            let status = loop {
                tokio::select! {
                    status = child.wait() => break status?,
                    _ = &mut talking, if !all_read => all_read = true,
                }
            };
            drop(group);
            if !all_read {
                let _ = tokio::time::timeout(DRAIN_TIME, talking).await;
            }
            status
        };
        let hidden = Hidden::of_variables(&self.command.environment);
        Ok(Ran { status, said: hidden.from_cut(String::from_utf8_lossy(&said).trim()) })
    }

    fn spawn(&self) -> std::io::Result<(Child, ProcessGroup)> {
        let command = &self.command;
        ProcessGroup::spawn(
            Command::new(&command.program)
                .args(&command.arguments)
                .env_clear()
                .env("PATH", std::env::var_os("PATH").unwrap_or_else(|| DEFAULT_PATH.into()))
                .envs(command.environment.iter().map(|(name, value)| (name, value.expose())))
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .stderr(Stdio::piped()),
        )
    }
}

/// Reads to the end, and keeps the beginning.
async fn read(stream: Option<impl AsyncRead + Unpin>, kept: &mut Vec<u8>) {
    let Some(mut stream) = stream else { return };
    let mut buffer = vec![0; 4096];
    while let Ok(count @ 1..) = stream.read(&mut buffer).await {
        let room = SAID_MAX - kept.len();
        kept.extend_from_slice(&buffer[..count.min(room)]);
    }
}

/// What a command reads: the event, and the task.
fn notification(event: &str, info: &TaskInfo) -> Json {
    let TaskInfo { task_id, run_id, thread_id, kind, parent_task_id, agent_name, resumed } = info;
    json!({
        "event": event, "task_id": task_id, "run_id": run_id, "thread_id": thread_id, "kind": kind.as_str(),
        "parent_task_id": parent_task_id, "agent_name": agent_name, "resumed": resumed,
    })
}

#[async_trait]
impl LifecycleHooks for CommandHook {
    async fn on_task_start(&self, _: &HookStore, _: &HookStore, info: &TaskInfo) {
        if self.command.on_start {
            self.notify(info, &notification("start", info)).await;
        }
    }

    async fn on_task_stop(&self, _: &HookStore, _: &HookStore, info: &TaskInfo, outcome: TaskConclusion) {
        if self.command.on_stop {
            let mut notification = notification("stop", info);
            notification["outcome"] = json!(outcome.as_str());
            self.notify(info, &notification).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use super::super::tests::info;
    use super::super::{Hooks, MAX_TIME};
    use super::*;

    /// A hook that runs this script for both events, with `$DIR` naming the directory.
    fn hook(dir: &Path, script: &str) -> CommandHook {
        let environment = [("DIR".to_owned(), threadkeep_config::Secret::new(dir.display().to_string()))];
        CommandHook::new(HookCommand {
            program: "sh".into(),
            arguments: vec!["-c".into(), script.into()],
            on_start: true,
            on_stop: true,
            environment: environment.into(),
        })
    }

    fn lines(path: &Path) -> Vec<Json> {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Waits until no process has the pipe open any more; one must have opened it.
    async fn end_of(pipe: std::path::PathBuf) {
        let reading = tokio::task::spawn_blocking(move || std::fs::read(pipe));
        reading.await.unwrap().unwrap();
    }

    fn pipe(dir: &Path) -> std::path::PathBuf {
        let path = dir.join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        path
    }

    /// Scenario 78, for commands.
    #[tokio::test(start_paused = true)]
    async fn s78_a_command_reads_one_object_for_the_start_and_one_for_the_stop() {
        // All cores may be busy: a paused clock does not go on while the runtime waits for such a thread.
        let (_until_the_end, ended) = std::sync::mpsc::channel::<()>();
        tokio::task::spawn_blocking(move || ended.recv());
        let dir = tempfile::tempdir().unwrap();
        let only_stops = HookCommand { on_start: false, ..hook(dir.path(), "cat >> $DIR/stops").command };
        let hooks = Hooks::new(vec![
            Arc::new(hook(dir.path(), "cat >> $DIR/all")) as Arc<dyn LifecycleHooks>,
            Arc::new(hook(dir.path(), "echo no >&2; exit 3")),
            Arc::new(CommandHook::new(HookCommand {
                program: "/no/such/program".into(),
                ..only_stops.clone()
            })),
            Arc::new(CommandHook::new(only_stops)),
        ]);
        hooks.started("call_0", &info()).await;
        hooks.stopped("call_0", &info(), TaskConclusion::Aborted).await;
        let start = json!({"event": "start", "task_id": "e", "run_id": "r", "thread_id": "t", "kind": "subagent",
            "parent_task_id": "r", "agent_name": "bash", "resumed": false});
        let mut stop = start.clone();
        (stop["event"], stop["outcome"]) = (json!("stop"), json!("aborted"));
        assert_eq!(lines(&dir.path().join("all")), [start, stop.clone()]);
        assert_eq!(lines(&dir.path().join("stops")), [stop], "and a failure before it changed nothing");
    }

    /// Scenario 78, for commands.
    #[tokio::test(start_paused = true)]
    async fn s78_a_command_that_hangs_delays_a_task_for_three_seconds() {
        let dir = tempfile::tempdir().unwrap();
        let hooks = Hooks::new(vec![Arc::new(hook(dir.path(), "sleep 1000")) as Arc<dyn LifecycleHooks>]);
        let before = tokio::time::Instant::now();
        hooks.started("call_0", &info()).await;
        assert_eq!(before.elapsed(), MAX_TIME);
    }

    #[tokio::test]
    async fn a_command_that_is_given_up_is_killed_with_all_it_started() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = pipe(dir.path());
        let hook = hook(dir.path(), "exec 3>$DIR/pipe; sleep 1000 & echo > $DIR/begun; sleep 1000");
        let running = tokio::spawn(async move { hook.run(&json!({})).await });
        let ended = tokio::spawn(end_of(pipe));
        while !dir.path().join("begun").exists() {
            tokio::task::yield_now().await;
        }
        running.abort();
        ended.await.unwrap();
    }

    #[tokio::test]
    async fn what_a_command_leaves_in_the_background_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = pipe(dir.path());
        let hook = hook(dir.path(), "exec 3>$DIR/pipe; sleep 1000 & exit 0");
        let (ran, ()) = tokio::join!(hook.run(&Json::Null), end_of(pipe));
        assert!(ran.unwrap().status.success());
    }

    /// What it says goes to the log.
    #[tokio::test]
    async fn no_key_of_a_command_is_in_what_it_says() {
        let dir = tempfile::tempdir().unwrap();
        for script in ["echo bad $TOKEN >&2; exit 3", "printf '%01995d%s' 0 $TOKEN >&2; exit 3"] {
            let mut hook = hook(dir.path(), script);
            hook.command
                .environment
                .insert("TOKEN".to_owned(), threadkeep_config::Secret::new("sk-secret-1"));
            let said = hook.run(&json!({})).await.unwrap().said;
            assert!(said.ends_with("***") && !said.contains("sk-se"), "{said}");
        }
    }

    #[tokio::test]
    async fn what_a_command_says_is_bounded_and_its_environment_is_what_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let ran = hook(dir.path(), "yes out | head -c 1000000; yes err | head -c 1000000 >&2; exit 3");
        let ran = ran.run(&json!({})).await.unwrap();
        assert_eq!((ran.status.code(), ran.said.len()), (Some(3), SAID_MAX - 1), "{ran:?}");
        hook(dir.path(), "env > $DIR/env").run(&json!({})).await.unwrap();
        let names = std::fs::read_to_string(dir.path().join("env")).unwrap();
        let names: Vec<&str> = names.lines().filter_map(|line| Some(line.split_once('=')?.0)).collect();
        // The shell sets the last ones itself.
        assert!(
            names.iter().all(|name| ["PATH", "DIR", "PWD", "OLDPWD", "SHLVL", "_"].contains(name)),
            "{names:?}"
        );
    }
}
