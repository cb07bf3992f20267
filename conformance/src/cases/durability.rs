//! What remains after the last handle was dropped and the store was opened again.

use std::sync::Arc;

use serde_json::json;
use threadkeep::Error;
use threadkeep::saver::{Flush, Saver};

use crate::case::{Case, Failure, Outcome, case, check, check_eq};
use crate::factory::Store;
use crate::kit::{
    MESSAGES, Step, dump, get, head, list, message, messages, path, plain, replayed, says, version,
};

pub(super) const CASES: &[Case] = &[
    case!(Core, capabilities_are_as_claimed, "a store would promise more, or less, than is tested"),
    case!(Durability, a_reopened_store_has_everything, "a restart would lose acknowledged steps", needs Durable),
    case!(Durability, a_reopened_store_goes_on, "a thread could not be continued after a restart", needs Durable),
    case!(Durability, pending_writes_survive_reopening, "finished tasks would run again after a crash", needs Durable),
    case!(
        Durability,
        deferred_commits_survive_reopening,
        "steps that wait for a flush would be gone after a restart",
        needs Durable
    ),
    case!(Durability, a_deletion_survives_reopening, "what a user deleted would be back after a restart", needs Durable),
];

async fn capabilities_are_as_claimed(store: Store) -> Outcome {
    let saver = store.open().await?;
    let capabilities = saver.capabilities();
    check_eq!(
        capabilities.durable,
        store.claims(crate::Claim::Durable),
        "durable, and whether the factory claims it"
    );
    // What the factory cannot measure is not tested, whatever the saver says of it.
    let shares = store.claims(crate::Claim::SharedElements);
    if shares || store.claims(crate::Claim::StoredBytes) {
        check_eq!(capabilities.shared_elements, shares, "shared elements, and whether they are claimed");
    }
    check!(!capabilities.name.is_empty(), "the saver has no name");
    Ok(())
}

/// Drops the handle and opens another one.
async fn reopen(store: &Store, saver: Arc<dyn Saver>) -> Result<Arc<dyn Saver>, Failure> {
    drop(saver);
    Ok(store.open().await?)
}

async fn a_reopened_store_has_everything(store: Store) -> Outcome {
    let mut saver = store.open().await?;
    for thread in ["t", "u"] {
        let first = Step::first(thread, 1).snapshot(MESSAGES, list(["a", "b"])?).value("title", plain("x")?);
        let root = first.meta("run_id", json!("r1")).commit(&*saver).await?;
        let two = Step::after(&root, 2).sentinel(MESSAGES).held("title", 1).runs(says(2, "two")?);
        let two = two.commit(&*saver).await?;
        let fork = Step::fork(&root, &two, 3)
            .sentinel(MESSAGES)
            .runs(says(3, thread)?)
            .value("title", plain(thread)?);
        let fork = fork.commit(&*saver).await?;
        Step::first(thread, 1)
            .namespace("nested")
            .value("n", messages(0..50)?.into())
            .commit(&*saver)
            .await?;
        saver.put_writes(&fork, &says(4, "pending")?).await?;
    }
    let mut before = Vec::new();
    for thread in ["t", "u"] {
        for tuple in dump(&*saver, thread).await? {
            let history = path(&*saver, &tuple.key(), None).await?;
            before.push((tuple, history));
        }
    }
    check_eq!(before.len(), 8, "checkpoints in both threads");
    for round in 1..=2 {
        saver = reopen(&store, saver).await?;
        for (tuple, history) in &before {
            let key = tuple.key();
            check_eq!(get(&*saver, &key).await?.as_ref(), Some(tuple), "{key:?}, reopened {round} times");
            check_eq!(
                path(&*saver, &key, None).await?,
                *history,
                "history of {key:?}, reopened {round} times"
            );
        }
    }
    Ok(())
}

