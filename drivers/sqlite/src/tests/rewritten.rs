//! A long thread is rewritten and deleted in pieces: before or after for every reader, whatever fails, and others get
//! their turn in between.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use async_trait::async_trait;
use futures::FutureExt as _;
use tempfile::TempDir;
use threadkeep::channel::Schema;
use threadkeep::checkpoint::{INTERRUPT_CHANNEL, Write};
use threadkeep::convert::convert;
use threadkeep::id::{TaskId, ThreadId};
use threadkeep::mode::ChannelMode;
use threadkeep::saver::{Rewrite, Saver, ThreadImage};
use threadkeep::value::ChannelValue;
use threadkeep::{Error, Result};
use threadkeep_conformance::{BoxError, Claim, Factory, Settings};

use super::common::Talk;
use super::faults::How;
use super::pieces::{MOMENTS, When, dropped, nothing_remains, store, thread};
use super::statements::{patient, rich};
use crate::{Options, SqliteSaver, Synchronous};

fn talk() -> ThreadId {
    "t".into()
}

/// Removes every checkpoint that was not among the newest `keep`, in each namespace, and makes new roots of their
/// children.
fn newest(image: &ThreadImage, keep: usize) -> Rewrite {
    let mut rewrite = Rewrite::default();
    let namespaces: BTreeSet<_> = image.checkpoints.keys().map(|(namespace, _)| namespace).collect();
    for namespace in namespaces {
        let chain: Vec<_> = image.checkpoints.iter().filter(|((other, _), _)| other == namespace).collect();
        let (old, left) = chain.split_at(chain.len().saturating_sub(keep));
        rewrite.remove.extend(old.iter().map(|(place, _)| (*place).clone()));
        for (_, tuple) in left {
            if tuple.parent.is_some_and(|parent| rewrite.remove.contains(&(namespace.clone(), parent))) {
                let mut root = (*tuple).clone();
                root.parent = None;
                root.checkpoint.applied.clear();
                rewrite.put.push(root);
            }
        }
    }
    rewrite
}

async fn read(saver: &SqliteSaver) -> ThreadImage {
    saver.read_thread(&talk()).await.unwrap()
}

async fn keep(saver: &SqliteSaver, count: usize) -> Result<()> {
    let image = saver.read_thread(&talk()).await?;
    saver.rewrite_thread(&talk(), &image.revision, newest(&image, count)).await
}

#[tokio::test]
async fn a_thread_rewritten_in_pieces_is_the_thread() {
    for count in [0, 1, 10, 25] {
        let mut sizes = Vec::new();
        for piece in [1, 3, 1000] {
            let store = store(piece);
            let mut talk_after = thread(&store, 30).await;
            let before = read(&store.saver).await;
            let expected = before.clone().after(&newest(&before, count)).checkpoints;
            keep(&store.saver, count).await.unwrap();
            let after = read(&store.saver).await;
            assert!(after.checkpoints == expected, "{count} kept, pieces of {piece}");
            assert_ne!(after.revision, before.revision);
            assert_eq!(store.saver.check().await.unwrap(), []);
            nothing_remains(&store).await;
            sizes.push(store.saver.stored_bytes(&talk()).await.unwrap());
            if count == 0 {
                assert_eq!(store.saver.threads(None, 9).await.unwrap(), []);
                continue;
            }
            // What was planned on the old thread is refused, and the thread goes on.
            let stale = store.saver.rewrite_thread(&talk(), &before.revision, newest(&before, 1)).await;
            assert!(matches!(stale, Err(Error::Stale { .. })), "{stale:?}");
            store.say(&mut talk_after, 500).await;
            assert_eq!(read(&store.saver).await.checkpoints.len(), expected.len() + 1);
            assert_eq!(store.saver.check().await.unwrap(), []);
        }
        let (least, most) = (*sizes.iter().min().unwrap(), *sizes.iter().max().unwrap());
        assert!(most * 10 <= least * 12, "{sizes:?}");
    }
}

