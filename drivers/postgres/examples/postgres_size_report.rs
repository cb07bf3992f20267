//! Table and index bytes of one growing thread, in full mode and in delta mode.
//!
//! ```text
//! cargo run --release -p threadkeep-postgres --example postgres_size_report
//! ```
//!
//! A turn is what the gateway does for one: open the head, one superstep for the question, one for the answer, and a
//! duration-only checkpoint. `step` is the second superstep, on a server on the same machine that does not flush.
//! Messages are seeded, varied text with the sizes of real transcripts (median 0.5 KB, at most 62 KB). Bytes are those of
//! all tables and their indexes, in use and after `VACUUM FULL`; raw bytes are the messages as compact JSON.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Map, Value as Json, json};
use threadkeep::channel::Schema;
use threadkeep::id::{IdSource, NodeName, ThreadId};
use threadkeep::metadata::Source;
use threadkeep::mode::ChannelMode;
use threadkeep::state::StateAccessor;
use threadkeep::step::{Durability, StepWriter};
use threadkeep_postgres::{Options, PostgresSaver, setup};
use threadkeep_testing::BoxError;
use tokio_postgres::{Client, NoTls};

const WORDS: usize = 4_000;
const SIZES: &str = "SELECT sum(pg_table_size(oid))::bigint, sum(pg_indexes_size(oid))::bigint FROM pg_class
                     WHERE relname LIKE 'threadkeep%' AND relkind = 'r'";

/// Text that looks like language: words of a fixed vocabulary, frequent ones far more often than rare ones.
struct Writer {
    random: StdRng,
    words: Vec<String>,
}

impl Writer {
    fn new() -> Self {
        let mut random = StdRng::seed_from_u64(7);
        let syllables = [
            "ra", "te", "mi", "con", "ver", "sa", "tion", "lo", "ed", "in", "pre", "gor", "um", "fi", "ness",
        ];
        let mut word = || {
            let parts = random.random_range(1..=4);
            (0..parts).map(|_| syllables[random.random_range(0..syllables.len())]).collect::<String>()
        };
        let words = (0..WORDS).map(|_| word()).collect();
        Self { random, words }
    }

