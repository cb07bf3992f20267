//! [`threadkeep::saver::Saver::delete_thread`] and [`threadkeep::saver::Saver::delete_seen`].

use threadkeep::checkpoint::Stored;
use threadkeep::id::ThreadId;
use threadkeep::saver::{Revision, Saver};
use threadkeep::{Error, Result};

use crate::case::{Case, Outcome, case, check_eq};
use crate::factory::Store;
use crate::kit::{
    MESSAGES, Step, all, dump, get, head, list, messages, not_found, path, plain, says, stored, version,
};

pub(super) const CASES: &[Case] = &[
    case!(Core, delete_thread_removes_everything_of_it, "what a user deleted would still be there"),
    case!(Deletion, a_deletion_of_a_changed_thread_is_stale, "a deletion would remove what a run just wrote"),
    case!(
        Deletion,
        a_deletion_of_what_was_seen_removes_everything,
        "what a user deleted would still be there"
    ),
    case!(Core, delete_thread_leaves_other_threads, "deleting one conversation would damage another one"),
    case!(Core, delete_unknown_thread_is_fine, "a repeated deletion would fail"),
    case!(
        Core,
        a_thread_made_anew_has_nothing_of_the_old_one,
        "deleted content would come back with its ids"
    ),
];

/// How a thread is deleted.
#[derive(Debug, Clone, Copy)]
enum By {
    Name,
    Revision,
}

async fn delete(saver: &dyn Saver, by: By) -> Result<()> {
    let thread = ThreadId::from("t");
    match by {
        By::Name => saver.delete_thread(&thread).await,
        By::Revision => saver.delete_seen(&thread, &saver.revision(&thread).await?).await,
    }
}

async fn delete_thread_removes_everything_of_it(store: Store) -> Outcome {
    removes_everything(&*store.open().await?, By::Name).await
}

async fn a_deletion_of_what_was_seen_removes_everything(store: Store) -> Outcome {
    let saver = store.open().await?;
    delete(&*saver, By::Revision).await?;
    removes_everything(&*saver, By::Revision).await?;
    delete(&*saver, By::Revision).await?;
    // A long list and a second life.
    let other = Step::first("t2", 1).value("all", messages(0..50)?.into());
    other.commit(&*saver).await?;
    Step::first("t", 1).value("all", messages(0..300)?.into()).commit(&*saver).await?;
    delete(&*saver, By::Revision).await?;
    check_eq!(dump(&*saver, "t").await?, [], "all namespaces of the second life");
    check_eq!(head(&*saver, "t2").await?, Some(other.tuple([])), "another thread");
    Ok(())
}

async fn removes_everything(saver: &dyn Saver, by: By) -> Outcome {
    let root = Step::first("t", 1).snapshot(MESSAGES, list(["a"])?).commit(saver).await?;
    let two = Step::after(&root, 2).sentinel(MESSAGES).runs(says(1, "b")?).commit(saver).await?;
    saver.put_writes(&two, &says(2, "pending")?).await?;
    let nested = Step::first("t", 1).namespace("nested").value("title", plain("x")?).commit(saver).await?;

    delete(saver, by).await?;
    check_eq!(head(saver, "t").await?, None, "the head");
    check_eq!(dump(saver, "t").await?, [], "all namespaces");
    for key in [&root, &two, &nested] {
        check_eq!(get(saver, key).await?, None, "checkpoint {key:?}");
        check_eq!(saver.put_writes(key, &says(3, "late")?).await, not_found(key), "writes under {key:?}");
    }
    check_eq!(path(saver, &two, None).await, not_found(&two), "the history");
    let next = Step::after(&two, 3).commit(saver).await;
    check_eq!(next.is_err(), true, "a run that did not notice: {next:?}");
    Ok(())
}

