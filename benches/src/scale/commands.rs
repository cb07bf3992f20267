//! Operator commands, each a process that is measured.

use std::fs::{self, File};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value as Json;

use super::{Grows, Measured, Used};
use crate::load::gateway::command;
use crate::measure::ms;
use crate::meter::Process;

/// How often a running process is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// The commands, on the store of a gateway's directory.
#[derive(Clone, Copy)]
pub(super) struct Commands<'a> {
    pub(super) binary: &'a Path,
    pub(super) directory: &'a Path,
}

impl Commands<'_> {
    /// Runs the commands that change nothing.
    pub(super) async fn read(&self) -> Result<Vec<Measured>> {
        let newest = self.checkpoints(2)?;
        ensure!(newest.len() == 2, "{} checkpoints in place of two", newest.len());
        let [head, before] = [0, 1].map(|at| newest[at].as_str());
        let long = "long-delta";
        // A line of a checkpoint has the number of its messages, and their size: the list is read once.
        let list: [(Grows, &[&str]); 23] = [
            (Grows::No, &["setup"]),
            (Grows::No, &["threads", "list", "--limit", "20"]),
            (Grows::Thread, &["threads", "show", long]),
            (Grows::Thread, &["threads", "du", "--thread", long]),
            (Grows::Store, &["threads", "du"]),
            (Grows::Thread, &["checkpoints", "list", "--thread", long, "--limit", "20"]),
            (Grows::Thread, &["checkpoints", "show", head, "--thread", long]),
            (Grows::Thread, &["checkpoints", "diff", before, head, "--thread", long]),
            (Grows::Thread, &["state", "get", "--thread", long]),
            (Grows::Thread, &["retention", "plan", "--thread", long, "--summary"]),
            (Grows::Store, &["retention", "plan", "--all", "--summary"]),
            (Grows::Thread, &["prune", "plan", "--thread", long, "--keep", "last:100", "--summary"]),
            (Grows::Store, &["prune", "plan", "--all", "--keep", "last:100", "--summary"]),
            (Grows::Store, &["prune", "plan", "--all", "--keep", "since:30d", "--summary"]),
            (Grows::Thread, &["delegations", "tree", long]),
            (Grows::Thread, &["delegations", "verify", long]),
            (Grows::Thread, &["batches", "list", long]),
            (Grows::Thread, &["verify", "--thread", long]),
            (Grows::Store, &["verify", "--all"]),
            (Grows::Thread, &["export", "--thread", long, "--out", "long.ndjson"]),
            (Grows::Store, &["export", "--all", "--out", "exported"]),
            (Grows::Thread, &["convert", "--thread", long, "--to", "full", "--dry-run"]),
            (Grows::Store, &["backup", "--out", "backup.db"]),
        ];
        self.all(&list).await
    }

    /// Runs the commands that change the store. In the end it has the threads again that [`Self::read`] exported.
    pub(super) async fn change(&self) -> Result<Vec<Measured>> {
        let keep = ["--keep", "last:100", "--boundary", "fresh-snapshot", "--yes"];
        let long = [&["prune", "apply", "--thread", "long-delta"][..], &keep].concat();
        let all = [&["prune", "apply", "--all"][..], &keep].concat();
        let list: [(Grows, &[&str]); 13] = [
            (Grows::No, &["keys", "create", "--user", "ann"]),
            (Grows::No, &["keys", "list"]),
            (Grows::Store, &["verify", "--all", "--repair", "--yes"]),
            (Grows::Thread, &["import", "long.ndjson", "--as", "imported", "--owner", "default"]),
            (Grows::Thread, &["convert", "--thread", "imported", "--to", "full"]),
            (Grows::Store, &["retention", "apply", "--all", "--yes"]),
            (Grows::Thread, &long),
            (Grows::Store, &all),
            (Grows::Store, &["vacuum"]),
            (Grows::Store, &["prune", "apply", "--all", "--keep", "nothing", "--yes"]),
            (Grows::Store, &["import", "exported", "--owner", "default"]),
            // The mode of the configuration.
            (Grows::Store, &["convert", "--all", "--to", "delta"]),
            (Grows::Store, &["vacuum", "--full"]),
        ];
        self.all(&list).await
    }

    async fn all(&self, list: &[(Grows, &[&str])]) -> Result<Vec<Measured>> {
        let mut rows = Vec::with_capacity(list.len());
        let is_on_postgres = self.is_on_postgres()?;
        for (grows, args) in list {
            // Postgres has its own programs for copies, and vacuums by itself.
            if is_on_postgres && ["backup", "vacuum"].contains(&args[0]) {
                continue;
            }
            let used = self.measure(args).await.with_context(|| args.join(" "))?;
            let shown = args.iter().map(|arg| if arg.len() == 36 { "ID" } else { arg });
            rows.push((shown.collect::<Vec<_>>().join(" "), *grows, used));
        }
        Ok(rows)
    }

    fn is_on_postgres(&self) -> Result<bool> {
        Ok(fs::read_to_string(self.directory.join("config.yaml"))?.contains("\"backend\":\"postgres\""))
    }

    /// Runs a command to its end. It must succeed.
    pub(super) async fn measure(&self, args: &[&str]) -> Result<Used> {
        let (out, log) = (self.directory.join("printed"), self.directory.join("errors"));
        let mut command = command(self.binary, self.directory);
        command.args(args).args(["--config", "config.yaml"]).stdin(Stdio::null());
        let began = Instant::now();
        let mut child = command.stdout(File::create(&out)?).stderr(File::create(&log)?).spawn()?;
        let process = Process::of(child.id());
        let (mut peak, mut read) = (0, 0);
        // The figures of a process that has ended can be read until it is waited for, except for its memory.
        while !process.has_ended() {
            peak = process.peak().max(peak);
            read = process.read().max(read);
            tokio::time::sleep(LOOK_EVERY).await;
        }
        let wall = began.elapsed();
        let (cpu, read) = (process.cpu(), process.read().max(read));
        let status = child.wait()?;
        ensure!(status.success(), "{status}: {}", fs::read_to_string(&log)?);
        Ok(Used { wall_ms: ms(wall), cpu_ms: ms(cpu), peak, read, printed: fs::metadata(&out)?.len() })
    }

    /// An old checkpoint of a long thread.
    pub(super) fn old(&self) -> Result<String> {
        let mut all = self.checkpoints(10_000_000)?;
        ensure!(!all.is_empty(), "a long thread has no checkpoints");
        Ok(all.swap_remove(all.len() * 3 / 4))
    }

    /// The newest checkpoints of a long thread.
    fn checkpoints(&self, limit: usize) -> Result<Vec<String>> {
        let mut command = command(self.binary, self.directory);
        command.args([
            "checkpoints",
            "list",
            "--thread",
            "long-delta",
            "--limit",
            &limit.to_string(),
            "--json",
        ]);
        let output = command.args(["--config", "config.yaml"]).output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout)?;
        let ids = text.lines().map(|line| {
            let id = serde_json::from_str::<Json>(line)?["checkpoint"].as_str().map(str::to_owned);
            id.context("a checkpoint without an id")
        });
        ids.collect()
    }
}
