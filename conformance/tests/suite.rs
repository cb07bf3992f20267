//! The suite and the contract name the same cases, and a report is complete.

use std::collections::BTreeSet;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::json;
use threadkeep::Result;
use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple, TaskWrites};
use threadkeep::id::{ChannelName, CheckpointId, ThreadId};
use threadkeep::saver::{
    Capabilities, CheckpointSelector, DeltaHistory, ListQuery, Revision, Rewrite, Saver, StepCommit,
    ThreadImage,
};
use threadkeep_conformance::{BoxError, Claim, Factory, Level, Settings, Verdict, cases, run};
use threadkeep_memory::MemorySaver;

/// The source of the contract, whose bullets are case names.
fn contract() -> String {
    let engine = concat!(env!("CARGO_MANIFEST_DIR"), "/../engine/src");
    let file = ["saver.rs", "saver/mod.rs"].map(|file| format!("{engine}/{file}"));
    file.iter().find_map(|file| std::fs::read_to_string(file).ok()).unwrap_or_default()
}

#[test]
fn every_bullet_of_the_contract_is_a_case() {
    let contract = contract();
    let bullets: BTreeSet<&str> = contract
        .lines()
        .filter_map(|line| line.trim().strip_prefix("/// - `")?.split_once('`'))
        .map(|(name, _)| name)
        .collect();
    assert!(bullets.len() >= 32, "the bullets of the contract were not recognised: {bullets:?}");
    let names: BTreeSet<&str> = cases().iter().map(|case| case.name).collect();
    let missing: Vec<_> = bullets.difference(&names).collect();
    assert!(missing.is_empty(), "bullets without a case: {missing:?}");
}

#[test]
fn every_case_that_the_coverage_names_is_there() {
    let names: BTreeSet<&str> = cases().iter().map(|case| case.name).collect();
    let mut found = 0;
    for row in include_str!("../COVERAGE.md").lines().filter(|line| line.starts_with('|')) {
        // The first column contains names of other projects.
        for cell in row.split('|').skip(2) {
            let quoted = cell.split('`').skip(1).step_by(2);
            for name in quoted.filter(|name| name.contains('_') && !name.contains(['*', '.', '/'])) {
                assert!(names.contains(name), "COVERAGE.md names {name}, which is not a case");
                found += 1;
            }
        }
    }
    assert!(found > 80, "only {found} names were recognised");
}

#[test]
fn names_are_unique_and_every_case_says_why() {
    let all = cases();
    let names: BTreeSet<&str> = all.iter().map(|case| case.name).collect();
    assert_eq!(names.len(), all.len());
    assert!(all.iter().all(|case| case.why.len() > 10));
    for level in Level::ALL {
        assert!(all.iter().any(|case| case.level == level), "no case at level {level}");
    }
    let needy = |claim| all.iter().filter(|case| case.needs == Some(claim)).count();
    assert_eq!(needy(Claim::Durable), 6);
    assert_eq!((needy(Claim::Killable), needy(Claim::FailOperations)), (3, 1));
    let others = [Claim::LoseCheckpoint, Claim::LoseWrites, Claim::LoseParentLink, Claim::ChangeByte];
    for claim in others.into_iter().chain([Claim::SharedElements, Claim::StoredBytes, Claim::WritesAsItComes])
    {
        assert_eq!(needy(claim), 1, "{claim}");
    }
}

/// Claims nothing, and opens what it creates in this way.
struct Plain(fn(&MemorySaver) -> Result<Arc<dyn Saver>, BoxError>);

#[async_trait]
impl Factory for Plain {
    type Storage = MemorySaver;

