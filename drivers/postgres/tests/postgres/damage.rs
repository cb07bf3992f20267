//! A flipped byte in any column of any row, or in any file of the server, or a column without bytes, is detected, or changes
//! nothing that is read.

use std::time::Duration;

use serde_json::json;
use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple};
use threadkeep::id::ThreadId;
use threadkeep::saver::{CheckpointSelector, DeltaHistory, ListQuery, Saver, Summary, ThreadImage};
use threadkeep::{Error, Result};
use threadkeep_postgres::{PostgresSaver, setup};
use threadkeep_testing::{Database, Postgres};
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;
use uuid::Uuid;

use crate::common::damage::connect;
use crate::common::talk::{MESSAGES, Talk, message, note};
use crate::common::{database, open, patient};

/// Everything that can be read of a thread.
#[derive(Debug, PartialEq)]
struct Seen {
    head: Result<Option<CheckpointTuple>>,
    each: Vec<Result<Option<CheckpointTuple>>>,
    list: Result<Vec<CheckpointTuple>>,
    history: Result<DeltaHistory>,
    image: Result<ThreadImage>,
    summary: Result<Summary>,
    threads: Result<Vec<ThreadId>>,
}

async fn see(saver: &PostgresSaver, keys: &[CheckpointKey]) -> Seen {
    let thread = &keys[0].thread;
    let mut each = Vec::new();
    for key in keys {
        each.push(saver.get(&CheckpointSelector::at(key)).await);
    }
    Seen {
        head: saver.get(&CheckpointSelector::head(thread)).await,
        each,
        list: saver.list(&ListQuery { namespace: None, ..ListQuery::new(thread) }).await,
        history: saver.delta_history(keys.last().unwrap(), &[MESSAGES.into()].into(), None).await,
        image: saver.read_thread(thread).await,
        summary: saver.summary(thread).await,
        threads: saver.threads(None, 10).await,
    }
}

/// The same, or an error that names the damage.
fn noticed<T: PartialEq>(found: &Result<T>, expected: &Result<T>) -> bool {
    found == expected || matches!(found, Err(Error::Corrupt { .. } | Error::BrokenLineage { .. }))
}

/// Returns whether something is read in another way.
fn check(what: &str, column: &str, found: &Seen, expected: &Seen) -> bool {
    assert!(noticed(&found.head, &expected.head), "{what}: head {:?}", found.head);
    assert!(noticed(&found.list, &expected.list), "{what}: list {:?}", found.list);
    assert!(noticed(&found.image, &expected.image), "{what}: image {:?}", found.image);
    assert!(noticed(&found.summary, &expected.summary), "{what}: summary {:?}", found.summary);
    assert!(noticed(&found.threads, &expected.threads), "{what}: threads {:?}", found.threads);
    // A checkpoint with another key is missing under its own.
    let keyed = matches!(column, "checkpoint.thread" | "checkpoint.ns" | "checkpoint.id");
    for (found, expected) in found.each.iter().zip(&expected.each) {
        assert!(noticed(found, expected) || (keyed && *found == Ok(None)), "{what}: get {found:?}");
    }
    let gone = keyed && matches!(found.history, Err(Error::NotFound { .. }));
    assert!(gone || noticed(&found.history, &expected.history), "{what}: history {:?}", found.history);
    found != expected
}

/// The columns of all tables, and how to change a byte of one: `$1` is its position, `$2` its new value.
const COLUMNS: [(&str, &str); 21] = [
    ("thread.id", "uuid"),
    ("thread.epoch", "bigint"),
    ("thread.revision", "bigint"),
    ("thread.name", "bytea"),
    ("thread.body", "bytea"),
    ("head.thread", "uuid"),
    ("head.ns", "bytea"),
    ("head.head", "uuid"),
    ("head.name", "bytea"),
    ("head.sum", "bytea"),
    ("checkpoint.thread", "uuid"),
    ("checkpoint.id", "uuid"),
    ("checkpoint.parent", "uuid"),
    ("checkpoint.seed", "uuid"),
    ("checkpoint.names", "int"),
    ("checkpoint.extra", "int"),
    ("checkpoint.ns", "bytea"),
    ("checkpoint.body", "bytea"),
    ("checkpoint.tasks", "bytea"),
    ("checkpoint.needs", "bigint[]"),
    ("element.hash", "uuid"),
];
const MORE: [(&str, &str); 5] = [
    ("thread.nonce", "uuid"),
    ("element.thread", "uuid"),
    ("element.seq", "bigint"),
    ("element.size", "int"),
    ("element.body", "bytea"),
];

