//! Whether what is stored is what was acknowledged.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use reqwest::Client;
use serde_json::Value as Json;

use super::clients::{Outcome, Thread};
use super::{Scene, operators};

/// The most memory of a gateway, in KiB.
const MEMORY: u64 = 700 * 1024;
/// Longer than any lease with its grace, on any busy machine.
const PATIENCE: Duration = Duration::from_mins(10);
/// How many runs a page has.
const PAGE: usize = 100;
/// The error of a run whose turn was taken back.
const ROLLED_BACK: &str = "Rolled back by user";

/// What was found.
#[derive(Default)]
pub(super) struct Judged {
    pub(super) acknowledged: usize,
    refused: usize,
    unknown: usize,
    /// Of those of which the client knows nothing, those that are there.
    unknown_there: usize,
    /// Of those, too, those that were rolled back.
    rolled_back: usize,
    runs: usize,
    memory: u64,
    pub(super) wrong: Vec<String>,
}

impl fmt::Display for Judged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, count) in [
            ("turns acknowledged", self.acknowledged),
            ("turns refused", self.refused),
            ("turns unknown", self.unknown),
            ("  of which are there", self.unknown_there),
            ("  were rolled back", self.rolled_back),
            ("runs", self.runs),
            ("wrong", self.wrong.len()),
        ] {
            writeln!(f, "{name:<20} {count:>5}")?;
        }
        writeln!(f, "{:<20} {:>5} MiB", "most memory", self.memory / 1024)?;
        for wrong in &self.wrong {
            writeln!(f, "WRONG: {wrong}")?;
        }
        Ok(())
    }
}

pub(super) async fn judge(scene: &Arc<Scene>, threads: &[Thread]) -> Judged {
    let mut judged = Judged::default();
    let client = crate::client();
    for (at, thread) in threads.iter().enumerate() {
        let bases = scene.bases();
        let of = format!("{}/api/threads/{}", bases[at % bases.len()], thread.id);
        let runs = judged.runs(&client, &of, thread).await;
        judged.messages(&client, &of, thread, &runs).await;
    }
    let (code, said) = operators::on_store(scene, &["verify", "--all"]).await;
    if code != Some(0) {
        judged.wrong.push(format!("verify: {said}"));
    }
    for gateway in scene.gateways.lock().unwrap().iter().flatten() {
        let status = std::fs::read_to_string(format!("/proc/{}/status", gateway.child.id())).unwrap();
        let most = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        judged.memory = judged.memory.max(most.trim().trim_end_matches(" kB").parse().unwrap());
    }
    if judged.memory > MEMORY {
        judged.wrong.push(format!("a gateway had {} KiB of memory", judged.memory));
    }
    judged
}

impl Judged {
    /// Every run has ended. Returns their records, by id.
    async fn runs(&mut self, client: &Client, of: &str, thread: &Thread) -> BTreeMap<String, Json> {
        let until = tokio::time::Instant::now() + PATIENCE;
        let runs = loop {
            let runs = all_runs(client, of).await;
            let is_active = |run: &&Json| matches!(run["status"].as_str(), Some("pending" | "running"));
            let active: Vec<Json> = runs.values().filter(is_active).cloned().collect();
            if active.is_empty() {
                break runs;
            }
            if tokio::time::Instant::now() > until {
                self.wrong.push(format!("{}: runs for ever: {active:?}", thread.id));
                break runs;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        };
        self.runs += runs.len();
        runs
    }

    /// Each acknowledged turn is there once, with its answer, in order, and its run a success; one that was rolled back
    /// is not there; the others are at most once.
    async fn messages(&mut self, client: &Client, of: &str, thread: &Thread, runs: &BTreeMap<String, Json>) {
        let state = read(client, &format!("{of}/state")).await;
        let messages: Vec<(&str, &str)> = state["values"]["messages"]
            .as_array()
            .map(Vec::as_slice)
            .unwrap_or_default()
            .iter()
            .map(|message| (message["type"].as_str().unwrap(), message["content"].as_str().unwrap()))
            .collect();
        let mut places = Vec::new();
        // A request that stops others, and that nobody answered, may be admitted late and stop any run after it.
        let mut may_be_stopped = false;
        for turn in &thread.turns {
            let there: Vec<usize> =
                (0..messages.len()).filter(|at| messages[*at] == ("human", turn.text.as_str())).collect();
            let answer = format!("You said: {}", turn.text);
            let answered =
                there.first().is_some_and(|at| messages.get(at + 1) == Some(&("ai", answer.as_str())));
            let record = turn.run.as_ref().and_then(|run| runs.get(run));
            let rolled_back = record.is_some_and(|record| record["error"] == ROLLED_BACK);
            let succeeded = record.is_some_and(|record| record["status"] == "success");
            let stopped = rolled_back || record.is_some_and(|record| record["status"] == "interrupted");
            let outcome = if may_be_stopped && stopped { Outcome::Unknown } else { turn.outcome };
            let is_right = match outcome {
                Outcome::Acknowledged => there.len() == 1 && answered && succeeded,
                Outcome::Refused => there.is_empty(),
                Outcome::Unknown if rolled_back => there.is_empty(),
                Outcome::Unknown => there.len() <= 1,
            };
            if !is_right {
                let text = &turn.text;
                self.wrong.push(format!(
                    "{text:?} is {outcome:?}, there at {there:?}, answered: {answered}; run: {record:?}"
                ));
            }
            match outcome {
                Outcome::Acknowledged => self.acknowledged += 1,
                Outcome::Refused => self.refused += 1,
                Outcome::Unknown => {
                    self.unknown += 1;
                    self.unknown_there += there.len();
                    self.rolled_back += usize::from(rolled_back);
                }
            }
            may_be_stopped |= turn.stops_others && turn.run.is_none() && turn.outcome == Outcome::Unknown;
            places.extend(there);
        }
        if !places.is_sorted() {
            self.wrong.push(format!("{}: out of order: {messages:?}", thread.id));
        }
        let foreign = messages.iter().filter(|(_, text)| !text.contains(&format!("{} says", thread.id)));
        for (_, text) in foreign {
            self.wrong.push(format!("{}: has {text:?}", thread.id));
        }
        if messages.iter().filter(|(kind, _)| *kind == "human").count() != places.len() {
            self.wrong.push(format!("{}: has turns that nobody sent: {messages:?}", thread.id));
        }
    }
}

/// The records of all runs of a thread, by id.
async fn all_runs(client: &Client, of: &str) -> BTreeMap<String, Json> {
    let (mut runs, mut offset) = (BTreeMap::new(), 0);
    loop {
        let fields = "select=run_id&select=status&select=error";
        let page = read(client, &format!("{of}/runs?limit={PAGE}&offset={offset}&{fields}")).await;
        let page = page.as_array().unwrap();
        runs.extend(page.iter().map(|run| (run["run_id"].as_str().unwrap().to_owned(), run.clone())));
        if page.len() < PAGE {
            return runs;
        }
        offset += PAGE;
    }
}

async fn read(client: &Client, url: &str) -> Json {
    loop {
        match client.get(url).send().await {
            Ok(answer) if answer.status().is_success() => return answer.json().await.unwrap(),
            // A pool may still have connections that have ended.
            Ok(answer) if answer.status().is_server_error() => {}
            other => panic!("{url}: {other:?}"),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
