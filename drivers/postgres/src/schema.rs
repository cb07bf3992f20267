//! The tables, their migrations, and the check that a database has them.
//!
//! # Format, version 7
//!
//! | table | key | holds |
//! |---|---|---|
//! | `threadkeep_format` | | the version of the format |
//! | `threadkeep_thread` | thread | its id, its mark, a sealed body: the next sequence number of each space, its past |
//! | `threadkeep_head` | thread, namespace | the namespace's text, the newest checkpoint, a seal |
//! | `threadkeep_checkpoint` | thread, namespace, id | a sealed body, and, sealed, the tasks that ran from it |
//! | `threadkeep_element` | thread, sequence number | bytes, compressed where that saves space, and their hash |
//! | `threadkeep_grave` | thread, life | since version 4: a life of a thread that was deleted in the last hours |
//!
//! Every key begins with the thread, so each table can be partitioned or distributed by it. Texts are `bytea`: they may
//! contain NUL. The functions (since version 3) hold the frequent statements. They are part of the format, because they
//! must fit the program that calls them: a changed function is a new version. Stop programs of an older version before
//! the tables are migrated. Since version 6 the walk from a checkpoint to its parents goes to older ids only: a damaged row
//! cannot make it endless. Since version 7 it returns no entries of metadata maps, and reads of one checkpoint leave out
//! those that the reader remembers.
//!
//! ## Keys
//!
//! The key of a thread is the first sixteen bytes of the BLAKE3 hash of its id, that of a namespace the same of its
//! text, and nothing for the root. Sequence numbers are `space << 32 | number`; each space counts from 0 and never
//! reuses a number while the thread exists. Spaces: 0 values and elements of lists, 1 names, metadata and chunks of
//! manifests, 2 entries of metadata maps.
//!
//! ## Marks
//!
//! The mark of a thread is `epoch`, drawn at random when the thread is created and when it is rewritten; `revision`,
//! twice the number of writes, plus one if the last one was acknowledged before it was flushed; and `nonce` (since
//! version 4; nil before), drawn at random by every write. Every write names the mark that it found: that is the fence.
//! Within one epoch only the tasks of a checkpoint ever change, and no row is removed. The body lists the first four
//! bytes of the last sixteen nonces, newest first, and the `life` of the thread, drawn at random when it is created: so
//! that a process can tell whether the history that it finds contains the writes that it knows.
//!
//! A deletion leaves the life of the thread in `threadkeep_grave` for some hours. If the answer to a commit that
//! created a thread was lost, its retry finds there that the thread was deleted since, and does not create it again.
//!
//! ## Rows
//!
//! Numbers are LEB128 varints, signed ones in zigzag form. A *sealed* body ends with four bytes of BLAKE3 over the name
//! of the table (without prefix), the other columns of the row, each preceded by its length (eight bytes,
//! little-endian), and the body. A nullable column is preceded by a column of one byte: 1, or 0 with nothing after it.
//! Integers are covered as eight bytes, little-endian.
//!
//! * thread: covers id, name, epoch, revision, and nonce unless that is nil. Body: version byte with a flag for what
//!   follows the numbers, the next number of each space; if flagged, life and trail (little-endian).
//! * head: covers thread, namespace, name, head. The body is empty.
//! * checkpoint, body: covers thread, namespace, id, parent, seed, names, extra. `names` is the element that lists the
//!   channels; `extra` the one that holds large metadata; `seed` the oldest checkpoint from which a sentinel of this
//!   one is replayed; `needs` (not covered, because missing elements are noticed) the first and last number of each run
//!   of elements of spaces 1 and 2 that are needed to understand the row. The body: version byte with source and delta
//!   marker, flags, step, next nodes, applied tasks, `parents` and counters if flagged, small or large `extra`, and
//!   every channel with its version and what is stored: a sentinel with its own seed, or a value.
//! * checkpoint, `tasks`: covers "tasks", thread, namespace, id. Of each task its id, node, index and writes. It grows
//!   when a task is stored.
//! * element: the hash is the first sixteen bytes of the BLAKE3 hash of the bytes; it is checked on every read. If
//!   `size` is set (since version 2), `body` is a zstd frame of that many bytes, else it is the bytes.
//!
//! ## Values
//!
//! A value of up to 32 bytes is stored inline. A larger one is split: each element of a list is a row of
//! `threadkeep_element`, stored once per thread, and the value is a *manifest*: runs of sequence numbers, so that an
//! append-only list of any length takes a few bytes. Runs beyond sixteen are packed in groups of eight into chunks,
//! which are elements themselves.