/// A column's bytes as `bytea`, and back.
fn casts(kind: &str) -> (&'static str, &'static str) {
    match kind {
        "uuid" => ("uuid_send", "encode($1, 'hex')::uuid"),
        "int" => ("int4send", "('x' || encode($1, 'hex'))::bit(32)::int"),
        "bigint" => ("int8send", "('x' || encode($1, 'hex'))::bit(64)::bigint"),
        _ => ("", "$1"),
    }
}

/// Returns how many bytes were flipped, and after how many of these something was read in another way.
async fn flip_each(
    client: &Client,
    saver: &PostgresSaver,
    keys: &[CheckpointKey],
    expected: &Seen,
) -> (usize, usize) {
    let (mut flips, mut seen) = (0, 0);
    for (name, kind) in COLUMNS.into_iter().chain(MORE) {
        let (table, column) = name.split_once('.').unwrap();
        let (send, back) = casts(kind);
        if kind == "bigint[]" {
            let (more, more_seen) = flip_needs(client, saver, keys, expected).await;
            flips += more;
            seen += more_seen;
            continue;
        }
        let select = format!(
            "SELECT ctid::text, {send}({column}) FROM threadkeep_{table} WHERE {column} IS NOT NULL ORDER BY ctid"
        );
        let update = format!(
            "UPDATE threadkeep_{table} SET {column} = {back} WHERE ctid = $2::text::tid RETURNING ctid::text"
        );
        let rows = client.query(&select, &[]).await.unwrap();
        assert!(!rows.is_empty(), "no row has {name}");
        for row in rows {
            let (mut place, bytes): (String, Vec<u8>) = (row.get(0), row.get(1));
            // Long cells are the same throughout.
            let step = bytes.len().div_ceil(10).max(1);
            for at in (flips % step..bytes.len()).step_by(step) {
                let mut damaged = bytes.clone();
                damaged[at] ^= 1 << (flips % 8);
                flips += 1;
                let moved = client.query_one(&update, &[&damaged, &place]).await;
                if moved.as_ref().is_err_and(|error| error.code() == Some(&SqlState::UNIQUE_VIOLATION)) {
                    // The key of another row: the server itself would notice.
                    continue;
                }
                place = moved.unwrap().get(0);
                let what = format!("byte {at} of {} in {name}", bytes.len());
                seen += usize::from(check(&what, name, &see(saver, keys).await, expected));
                place = client.query_one(&update, &[&bytes, &place]).await.unwrap().get(0);
            }
            if kind == "bytea" && !bytes.is_empty() {
                let emptied = client.query_one(&update, &[&Vec::<u8>::new(), &place]).await;
                if emptied.as_ref().is_err_and(|error| error.code() == Some(&SqlState::UNIQUE_VIOLATION)) {
                    continue;
                }
                place = emptied.unwrap().get(0);
                let what = format!("nothing in {name}");
                seen += usize::from(check(&what, name, &see(saver, keys).await, expected));
                client.query_one(&update, &[&bytes, &place]).await.unwrap();
                flips += 1;
            }
        }
    }
    (flips, seen)
}

/// `needs` has no checksum: what it should list and does not is noticed as missing, what it lists in addition does no
/// harm.
async fn flip_needs(
    client: &Client,
    saver: &PostgresSaver,
    keys: &[CheckpointKey],
    expected: &Seen,
) -> (usize, usize) {
    let select = "SELECT ctid::text, needs FROM threadkeep_checkpoint WHERE needs IS NOT NULL";
    let update =
        "UPDATE threadkeep_checkpoint SET needs = $1 WHERE ctid = $2::text::tid RETURNING ctid::text";
    let rows = client.query(select, &[]).await.unwrap();
    assert!(!rows.is_empty(), "no row has needs");
    let (mut flips, mut seen) = (0, 0);
    for row in rows {
        let (mut place, needs): (String, Vec<i64>) = (row.get(0), row.get(1));
        for at in 0..needs.len() {
            for bit in [0, 1, 5, 31, 32, 33, 63] {
                let mut damaged = needs.clone();
                damaged[at] ^= 1 << bit;
                place = client.query_one(update, &[&damaged, &place]).await.unwrap().get(0);
                let what = format!("bit {bit} of {at} in needs");
                seen += usize::from(check(&what, "", &see(saver, keys).await, expected));
                place = client.query_one(update, &[&needs, &place]).await.unwrap().get(0);
                flips += 1;
            }
        }
    }
    (flips, seen)
}