    /// A length with the distribution of transcripts: log-normal, by the Box-Muller transform.
    fn length(&mut self) -> usize {
        let (a, b): (f64, f64) = (self.random.random_range(1e-9..1.0), self.random.random());
        let normal = (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos();
        // In range by the clamp.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let length = (500.0 * (1.55 * normal).exp()).clamp(20.0, 62_000.0) as usize;
        length
    }

    fn message(&mut self, kind: &str, id: usize) -> Json {
        let length = self.length();
        let mut text = String::with_capacity(length + 12);
        while text.len() < length {
            let rank: f64 = self.random.random();
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
            let word = ((WORDS as f64).powf(rank) - 1.0) as usize;
            text.push_str(&self.words[word.min(WORDS - 1)]);
            text.push_str(if self.random.random_ratio(1, 12) { ".\n" } else { " " });
        }
        match kind {
            "human" => {
                json!({"type": kind, "content": text, "id": format!("{id:032x}"), "additional_kwargs": {}})
            }
            _ => json!({
                "type": kind, "content": text, "id": format!("lc_run--{id:032x}"), "tool_calls": [],
                "usage_metadata": {"input_tokens": id * 3, "output_tokens": 200, "total_tokens": id * 3 + 200},
                "response_metadata": {"finish_reason": "stop", "model_name": "m"},
            }),
        }
    }
}

struct Row {
    raw: u64,
    used: [i64; 2],
    packed: [i64; 2],
    step_20: Duration,
    step_last: Duration,
}

async fn sizes(client: &Client) -> Result<[i64; 2], BoxError> {
    let row = client.query_one(SIZES, &[]).await?;
    Ok([row.get(0), row.get(1)])
}

async fn measure(mode: ChannelMode, frequency: u64, turns: usize) -> Result<Row, BoxError> {
    let database = threadkeep_testing::postgres()?.database().await?;
    setup(database.url(), &Options::default()).await?;
    let saver = Arc::new(PostgresSaver::connect(database.url(), Options::default()).await?);
    let table = Schema::thread_state().compile(mode, frequency)?;
    let accessor = StateAccessor::new(saver.clone(), Arc::new(table), Arc::new(IdSource::default()));
    let thread = ThreadId::from("thread");
    accessor.create(&thread, Map::new()).await?;
    let mut writer = Writer::new();
    let (mut raw, mut steps) = (0, Vec::new());
    for turn in 0..turns {
        let human = writer.message("human", 2 * turn);
        let ai = writer.message("ai", 2 * turn + 1);
        raw += (human.to_string().len() + ai.to_string().len()) as u64;
        let mut run = StepWriter::open(&accessor, &thread, None).await?;
        let metadata = Map::from_iter([("run_id".to_owned(), json!(format!("{turn:032x}")))]);
        superstep(&mut run, "input", human, Source::Input, vec!["model".into()], &metadata).await?;
        let stepping = Instant::now();
        superstep(&mut run, "model", ai, Source::Loop, Vec::new(), &metadata).await?;
        steps.push(stepping.elapsed());
        if let Some(head) = run.state().cloned() {
            accessor.annotate(&head, metadata).await?;
        }
    }
    let (client, connection) = tokio_postgres::connect(database.url(), NoTls).await?;
    tokio::spawn(connection);
    let used = sizes(&client).await?;
    client.batch_execute("VACUUM FULL").await?;
    let packed = sizes(&client).await?;
    let median = |around: usize| {
        let mut window: Vec<_> = steps[around.saturating_sub(10)..(around + 10).min(steps.len())].to_vec();
        window.sort();
        window[window.len() / 2]
    };
    Ok(Row { raw, used, packed, step_20: median(20), step_last: median(turns - 10) })
}

async fn superstep(
    run: &mut StepWriter,
    node: &str,
    message: Json,
    source: Source,
    next: Vec<NodeName>,
    metadata: &Map<String, Json>,
) -> threadkeep::Result<()> {
    let write = run.write("messages", json!([message]), false)?;
    let task = run.start_task(&node.into(), 0);
    run.finish_task(task, vec![write], Durability::WithCommit).await?;
    run.commit(source, next, metadata.clone()).await?;
    Ok(())
}

#[tokio::main]
#[allow(clippy::print_stdout, clippy::cast_precision_loss)] // A report is for people to read.
async fn main() -> Result<(), BoxError> {
    println!(
        "{:<13} {:>5} {:>10} {:>10} {:>9} {:>8} {:>8}   {:>9} {:>9} {:>5}",
        "mode", "turns", "raw", "tables", "indexes", "/raw", "packed", "step @20", "step @end", "x"
    );
    for turns in [200, 2_000] {
        for (mode, frequency) in
            [(ChannelMode::Full, 10), (ChannelMode::Delta, 10), (ChannelMode::Delta, 1_000)]
        {
            let row = measure(mode, frequency, turns).await?;
            let ms = |time: Duration| format!("{:.2} ms", time.as_secs_f64() * 1e3);
            let over = |sizes: [i64; 2]| sizes.iter().sum::<i64>() as f64 / row.raw as f64;
            let name =
                if mode == ChannelMode::Full { "full".to_owned() } else { format!("delta K={frequency}") };
            println!(
                "{:<13} {:>5} {:>10} {:>10} {:>9} {:>8.3} {:>8.3}   {:>9} {:>9} {:>5.2}",
                name,
                turns,
                row.raw,
                row.used[0],
                row.used[1],
                over(row.used),
                over(row.packed),
                ms(row.step_20),
                ms(row.step_last),
                row.step_last.as_secs_f64() / row.step_20.as_secs_f64(),
            );
        }
    }
    Ok(())
}
