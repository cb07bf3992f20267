//! The suite and the contract name the same things, and a report says what there is to know.

use std::collections::BTreeSet;
use std::sync::Arc;

use async_trait::async_trait;
use threadkeep::saver::Saver;
use threadkeep_conformance::{BoxError, Claim, Factory, Level, Verdict, cases, run};
use threadkeep_memory::MemorySaver;

/// The source of the contract: its bullets are the names of cases.
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
fn names_are_unique_and_every_case_says_why() {
    let all = cases();
    let names: BTreeSet<&str> = all.iter().map(|case| case.name).collect();
    assert_eq!(names.len(), all.len());
    assert!(all.iter().all(|case| case.why.len() > 10));
    for level in [Level::Core, Level::Delta, Level::Deletion, Level::Concurrency, Level::Durability] {
        assert!(all.iter().any(|case| case.level == level), "no case at level {level}");
    }
    let needy = |claim| all.iter().filter(|case| case.needs == Some(claim)).count();
    assert_eq!(needy(Claim::Durable), 5);
    for damage in [Claim::LoseCheckpoint, Claim::LoseWrites, Claim::LoseParentLink] {
        assert_eq!(needy(damage), 1, "{damage}");
    }
}

/// Claims nothing, and cannot open what it creates if `closed`.
struct Plain {
    closed: bool,
}

#[async_trait]
impl Factory for Plain {
    type Place = MemorySaver;

    fn name(&self) -> &'static str {
        "plain"
    }

    async fn create(&self) -> Result<MemorySaver, BoxError> {
        Ok(MemorySaver::new())
    }

    async fn open(&self, place: &MemorySaver) -> Result<Arc<dyn Saver>, BoxError> {
        if self.closed { Err("the door is locked".into()) } else { Ok(Arc::new(place.clone())) }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_claimed_is_reported_as_such() {
    let report =
        run(Plain { closed: false }, |case| case.needs.is_some() || case.name.starts_with("get_by")).await;
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
    assert_eq!(lines.last(), Some(&"plain: 1 passed, 0 failed, 8 not claimed"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_says_what_why_and_where() {
    let report = run(Plain { closed: true }, |case| case.name == "get_by_id_is_exact").await;
    assert_eq!(report.failed(), ["get_by_id_is_exact"]);
    let text = report.to_string();
    for part in [
        "core         get_by_id_is_exact  FAILED",
        "otherwise a client that names a checkpoint would get the state of another one",
        "the door is locked",
        "plain: 0 passed, 1 failed, 0 not claimed",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
}