/// A thread with every kind of row and of stored value; returns the keys of its root namespace.
async fn fill(saver: &PostgresSaver) -> Vec<CheckpointKey> {
    let mut talk = Talk::delta("t", 3);
    let mut keys = Vec::new();
    for n in 0..4 {
        // One is long enough to be packed.
        let mut step = talk.say(&message(n, if n == 1 { 500 } else { 60 }));
        step.metadata.extra.insert("run".into(), json!("a text that does not fit in the row itself"));
        if n == 2 {
            let map: serde_json::Map<_, _> = (0..9).map(|n| (n.to_string(), json!(n))).collect();
            step.metadata.extra.insert("map".into(), map.into());
        }
        saver.commit(step.clone()).await.unwrap();
        talk.accept(&step);
        keys.push(talk.key());
    }
    let mut nested = Talk::new("t").say(&note(9));
    nested.namespace = "nested".into();
    saver.commit(nested).await.unwrap();
    keys
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flipped_byte_anywhere_is_noticed_or_changes_nothing() {
    let database = database().await;
    let saver = open(database.url()).await;
    let keys = fill(&saver).await;
    let client = connect(database.url()).await;
    let expected = see(&saver, &keys).await;
    assert!(expected.image.as_ref().unwrap().checkpoints.len() == 5);
    let (flips, seen) = flip_each(&client, &saver, &keys, &expected).await;
    assert!(flips > 500 && seen > 100, "{flips} flips, of which {seen} were noticed");
    assert_eq!(see(&saver, &keys).await, expected, "after all is as it was");
}

/// A thread whose row is damaged can be deleted by a process that knows it, and others learn that it was deleted.
#[tokio::test(flavor = "multi_thread")]
async fn a_thread_with_a_damaged_row_is_deleted_for_all_who_know_it() {
    let database = database().await;
    let client = connect(database.url()).await;
    // The number of the next value; the version of the row, without which nothing of it can be read; nothing is left of it.
    let damages =
        ["set_byte(body, 1, get_byte(body, 1) # 1)", "set_byte(body, 0, get_byte(body, 0) # 1)", "''"];
    for (n, damage) in damages.into_iter().enumerate() {
        let (one, two) = (open(database.url()).await, open(database.url()).await);
        let mut talk = Talk::new(&format!("t{n}"));
        let first = talk.say(&note(0));
        one.commit(first.clone()).await.unwrap();
        talk.accept(&first);
        let head = CheckpointSelector::head(&talk.thread);
        two.commit(talk.say(&note(1))).await.unwrap();
        one.get(&head).await.unwrap().unwrap();
        let update = format!("UPDATE threadkeep_thread SET body = {damage}");
        assert_eq!(client.execute(&update, &[]).await.unwrap(), 1);
        let damaged = one.get(&head).await;
        assert!(matches!(damaged, Err(Error::Corrupt { .. })), "{damaged:?}");

        one.delete_thread(&talk.thread).await.unwrap();
        assert_eq!(two.get(&head).await, Ok(None), "{damage}");
        assert_eq!(one.get(&head).await, Ok(None), "{damage}");
        assert_eq!(two.threads(None, 10).await, Ok(Vec::new()));
        one.delete_thread(&talk.thread).await.unwrap();
        two.commit(first).await.unwrap();
        assert!(one.get(&head).await.unwrap().is_some());
        two.delete_thread(&talk.thread).await.unwrap();
    }
}

/// The walk to the parents ends also where a row is its own.
#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_that_names_itself_or_a_later_one_as_its_parent_is_noticed() {
    let database = database().await;
    let client = connect(database.url()).await;
    // Otherwise the server would write until its disk is full.
    let limit = format!("ALTER DATABASE {} SET temp_file_limit = '64MB'", database.name());
    client.batch_execute(&limit).await.unwrap();
    let saver = open(database.url()).await;
    let mut talk = Talk::delta("t", 100);
    let mut keys = Vec::new();
    for n in 0..5 {
        let step = talk.say(&note(n));
        saver.commit(step.clone()).await.unwrap();
        talk.accept(&step);
        keys.push(talk.key());
    }
    let channels = [MESSAGES.into()].into();
    let sound = saver.delta_history(&talk.key(), &channels, None).await.unwrap();
    let id = |n: usize| Uuid::from_bytes(*keys[n].id.as_bytes());
    for (row, parent) in [(4, 4), (2, 4)] {
        let damage = "UPDATE threadkeep_checkpoint SET parent = $1 WHERE id = $2";
        assert_eq!(client.execute(damage, &[&id(parent), &id(row)]).await.unwrap(), 1);
        let history = async { saver.delta_history(&talk.key(), &channels, None).await };
        let history = tokio::time::timeout(Duration::from_mins(10), history).await.expect("it never ends");
        assert!(matches!(history, Err(Error::Corrupt { .. } | Error::BrokenLineage { .. })), "{history:?}");
        client.execute(damage, &[&id(row - 1), &id(row)]).await.unwrap();
    }
    assert_eq!(saver.delta_history(&talk.key(), &channels, None).await, Ok(sound));
}