use std::sync::atomic::{AtomicBool, Ordering};

use threadkeep::{Error, Result};
use tokio_postgres::{Client, SimpleQueryMessage};

use crate::config::{Options, Target};
use crate::connect::Connector;
use crate::error::{NOT_ALLOWED, NOT_ITS_OWNER, NOT_SET_UP, SILENT, Trouble, in_doubt, told, unavailable};
use crate::function;
use crate::pool::BEGIN;
use crate::sql::fill;

/// The newest format that this driver reads, and the format that it writes.
pub const FORMAT_VERSION: u32 = 7;

/// Server settings with which the saver cannot keep its promises, and their consequences.
const RISKS: [(&str, &str); 5] = [
    (
        "fsync=off",
        "a crash of the machine loses acknowledged commits, and can corrupt the database; turn it on",
    ),
    ("full_page_writes=off", "a crash of the machine can corrupt pages of the database; turn it on"),
    (
        "synchronous_commit=off",
        "the saver turns it on for its own commits that ask for a flush; other programs' may be lost by a crash",
    ),
    (
        "synchronous_commit=local",
        "a failover to a synchronous standby can lose acknowledged commits; set it to on",
    ),
    (
        "data_checksums=off",
        "damage below the rows can hide some of them; turn them on with pg_checksums --enable while the server is stopped",
    ),
];

const TABLES: &str = "
CREATE TABLE {s}.threadkeep_thread (
    id uuid PRIMARY KEY, epoch bigint NOT NULL, revision bigint NOT NULL, name bytea NOT NULL, body bytea NOT NULL
) WITH (fillfactor = 50);
CREATE INDEX threadkeep_thread_name ON {s}.threadkeep_thread (substring(name, 1, 512));
CREATE TABLE {s}.threadkeep_head (
    thread uuid NOT NULL, ns bytea NOT NULL, head uuid NOT NULL, name bytea NOT NULL, sum bytea NOT NULL,
    PRIMARY KEY (thread, ns)
) WITH (fillfactor = 70);
CREATE TABLE {s}.threadkeep_checkpoint (
    thread uuid NOT NULL, id uuid NOT NULL, parent uuid, seed uuid, names int NOT NULL, extra int,
    ns bytea NOT NULL, body bytea NOT NULL, tasks bytea, needs bigint[],
    PRIMARY KEY (thread, ns, id)
);
CREATE TABLE {s}.threadkeep_element (
    thread uuid NOT NULL, hash uuid NOT NULL, seq bigint NOT NULL, body bytea NOT NULL,
    PRIMARY KEY (thread, seq)
);
";

const PACKED_ELEMENTS: &str = "
ALTER TABLE {s}.threadkeep_element ADD COLUMN size int;
ALTER TABLE {s}.threadkeep_element ALTER COLUMN body SET STORAGE EXTERNAL;
";

const MARKS: &str = "
ALTER TABLE {s}.threadkeep_thread ADD COLUMN nonce uuid NOT NULL DEFAULT '00000000-0000-0000-0000-000000000000';
CREATE TABLE {s}.threadkeep_grave (
    thread uuid NOT NULL, life bigint NOT NULL, at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (thread, life)
);
CREATE INDEX threadkeep_grave_at ON {s}.threadkeep_grave (at);
";

/// Roles that may call the function for every write may call the one for the usual commit. {s} is the schema in a
/// literal.
const RIGHT_TO_COMMIT: &str = "
DECLARE r record;
BEGIN
    FOR r IN
        SELECT a.privilege_type, a.grantee FROM pg_proc p, aclexplode(p.proacl) a
        WHERE p.oid = '{s}.threadkeep_write({o})'::regprocedure
    LOOP
        EXECUTE 'GRANT ' || r.privilege_type || ' ON FUNCTION {s}.threadkeep_commit TO '
            || CASE r.grantee WHEN 0 THEN 'PUBLIC' ELSE r.grantee::regrole::text END;
    END LOOP;
