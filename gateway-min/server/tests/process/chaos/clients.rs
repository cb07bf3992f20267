//! Clients that remember what was acknowledged to them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::RngExt as _;
use rand::rngs::StdRng;
use reqwest::{Client, Response};
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
    /// Its run, if the request was answered with one.
    pub(super) run: Option<String>,
    /// Whether the request stops the runs before it.
    pub(super) stops_others: bool,
    pub(super) outcome: Outcome,
}

/// What the client knows of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// A stream of its run ended with `end`, without an error.
    Acknowledged,
    /// It was refused before anything was done: it must not be there.
    Refused,
    /// Everything else: it is there once, or not at all.
    Unknown,
}

/// How a turn is asked.
struct Manner {
    way: Way,
    /// `multitask_strategy`
    strategy: &'static str,
    /// `on_disconnect`
    on_disconnect: &'static str,
}

/// What a client does once its run has begun.
#[derive(Clone, Copy)]
enum Way {
    /// Follows it to its end.
    Follows,
    /// Leaves the stream.
    Leaves,
    /// Leaves the stream, and follows the run at another gateway.
    Joins,
    /// Leaves the stream, and has another gateway cancel the run with this action.
    Cancels(&'static str),
}

const WAYS: [Way; 10] = [
    Way::Follows,
    Way::Follows,
    Way::Follows,
    Way::Follows,
    Way::Follows,
    Way::Leaves,
    Way::Joins,
    Way::Joins,
    Way::Cancels("interrupt"),
    Way::Cancels("rollback"),
];

const STRATEGIES: [&str; 6] = ["reject", "reject", "enqueue", "enqueue", "interrupt", "rollback"];

/// How long a client waits for the end of a turn.
const PATIENCE: Duration = Duration::from_secs(20);
/// Longer than any lease with its grace, on any busy machine.
const LONGEST: Duration = Duration::from_mins(10);

impl Manner {
    fn chosen(choices: &mut StdRng) -> Self {
        let way = WAYS[choices.random_range(0..WAYS.len())];
        let strategy = STRATEGIES[choices.random_range(0..STRATEGIES.len())];
        let on_disconnect = match way {
            Way::Follows => "cancel",
            Way::Leaves => ["cancel", "continue"][choices.random_range(0..2)],
            Way::Joins | Way::Cancels(_) => "continue",
        };
        Self { way, strategy, on_disconnect }
    }
}

/// Creates the threads of the client with this number.
pub(super) async fn threads(scene: &Scene, number: usize) -> Vec<Thread> {
    let client = crate::client();
    let base = scene.bases().remove(0);
    let threads: Vec<Thread> =
        (0..2).map(|thread| Thread { id: format!("c{number}-{thread}"), turns: Vec::new() }).collect();
    for thread in &threads {
        let body = json!({ "thread_id": thread.id });
        let answer = client.post(format!("{base}/api/threads")).json(&body).send().await.unwrap();
        assert!(answer.status().is_success(), "{answer:?}");
    }
    threads
}

/// Sends one turn after the other on these threads, until it is over.
pub(super) async fn work(
    scene: Arc<Scene>,
    over: CancellationToken,
    mut threads: Vec<Thread>,
    mut choices: StdRng,
) -> Vec<Thread> {
    let client = Client::builder().no_proxy().build().unwrap();
    while !over.is_cancelled() {
        let chosen = choices.random_range(0..threads.len());
        let thread = &mut threads[chosen];
        let bases = scene.bases();
        let base = &bases[choices.random_range(0..bases.len())];
        let elsewhere = &bases[choices.random_range(0..bases.len())];
        let turn = ask(&client, [base, elsewhere], thread, Manner::chosen(&mut choices)).await;
        if turn.run.is_none() {
            // A server that is away answers at once.
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        thread.turns.push(turn);
    }
    threads
}

/// Asks until a turn is acknowledged, once everything serves again: nothing holds the thread for ever, and the runs
/// that were admitted before have ended then.
pub(super) async fn ask_last(scene: &Scene, thread: &mut Thread) {
    let client = crate::client();
    let until = Instant::now() + LONGEST;
    for base in scene.bases().iter().cycle() {
        let manner = Manner { way: Way::Follows, strategy: "enqueue", on_disconnect: "cancel" };
        let turn = ask(&client, [base, base], thread, manner).await;
        let is_acknowledged = turn.outcome == Outcome::Acknowledged;
        thread.turns.push(turn);
        if is_acknowledged {
            return;
        }
        assert!(Instant::now() < until, "{} does not go on", thread.id);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Asks at the first of two gateways.
async fn ask(
    client: &Client,
    [base, elsewhere]: [&str; 2],
    thread: &Thread,
    Manner { way, strategy, on_disconnect }: Manner,
) -> Turn {
    let text = format!("{} says {}", thread.id, thread.turns.len());
    let body = json!({
        "input": {"messages": [{"role": "user", "content": text}]},
        "stream_mode": ["updates"], "multitask_strategy": strategy, "on_disconnect": on_disconnect,
    });
    let runs = format!("api/threads/{}/runs", thread.id);
    let sent = client.post(format!("{base}/{runs}/stream")).json(&body).send();
    let mut run = None;
    let asked = async {
        let Ok(answer) = sent.await else { return Outcome::Unknown };
        let status = answer.status().as_u16();
        if status == 409 {
            return Outcome::Refused;
        }
        assert!(status == 200 || status >= 500, "a client of its own threads gets {status}");
        let place = answer.headers().get("content-location").and_then(|place| place.to_str().ok());
        run = place.and_then(|place| place.rsplit('/').next()).map(str::to_owned);
        let Some(run) = &run else { return Outcome::Unknown };
        if matches!(way, Way::Follows) {
            return followed(answer).await;
        }
        // Closes the connection.
        drop(answer);
        match way {
            Way::Joins => match client.get(format!("{elsewhere}/{runs}/{run}/stream")).send().await {
                Ok(joined) if joined.status().is_success() => followed(joined).await,
                _ => Outcome::Unknown,
            },
            Way::Cancels(action) => {
                let cancel = format!("{elsewhere}/{runs}/{run}/cancel?wait=true&action={action}");
                // Whether it is accepted, too late or lost: the run's record says how it has ended.
                client.post(cancel).send().await.ok();
                Outcome::Unknown
            }
            Way::Follows | Way::Leaves => Outcome::Unknown,
        }
    };
    let outcome = tokio::time::timeout(PATIENCE, asked).await.unwrap_or(Outcome::Unknown);
    Turn { text, run, stops_others: matches!(strategy, "interrupt" | "rollback"), outcome }
}

async fn followed(stream: Response) -> Outcome {
    let Ok(frames) = stream.text().await else { return Outcome::Unknown };
    if frames.ends_with("event: end\ndata: null\n\n") && !frames.contains("event: error\n") {
        return Outcome::Acknowledged;
    }
    Outcome::Unknown
}
