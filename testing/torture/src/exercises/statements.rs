//! Failing operations: each write to a file, and each flush, fails once, before or after it is carried out.
//!
//! What the engine returned must be true after a restart: `Ok` means stored, `Unavailable` means absent, `InDoubt`
//! either; and what was acknowledged before is there. A restart is what kill -9 leaves; a power loss is tried too.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, bail, ensure};
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use serde_json::{Map, json};
use threadkeep::Error;
use threadkeep::id::ThreadId;
use threadkeep::metadata::Source;
use threadkeep::mode::ChannelMode;
use threadkeep::saver::Saver;
use threadkeep::state::StateAccessor;
use threadkeep::step::{Durability, StepWriter};
use threadkeep_sqlite::SqliteSaver;

use crate::actor::{accessor, say, texts, verified};
use crate::disk::{self, Disk};
use crate::exercise::{About, Turn};
use crate::storage::{scratch, sqlite_options};
use crate::trace::{Operation, Recorder, Verdict};
use crate::vfs;

/// What it tries, and what each run of it does.
pub const ABOUT: About = About {
    what: "each write and each flush of a file fails once; `Unavailable` means absent after a restart",
    needs: &["failures", "restarts", "images"],
};

const FILE: &str = "db";
const THREAD: &str = "t";
const PAYMENT: &str = "pay 100 EUR";

/// How the payment is made.
#[derive(Debug, Clone, Copy)]
enum Call {
    Update,
    Step,
    Annotate,
}

/// Makes each operation of each kind fail, in each way, during each call, until none is left.
///
/// # Errors
/// An error that was not true.
pub async fn run(turn: Turn) -> anyhow::Result<()> {
    for operation in [Operation::Sync, Operation::Write] {
        for how in [Verdict::Fail, Verdict::DoAndFail] {
            for call in [Call::Update, Call::Step, Call::Annotate] {
                let mut nth = 0;
                while fails(&turn, operation, nth, how, call).await? {
                    turn.tally.add("failures", 1);
                    nth += 1;
                }
                ensure!(nth > 0, "no {operation:?} was met in {call:?}");
            }
        }
    }
    Ok(())
}

/// Whether there was an `nth` operation to fail.
async fn fails(
    turn: &Turn,
    operation: Operation,
    nth: u32,
    how: Verdict,
    call: Call,
) -> anyhow::Result<bool> {
    let directory = scratch()?;
    let recorder = Arc::new(Recorder::keeping());
    let _recording = vfs::record(directory.path(), recorder.clone())?;
    let path = directory.path().join(FILE);
    let saver: Arc<dyn Saver> = Arc::new(SqliteSaver::open(&path, &sqlite_options())?);
    let mode = if turn.seed.is_multiple_of(2) { ChannelMode::Full } else { ChannelMode::Delta };
    let engine = accessor(&saver, mode, turn.seed)?;
    let mut acknowledged = Vec::new();
    for n in 0..3 + turn.seed % 5 {
        let text = format!("said {n}");
        say(&engine, &THREAD.into(), &text).await?;
        acknowledged.push(text);
    }
    recorder.promised(acknowledged.len());
    recorder.arm(operation, nth, how);
    let done = pay(&engine, call).await;
    if !recorder.disarm() {
        done?;
        return Ok(false);
    }
    let about = format!("{call:?} with {operation:?} {nth} that fails ({how:?})");
    // What the same process returns afterwards must be true as well.
    let again = pay(&engine, call).await;
    turn.tally.add("commits", acknowledged.len() + 2);

    let killed = scratch()?;
    for end in ["", "-wal"] {
        let name = format!("{FILE}{end}");
        if directory.path().join(&name).exists() {
            std::fs::copy(directory.path().join(&name), killed.path().join(&name))?;
        }
    }
    expect(&about, killed.path(), &acknowledged, &done, &again, mode, call).await?;
    turn.tally.add("restarts", 1);
    let mut disk = Disk::default();
    recorder.take().iter().for_each(|event| disk.follow(event));
    let mut rng = StdRng::seed_from_u64(turn.seed ^ u64::from(nth));
    for _ in 0..2 * turn.effort {
        let lost = scratch()?;
        disk::write(&disk.image(&mut rng), lost.path())?;
        let about = format!("{about}, then a loss of power");
        expect(&about, lost.path(), &acknowledged, &done, &again, mode, call).await?;
        turn.tally.add("images", 1);
    }
    Ok(true)
}

