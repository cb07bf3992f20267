//! Failing statements: the server refuses a change of one of our rows once, where it is made or at the commit.
//!
//! What the engine answered must be true: `Ok` means stored, `Unavailable` that nothing has changed, and the next attempt
//! is carried out.

use std::sync::Arc;

use anyhow::{bail, ensure};
use threadkeep::Error;
use threadkeep::id::ThreadId;
use threadkeep::mode::ChannelMode;
use threadkeep::saver::Saver;
use threadkeep::state::StateAccessor;
use threadkeep_testing::Database;

use crate::actor::{accessor, say, texts, verified};
use crate::exercise::{About, Turn};
use crate::storage::{Kind, database, open_at};

/// What it tries, and what each run of it does.
pub const ABOUT: About = About {
    what: "the server refuses each change of a row once, at once or at the commit",
    needs: &["failures", "commits", "states"],
};

const TABLES: [&str; 4] = ["thread", "element", "checkpoint", "head"];
/// When it is refused. At the commit, all is done but that.
const MOMENTS: [(&str, &str); 2] = [
    ("CREATE TRIGGER torture BEFORE", "FOR EACH ROW"),
    ("CREATE CONSTRAINT TRIGGER torture AFTER", "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW"),
];
/// A full disk, a cancelled statement, an error of a function, a deadlock.
const CODES: [&str; 4] = ["53100", "57014", "P0001", "40P01"];

#[derive(Debug, Clone, Copy)]
enum Call {
    Begin,
    Say,
    Delete,
}

/// Refuses each change of each call, with one code after the other.
///
/// # Errors
/// An answer that was not true.
pub async fn run(turn: Turn) -> anyhow::Result<()> {
    let database = database().await?;
    let saver = open_at(Kind::Postgres, database.url()).await?;
    ask(&database, "CREATE SEQUENCE public.torture_changes").await?;
    let mut number = usize::try_from(turn.seed % 4)?;
    for (create, how) in MOMENTS {
        refuse(&database, 0, CODES[0]).await?;
        for table in TABLES {
            let trigger = format!(
                "{create} INSERT OR UPDATE OR DELETE ON threadkeep_{table} {how} EXECUTE FUNCTION public.torture()"
            );
            ask(&database, &trigger).await?;
        }
        for call in [Call::Begin, Call::Say, Call::Delete] {
            let mut nth = 1;
            loop {
                number += 1;
                let thread = ThreadId::from(format!("t{number}"));
                let code = CODES[number % CODES.len()];
                if !fails(&turn, &database, &saver, &thread, (call, nth, code)).await? {
                    break;
                }
                turn.tally.add("failures", 1);
                nth += 1;
            }
            ensure!(nth > 1, "no change was met in {call:?}");
        }
        for table in TABLES {
            ask(&database, &format!("DROP TRIGGER torture ON threadkeep_{table}")).await?;
        }
    }
    Ok(())
}

async fn ask(database: &Database, statements: &str) -> anyhow::Result<String> {
    database.ask(statements).await.map_err(anyhow::Error::from_boxed)
}

/// Lets the `nth` change from now on fail; none if that is 0. A sequence counts on when a transaction is rolled back.
async fn refuse(database: &Database, nth: u32, code: &str) -> anyhow::Result<()> {
    let statements = format!(
        "CREATE OR REPLACE FUNCTION public.torture() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF nextval('public.torture_changes') = {nth} THEN
                RAISE EXCEPTION 'arranged' USING ERRCODE = '{code}';
            END IF;
            IF TG_OP = 'DELETE' THEN RETURN OLD; END IF;
            RETURN NEW;
        END $$;
        ALTER SEQUENCE public.torture_changes RESTART"
    );
    ask(database, &statements).await.map(drop)
}

/// Whether there was an `nth` change to refuse.
async fn fails(
    turn: &Turn,
    database: &Database,
    saver: &Arc<dyn Saver>,
    thread: &ThreadId,
    (call, nth, code): (Call, u32, &str),
) -> anyhow::Result<bool> {
    let mode = if turn.seed.is_multiple_of(2) { ChannelMode::Full } else { ChannelMode::Delta };
    let engine = accessor(saver, mode, turn.seed)?;
    let lines = if matches!(call, Call::Begin) { 0 } else { 1 + turn.seed % 4 };
    refuse(database, 0, code).await?;
    let mut before = Vec::new();
    for line in 0..lines {
        let text = format!("line {line}");
        say(&engine, thread, &text).await?;
        before.push(text);
    }
    refuse(database, nth, code).await?;
    let done = make(&engine, thread, call).await;
    let met = format!("SELECT (is_called AND last_value >= {nth})::text FROM public.torture_changes");
    let failed = ask(database, &met).await? == "true";
    refuse(database, 0, code).await?;
    let about = format!("{call:?} of {thread} with {code} at change {nth}; the answer was {done:?}");
    let after: Vec<String> = match call {
        Call::Begin | Call::Say => before.iter().cloned().chain(["paid".to_owned()]).collect(),
        Call::Delete => Vec::new(),
    };
    let is_done = match &done {
        Ok(()) => true,
        Err(Error::Unavailable { .. }) => false,
        Err(_) => bail!("{about}"),
    };
    // The driver retries some.
    ensure!(is_done || failed, "{about}, though nothing failed");
    expect(saver, thread, if is_done { &after } else { &before }, &about).await?;
    if !is_done {
        make(&engine, thread, call).await?;
        expect(saver, thread, &after, &about).await?;
    }
    turn.tally.add("commits", before.len() + 1);
    turn.tally.add("states", 1);
    Ok(failed)
}

async fn make(engine: &StateAccessor, thread: &ThreadId, call: Call) -> threadkeep::Result<()> {
    match call {
        Call::Begin | Call::Say => say(engine, thread, "paid").await.map(drop),
        Call::Delete => engine.delete_thread(thread).await,
    }
}

/// Fails unless a process that knows nothing reads this.
async fn expect(
    saver: &Arc<dyn Saver>,
    thread: &ThreadId,
    expected: &[String],
    about: &str,
) -> anyhow::Result<()> {
    let cold = accessor(saver, ChannelMode::Delta, 0)?;
    let head = cold.get(thread, None).await?;
    let read = head.as_ref().map(texts).transpose()?.unwrap_or_default();
    ensure!(read == expected, "{about}: it reads {read:?}, expected {expected:?}");
    verified(&**saver, thread).await
}