async fn a_reopened_store_goes_on(store: Store) -> Outcome {
    let mut saver = store.open().await?;
    let mut all = messages(0..3)?;
    let first = Step::first("t", 1).value("all", all.clone().into()).snapshot(MESSAGES, list([])?);
    let mut last = first.commit(&*saver).await?;
    all.rebase(version(1));
    let mut said = Vec::new();
    for n in 2..=8_u16 {
        saver = reopen(&store, saver).await?;
        all.push(message(&format!("m{n}"), "after a restart")?);
        let step = Step::after(&last, n).value("all", all.clone().into()).sentinel(MESSAGES);
        let step = step.runs(says(n, &n.to_string())?);
        let mut stale = step.clone();
        stale.commit.expected_head = None;
        let refused = stale.commit(&*saver).await;
        check!(matches!(refused, Err(Error::Conflict { .. })), "a stale commit after a restart: {refused:?}");
        let parent = std::mem::replace(&mut last, step.commit(&*saver).await?);
        saver = reopen(&store, saver).await?;
        check_eq!(step.commit(&*saver).await, Ok(last.clone()), "the same commit again after a restart");
        all.rebase(version(n));
        said.push(n.to_string());
        check_eq!(head(&*saver, "t").await?, Some(step.tuple([])), "the head");
        check_eq!(
            get(&*saver, &parent).await?.map(|tuple| tuple.writes.len()),
            Some(1),
            "rows under its parent"
        );
        check_eq!(replayed(&*saver, &last).await?, json!(said), "messages");
    }
    Ok(())
}

async fn deferred_commits_survive_reopening(store: Store) -> Outcome {
    let mut saver = store.open().await?;
    let mut last = None;
    let mut said = Vec::new();
    for n in 1..=6_u16 {
        let mut step = match &last {
            None => Step::first("t", n).snapshot(MESSAGES, list([])?),
            Some(last) => Step::after(last, n).sentinel(MESSAGES).runs(says(n, &n.to_string())?),
        };
        step.commit.flush = Flush::WithNext;
        let key = step.commit(&*saver).await?;
        if last.is_some() {
            said.push(n.to_string());
        }
        if n == 3 {
            saver.flush(&key.thread).await?;
        }
        saver = reopen(&store, saver).await?;
        check_eq!(head(&*saver, "t").await?, Some(step.tuple([])), "the head after step {n}");
        check_eq!(step.commit(&*saver).await, Ok(key.clone()), "the same commit again");
        check_eq!(replayed(&*saver, &key).await?, json!(said), "messages after step {n}");
        last = Some(key);
    }
    Ok(())
}

async fn pending_writes_survive_reopening(store: Store) -> Outcome {
    let mut saver = store.open().await?;
    let first = Step::first("t", 1).snapshot(MESSAGES, list([])?);
    let root = first.commit(&*saver).await?;
    let rows = [says(3, "three")?, says(1, "one")?, says(2, "two")?];
    for (n, row) in (1..).zip(&rows) {
        saver.put_writes(&root, row).await?;
        saver = reopen(&store, saver).await?;
        saver.put_writes(&root, row).await?;
        check_eq!(get(&*saver, &root).await?, Some(first.tuple(&rows[..n])), "after {n} tasks");
    }
    let step =
        Step::after(&root, 2).sentinel(MESSAGES).applies(1).applies(2).applies(3).commit(&*saver).await?;
    saver = reopen(&store, saver).await?;
    check_eq!(replayed(&*saver, &step).await?, json!(["one", "two", "three"]), "messages");
    Ok(())
}

async fn a_deletion_survives_reopening(store: Store) -> Outcome {
    let mut saver = store.open().await?;
    for life in ["old", "new"] {
        let first = Step::first("t", 1).snapshot(MESSAGES, list([life])?);
        let root = first.commit(&*saver).await?;
        let two = Step::after(&root, 2).sentinel(MESSAGES).runs(says(1, life)?).commit(&*saver).await?;
        saver = reopen(&store, saver).await?;
        check_eq!(replayed(&*saver, &two).await?, json!([life, life]), "messages of the {life} life");
        saver.delete_thread(&root.thread).await?;
        saver = reopen(&store, saver).await?;
        check_eq!(dump(&*saver, "t").await?, [], "the thread after its deletion");
    }
    Ok(())
}