END";

/// Roles that may call the functions for reads of one checkpoint may call those that leave out what the caller remembers.
/// The functions are missing where a dump of the tables alone was restored. {s} is the schema in a literal.
const RIGHTS_TO_READ: &str = "
DECLARE r record;
BEGIN
    FOR r IN
        SELECT a.privilege_type, p.proname, a.grantee FROM pg_proc p, aclexplode(p.proacl) a
        WHERE p.oid IN (
            to_regprocedure('{s}.threadkeep_head(uuid, bytea)'), to_regprocedure('{s}.threadkeep_by_id(uuid, bytea, uuid)')
        )
    LOOP
        EXECUTE 'GRANT ' || r.privilege_type || ' ON FUNCTION {s}.' || r.proname || '_beyond TO '
            || CASE r.grantee WHEN 0 THEN 'PUBLIC' ELSE r.grantee::regrole::text END;
    END LOOP;
END";

/// Roles with rights on the old table and function get them on the new ones. {s} is the schema in a literal.
const RIGHTS: &str = "
DECLARE r record;
BEGIN
    FOR r IN
        SELECT a.privilege_type, 'TABLE {s}.threadkeep_grave' AS object, a.grantee
        FROM pg_class c, aclexplode(c.relacl) a WHERE c.oid = '{s}.threadkeep_thread'::regclass
        UNION ALL
        SELECT a.privilege_type, 'FUNCTION {s}.threadkeep_write(' || pg_get_function_identity_arguments(n.oid) || ')', a.grantee
        FROM pg_proc p, aclexplode(p.proacl) a, pg_proc n
        WHERE p.oid = '{s}.threadkeep_write({o})'::regprocedure AND n.oid = '{s}.threadkeep_write({n})'::regprocedure
    LOOP
        EXECUTE 'GRANT ' || r.privilege_type || ' ON ' || r.object || ' TO '
            || CASE r.grantee WHEN 0 THEN 'PUBLIC' ELSE r.grantee::regrole::text END;
    END LOOP;
END";

/// The types of the arguments of `threadkeep_write` in version 3.
const WRITE_3: &str = "uuid, bytea, bigint, bigint, bigint, bigint, bytea, boolean, bigint[], uuid[], int[], bytea[], \
    bytea[], uuid[], uuid[], uuid[], int[], int[], text[], bytea[], bytea[], bytea[], uuid[], bytea[], bytea[]";
/// The same in version 4.
const WRITE_4: &str = "uuid, bytea, bigint, bigint, uuid, bigint, bigint, uuid, bytea, boolean, bigint[], uuid[], int[], \
    bytea[], bytea[], uuid[], uuid[], uuid[], int[], int[], text[], bytea[], bytea[], bytea[], uuid[], bytea[], bytea[]";

/// Marks with random bits, graves, and the functions that know them.
fn marks(schema: &str) -> String {
    let in_literal = |text: &str| text.replace('\'', "''");
    let rights = fill(RIGHTS, &[("{s}", &in_literal(schema)), ("{o}", WRITE_3), ("{n}", WRITE_4)]);
    [
        MARKS.replace("{s}", schema),
        function::create(schema),
        format!("DO '{}';\n", in_literal(&rights)),
        format!("DROP FUNCTION {schema}.threadkeep_write({WRITE_3});\n"),
    ]
    .concat()
}

/// The function for the usual commit.
fn usual_commit(schema: &str) -> String {
    let in_literal = |text: &str| text.replace('\'', "''");
    let rights = fill(RIGHT_TO_COMMIT, &[("{s}", &in_literal(schema)), ("{o}", WRITE_4)]);
    [function::create_commit(schema), format!("DO '{}';\n", in_literal(&rights))].concat()
}

/// The functions that leave out what the caller remembers.
fn beyond(schema: &str) -> String {
    let in_literal = |text: &str| text.replace('\'', "''");
    let rights = fill(RIGHTS_TO_READ, &[("{s}", &in_literal(schema))]);
    [function::create_beyond(schema), format!("DO '{}';\n", in_literal(&rights))].concat()
}

