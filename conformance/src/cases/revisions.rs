//! Revisions of threads: each change gives a thread a new one, and none comes back.

use threadkeep::Error;
use threadkeep::saver::{Revision, Rewrite, Saver};

use super::rewrite::{image, removing, rewrite, tree};
use crate::case::{Case, Outcome, case, check, check_eq};
use crate::factory::Store;
use crate::kit::{MESSAGES, Step, says};

pub(super) const CASES: &[Case] = &[
    case!(
        Deletion,
        revisions_tell_every_change,
        "a deletion would remove what was written after it was planned"
    ),
    case!(
        Deletion,
        the_revision_is_that_of_the_thread,
        "a thread that nobody has changed could not be deleted, or one that somebody has could"
    ),
    case!(Deletion, revisions_never_repeat, "a deletion planned on one state would destroy another"),
];

async fn revisions_tell_every_change(store: Store) -> Outcome {
    let saver = store.open().await?;
    let mut seen = vec![Revision::absent()];
    let tree = tree(&*saver).await?;
    let mut changed = async |what: &str| -> Outcome {
        let revision = image(&*saver, "t").await?.revision;
        check!(!seen.contains(&revision), "the revision did not change with {what}");
        check_eq!(image(&*saver, "t").await?.revision, revision, "the revision after a read");
        seen.push(revision);
        Ok(())
    };
    changed("the first commits").await?;
    let last = tree.keys[4].clone();
    saver.put_writes(&last, &says(7, "late")?).await?;
    changed("a put of writes").await?;
    let six = Step::after(&last, 6).held(MESSAGES, 5).held("title", 1);
    let six = six.commit(&*saver).await?;
    changed("a commit that writes nothing").await?;
    Step::after(&tree.nested, 2).namespace("nested").held("inner", 1).commit(&*saver).await?;
    changed("a commit to another namespace").await?;
    rewrite(&*saver, "t", removing([&six])).await?;
    changed("a removal").await?;
    let put = image(&*saver, "t").await?.checkpoints.into_values().take(1).collect();
    rewrite(&*saver, "t", Rewrite { put, ..Rewrite::default() }).await?;
    changed("a rewrite that puts what is there").await?;
    let before = image(&*saver, "t").await?;
    let stale = Step::after(&tree.keys[0], 9).commit(&*saver).await;
    check!(matches!(stale, Err(Error::Conflict { .. })), "a stale commit gave {stale:?}");
    check_eq!(image(&*saver, "t").await?, before, "the thread after a commit that was refused");
    rewrite(&*saver, "t", Rewrite::default()).await?;
    check_eq!(image(&*saver, "t").await?, before, "the thread after a rewrite that removes and puts nothing");
    Step::first("t2", 1).commit(&*saver).await?;
    check_eq!(image(&*saver, "t").await?, before, "the thread after a commit to another thread");

    // The same rows in a second life.
    saver.delete_thread(&"t".into()).await?;
    let first = Step::first("t", 1).commit(&*saver).await?;
    changed("a new life").await?;
    saver.delete_thread(&first.thread).await?;
    Step::first("t", 1).commit(&*saver).await?;
    changed("a third life that is like the second").await
}

async fn the_revision_is_that_of_the_thread(store: Store) -> Outcome {
    let (saver, other) = (store.open().await?, store.open().await?);
    let same = async |what: &str| -> Outcome {
        let read = image(&*saver, "t").await?.revision;
        for handle in [&saver, &other] {
            check_eq!(handle.revision(&"t".into()).await?, read, "the revision after {what}");
        }
        Ok(())
    };
    same("nothing").await?;
    check_eq!(saver.revision(&"t".into()).await?, Revision::absent(), "the revision of an unknown thread");
    let tree = tree(&*saver).await?;
    same("the first commits").await?;
    other.put_writes(&tree.keys[4], &says(7, "late")?).await?;
    same("a put by the other handle").await?;
    rewrite(&*saver, "t", removing([&tree.nested])).await?;
    same("a rewrite").await?;
    other.delete_thread(&"t".into()).await?;
    same("a deletion by the other handle").await
}

/// The revisions of a thread, in the order in which they were read.
#[derive(Default)]
struct Seen(Vec<Revision>);

impl Seen {
    /// Fails if the thread has a revision that it had before.
    async fn next(&mut self, saver: &dyn Saver, what: &str) -> Outcome {
        let revision = image(saver, "t").await?.revision;
        check!(!self.0.contains(&revision), "a revision came back {what}");
        self.0.push(revision);
        Ok(())
    }
}

async fn revisions_never_repeat(store: Store) -> Outcome {
    let (mut saver, mut seen) = (store.open().await?, Seen::default());
    for life in ["first", "second", "third"] {
        // What counts in memory begins again with a new handle, and what counts in the thread with a new life.
        drop(saver);
        saver = store.open().await?;
        let one = Step::first("t", 1).meta("note", "A".repeat(100).into());
        if life == "third" {
            // As a copy of itself, which has all that the second life began with.
            let copy = Rewrite { put: vec![one.tuple([])], ..Rewrite::default() };
            saver.rewrite_thread(&"t".into(), &Revision::absent(), copy).await?;
        } else {
            one.commit(&*saver).await?;
        }
        let root = one.commit.key();
        seen.next(&*saver, &format!("when the {life} life began")).await?;
        for note in [None, Some("B"), None, Some("A"), Some("B")] {
            let mut tuple = one.tuple([]);
            match note {
                Some(note) => tuple.metadata.extra.insert("note".to_owned(), note.repeat(100).into()),
                None => drop(tuple.metadata.extra.remove("note")),
            }
            rewrite(&*saver, "t", Rewrite { put: vec![tuple], ..Rewrite::default() }).await?;
            seen.next(&*saver, &format!("when the note became {note:?} in the {life} life")).await?;
        }
        // Two handles in turn, of which one is new each time.
        for n in [2, 2, 3] {
            let other = store.open().await?;
            let more = Step::after(&root, n).commit(&*other).await?;
            seen.next(&*saver, &format!("with commit {n} of the {life} life")).await?;
            saver.put_writes(&root, &says(n, "late")?).await?;
            seen.next(&*other, &format!("with a row after commit {n} of the {life} life")).await?;
            drop(saver);
            saver = store.open().await?;
            let put = vec![one.tuple([])];
            rewrite(&*saver, "t", Rewrite { put, ..removing([&more]) }).await?;
            let what = format!("when commit {n} of the {life} life was taken back");
            seen.next(&*other, &what).await?;
        }
        if life == "first" {
            saver.delete_thread(&root.thread).await?;
        } else {
            rewrite(&*saver, "t", removing([&root])).await?;
        }
    }
    // A plan of any time before is stale.
    let one = Step::first("t", 1).meta("note", "A".repeat(100).into());
    one.commit(&*saver).await?;
    let before = image(&*saver, "t").await?;
    for revision in &seen.0 {
        let stale = saver.rewrite_thread(&"t".into(), revision, removing([&one.commit.key()])).await;
        check_eq!(stale, Err(Error::Stale { thread: "t".into() }), "a plan of an earlier life");
    }
    check_eq!(image(&*saver, "t").await?, before, "the thread after plans of earlier lives");
    Ok(())
}
