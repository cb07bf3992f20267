//! Instruction counts of the hot paths under callgrind: numbers that a busy machine does not change.
//!
//! ```text
//! scripts/instructions.sh              compares with benches/instructions.json, fails beyond the bound
//! scripts/instructions.sh --bound 50   the same with another bound, in percent
//! scripts/instructions.sh --update     writes that file
//! ```
//!
//! Each path runs N and 2N times, each in its own process under callgrind; the difference over N is the count of one
//! run. So whatever happens once (start, setup, exit) does not count.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::hint::black_box;
use std::io::{self, Write as _};
use std::process::{Command, ExitCode};
use std::sync::Arc;

use serde_json::{Map, Value as Json, json};
use tempfile::TempDir;
use threadkeep::channel::{MESSAGES_CHANNEL, Messages, Reducer, Schema};
use threadkeep::id::{IdSource, ThreadId};
use threadkeep::metadata::Source;
use threadkeep::mode::ChannelMode;
use threadkeep::saver::{ListQuery, Load, Saver};
use threadkeep::state::{HistoryQuery, StateAccessor};
use threadkeep::step::{Durability, StepWriter};
use threadkeep::value::{ChannelValue, Element, ListValue};
use threadkeep_benches::transcript::Transcript;
use threadkeep_memory::MemorySaver;
use threadkeep_sqlite::{Options, SqliteSaver, Synchronous};
use tokio::runtime::{Builder, Runtime};

/// Where the counts are kept.
const COUNTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/instructions.json");
/// A count may grow by this many percent before it is a regression, and shrink by as much before the file is out of
/// date.
const BOUND: f64 = 15.0;

type BoxError = Box<dyn std::error::Error + Send + Sync>;
type Result<T, E = BoxError> = std::result::Result<T, E>;

/// Runs a path the given number of times.
type Path = fn(usize) -> Result<()>;

/// The paths, and how often each runs.
const PATHS: [(&str, usize, Path); 16] = [
    ("encode a message", 500, |times| values(times, |messages, _| Element::from_json(messages).map(drop))),
    ("decode a message", 500, |times| values(times, |_, element| element.to_json().map(drop))),
    ("split a list of 64 messages", 100, split),
    ("hash a message", 500, |times| {
        values(times, |_, element| {
            black_box(Element::hash_of(element.bytes()));
            Ok(())
        })
    }),
    ("append to a list of 4,000", 500, append),
    ("superstep in memory, full, 4,000 messages", 400, |times| steps(times, &memory(), FULL, 4_000)),
    ("superstep in memory, delta, 4,000 messages", 400, |times| steps(times, &memory(), FAR, 4_000)),
    ("head in memory, 500 updates and no snapshot", 4, |times| heads(times, &memory(), FAR, 500)),
    ("superstep on SQLite, full, 40 messages", 40, |times| on_sqlite(times, steps, FULL, 40)),
    ("superstep on SQLite, full, 4,000 messages", 40, |times| on_sqlite(times, steps, FULL, 4_000)),
    ("superstep on SQLite, delta K=10, 40 messages", 40, |times| on_sqlite(times, steps, TEN, 40)),
    ("superstep on SQLite, delta K=10, 4,000 messages", 40, |times| on_sqlite(times, steps, TEN, 4_000)),
    ("head on SQLite, delta K=10, 400 messages", 10, |times| on_sqlite(times, heads, TEN, 400)),
    ("history of 100 on SQLite, delta K=10, 400 messages", 2, |times| on_sqlite(times, pages, TEN, 400)),
    ("list of 400 on SQLite, delta K=10", 2, |times| on_sqlite(times, lists, TEN, 400)),
    ("list of 400 on SQLite without values, delta K=10", 2, |times| on_sqlite(times, outlines, TEN, 400)),
];

