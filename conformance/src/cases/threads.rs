//! [`threadkeep::saver::Saver::threads`].

use threadkeep::id::ThreadId;

use crate::case::{Case, Outcome, case, check, check_eq};
use crate::factory::Store;
use crate::kit::{Step, plain};

pub(super) const CASES: &[Case] = &[
    case!(Core, threads_are_listed_by_page, "a pass over all threads would miss some, or never end"),
    case!(Core, many_threads_are_all_listed, "a pass over a large store would end early"),
];

async fn threads_are_listed_by_page(store: Store) -> Outcome {
    let saver = store.open().await?;
    check_eq!(saver.threads(None, 10).await?, [], "the threads of an empty store");
    // The last two are ordered by their code points, and the other way round by the halves of UTF-16.
    let names = ["", "T", "a", "a ", "a\u{0}b", "b", "\u{e9}", "\u{ff5e}", "\u{1f9f5}"];
    for name in names.iter().rev() {
        // One thread has a checkpoint in another namespace only.
        if *name != "a " {
            Step::first(name, 1).value("title", plain(*name)?).commit(&*saver).await?;
        }
        Step::first(name, 2).namespace("nested").commit(&*saver).await?;
    }
    let mut sorted = names.map(ThreadId::from);
    sorted.sort();
    check_eq!(saver.threads(None, 100).await?, sorted, "all of them");
    check_eq!(saver.threads(None, 0).await?, [], "none of them");
    for limit in [1, 2, 3] {
        let (mut found, mut after) = (Vec::new(), None);
        loop {
            let page = saver.threads(after.as_ref(), limit).await?;
            // A reader may take a short page for the last one.
            let rest = sorted.len() - found.len().min(sorted.len());
            check_eq!(page.len(), limit.min(rest), "how many threads a page of {limit} has");
            let Some(last) = page.last() else { break };
            after = Some(last.clone());
            found.extend(page);
            check!(found.len() <= sorted.len(), "the pages of {limit} do not end");
        }
        check_eq!(found, sorted, "pages of {limit}");
    }
    let between = saver.threads(Some(&"aa".into()), 1).await?;
    check_eq!(between, ["b".into()], "the page after a missing thread");
    saver.delete_thread(&"b".into()).await?;
    check!(!saver.threads(None, 100).await?.contains(&"b".into()), "a deleted thread is still listed");
    Ok(())
}

/// More than a store returns in one request if nobody asks for the next page.
async fn many_threads_are_all_listed(store: Store) -> Outcome {
    const THREADS: usize = 1_100;
    const WRITERS: usize = 10;
    let saver = store.open().await?;
    let name = |n: usize| format!("thread {n:04}");
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..WRITERS {
        let saver = saver.clone();
        writers.spawn(async move {
            for n in (writer..THREADS).step_by(WRITERS) {
                Step::first(&name(n), 1).commit(&*saver).await?;
            }
            Ok(())
        });
    }
    super::concurrency::join(writers).await?;
    let expected: Vec<ThreadId> = (0..THREADS).map(|n| name(n).as_str().into()).collect();
    for limit in [THREADS, THREADS + 1, 1_050, usize::MAX] {
        let found = saver.threads(None, limit).await?;
        check_eq!(found.len(), THREADS.min(limit), "how many of {THREADS} threads a page of {limit} has");
        check!(found[..] == expected[..found.len()], "a page of {limit} has other threads, or another order");
    }
    let rest = saver.threads(Some(&expected[9]), usize::MAX).await?;
    check!(rest[..] == expected[10..], "the threads after the tenth are {} others", rest.len());
    Ok(())
}