async fn a_deletion_of_a_changed_thread_is_stale(store: Store) -> Outcome {
    let (saver, other) = (store.open().await?, store.open().await?);
    let t = ThreadId::from("t");
    let stale = Err(Error::Stale { thread: t.clone() });
    let root = Step::first("t", 1).snapshot(MESSAGES, list(["a"])?).commit(&*saver).await?;
    check_eq!(saver.delete_seen(&t, &Revision::absent()).await, stale, "of a thread that nobody had seen");
    let mut seen = saver.revision(&t).await?;
    let two = Step::after(&root, 2).sentinel(MESSAGES).runs(says(1, "b")?);
    let key = two.commit(&*other).await?;
    for change in ["a commit", "a row"] {
        let before = dump(&*saver, "t").await?;
        check_eq!(saver.delete_seen(&t, &seen).await, stale, "after {change}");
        check_eq!(dump(&*saver, "t").await?, before, "the thread after a refused deletion");
        seen = saver.revision(&t).await?;
        other.put_writes(&key, &says(2, "pending")?).await?;
    }
    seen = saver.revision(&t).await?;
    saver.delete_seen(&t, &seen).await?;
    check_eq!(saver.delete_seen(&t, &seen).await, stale, "a repeat");
    // The same rows in another life.
    Step::first("t", 1).snapshot(MESSAGES, list(["a"])?).commit(&*other).await?;
    check_eq!(saver.delete_seen(&t, &seen).await, stale, "of a thread that was begun again");
    check_eq!(dump(&*saver, "t").await?.len(), 1, "the thread that was begun again");
    Ok(())
}

async fn delete_thread_leaves_other_threads(store: Store) -> Outcome {
    let saver = store.open().await?;
    // The same ids, versions and elements everywhere; names that begin alike or differ in case.
    let names = ["t", "t2", "T", "t ", "", "t\u{0}", "%"];
    for name in names {
        let root = Step::first(name, 1).snapshot(MESSAGES, list(["shared", "too"])?).commit(&*saver).await?;
        let step = Step::after(&root, 2).held(MESSAGES, 1).value("who", plain(name)?).runs(says(1, name)?);
        step.commit(&*saver).await?;
    }
    let mut before = Vec::new();
    for name in names {
        before.push(dump(&*saver, name).await?);
    }
    for (n, deleted) in names.iter().enumerate() {
        saver.delete_thread(&(*deleted).into()).await?;
        check_eq!(saver.list(&all(deleted)).await?, [], "{deleted:?} after its deletion");
        for (name, before) in names.iter().zip(&before).skip(n + 1) {
            check_eq!(dump(&*saver, name).await?, *before, "{name:?} after the deletion of {deleted:?}");
        }
    }
    Ok(())
}

async fn delete_unknown_thread_is_fine(store: Store) -> Outcome {
    let saver = store.open().await?;
    let first = Step::first("t", 1);
    for _ in 0..2 {
        saver.delete_thread(&"t".into()).await?;
        saver.delete_thread(&"never there".into()).await?;
        check_eq!(head(&*saver, "t").await?, None, "the thread");
        first.commit(&*saver).await?;
        saver.delete_thread(&"never there".into()).await?;
        check_eq!(head(&*saver, "t").await?, Some(first.tuple([])), "the other thread");
    }
    Ok(())
}

async fn a_thread_made_anew_has_nothing_of_the_old_one(store: Store) -> Outcome {
    let saver = store.open().await?;
    // The second life has the same ids and versions, but other values.
    for life in ["old", "new"] {
        let first = Step::first("t", 1).snapshot(MESSAGES, list([life])?).value("title", plain(life)?);
        let root = first.commit(&*saver).await?;
        check_eq!(get(&*saver, &root).await?, Some(first.tuple([])), "the root of the {life} life");
        saver.put_writes(&root, &says(1, life)?).await?;
        let two =
            Step::after(&root, 2).sentinel(MESSAGES).held("title", 1).applies(1).commit(&*saver).await?;
        let title = Stored::Value(plain(life)?);
        check_eq!(stored(&*saver, &two, "title").await?, Some(title), "the title of the {life} life");
        let messages = path(&*saver, &two, None).await?;
        check_eq!(
            messages.seed.map(|seed| (seed.value, seed.version)),
            Some((list([life])?, version(1))),
            "its seed"
        );
        let writes: Vec<_> = messages.steps.into_iter().flat_map(|step| step.writes).collect();
        check_eq!(writes, says(1, life)?.writes, "its writes");
        let inner = Step::first("t", 1).namespace("nested").value("title", plain(life)?);
        let nested = inner.commit(&*saver).await?;
        check_eq!(get(&*saver, &nested).await?, Some(inner.tuple([])), "the nested root of the {life} life");
        saver.put_writes(&nested, &says(3, life)?).await?;
        if life == "old" {
            saver.delete_thread(&root.thread).await?;
        }
    }
    Ok(())
}