/// The migration from each version to the next; the first one creates the tables.
const MIGRATIONS: [fn(&str) -> String; FORMAT_VERSION as usize] = [
    |schema| TABLES.replace("{s}", schema),
    |schema| PACKED_ELEMENTS.replace("{s}", schema),
    function::create_3,
    marks,
    usual_commit,
    function::create_lineage,
    beyond,
];

/// Creates the tables in the database at `address`, or migrates them to the newest format. Run it once, as the role
/// that will own them; any number of processes may run it at the same time. The schema is created if it is missing.
///
/// It waits for at most [`Options::patience`], unless that is zero.
///
/// # Errors
/// [`Error::NewerFormat`] if a newer version of this program created them; [`Error::Unavailable`] if the server cannot
/// be reached, does not finish in time, or the role may not create them: nothing was changed; [`Error::InDoubt`] if the
/// answer to the commit was lost; [`Error::InvalidInput`] for an invalid address or schema name.
pub async fn setup(address: &str, options: &Options) -> Result<()> {
    migrate(address, options, FORMAT_VERSION).await
}

/// Whether [`setup`] mends this error of [`crate::PostgresSaver::connect`]: the tables are missing or older, which the
/// server has said. One that does not answer, or a role without rights, does not want it.
pub fn is_wanted(error: &Error) -> bool {
    matches!(error, Error::Unavailable { reason, .. } if reason.starts_with(NOT_SET_UP))
}

/// [`setup`], up to a version.
async fn migrate(address: &str, options: &Options, version: u32) -> Result<()> {
    let schema = options.quoted_schema()?;
    let Target { config, tls } = Target::parse(address, options.patience)?;
    // What is dropped before the commit is rolled back.
    let committing = AtomicBool::new(false);
    let setting_up = async {
        let (client, _driver) = Box::pin(Connector::new(tls).open(&config)).await?;
        // After the commit nothing may fail.
        warn_of_losses(&client).await;
        apply(&client, options, &schema, version).await?;
        committing.store(true, Ordering::Relaxed);
        client.batch_execute("COMMIT").await?;
        Ok(())
    };
    let done = if options.patience.is_zero() {
        setting_up.await
    } else {
        let late =
            format!("{SILENT} within {:?}, or another session holds a lock on the tables", options.patience);
        let late = |_| Err(Trouble::Again { reason: late, in_doubt: true, renew: false });
        tokio::time::timeout(options.patience, setting_up).await.unwrap_or_else(late)
    };
    done.map_err(|trouble| match trouble {
        Trouble::Final(Error::Unavailable { reason, .. }) if reason.starts_with(NOT_ALLOWED) => {
            unavailable(reason.replacen(NOT_ALLOWED, NOT_ITS_OWNER, 1))
        }
        Trouble::Final(error) | Trouble::Lost(error) => error,
        Trouble::Again { reason, in_doubt: true, .. } if committing.load(Ordering::Relaxed) => {
            in_doubt(format!("{reason}; run setup again"))
        }
        Trouble::Again { reason, .. } => unavailable(format!("{reason}; run setup again")),
    })
}

/// Migrates in a transaction, and leaves it open.
async fn apply(client: &Client, options: &Options, schema: &str, version: u32) -> Result<(), Trouble> {
    client.batch_execute(BEGIN).await?;
    if !options.patience.is_zero() {
        // A session whose client has gone would go on to wait for a lock, and everybody else for that session.
        let limit = format!(
            "SET LOCAL lock_timeout = '{}ms'",
            options.patience.as_millis().clamp(1, i32::MAX as u128)
        );
        client.batch_execute(&limit).await?;
    }
    // Held until the end of the transaction: other migrations wait, and then find the work done.
    client.batch_execute(&format!("SELECT pg_advisory_xact_lock({})", lock_key(&options.schema))).await?;
    let literal = format!("'{}'", options.schema.replace('\'', "''"));
    let there = format!("SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = {literal}");
    if first_column(client, &there).await?.is_none() {
        client.batch_execute(&format!("CREATE SCHEMA {schema}")).await?;
    }
    // A role that finds nothing to do needs no right to create anything.
    let there = format!(
        "SELECT 1 FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
         WHERE n.nspname = {literal} AND c.relname = 'threadkeep_format'"
    );
    if first_column(client, &there).await?.is_none() {
        client
            .batch_execute(&format!("CREATE TABLE {schema}.threadkeep_format (version int NOT NULL)"))
            .await?;
    }
    let have = first_column(client, &format!("SELECT version FROM {schema}.threadkeep_format")).await?;
    let have = have.map_or(Ok(0), |have| known(&options.schema, &have))?;
    for migration in MIGRATIONS.iter().take(version as usize).skip(have as usize) {
        client.batch_execute(&migration(schema)).await?;
    }
    if have < version {
        let mut set = format!("INSERT INTO {schema}.threadkeep_format VALUES ({version})");
        if have > 0 {
            // The table has no key: where a publication for all tables has it, rows of it could not be deleted.
            let replace = format!(
                "ALTER TABLE {schema}.threadkeep_format REPLICA IDENTITY FULL; DELETE FROM {schema}.threadkeep_format; "
            );
            set.insert_str(0, &replace);
        }
        client.batch_execute(&set).await?;
    }
    if version == FORMAT_VERSION && first_column(client, &incomplete(schema)).await?.is_some() {
        client.batch_execute(&function::create_all(schema)).await?;
    }
    Ok(())
}

