//! Whether what is stored is what was acknowledged.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use reqwest::Client;
use serde_json::Value as Json;

use super::clients::{Outcome, Thread};
use super::{Scene, faults};

/// The most memory of a gateway, in KiB.
const MEMORY: u64 = 700 * 1024;
/// Longer than any lease with its grace, on any busy machine.
const PATIENCE: Duration = Duration::from_mins(10);

/// What was found.
#[derive(Default)]
pub(super) struct Judged {
    pub(super) acknowledged: usize,
    refused: usize,
    unknown: usize,
    /// Of those of which the client knows nothing, those that are there.
    unknown_there: usize,
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
        judged.runs(&client, &of, thread).await;
        judged.messages(&client, &of, thread).await;
    }
    let (code, said) = faults::command(scene, &["verify", "--all"]).await;
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
    /// Every run has ended, those that were acknowledged as a success.
    async fn runs(&mut self, client: &Client, of: &str, thread: &Thread) {
        let until = tokio::time::Instant::now() + PATIENCE;
        let runs = loop {
            let runs = read(client, &format!("{of}/runs?limit=100")).await;
            let active = runs
                .as_array()
                .unwrap()
                .iter()
                .filter(|run| matches!(run["status"].as_str(), Some("pending" | "running")));
            if active.count() == 0 {
                break runs;
            }
            if tokio::time::Instant::now() > until {
                self.wrong.push(format!("{}: runs for ever: {runs}", thread.id));
                break runs;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        };
        self.runs += runs.as_array().unwrap().len();
        for turn in &thread.turns {
            let Outcome::Acknowledged(run) = &turn.outcome else { continue };
            let record = read(client, &format!("{of}/runs/{run}")).await;
            if record["status"] != "success" {
                self.wrong.push(format!("{}: `end` alone, but the run is {record}", turn.text));
            }
        }
    }

    /// Each acknowledged turn is there once, with its answer, in order; the others at most once.
    async fn messages(&mut self, client: &Client, of: &str, thread: &Thread) {
        let state = read(client, &format!("{of}/state")).await;
        let messages: Vec<(&str, &str)> = state["values"]["messages"]
            .as_array()
            .map(Vec::as_slice)
            .unwrap_or_default()
            .iter()
            .map(|message| (message["type"].as_str().unwrap(), message["content"].as_str().unwrap()))
            .collect();
        let mut places = Vec::new();
        for turn in &thread.turns {
            let there: Vec<usize> =
                (0..messages.len()).filter(|at| messages[*at] == ("human", turn.text.as_str())).collect();
            let answer = format!("You said: {}", turn.text);
            let answered =
                there.first().is_some_and(|at| messages.get(at + 1) == Some(&("ai", answer.as_str())));
            let is_right = match &turn.outcome {
                Outcome::Acknowledged(_) => there.len() == 1 && answered,
                Outcome::Refused => there.is_empty(),
                Outcome::Unknown => there.len() <= 1,
            };
            if !is_right {
                let text = &turn.text;
                self.wrong.push(format!(
                    "{text:?} is {:?}, and there at {there:?}, answered: {answered}",
                    turn.outcome
                ));
            }
            match turn.outcome {
                Outcome::Acknowledged(_) => self.acknowledged += 1,
                Outcome::Refused => self.refused += 1,
                Outcome::Unknown => {
                    self.unknown += 1;
                    self.unknown_there += there.len();
                }
            }
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
