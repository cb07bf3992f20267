//! What is left of deleted threads is deleted in short transactions, and damage in one of them keeps only its own rows.

use std::path::Path;

use threadkeep::id::ThreadId;
use threadkeep::saver::{Revision, Rewrite, Saver};
use threadkeep::value::Element;

use super::common::{Talk, message};
use super::pieces::{MOMENTS, dropped, nothing_remains, store};
use super::statements::Opened;
use crate::write::commit::Work;
use crate::{Options, SqliteSaver};

const PAGE: usize = threadkeep_pages::PAGE_SIZE as usize;

/// The numbers of the threads whose rows are left.
fn left(path: &Path) -> Vec<i64> {
    let conn = rusqlite::Connection::open(path).unwrap();
    let mut statement = conn.prepare("SELECT key FROM scope WHERE owner = 4294967294 ORDER BY key").unwrap();
    let keys = statement.query_map([], |row| row.get(0)).unwrap();
    keys.collect::<Result<_, _>>().unwrap()
}

/// What a transaction of a deletion reads and writes does not grow with the number of namespaces.
#[tokio::test]
async fn no_transaction_grows_with_the_namespaces_of_a_deleted_thread() {
    let most = async |namespaces: usize| {
        let made = store(8);
        for number in 0..namespaces {
            let mut speaker = Talk { namespace: format!("n{number}").as_str().into(), ..Talk::new("t") };
            made.say(&mut speaker, number).await;
        }
        let saver = SqliteSaver::open(made.dir.path().join("db"), &made.options).unwrap();
        saver.delete_thread(&"t".into()).await.unwrap();
        assert_eq!(saver.check().await.unwrap(), []);
        saver.close().await;
        saver.stats().most_rows
    };
    let (few, many) = (most(60).await, most(300).await);
    assert!(few > 20 && many * 4 <= few * 5, "{few} rows in a transaction, then {many}");
}

/// Threads of many rows each. A page that holds rows of the first one only is damaged after that and the second one were
/// deleted.
#[tokio::test]
async fn a_damaged_page_of_a_deleted_thread_keeps_only_its_own_rows() {
    let options = Options { piece: 1, compression: false, ..Options::default() };
    let Opened { dir, options, saver } = Opened::with(options);
    for (place, id) in ["a", "b", "c", "kept"].into_iter().enumerate() {
        let mut talk = Talk::new(id);
        for number in 0..30 {
            let step = talk.say(&message(place * 100 + number, 1_500));
            saver.commit(step.clone()).await.unwrap();
            talk.accept(&step);
        }
    }
    // Each deletes the first few rows, and leaves the others.
    for id in ["a", "b"] {
        saver.write(Work::DeleteThread(id.into())).await.unwrap();
    }
    saver.close().await;
    let path = dir.path().join("db");
    let first = left(&path);
    assert_eq!(first.len(), 2);
    let mut bytes = std::fs::read(&path).unwrap();
    let text = b"m-00000015";
    let at = bytes.windows(text.len()).position(|window| window == text).unwrap();
    bytes[at / PAGE * PAGE + PAGE / 2] ^= 1;
    std::fs::write(&path, bytes).unwrap();

    let saver = SqliteSaver::open(&path, &options).unwrap();
    saver.delete_thread(&"c".into()).await.unwrap();
    assert_eq!(left(&path), first[..1], "rows of the damaged thread only");
    assert_eq!(saver.threads(None, 9).await.unwrap(), ["kept".into()]);
    let found = saver.check().await.unwrap();
    let named = format!("deleted thread number {}", first[0]);
    assert!(found.iter().any(|finding| finding.to_string().contains(&named)), "{found:?}");
    assert!(found.iter().all(|finding| finding.scope.is_none() && !finding.orphan), "{found:?}");
    saver.close().await;
}

/// The number of elements in the database.
fn elements(path: &Path) -> i64 {
    let conn = rusqlite::Connection::open(path).unwrap();
    conn.query_row("SELECT count(*) FROM element", [], |row| row.get(0)).unwrap()
}

/// A thread that a store with pieces of 32 rewrites in one transaction, but does not delete in one; and what removes all of
/// it.
async fn middling(store: &Opened, id: &str) -> (ThreadId, Revision, Rewrite) {
    let mut talk = Talk::new(id);
    for number in 1..180 {
        talk.messages.push(Element::from_json(&message(number, 99)).unwrap());
    }
    store.say(&mut talk, 0).await;
    let image = store.saver.read_thread(&talk.thread).await.unwrap();
    let remove = image.checkpoints.into_keys().collect();
    (talk.thread, image.revision, Rewrite { remove, ..Rewrite::default() })
}

#[tokio::test]
async fn a_rewrite_that_removes_all_of_a_thread_leaves_no_rows() {
    let store = store(32);
    let path = store.dir.path().join("db");
    let (first, revision, all) = middling(&store, "a").await;
    assert!((129..=256).contains(&elements(&path)), "neither short nor long");
    store.saver.write(Work::Rewrite(first, revision, Box::new(all))).await.unwrap();
    assert_eq!(left(&path).len(), 1, "a single transaction deletes the first piece");
    let (second, revision, all) = middling(&store, "b").await;
    store.saver.rewrite_thread(&second, &revision, all).await.unwrap();
    assert_eq!((left(&path), elements(&path)), (Vec::new(), 0));
    assert_eq!(store.saver.threads(None, 9).await.unwrap(), []);
    assert_eq!(store.saver.check().await.unwrap(), []);
    store.saver.close().await;
}

#[tokio::test]
async fn a_dropped_rewrite_that_removes_all_of_a_thread_leaves_no_rows() {
    for when in MOMENTS {
        for polls in 1.. {
            let store = store(32);
            let (thread, revision, all) = middling(&store, "t").await;
            let removing = store.saver.rewrite_thread(&thread, &revision, all);
            let done = dropped(&store, removing, (polls, when)).await;
            nothing_remains(&store).await;
            assert_eq!(store.saver.check().await.unwrap(), [], "{when:?}, dropped after {polls} polls");
            if let Some(done) = done {
                done.unwrap();
                break;
            }
        }
    }
}