    fn name(&self) -> &'static str {
        "plain"
    }

    async fn create(&self) -> Result<MemorySaver, BoxError> {
        Ok(MemorySaver::new())
    }

    async fn open(&self, place: &MemorySaver) -> Result<Arc<dyn Saver>, BoxError> {
        (self.0)(place)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_claimed_is_reported_as_such() {
    let opens = Plain(|place| Ok(Arc::new(place.clone())));
    let report =
        run(opens, Settings::default(), |case| case.needs.is_some() || case.name.starts_with("get_by")).await;
    assert!(report.cases.iter().all(|report| match report.case.needs {
        Some(_) => report.verdict == Verdict::NotClaimed,
        None => report.verdict == Verdict::Passed,
    }));
    let text = report.to_string();
    let lines: Vec<&str> = text.lines().collect();
    let get = "core         get_by_id_is_exact                                     passed";
    assert!(lines.contains(&get), "{text}");
    let reopened = "durability   a_reopened_store_goes_on                               not claimed: durable";
    assert!(lines.contains(&reopened), "{text}");
    let summary = "plain: 1 passed, 0 failed, 17 not claimed (seed 1, 128 programs)";
    assert_eq!(lines.last(), Some(&summary));
    let core = "core            1 passed     0 failed     1 not claimed";
    assert!(lines.contains(&core), "{text}");

    let badge = report.to_badge();
    assert_eq!((&badge["message"], &badge["color"]), (&"1 of 1".into(), &"brightgreen".into()));
    let json = report.to_json();
    assert_eq!((&json["saver"], &json["seed"]), (&"plain".into(), &1.into()));
    assert_eq!((&json["passed"], &json["failed"], &json["not_claimed"]), (&1.into(), &0.into(), &17.into()));
    let cases = json["cases"].as_array().expect("a list");
    assert_eq!(cases.len(), 18);
    assert!(cases.iter().all(|case| case["seconds"].is_number() == (case["verdict"] == "passed")));
    let reopened =
        cases.iter().find(|case| case["name"] == "a_reopened_store_goes_on").expect("the report has it");
    assert_eq!(
        *reopened,
        json!({
            "name": "a_reopened_store_goes_on", "level": "durability", "verdict": "not claimed",
            "why": "a thread could not be continued after a restart", "needs": "durable",
        })
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_says_what_why_and_where() {
    let closed = Plain(|_| Err("the door is locked".into()));
    let report = run(closed, Settings::default(), |case| case.name == "get_by_id_is_exact").await;
    assert_eq!(report.failed(), ["get_by_id_is_exact"]);
    let text = report.to_string();
    for part in [
        "core         get_by_id_is_exact  FAILED",
        "otherwise a client that names a checkpoint would get the state of another one",
        "the door is locked",
        "again: case get_by_id_is_exact, PROPTEST_RNG_SEED=1",
        "plain: 0 passed, 1 failed, 0 not claimed",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    assert_eq!(report.to_badge()["color"], "red");
    let failed = &report.to_json()["cases"][0];
    assert_eq!(failed["verdict"], "failed");
    assert!(failed["failure"].as_str().is_some_and(|what| what.contains("the door is locked")), "{failed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_case_that_is_only_slow_says_how_much_it_has_done() {
    // As one to a distant server.
    let slow = Plain(|place| {
        std::thread::sleep(Duration::from_secs(1));
        Ok(Arc::new(place.clone()))
    });
    // Its 128 programs open a handle each.
    let settings = Settings { limit: Duration::from_secs(10), ..Settings::default() };
    let report = run(slow, settings, |case| case.name == "random_programs_agree_with_the_model").await;
    let text = report.to_string();
    assert_eq!(report.failed(), ["random_programs_agree_with_the_model"], "{text}");
    let calls = text
        .split_once("    it began ")
        .and_then(|(_, rest)| rest.split_once(" calls; if they are only slow"));
    let calls: u32 = calls.expect("a number of calls").0.parse().expect("a number");
    assert!(calls > 1, "{text}");
}

/// Otherwise it would run the suite of the first factory before it did what its parent waits for.
#[test]
fn a_child_of_another_factory_says_so_and_runs_no_suite() {
    const CHILD_OF: &str = "THREADKEEP_CONFORMANCE_CHILD_OF";
    if std::env::var_os(CHILD_OF).is_some() {
        let first = Plain(|place| Ok(Arc::new(place.clone())));
        assert_eq!(threadkeep_conformance::main(first), ExitCode::FAILURE);
        return;
    }
    let child = Command::new(std::env::current_exe().expect("this program has a path"))
        .args(["--exact", "a_child_of_another_factory_says_so_and_runs_no_suite", "--nocapture"])
        .env(CHILD_OF, "second")
        .output()
        .expect("it starts");
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success(), "{said}");
    assert!(said.contains("threadkeep-child: failed: it is for \"second\"; its main must call"), "{said}");
}

/// Where a factory or its saver hangs.
#[derive(Debug, Clone, Copy)]
enum Stuck {
    Creating,
    /// A call that waits, and lets its thread do other work.
    Waiting,
    /// A call that keeps its thread.
    Blocking,
}

struct Hanging(Stuck, MemorySaver);

#[async_trait]
impl Factory for Stuck {
    type Storage = MemorySaver;

    fn name(&self) -> &'static str {
        "stuck"
    }

    async fn create(&self) -> Result<MemorySaver, BoxError> {
        if matches!(self, Self::Creating) {
            std::future::pending::<()>().await;
        }
        Ok(MemorySaver::new())
    }

    async fn open(&self, place: &MemorySaver) -> Result<Arc<dyn Saver>, BoxError> {
        Ok(Arc::new(Hanging(*self, place.clone())))
    }
}

#[async_trait]
impl Saver for Hanging {
    async fn get(&self, at: &CheckpointSelector) -> Result<Option<CheckpointTuple>> {
        self.1.get(at).await
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<CheckpointTuple>> {
        self.1.list(query).await
    }

    async fn put_writes(&self, at: &CheckpointKey, task: &TaskWrites) -> Result<()> {
        self.1.put_writes(at, task).await
    }

    async fn commit(&self, step: StepCommit) -> Result<CheckpointKey> {
        if step.parent.is_some() {
            match self.0 {
                Stuck::Blocking => loop {
                    std::thread::park();
                },
                _ => std::future::pending::<()>().await,
            }
        }
        self.1.commit(step).await
    }

    async fn flush(&self, thread: &ThreadId) -> Result<()> {
        self.1.flush(thread).await
    }

    async fn delta_history(
        &self,
        at: &CheckpointKey,
        channels: &BTreeSet<ChannelName>,
        reach: Option<CheckpointId>,
    ) -> Result<DeltaHistory> {
        self.1.delta_history(at, channels, reach).await
    }

    async fn delete_thread(&self, thread: &ThreadId) -> Result<()> {
        self.1.delete_thread(thread).await
    }

    async fn threads(&self, after: Option<&ThreadId>, limit: usize) -> Result<Vec<ThreadId>> {
        self.1.threads(after, limit).await
    }

    async fn read_thread(&self, thread: &ThreadId) -> Result<ThreadImage> {
        self.1.read_thread(thread).await
    }

    async fn rewrite_thread(&self, thread: &ThreadId, expected: &Revision, rewrite: Rewrite) -> Result<()> {
        self.1.rewrite_thread(thread, expected, rewrite).await
    }

    fn capabilities(&self) -> Capabilities {
        self.1.capabilities()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_case_that_never_ends_is_reported() {
    let settings = Settings { limit: Duration::from_secs(20), ..Settings::default() };
    let commit = "commit of checkpoint 01935a00-0014-7000-8001-020304050607 to \"t\"";
    for (stuck, what) in
        [(Stuck::Creating, "a new store of the factory"), (Stuck::Waiting, commit), (Stuck::Blocking, commit)]
    {
        // The cases after it still run.
        let report =
            run(stuck, settings, |case| ["get_by_id_is_exact", "get_unknown_is_none"].contains(&case.name))
                .await;
        let text = report.to_string();
        let failed = report.failed();
        assert!(failed.contains(&"get_by_id_is_exact"), "{stuck:?}\n{text}");
        assert_eq!(failed.len(), if matches!(stuck, Stuck::Creating) { 2 } else { 1 }, "{stuck:?}\n{text}");
        let expected = format!("the case did not end within 20s; it waits for\n    {what}, for ");
        assert!(text.contains(&expected), "{expected} is not in\n{text}");
    }
}