/// Leaves a value that nothing refers to.
async fn make_untidy(saver: &SqliteSaver, speaker: &Talk) {
    for text in ["a first answer of more than a few bytes", "a second answer, which replaces the first one"] {
        let mut row = rich(speaker, 1).writes.remove(0);
        row.task = TaskId::from_bytes([7; 16]);
        row.writes = vec![Write {
            channel: INTERRUPT_CHANNEL.into(),
            value: ChannelValue::from_json(&text.repeat(3).into()).unwrap(),
            overwrite: false,
        }];
        saver.put_writes(&speaker.key(), &row).await.unwrap();
    }
    assert_eq!(saver.check().await.unwrap().len(), 1);
}

/// What a transaction reads and writes does not grow with the thread, whatever command writes it: an import and a copy
/// make a thread, a conversion and a repair change its checkpoints, a repair sweeps it, `prune` and `retention` remove
/// checkpoints, and it is deleted. `vacuum` is bounded by pages.
#[tokio::test]
async fn no_transaction_grows_with_the_thread() {
    let most = async |steps: usize| {
        let made = store(8);
        let mut speaker = Talk::new("t");
        for number in 0..steps {
            made.say(&mut speaker, number).await;
        }
        // A handle of its own: the first commit after opening reads the hashes of the thread.
        let saver = SqliteSaver::open(made.dir.path().join("db"), &made.options).unwrap();
        threadkeep::deletion::copy_thread(&saver, &talk(), &"copy".into()).await.unwrap();
        let copied = saver.stats().most_rows;
        let converted = async |mode: ChannelMode| {
            let table = Schema::thread_state().compile(mode, 4).unwrap();
            assert_eq!(convert(&saver, &talk(), &table).await.unwrap().changed, steps, "{mode}");
            saver.stats().most_rows
        };
        let to_delta = converted(ChannelMode::Delta).await;
        let to_full = converted(ChannelMode::Full).await;
        // Through the other handle: the first write of a step through this one would read the hashes of the thread.
        make_untidy(&made.saver, &speaker).await;
        saver.sweep().await.unwrap();
        assert_eq!(saver.check().await.unwrap(), []);
        let swept = saver.stats().most_rows;
        keep(&saver, steps / 2).await.unwrap();
        let halved = saver.stats().most_rows;
        saver.delete_thread(&"copy".into()).await.unwrap();
        keep(&saver, 1).await.unwrap();
        assert_eq!(saver.check().await.unwrap(), []);
        saver.close().await;
        [copied, to_delta, to_full, swept, halved, saver.stats().most_rows]
    };
    let (short, long) = (most(60).await, most(300).await);
    let commands = ["copy", "to delta", "to full", "sweep", "prune", "delete"];
    for (command, (short, long)) in commands.into_iter().zip(short.into_iter().zip(long)) {
        assert!(short > 20 && long * 4 <= short * 5, "{command}: {short} rows in a transaction, then {long}");
    }
}

#[tokio::test]
async fn others_write_while_a_thread_is_rewritten_and_see_the_old_or_the_new_one() {
    let store = store(4);
    thread(&store, 60).await;
    let before = read(&store.saver).await;
    let after = before.clone().after(&newest(&before, 30)).checkpoints;
    let (mut keeping, mut other) = (Box::pin(keep(&store.saver, 30)), Talk::new("other"));
    let mut turns = 0;
    loop {
        tokio::select! {
            biased;
            kept = &mut keeping => break kept.unwrap(),
            () = store.say(&mut other, turns) => {
                turns += 1;
                let now = read(&store.saver).await.checkpoints;
                assert!(now == before.checkpoints || now == after, "{} checkpoints", now.len());
                assert_eq!(store.saver.check().await.unwrap(), [], "a rewrite at work is no defect");
            }
        }
    }
    assert!(read(&store.saver).await.checkpoints == after);
    assert!(turns >= 5, "{turns} turns while 8 pieces were written");
}