/// Finds something if a function is missing, as after a dump of the tables alone was restored.
fn incomplete(schema: &str) -> String {
    let schema = schema.replace('\'', "''");
    let missing = function::NAMES.map(|name| format!("pg_catalog.to_regproc('{schema}.{name}') IS NULL"));
    format!("SELECT 1 WHERE {}", missing.join(" OR "))
}

/// Warns of server settings with which a crash loses, or hides, what was acknowledged. If they cannot be read, it says so.
async fn warn_of_losses(client: &Client) {
    let query = "SELECT name || '=' || setting FROM pg_catalog.pg_settings
                 WHERE name IN ('fsync', 'full_page_writes', 'synchronous_commit', 'data_checksums')";
    let settings = match client.simple_query(query).await {
        Ok(settings) => settings,
        Err(error) => {
            let error = told(&error);
            tracing::warn!(
                %error,
                "cannot see whether the server keeps what it acknowledges; grant the role SELECT on pg_catalog.pg_settings"
            );
            return;
        }
    };
    let settings: Vec<&str> = settings
        .iter()
        .filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => row.get(0),
            _ => None,
        })
        .collect();
    for (setting, consequence) in risks(&settings) {
        tracing::warn!("the server has {setting}: {consequence}");
    }
}

/// The risks of these settings.
fn risks(settings: &[&str]) -> impl Iterator<Item = (&'static str, &'static str)> {
    RISKS.into_iter().filter(|(setting, _)| settings.contains(setting))
}

/// Checks that the tables and functions exist, in the format that this driver knows.
pub(crate) async fn check(client: &Client, options: &Options, schema: &str) -> Result<(), Trouble> {
    let incomplete = incomplete(schema);
    let asked = format!(
        "SELECT CASE WHEN version = {FORMAT_VERSION} AND EXISTS ({incomplete}) THEN 0 ELSE version END
         FROM {schema}.threadkeep_format"
    );
    let asked = first_column(client, &asked).await?;
    match asked.map(|have| known(&options.schema, &have)).transpose()? {
        Some(FORMAT_VERSION) => {
            warn_of_losses(client).await;
            Ok(())
        }
        _ => Err(unavailable(NOT_SET_UP).into()),
    }
}

fn known(schema: &str, version: &str) -> Result<u32> {
    let store = || format!("schema {schema}");
    let found: u32 =
        version.parse().map_err(|_| Error::corrupt(store(), format!("format version {version}")))?;
    if found > FORMAT_VERSION {
        return Err(Error::NewerFormat { store: store(), found, supported: FORMAT_VERSION });
    }
    Ok(found)
}

/// The text in the first column of the first row.
async fn first_column(client: &Client, query: &str) -> Result<Option<String>, Trouble> {
    let messages = client.simple_query(query).await?;
    Ok(messages.into_iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
        _ => None,
    }))
}

/// The advisory lock of a schema's migrations.
fn lock_key(schema: &str) -> i64 {
    let mut key = [0; 8];
    let hash = blake3::hash(format!("threadkeep migrations of {schema}").as_bytes());
    key.copy_from_slice(&hash.as_bytes()[..8]);
    i64::from_le_bytes(key)
}

#[cfg(test)]
mod tests;