/// Modes with their cadence.
const FULL: (ChannelMode, u64) = (ChannelMode::Full, 1);
const TEN: (ChannelMode, u64) = (ChannelMode::Delta, 10);
const FAR: (ChannelMode, u64) = (ChannelMode::Delta, 1_000_000);

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match arguments[..] {
        [] => compare(false, BOUND),
        ["--update"] => compare(true, BOUND),
        ["--bound", percent] => percent.parse().map_err(Into::into).and_then(|bound| compare(false, bound)),
        ["run", path, times] => run(path, times),
        _ => Err("usage: instructions [--update | --bound PERCENT]".into()),
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            // Nobody may be reading stderr.
            let _ = writeln!(io::stderr(), "{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(path: &str, times: &str) -> Result<ExitCode> {
    let (_, _, run) = PATHS.iter().find(|(name, ..)| *name == path).ok_or("unknown path")?;
    run(times.parse()?)?;
    Ok(ExitCode::SUCCESS)
}

/// Counts all paths, then compares the counts with the file or writes it.
fn compare(update: bool, bound: f64) -> Result<ExitCode> {
    let kept: BTreeMap<String, u64> = match fs::read_to_string(COUNTS) {
        Ok(text) => serde_json::from_str(&text)?,
        Err(_) if update => BTreeMap::new(),
        Err(error) => return Err(format!("{COUNTS}: {error}; --update writes it").into()),
    };
    let (mut counts, mut beyond) = (BTreeMap::new(), 0);
    let mut out = io::stdout();
    for (name, times, _) in PATHS {
        let count = count(name, 2 * times)?.saturating_sub(count(name, times)?) / times as u64;
        let before = kept.get(name).copied();
        let change = before.map(|before| change(before, count));
        let text = match change {
            Some(change) if change.abs() <= bound => format!("{change:+.1} %"),
            Some(change) => format!("{change:+.1} %, beyond {bound} %"),
            None => "new".to_owned(),
        };
        beyond += usize::from(change.is_none_or(|change| change.abs() > bound));
        writeln!(out, "{name:<52} {count:>11}   {text}")?;
        counts.insert(name.to_owned(), count);
    }
    if update {
        fs::write(COUNTS, serde_json::to_string_pretty(&counts)? + "\n")?;
        return Ok(ExitCode::SUCCESS);
    }
    if beyond == 0 && kept.len() == counts.len() {
        return Ok(ExitCode::SUCCESS);
    }
    writeln!(out, "if this is intended, run scripts/instructions.sh --update and say why in the commit")?;
    Ok(ExitCode::FAILURE)
}

/// The change of a count, in percent.
#[allow(clippy::cast_precision_loss, reason = "shown with one digit")]
fn change(before: u64, now: u64) -> f64 {
    (now as f64 / before.max(1) as f64 - 1.0) * 100.0
}

/// The instructions of a process that runs a path the given number of times.
fn count(path: &str, times: usize) -> Result<u64> {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(env::current_exe()?)
        .args(["run", path, &times.to_string()])
        .output()
        .map_err(|error| format!("valgrind: {error}; install it, as scripts/instructions.sh does"))?;
    let text = String::from_utf8_lossy(&output.stderr);
    let found = text.lines().find_map(|line| line.split_once("Collected : ")?.1.trim().parse().ok());
    match found {
        Some(count) if output.status.success() => Ok(count),
        _ => Err(format!("{path}: {}\n{text}", output.status).into()),
    }
}

fn values(times: usize, run: impl Fn(&Json, &Element) -> threadkeep::Result<()>) -> Result<()> {
    let messages = transcript();
    let elements = messages.iter().map(Element::from_json).collect::<threadkeep::Result<Vec<_>>>()?;
    for (message, element) in messages.iter().zip(&elements).cycle().take(times) {
        run(black_box(message), black_box(element))?;
    }
    Ok(())
}

fn split(times: usize) -> Result<()> {
    let encoded = ChannelValue::from_json(&Json::Array(transcript()))?.to_encoded();
    for _ in 0..times {
        black_box(ChannelValue::from_encoded(encoded.clone())?);
    }
    Ok(())
}

fn append(times: usize) -> Result<()> {
    let mut value: ChannelValue = (0..4_000)
        .map(|n| Element::from_json(&message(n)))
        .collect::<threadkeep::Result<ListValue>>()?
        .into();
    for number in 0..times {
        let write = ChannelValue::from_json(&json!([message(4_000 + number)]))?;
        value = Messages.reduce(value, &write)?;
    }
    black_box(value);
    Ok(())
}

/// Supersteps on a thread whose messages were written in one superstep.
fn steps(times: usize, saver: &Arc<dyn Saver>, mode: (ChannelMode, u64), length: usize) -> Result<()> {
    let runtime = runtime()?;
    let thread = ThreadId::from("t");
    runtime.block_on(async {
        let accessor = accessor(saver, mode)?;
        let mut run = grown(&accessor, &thread, length, length).await?;
        for number in 0..times {
            step(&mut run, json!([message(length + number)])).await?;
        }
        Ok(())
    })
}

/// Heads of a thread that grew one message at a time.
fn heads(times: usize, saver: &Arc<dyn Saver>, mode: (ChannelMode, u64), length: usize) -> Result<()> {
    let thread = ThreadId::from("t");
    runtime()?.block_on(async {
        grown(&accessor(saver, mode)?, &thread, length, 1).await?;
        for _ in 0..times {
            black_box(accessor(saver, mode)?.get(&thread, None).await?);
        }
        Ok(())
    })
}

fn pages(times: usize, saver: &Arc<dyn Saver>, mode: (ChannelMode, u64), length: usize) -> Result<()> {
    let thread = ThreadId::from("t");
    runtime()?.block_on(async {
        grown(&accessor(saver, mode)?, &thread, length, 1).await?;
        for _ in 0..times {
            let query = HistoryQuery { limit: Some(100), ..HistoryQuery::default() };
            black_box(accessor(saver, mode)?.history(&thread, query).await?);
        }
        Ok(())
    })
}

fn lists(times: usize, saver: &Arc<dyn Saver>, mode: (ChannelMode, u64), length: usize) -> Result<()> {
    listed(times, saver, mode, length, &Load::All)
}

fn outlines(times: usize, saver: &Arc<dyn Saver>, mode: (ChannelMode, u64), length: usize) -> Result<()> {
    listed(times, saver, mode, length, &Load::None)
}

/// The newest checkpoints of a thread that grew one message at a time.
fn listed(
    times: usize,
    saver: &Arc<dyn Saver>,
    mode: (ChannelMode, u64),
    length: usize,
    load: &Load,
) -> Result<()> {
    let thread = ThreadId::from("t");
    runtime()?.block_on(async {
        grown(&accessor(saver, mode)?, &thread, length, 1).await?;
        for _ in 0..times {
            let query = ListQuery { limit: Some(length), load: load.clone(), ..ListQuery::new(&thread) };
            black_box(saver.list(&query).await?);
        }
        Ok(())
    })
}

/// Something to run on a thread of a saver.
type OnThread = fn(usize, &Arc<dyn Saver>, (ChannelMode, u64), usize) -> Result<()>;

fn on_sqlite(times: usize, run: OnThread, mode: (ChannelMode, u64), length: usize) -> Result<()> {
    let directory = TempDir::new()?;
    // Messages this short are compressed only with a dictionary, and to train one on a thread of its own would count too.
    let (synchronous, compression) = (Synchronous::Normal, false);
    let options = Options { synchronous, compression, readers: 1, ..Options::default() };
    let saver = Arc::new(SqliteSaver::open(directory.path().join("c.db"), &options)?);
    let any: Arc<dyn Saver> = saver.clone();
    run(times, &any, mode, length)?;
    runtime()?.block_on(saver.close());
    Ok(())
}

fn memory() -> Arc<dyn Saver> {
    Arc::new(MemorySaver::new())
}

fn runtime() -> Result<Runtime> {
    Ok(Builder::new_current_thread().enable_all().build()?)
}

fn accessor(
    saver: &Arc<dyn Saver>,
    (mode, frequency): (ChannelMode, u64),
) -> threadkeep::Result<StateAccessor> {
    let table = Schema::thread_state().compile(mode, frequency)?;
    Ok(StateAccessor::new(saver.clone(), Arc::new(table), Arc::new(IdSource::default())))
}

async fn grown(
    accessor: &StateAccessor,
    thread: &ThreadId,
    length: usize,
    at_once: usize,
) -> threadkeep::Result<StepWriter> {
    accessor.create(thread, Map::new()).await?;
    let mut run = StepWriter::open(accessor, thread, None).await?;
    for first in (0..length).step_by(at_once) {
        step(&mut run, (first..first + at_once).map(message).collect()).await?;
    }
    Ok(run)
}

async fn step(run: &mut StepWriter, messages: Json) -> threadkeep::Result<()> {
    let write = run.write(MESSAGES_CHANNEL, messages, false)?;
    let task = run.start_task(&"model".into(), 0);
    run.finish_task(task, vec![write], Durability::WithCommit).await?;
    run.commit(Source::Loop, vec!["model".into()], Map::new()).await?;
    Ok(())
}

fn transcript() -> Vec<Json> {
    let mut transcript = Transcript::new(7);
    (0..64).map(|n| if n % 2 == 0 { transcript.human() } else { transcript.ai() }).collect()
}

/// A message that is cheap to build.
fn message(number: usize) -> Json {
    json!({"type": "human", "id": format!("{number:032x}"), "content": "a question of ordinary length, as people ask many of them"})
}
