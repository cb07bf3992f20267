//! Commits that share a transaction, on a database with a damaged page: each has the outcome that it has alone.

use std::path::Path;

use futures::FutureExt;
use futures::future::join_all;
use tempfile::TempDir;
use threadkeep::saver::{CheckpointSelector, Saver, StepCommit};
use threadkeep::{Error, Result};

use super::common::{Talk, message};
use super::statements::{Opened, patient};
use crate::{Options, SqliteSaver};

const PAGE: usize = threadkeep_pages::PAGE_SIZE as usize;

/// A store with these bytes; none if it cannot be opened.
fn with_bytes(bytes: &[u8]) -> Option<Opened> {
    let (dir, options) = (TempDir::new().unwrap(), patient());
    let path = dir.path().join("db");
    std::fs::write(&path, bytes).unwrap();
    let saver = SqliteSaver::open(path, &options).ok()?;
    Some(Opened { dir, options, saver })
}

/// Commits these steps in one transaction.
async fn together(store: &Opened, steps: &[StepCommit]) -> Vec<Result<()>> {
    let lock = store.lock();
    let mut waiting: Vec<_> = steps
        .iter()
        .map(|step| store.saver.commit(step.clone()).map(|done| done.map(drop)).boxed())
        .collect();
    for future in &mut waiting {
        assert!(future.now_or_never().is_none(), "the lock is held");
    }
    lock.execute_batch("ROLLBACK").unwrap();
    drop(lock);
    join_all(waiting).await
}

fn outcome(result: &Result<()>) -> &'static str {
    match result {
        Ok(()) => "stored",
        Err(Error::Corrupt { .. }) => "corrupt",
        other => panic!("{other:?}"),
    }
}

/// Stores forty steps of each; returns the bytes of the closed database.
async fn stored(path: &Path, talks: &mut [Talk]) -> Vec<u8> {
    let saver = SqliteSaver::open(path, &Options::default()).unwrap();
    for number in 0..40 {
        for talk in &mut *talks {
            let step = talk.say(&message(number, 300));
            saver.commit(step.clone()).await.unwrap();
            talk.accept(&step);
        }
    }
    saver.close().await;
    std::fs::read(path).unwrap()
}

#[tokio::test]
async fn a_damaged_page_fails_only_the_commits_that_need_it() {
    let dir = TempDir::new().unwrap();
    let mut talks = [Talk::new("a"), Talk::new("b"), Talk::new("c")];
    let bytes = stored(&dir.path().join("db"), &mut talks).await;
    let steps: Vec<_> = talks.iter().map(|talk| talk.say(&message(99, 300))).collect();
    let mut apart = 0;
    for page in 0..bytes.len() / PAGE {
        let mut damaged = bytes.clone();
        damaged[page * PAGE + PAGE / 2] ^= 1;
        let Some(store) = with_bytes(&damaged) else { continue };
        let mut alone = Vec::new();
        for step in &steps {
            let store = with_bytes(&damaged).unwrap();
            alone.push(store.saver.commit(step.clone()).await.map(drop));
        }
        let alone: Vec<_> = alone.iter().map(outcome).collect();
        let grouped = together(&store, &steps).await;
        assert_eq!(grouped.iter().map(outcome).collect::<Vec<_>>(), alone, "page {page}");
        apart += usize::from(alone.contains(&"stored") && alone.contains(&"corrupt"));
        for (step, _) in steps.iter().zip(alone).filter(|(_, outcome)| *outcome == "stored") {
            let head = store.saver.get(&CheckpointSelector::head(&step.thread)).await.unwrap().unwrap();
            assert_eq!(head.checkpoint.id, step.checkpoint.id, "page {page}");
        }
    }
    assert!(apart >= 3, "only {apart} pages are needed by some and not by others");
}
