//! Operators, who repeat their commands whatever else happens.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use threadkeep_testing::unconfigured;
use tokio_util::sync::CancellationToken;

use super::Scene;
use crate::{configured, on_postgres};

/// What operators do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Task {
    Retention,
    Prune,
    PruneToLatest,
    /// To the mode that the store has.
    Convert,
    Verify,
    List,
    Usage,
    SetUp,
    /// Exports every thread, and imports what was exported into another store.
    Move,
}

const ALL: [Task; 9] = [
    Task::Retention,
    Task::Prune,
    Task::PruneToLatest,
    Task::Convert,
    Task::Verify,
    Task::List,
    Task::Usage,
    Task::SetUp,
    Task::Move,
];

/// How long a command may take: a pass gives up a busy thread after a minute.
const LONGEST: Duration = Duration::from_mins(15);
/// What an error says of a thread that somebody kept writing to.
const IN_USE: &str = "was changed since it was read";
/// What no fault explains.
const DAMAGE: [&str; 3] = ["corrupt data", "broken lineage", "lost changes"];

/// What became of the tasks.
#[derive(Default)]
pub(super) struct Done(BTreeMap<Task, Ends>);

/// How often a task ended how.
#[derive(Clone, Copy, Default)]
struct Ends {
    succeeded: usize,
    /// Failed, and the database was away, or ended its sessions, meanwhile.
    disturbed: usize,
    /// Left threads as they were because these were in use.
    in_use: usize,
}

impl fmt::Display for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (task, Ends { succeeded, disturbed, in_use }) in &self.0 {
            let task = format!("{task:?}");
            writeln!(f, "{task:<20} {succeeded:>5} (disturbed: {disturbed}, threads in use: {in_use})")?;
        }
        let succeeded: usize = self.0.values().map(|ends| ends.succeeded).sum();
        write!(f, "{:<20} {succeeded:>5}", "commands done")
    }
}

/// Does one task after the other, until it is over: each once in the beginning, then any.
pub(super) async fn work(scene: Arc<Scene>, over: CancellationToken, seed: u64) -> Done {
    let mut choices = StdRng::seed_from_u64(seed);
    let mut done = Done::default();
    while !over.is_cancelled() {
        let missing: Vec<Task> = ALL.into_iter().filter(|task| !done.0.contains_key(task)).collect();
        let among = if missing.is_empty() { &ALL[..] } else { &missing };
        done.once(&scene, among[choices.random_range(0..among.len())]).await;
        tokio::time::sleep(Duration::from_millis(choices.random_range(100..800))).await;
    }
    done
}

impl Done {
    /// Does each task that has not succeeded yet, where nothing is in its way any more.
    pub(super) async fn rest(&mut self, scene: &Arc<Scene>) {
        for task in ALL {
            if self.succeeded(task) == 0 {
                self.once(scene, task).await;
                assert!(self.succeeded(task) > 0, "{task:?} fails although nothing is in its way");
            }
        }
    }

    fn succeeded(&self, task: Task) -> usize {
        self.0.get(&task).map_or(0, |ends| ends.succeeded)
    }

    /// Does a task, which may fail only because of the database or of threads in use.
    async fn once(&mut self, scene: &Arc<Scene>, task: Task) {
        let before = scene.disturbances.load(Ordering::SeqCst);
        let (code, said) = task.run(scene).await;
        let is_disturbed = before % 2 == 1 || scene.disturbances.load(Ordering::SeqCst) != before;
        let is_damage = DAMAGE.iter().any(|text| said.contains(*text));
        let ends = self.0.entry(task).or_default();
        match code {
            Some(0) => ends.succeeded += 1,
            Some(1) if is_disturbed && !is_damage => ends.disturbed += 1,
            Some(1) if said.contains(IN_USE) && !is_damage => ends.in_use += 1,
            _ => panic!("{task:?} ends with {code:?}: {said}"),
        }
    }
}

impl Task {
    /// The exit code, and what was printed.
    async fn run(self, scene: &Arc<Scene>) -> (Option<i32>, String) {
        let arguments: &[&str] = match self {
            Self::Retention => &["retention", "apply", "--all", "--yes"],
            Self::Prune => {
                &["prune", "apply", "--all", "--keep", "last:30", "--boundary", "fresh-snapshot", "--yes"]
            }
            Self::PruneToLatest => {
                &["prune", "apply", "--all", "--keep", "latest", "--boundary", "fresh-snapshot", "--yes"]
            }
            Self::Convert => &["convert", "--all", "--to", scene.mode],
            Self::Verify => &["verify", "--all"],
            Self::List => &["threads", "list"],
            Self::Usage => &["threads", "du"],
            Self::SetUp => {
                let desk = on_postgres(scene.database.url(), scene.mode);
                return ended(configured_command(desk.path(), &["setup"])).await;
            }
            Self::Move => return moved(scene).await,
        };
        on_store(scene, arguments).await
    }
}

/// Exports every thread. What was exported can be imported into another store, and is whole there.
async fn moved(scene: &Arc<Scene>) -> (Option<i32>, String) {
    let elsewhere = configured(scene.mode);
    let path = elsewhere.path().join("exported");
    let files = path.to_str().unwrap();
    let exported = on_store(scene, &["export", "--all", "--out", files]).await;
    if exported.0 != Some(0) {
        return exported;
    }
    for arguments in [&["setup"][..], &["import", files, "--no-owner"], &["verify", "--all"]] {
        let (code, said) = ended(configured_command(elsewhere.path(), arguments)).await;
        assert_eq!(code, Some(0), "{arguments:?} elsewhere: {said}");
    }
    exported
}

/// Runs a command on the database of the gateways; returns its exit code and what it printed.
pub(super) async fn on_store(scene: &Arc<Scene>, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = unconfigured(env!("CARGO_BIN_EXE_threadkeep"));
    command.args(arguments).args(["--postgres", scene.database.url()]);
    ended(command).await
}

/// A command on the stores that are configured in this directory.
fn configured_command(dir: &Path, arguments: &[&str]) -> Command {
    let mut command = unconfigured(env!("CARGO_BIN_EXE_threadkeep"));
    command.current_dir(dir).args(arguments).args(["--config", "config.yaml"]);
    command.env("SVC_HOME", dir.join("state"));
    command
}

async fn ended(mut command: Command) -> (Option<i32>, String) {
    command.stdin(Stdio::null());
    let shown = format!("{:?}", command.get_args());
    let output = tokio::task::spawn_blocking(move || command.output().unwrap());
    let output = tokio::time::timeout(LONGEST, output).await;
    let output = output.unwrap_or_else(|_| panic!("{shown} does not end")).unwrap();
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output.status.code(), said)
}
