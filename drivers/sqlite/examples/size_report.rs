//! File bytes and time per turn of one growing thread, in full mode and in delta mode.
//!
//! ```text
//! cargo run --release -p threadkeep-sqlite --example size_report
//! ```
//!
//! A turn is what the gateway does for one: open the head, one superstep for the question, one for the answer, and a
//! duration-only checkpoint. `step` is the second superstep: the first one after opening also indexes the message ids of
//! the head, once. Messages are seeded, varied text with the sizes of real transcripts (median 0.7 KB, 90 % below
//! 5.2 KB, at most 63 KB). Bytes are those of the closed file; raw bytes are the messages as compact JSON.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Map, Value as Json, json};
use threadkeep::Result;
use threadkeep::channel::Schema;
use threadkeep::id::{IdSource, NodeName, ThreadId};
use threadkeep::metadata::Source;
use threadkeep::mode::ChannelMode;
use threadkeep::state::StateAccessor;
use threadkeep::step::{Durability, StepWriter};
use threadkeep_sqlite::{Options, SqliteSaver};

const WORDS: usize = 4_000;

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
        let length = 500.0 * (1.55 * normal).exp();
        // In range by the clamp.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let length = length.clamp(20.0, 62_000.0) as usize;
        length
    }

    fn text(&mut self) -> String {
        let length = self.length();
        let mut text = String::with_capacity(length + 12);
        while text.len() < length {
            let rank: f64 = self.random.random();
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
            let word = ((WORDS as f64).powf(rank) - 1.0) as usize;
            text.push_str(&self.words[word.min(WORDS - 1)]);
            text.push_str(if self.random.random_ratio(1, 12) { ".\n" } else { " " });
        }
        text
    }

    fn message(&mut self, kind: &str, id: usize) -> Json {
        let text = self.text();
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
    mode: String,
    turns: usize,
    raw: u64,
    file: u64,
    step_20: Duration,
    step_last: Duration,
    turn_20: Duration,
    turn_last: Duration,
}

async fn measure(mode: ChannelMode, frequency: u64, turns: usize) -> Result<Row> {
    let dir = tempfile::tempdir().map_err(|e| threadkeep::Error::InvalidInput(e.to_string()))?;
    let path = dir.path().join("checkpoints.db");
    let saver = Arc::new(SqliteSaver::open_async(&path, Options::default()).await?);
    let table = Schema::thread_state().compile(mode, frequency)?;
    let accessor = StateAccessor::new(saver.clone(), Arc::new(table), Arc::new(IdSource::default()));
    let thread = ThreadId::from("thread");
    accessor.create(&thread, Map::new()).await?;
    let mut writer = Writer::new();
    let (mut raw, mut steps, mut whole) = (0, Vec::new(), Vec::new());
    for turn in 0..turns {
        let human = writer.message("human", 2 * turn);
        let ai = writer.message("ai", 2 * turn + 1);
        raw += (human.to_string().len() + ai.to_string().len()) as u64;
        let started = Instant::now();
        let mut run = StepWriter::open(&accessor, &thread, None).await?;
        let metadata = Map::from_iter([("run_id".to_owned(), json!(format!("{turn:032x}")))]);
        superstep(&mut run, "input", human, Source::Input, vec!["model".into()], &metadata).await?;
        let stepping = Instant::now();
        superstep(&mut run, "model", ai, Source::Loop, Vec::new(), &metadata).await?;
        steps.push(stepping.elapsed());
        let head = run.state().cloned();
        if let Some(head) = head {
            accessor.annotate(&head, metadata).await?;
        }
        whole.push(started.elapsed());
    }
    saver.close().await;
    let file = std::fs::metadata(&path).map_or(0, |m| m.len());
    let median = |times: &[Duration], around: usize| {
        let mut window: Vec<_> = times[around.saturating_sub(10)..(around + 10).min(times.len())].to_vec();
        window.sort();
        window[window.len() / 2]
    };
    let name = if mode == ChannelMode::Full { "full".to_owned() } else { format!("delta K={frequency}") };
    Ok(Row {
        mode: name,
        turns,
        raw,
        file,
        step_20: median(&steps, 20),
        step_last: median(&steps, turns - 10),
        turn_20: median(&whole, 20),
        turn_last: median(&whole, turns - 10),
    })
}

async fn superstep(
    run: &mut StepWriter,
    node: &str,
    message: Json,
    source: Source,
    next: Vec<NodeName>,
    metadata: &Map<String, Json>,
) -> Result<()> {
    let write = run.write("messages", json!([message]), false)?;
    let task = run.start_task(&node.into(), 0);
    run.finish_task(task, vec![write], Durability::WithCommit).await?;
    run.commit(source, next, metadata.clone()).await?;
    Ok(())
}

#[tokio::main]
#[allow(clippy::print_stdout, clippy::cast_precision_loss)] // A report is for people to read.
async fn main() -> Result<()> {
    println!(
        "{:<13} {:>5} {:>10} {:>10} {:>9}   {:>9} {:>9} {:>5}   {:>9} {:>9} {:>5}",
        "mode",
        "turns",
        "raw bytes",
        "file",
        "file/raw",
        "step @20",
        "step @end",
        "x",
        "turn @20",
        "turn @end",
        "x"
    );
    for turns in [200, 2_000] {
        for (mode, frequency) in [
            (ChannelMode::Full, 10),
            (ChannelMode::Delta, 1),
            (ChannelMode::Delta, 10),
            (ChannelMode::Delta, 1_000),
        ] {
            let row = measure(mode, frequency, turns).await?;
            let ms = |time: Duration| format!("{:.2} ms", time.as_secs_f64() * 1e3);
            let ratio = |a: Duration, b: Duration| a.as_secs_f64() / b.as_secs_f64();
            println!(
                "{:<13} {:>5} {:>10} {:>10} {:>9.3}   {:>9} {:>9} {:>5.2}   {:>9} {:>9} {:>5.2}",
                row.mode,
                row.turns,
                row.raw,
                row.file,
                row.file as f64 / row.raw as f64,
                ms(row.step_20),
                ms(row.step_last),
                ratio(row.step_last, row.step_20),
                ms(row.turn_20),
                ms(row.turn_last),
                ratio(row.turn_last, row.turn_20),
            );
        }
    }
    Ok(())
}
