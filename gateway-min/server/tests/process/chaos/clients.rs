//! Clients that remember what was acknowledged to them.

use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use reqwest::Client;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::Scene;

/// A client's thread, and its turns in the order in which they were sent.
pub(super) struct Thread {
    pub(super) id: String,
    pub(super) turns: Vec<Turn>,
}

/// A turn.
pub(super) struct Turn {
    /// Its question, which no other turn has.
    pub(super) text: String,
    pub(super) outcome: Outcome,
}

/// What the client knows of a turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The stream of this run ended with `end`, without an error.
    Acknowledged(String),
    /// It was refused before anything was done: it must not be there.
    Refused,
    /// Everything else: it is there once, or not at all.
    Unknown,
}

/// How long a client waits for a stream.
const PATIENCE: Duration = Duration::from_secs(20);

/// Sends one turn after the other, until it is over.
pub(super) async fn work(
    scene: Arc<Scene>,
    over: CancellationToken,
    number: usize,
    seed: u64,
) -> Vec<Thread> {
    let mut choices = StdRng::seed_from_u64(seed ^ (number as u64 + 1) << 32);
    let client = Client::builder().no_proxy().build().unwrap();
    let mut threads: Vec<Thread> =
        (0..2).map(|thread| Thread { id: format!("c{number}-{thread}"), turns: Vec::new() }).collect();
    for thread in &threads {
        create(&client, &scene, &thread.id).await;
    }
    while !over.is_cancelled() {
        let chosen = choices.random_range(0..threads.len());
        let thread = &mut threads[chosen];
        let text = format!("{} says {}", thread.id, thread.turns.len());
        let bases = scene.bases();
        let base = &bases[choices.random_range(0..bases.len())];
        let strategy = ["reject", "enqueue"][choices.random_range(0..2)];
        let body = json!({
            "input": {"messages": [{"role": "user", "content": text}]},
            "stream_mode": ["updates"], "multitask_strategy": strategy,
        });
        let sent = client.post(format!("{base}/api/threads/{}/runs/stream", thread.id)).json(&body).send();
        let outcome = tokio::time::timeout(PATIENCE, outcome(sent)).await.unwrap_or(Outcome::Unknown);
        if outcome == Outcome::Unknown || outcome == Outcome::Refused {
            // A server that is away answers at once.
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        thread.turns.push(Turn { text, outcome });
    }
    threads
}

async fn create(client: &Client, scene: &Scene, id: &str) {
    loop {
        let base = scene.bases().remove(0);
        let body = json!({"thread_id": id, "if_exists": "do_nothing"});
        match client.post(format!("{base}/api/threads")).json(&body).send().await {
            Ok(answer) if answer.status().is_success() => return,
            _ => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

async fn outcome(sent: impl Future<Output = reqwest::Result<reqwest::Response>>) -> Outcome {
    let Ok(answer) = sent.await else { return Outcome::Unknown };
    let status = answer.status().as_u16();
    if status == 409 {
        return Outcome::Refused;
    }
    let place = answer.headers().get("content-location").and_then(|place| place.to_str().ok());
    let run = place.and_then(|place| place.rsplit('/').next()).map(str::to_owned);
    assert!(status == 200 || status >= 500, "a client of its own threads gets {status}");
    let (Some(run), Ok(frames)) = (run, answer.text().await) else { return Outcome::Unknown };
    if frames.ends_with("event: end\ndata: null\n\n") && !frames.contains("event: error\n") {
        return Outcome::Acknowledged(run);
    }
    Outcome::Unknown
}
