//! Makes a checkpoint database with two long threads, one in each mode, to try the operator commands on.
//!
//! ```text
//! cargo run --release -p threadkeep-gateway --example long_threads -- /tmp/checkpoints.db 2000
//! ```
//!
//! A turn is what the gateway does for one: a superstep for the question, one for the answer, and a duration note that
//! carries the notes before it. Every tenth turn is answered twice: the first answer stays as a side branch.

use std::collections::BTreeMap;
use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Map, Value as Json, json};
use threadkeep::Result;
use threadkeep::channel::Schema;
use threadkeep::id::{IdSource, ThreadId};
use threadkeep::metadata::{DURATION_NODE, Source};
use threadkeep::mode::ChannelMode;
use threadkeep::state::StateAccessor;
use threadkeep::step::{Durability, StepWriter};
use threadkeep_sqlite::{Options, SqliteSaver, Synchronous};

const WORDS: &str = "the of agent thread model answer because under window planning river seven reply token market lemon \
                     quickly index stored table between carefully paper remote value message green system checkpoint never \
                     always sometimes question history";

struct Talk {
    random: StdRng,
    run: usize,
    durations: BTreeMap<String, u64>,
    messages: BTreeMap<String, String>,
}

impl Talk {
    fn message(&mut self, kind: &str, id: &str) -> Json {
        let words: Vec<&str> = WORDS.split_whitespace().collect();
        let length = self.random.random_range(20..400);
        let text: Vec<&str> = (0..length).map(|_| words[self.random.random_range(0..words.len())]).collect();
        json!({"type": kind, "id": id, "content": text.join(" ")})
    }

    /// A superstep; answers its checkpoint.
    async fn step(
        &mut self,
        writer: &mut StepWriter,
        node: &str,
        message: Json,
        next: &[&str],
        run: &str,
    ) -> Result<threadkeep::id::CheckpointId> {
        let write = writer.write("messages", json!([message]), false)?;
        let task = writer.start_task(&node.into(), 0);
        writer.finish_task(task, vec![write], Durability::WithCommit).await?;
        let source = if node == "input" { Source::Input } else { Source::Loop };
        let extra = Map::from_iter([("run_id".to_owned(), json!(run))]);
        let state = writer.commit(source, next.iter().map(|node| (*node).into()).collect(), extra).await?;
        Ok(state.key.id)
    }

    /// An answer and its duration note.
    async fn answer(
        &mut self,
        accessor: &StateAccessor,
        mut writer: StepWriter,
        run: &str,
        question: &str,
    ) -> Result<()> {
        let id = format!("lc_run--{run}");
        let message = self.message("ai", &id);
        self.step(&mut writer, "model", message, &[], run).await?;
        self.durations.insert(run.to_owned(), self.random.random_range(1..60));
        self.messages.extend([(id, run.to_owned()), (question.to_owned(), run.to_owned())]);
        let writes = json!({DURATION_NODE: {"run_ids": [run]}});
        let notes =
            json!({"run_durations": self.durations, "run_message_ids": self.messages, "writes": writes});
        if let (Some(state), Json::Object(extra)) = (writer.state(), notes) {
            accessor.annotate(state, extra).await?;
        }
        Ok(())
    }

    fn run_id(&mut self) -> String {
        self.run += 1;
        uuid::Builder::from_random_bytes(self.random.random()).into_uuid().to_string()
    }
}

async fn make(saver: &Arc<SqliteSaver>, mode: ChannelMode, turns: usize) -> Result<()> {
    let table = Schema::thread_state().compile(mode, 10)?;
    let accessor = StateAccessor::new(saver.clone(), Arc::new(table), Arc::new(IdSource::default()));
    let thread = ThreadId::from(format!("long-{mode}"));
    let mut talk = Talk {
        random: StdRng::seed_from_u64(7),
        run: 0,
        durations: BTreeMap::new(),
        messages: BTreeMap::new(),
    };
    for turn in 0..turns {
        let mut writer = StepWriter::open(&accessor, &thread, None).await?;
        let (run, question) = (talk.run_id(), format!("question-{turn}"));
        let message = talk.message("human", &question);
        let asked = talk.step(&mut writer, "input", message, &["model"], &run).await?;
        talk.answer(&accessor, writer, &run, &question).await?;
        if turn % 10 == 9 {
            let writer = StepWriter::open(&accessor, &thread, Some(asked)).await?;
            let again = talk.run_id();
            talk.answer(&accessor, writer, &again, &question).await?;
        }
    }
    Ok(())
}

#[tokio::main]
#[allow(clippy::print_stdout)] // It reports what it created.
async fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let path = args.next().unwrap_or_else(|| "checkpoints.db".to_owned());
    let turns = args.next().map_or(Ok(2_000), |turns| turns.parse())?;
    let options = Options { synchronous: Synchronous::Normal, ..Options::default() };
    let saver = Arc::new(SqliteSaver::open_async(&path, options).await?);
    for mode in [ChannelMode::Full, ChannelMode::Delta] {
        make(&saver, mode, turns).await?;
    }
    saver.close().await;
    println!("{path}: two threads of {turns} turns");
    Ok(())
}