async fn pay(engine: &StateAccessor, call: Call) -> threadkeep::Result<()> {
    let thread = ThreadId::from(THREAD);
    match call {
        Call::Update => say(engine, &thread, PAYMENT).await.map(drop),
        Call::Step => {
            let mut writer = StepWriter::open(engine, &thread, None).await?;
            let task = writer.start_task(&"model".into(), 0);
            let message = json!([{ "type": "ai", "content": PAYMENT }]);
            let writes = vec![writer.write("messages", message, false)?];
            writer.finish_task(task, writes, Durability::WithCommit).await?;
            let paid = writer.commit(Source::Loop, vec![], Map::new()).await.map(drop);
            match paid {
                Err(Error::InDoubt { .. }) => {
                    // The writer does not know the outcome; asking it again must not make it certain of the wrong one.
                    writer.commit(Source::Loop, vec![], Map::new()).await.map(drop)
                }
                other => other,
            }
        }
        Call::Annotate => {
            let head = engine.get(&thread, None).await?;
            let Some(head) = head else { return Ok(()) };
            engine.annotate(&head, Map::from_iter([(PAYMENT.to_owned(), json!(true))])).await.map(drop)
        }
    }
}

/// Fails unless the content of the directory agrees with what was returned.
async fn expect(
    about: &str,
    directory: &Path,
    acknowledged: &[String],
    done: &threadkeep::Result<()>,
    again: &threadkeep::Result<()>,
    mode: ChannelMode,
    call: Call,
) -> anyhow::Result<()> {
    let _unflushed = vfs::record(directory, Arc::new(Recorder::default()))?;
    let store = Arc::new(SqliteSaver::open(directory.join(FILE), &sqlite_options())?);
    let saver: Arc<dyn Saver> = store.clone();
    let cold = accessor(&saver, mode, 1)?;
    let Some(head) = cold.get(&THREAD.into(), None).await? else { bail!("{about}: the thread is gone") };
    let read = texts(&head)?;
    let damage: Vec<_> = store.check().await?.into_iter().filter(|finding| !finding.orphan).collect();
    ensure!(damage.is_empty(), "{about}: {}", damage[0]);
    verified(&*saver, &THREAD.into()).await.with_context(|| about.to_owned())?;
    let (mut least, mut most) = (0, 0);
    for said in [done, again] {
        match said {
            Ok(()) => (least, most) = (least + 1, most + 1),
            Err(Error::InDoubt { .. }) => most += 1,
            Err(Error::Unavailable { .. }) => {}
            Err(error) => bail!("{about}: {error}"),
        }
    }
    let paid = match call {
        Call::Update | Call::Step => {
            ensure!(read.starts_with(acknowledged), "{about}: {read:?} of {acknowledged:?}");
            read.len() - acknowledged.len()
        }
        Call::Annotate => {
            ensure!(read == acknowledged, "{about}: {read:?} of {acknowledged:?}");
            let extra = Map::from_iter([(PAYMENT.to_owned(), json!(true))]);
            let query = threadkeep::state::HistoryQuery { filter: extra, ..Default::default() };
            cold.history(&THREAD.into(), query).await?.len()
        }
    };
    store.close().await;
    let said = [done, again].map(|said| said.as_ref().map_err(ToString::to_string));
    ensure!((least..=most).contains(&paid), "{about}: paid {paid} times; the answers were {said:?}");
    Ok(())
}