/// The files of the driver's tables and indexes in a database, under the server's directory.
async fn files(database: &Database) -> Vec<String> {
    let client = connect(database.url()).await;
    client.batch_execute("CHECKPOINT").await.unwrap();
    let query = "
        WITH ours AS (SELECT oid, reltoastrelid FROM pg_class WHERE relname LIKE 'threadkeep%')
        SELECT pg_relation_filepath(c.oid) FROM pg_class c
        WHERE pg_relation_size(c.oid) > 0 AND c.oid IN (
            SELECT oid FROM ours UNION SELECT reltoastrelid FROM ours
            UNION SELECT indexrelid FROM pg_index WHERE indrelid IN (SELECT reltoastrelid FROM ours))
        ORDER BY c.relname";
    client.query(query, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

/// The server's own page checksums detect damage below the rows: in headers, pointers, indexes. Each damage has a
/// database of its own, so that the server starts once.
#[tokio::test(flavor = "multi_thread")]
async fn a_flipped_byte_in_any_file_of_the_server_is_noticed_or_changes_nothing() {
    const PAGE: usize = 8_192;
    let server = Postgres::start().unwrap();
    let first = server.database().await.unwrap();
    setup(first.url(), &patient()).await.unwrap();
    let saver = open(first.url()).await;
    let keys = fill(&saver).await;
    let expected = see(&saver, &keys).await;
    saver.close();
    // In each page: its header, its first pointer, and a byte of its content.
    let mut places = Vec::new();
    let names = files(&first).await;
    assert!(names.len() > 10, "{names:?}");
    for (file, name) in names.iter().enumerate() {
        let bytes = std::fs::read(server.data().unwrap().join(name)).unwrap();
        for (page, content) in bytes.chunks(PAGE).enumerate() {
            let held = (PAGE / 2..PAGE).find(|at| content[*at] != 0);
            let inside = [Some(2 + 3 * file % 20), Some(25), held];
            places.extend(inside.into_iter().flatten().map(|at| (file, page * PAGE + at)));
        }
    }
    let admin = connect(&server.url("postgres")).await;
    // The server makes no copy of a database that has a session, and waits five seconds for the last ones to end.
    let sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = $1";
    while admin.query_one(sessions, &[&first.name()]).await.unwrap().get::<_, i64>(0) > 0 {
        tokio::task::yield_now().await;
    }
    let mut damaged = Vec::new();
    for (n, (file, at)) in places.into_iter().enumerate().filter(|(n, _)| n % 2 == 0) {
        let name = format!("damaged_{n}");
        let create = format!("CREATE DATABASE {name} TEMPLATE {} STRATEGY FILE_COPY", first.name());
        admin.batch_execute(&create).await.unwrap();
        let oid = "SELECT oid::text FROM pg_database WHERE datname = $1";
        let oid: String = admin.query_one(oid, &[&name]).await.unwrap().get(0);
        // base/<database>/<file>; a copy has the same file names.
        let name_of_file = names[file].rsplit('/').next().unwrap();
        damaged.push((server.url(&name), format!("base/{oid}/{name_of_file}"), at));
    }
    admin.batch_execute("CHECKPOINT").await.unwrap();
    tokio::task::block_in_place(|| server.crash().unwrap());
    for (n, (_, file, at)) in damaged.iter().enumerate() {
        let path = server.data().unwrap().join(file);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[*at] ^= 1 << (n % 8);
        std::fs::write(&path, bytes).unwrap();
    }
    tokio::task::block_in_place(|| server.resume().unwrap());
    let mut refused = 0;
    for (url, file, at) in &damaged {
        let found = match PostgresSaver::connect(url, patient()).await {
            Ok(saver) => see(&saver, &keys).await,
            Err(error) => {
                assert!(matches!(error, Error::Corrupt { .. }), "{file} at {at}: {error}");
                refused += 1;
                continue;
            }
        };
        check(&format!("{file} at {at}"), "", &found, &expected);
        refused += usize::from(found != expected);
    }
    let all = damaged.len();
    assert!(all > 20 && refused * 2 > all, "{refused} of {all} refused");
}