/// Somebody who writes to the thread meanwhile loses nothing; the pass plans again.
#[tokio::test]
async fn a_write_meanwhile_is_kept() {
    let store = store(2);
    let mut speaker = thread(&store, 30).await;
    let image = read(&store.saver).await;
    let t = talk();
    let mut keeping = Box::pin(store.saver.rewrite_thread(&t, &image.revision, newest(&image, 20)));
    // What is written before it has read the thread ends it at once: on a busy machine that was before the first step.
    let before = store.saver.stats().transactions;
    while store.saver.stats().transactions == before {
        assert!((&mut keeping).now_or_never().is_none());
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
    // It goes on only when it is polled: nothing else would force a step between its pieces.
    store.say(&mut speaker, 600).await;
    let mut said = 1;
    let refused = loop {
        tokio::select! {
            biased;
            kept = &mut keeping => break kept,
            () = store.say(&mut speaker, 600 + said) => said += 1,
        }
    };
    assert!(matches!(refused, Err(Error::Stale { .. })), "{said} steps meanwhile: {refused:?}");
    drop(keeping);
    // The last step may have been given up while it was committed. After this it is there, or never will be.
    store.saver.flush(&t).await.unwrap();
    let now = read(&store.saver).await;
    let more = now.checkpoints.len() - image.checkpoints.len();
    assert!((said..=said + 1).contains(&more), "{more} of {said} steps");
    let row = rich(&speaker, 78).writes.remove(0);
    let mut keeping = Box::pin(store.saver.rewrite_thread(&t, &now.revision, newest(&now, 5)));
    assert!((&mut keeping).now_or_never().is_none());
    store.saver.put_writes(&speaker.key(), &row).await.unwrap();
    assert!(matches!(keeping.await, Err(Error::Stale { .. })), "writes of a task are a change too");
    nothing_remains(&store).await;
}

#[tokio::test]
async fn a_rewrite_or_deletion_with_a_failing_statement_is_before_or_after() {
    for how in [How::NotDone, How::Done, How::RolledBack, How::NoRoom] {
        for deletes in [false, true] {
            for nth in (0..).step_by(13) {
                let store = store(1);
                thread(&store, 4).await;
                let before = read(&store.saver).await;
                let after = if deletes {
                    BTreeMap::default()
                } else {
                    before.clone().after(&newest(&before, 2)).checkpoints
                };
                store.faults().arm(nth, how, "");
                let result = if deletes {
                    store.saver.delete_thread(&talk()).await
                } else {
                    keep(&store.saver, 2).await
                };
                let met = store.faults().disarm();
                let now = read(&store.saver).await.checkpoints;
                match &result {
                    Ok(()) => assert!(now == after, "{how:?} {nth}"),
                    Err(Error::Unavailable { .. }) => assert!(now == before.checkpoints, "{how:?} {nth}"),
                    Err(Error::InDoubt { .. }) => assert!(now == before.checkpoints || now == after),
                    other => panic!("{how:?}, statement {nth}: {other:?}"),
                }
                // The next process clears up what is left.
                let reopened =
                    SqliteSaver::open(store.dir.path().join("db"), &Options { piece: 1, ..patient() })
                        .unwrap();
                if result.is_ok() {
                    nothing_remains(&store).await;
                }
                if now != after {
                    if deletes {
                        reopened.delete_thread(&talk()).await.unwrap();
                    } else {
                        keep(&reopened, 2).await.unwrap();
                    }
                }
                assert!(read(&reopened).await.checkpoints == after, "{how:?} {nth}");
                assert_eq!(reopened.check().await.unwrap(), [], "{how:?} {nth}");
                if !met {
                    assert!(nth > 30, "only {nth} statements were met");
                    break;
                }
            }
        }
    }
}

/// A dropped rewrite is before or after, and leaves nothing.
#[tokio::test]
async fn a_dropped_rewrite_or_deletion_leaves_nothing() {
    let t = talk();
    for (deletes, when) in [false, true].into_iter().flat_map(|deletes| MOMENTS.map(|when| (deletes, when))) {
        let mut made = store(2);
        thread(&made, 3).await;
        for polls in 1.. {
            let before = read(&made.saver).await;
            let after = if deletes {
                BTreeMap::default()
            } else {
                before.clone().after(&newest(&before, 2)).checkpoints
            };
            let working = if deletes {
                made.saver.delete_thread(&t).boxed_local()
            } else {
                keep(&made.saver, 2).boxed_local()
            };
            let done = dropped(&made, working, (polls, when)).await;
            nothing_remains(&made).await;
            let now = read(&made.saver).await.checkpoints;
            assert!(now == before.checkpoints || now == after, "{when:?}, dropped after {polls} polls");
            assert_eq!(made.saver.check().await.unwrap(), []);
            if let Some(done) = done {
                done.unwrap();
                assert!(now == after);
                // Nothing is carried out while a future is polled that is dropped before.
                assert!(polls > 2 || when != When::Queued, "{polls} polls");
                break;
            }
            if now == after {
                made = store(2);
                thread(&made, 3).await;
            }
        }
    }
}

/// A process that ends between two pieces of a deletion: the next one that opens the database goes on.
#[tokio::test]
async fn the_next_process_goes_on_with_a_deletion() {
    let store = store(2);
    thread(&store, 40).await;
    store.saver.write(crate::write::commit::Work::DeleteThread(talk())).await.unwrap();
    store.saver.close().await;
    let hidden = || {
        let conn = rusqlite::Connection::open(store.dir.path().join("db")).unwrap();
        conn.query_row("SELECT count(*) FROM checkpoint", [], |row| row.get::<_, i64>(0)).unwrap()
    };
    assert!(hidden() > 0, "rows are left");
    let reopened = store.reopen();
    assert_eq!(reopened.check().await.unwrap(), []);
    assert_eq!(reopened.threads(None, 9).await.unwrap(), []);
    nothing_remains(&store).await;
    assert_eq!(hidden(), 0);
}

/// Values that nothing refers to are swept out of a long thread too.
#[tokio::test]
async fn a_long_thread_is_swept() {
    for piece in [2, 1000] {
        let store = store(piece);
        let speaker = thread(&store, 20).await;
        make_untidy(&store.saver, &speaker).await;
        let before = read(&store.saver).await;
        store.saver.sweep().await.unwrap();
        assert_eq!(store.saver.check().await.unwrap(), []);
        let after = read(&store.saver).await;
        assert!(after.checkpoints == before.checkpoints && after.revision != before.revision);
        nothing_remains(&store).await;
    }
}

/// The saver, for which a thread of two checkpoints is a long one.
struct InPieces;

async fn open(place: &TempDir) -> Result<Arc<dyn Saver>, BoxError> {
    let options = Options { piece: 1, synchronous: Synchronous::Normal, ..patient() };
    Ok(Arc::new(SqliteSaver::open_async(place.path().join("db"), options).await?))
}

#[async_trait]
impl Factory for InPieces {
    type Storage = TempDir;

    fn name(&self) -> &'static str {
        "sqlite in pieces"
    }

    fn claims(&self) -> &'static [Claim] {
        &[Claim::Durable]
    }

    async fn create(&self) -> Result<TempDir, BoxError> {
        Ok(tempfile::tempdir()?)
    }

    async fn open(&self, place: &TempDir) -> Result<Arc<dyn Saver>, BoxError> {
        open(place).await
    }
}

/// The whole suite, random programs included.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_contract_holds_in_pieces() {
    let settings = Settings { programs: 4, ..Settings::from_env().unwrap() };
    let report = threadkeep_conformance::run(InPieces, settings, |_| true).await;
    assert!(report.failed().is_empty(), "{report}");
}
