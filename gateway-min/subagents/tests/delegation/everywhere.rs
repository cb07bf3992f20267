//! A process that dies, and a run that is cancelled, at every point where a run with four subagents can be interrupted.

use std::pin::Pin;
use std::task::{Context, Poll};

use async_trait::async_trait;
use serde_json::{Value as Json, json};
use threadkeep_agent::tools::WorkUsage;
use threadkeep_agent::{Ended, Observer};
use threadkeep_records::{ExecutionRow, ExecutionStatus};
use tokio_util::sync::CancellationToken;

use crate::support::{House, Seen, Still, lead, subagent, task};

/// A lead with four subagents of five turns, of which three run at once.
fn script() -> Json {
    let calls: Vec<Json> = ["a", "b", "c", "d"].iter().map(|name| task(name, "general-purpose")).collect();
    let mut answers: Vec<Json> = (1..5)
        .map(|turn| {
            json!({
                "text": format!("{turn}."), "tool_calls": [{"name": "glob", "args": {"pattern": turn.to_string()}}],
                "usage": {"input_tokens": 9, "output_tokens": 1},
            })
        })
        .collect();
    answers.push(json!({"text": "Done with {{input}}.", "usage": {"input_tokens": 9, "output_tokens": 1}}));
    lead(&calls, vec![subagent(json!(answers))])
}

async fn house() -> House {
    let mut house = House::new(script(), "").await;
    house.limits.concurrent = 4;
    house
}

fn contents(results: Vec<Json>) -> Vec<Json> {
    results.into_iter().map(|result| result["content"].clone()).collect()
}

/// Polls a future at most this often; afterwards calls `then` once, and `None` is the result if that is true.
struct Interrupted<'f, F, T> {
    future: Pin<&'f mut F>,
    polls: usize,
    then: T,
}

impl<F: Future, T: FnMut() -> bool + Unpin> Future for Interrupted<'_, F, T> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if self.polls == 0 && (self.then)() {
            return Poll::Ready(None);
        }
        self.polls = self.polls.wrapping_sub(1);
        self.future.as_mut().poll(context).map(Some)
    }
}

/// Runs until the process dies after `polls` polls; true if the run ended before.
fn killed_after(house: &House, polls: usize) -> bool {
    std::thread::scope(|threads| {
        let process = threads.spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let mut seen = Seen::default();
            let mut running = Box::pin(house.run("r1", Some("go"), &mut seen));
            let ended = runtime.block_on(Interrupted { future: running.as_mut(), polls, then: || true });
            // Its tasks first: dropping the run would tell them to stop.
            drop(runtime);
            std::mem::forget(running);
            ended.is_some()
        });
        process.join().unwrap()
    })
}

/// Check 1: the final state is that of a run that nobody killed, each stored answer was requested once, and nothing is left
/// over.
#[tokio::test]
async fn a_process_may_die_anywhere() {
    let whole = house().await;
    whole.ask("go").await;
    let expected = contents(whole.results().await);
    assert_eq!(expected.len(), 4);
    let mut points = 0;
    for polls in 1.. {
        let house = house().await;
        if killed_after(&house, polls) {
            break;
        }
        points += 1;
        let next = house.restarted();
        let mut seen = Seen::default();
        // A process that died before the input was stored leaves nothing to go on with.
        let stored = next.is_begun().await;
        next.run("r2", (!stored).then_some("go"), &mut seen).await.unwrap();
        assert_eq!(contents(next.results().await), expected, "{polls}");
        let rows = next.executions().await;
        assert_eq!(rows.len(), 4, "{polls}: no orphan");
        for row in &rows {
            assert_eq!(
                (row.status, row.delivered, row.attempt),
                (ExecutionStatus::Completed, true, 1),
                "{polls}"
            );
            assert_eq!(row.tokens().unwrap().total_tokens, 50, "{polls}: every stored answer counts once");
        }
        // What was under way is asked again: at most one question an agent.
        let repeated = next.requests("subagent:general-purpose").len() - 20;
        assert!(repeated <= 4, "{polls}: {repeated} questions were repeated");
        assert_eq!(next.delegator.admission.counts().running, 0, "{polls}");
        assert!(next.ledger().await.iter().all(|entry| entry["status"] == "completed"), "{polls}");
    }
    assert!(points > 5, "{points} points");
}

/// Check 4: cancelled once, twice or three times, at every event of a run: no slot and no execution is left, and what
/// models did is reported once.
#[tokio::test]
async fn a_run_may_be_cancelled_anywhere() {
    // Each of four subagents starts, says five things, gets four results, ends.
    for at in 1..=4 * (1 + 5 + 4 + 1) {
        let house = house().await;
        let cancel = CancellationToken::new();
        let mut seen = Cancelling {
            seen: Seen::default(),
            left: at,
            times: at % 3 + 1,
            cancel: cancel.clone(),
            still: None,
        };
        let ended = house.run_until("r1", Some("go"), &mut seen, cancel).await.unwrap();
        assert_eq!(ended, Ended::Cancelled, "{at}");
        let counts = house.delegator.admission.counts();
        assert_eq!((counts.running, counts.waiting()), (0, 0), "{at}: no slot is left");
        let rows = house.executions().await;
        assert!(rows.iter().all(|row| row.status.is_terminal()), "{at}: {rows:?}");
        let recorded: u64 =
            rows.iter().filter_map(ExecutionRow::tokens).map(|tokens| tokens.total_tokens).sum();
        let reported: i64 = seen.seen.used.iter().map(|(.., tokens)| tokens.total).sum();
        assert_eq!(u64::try_from(reported).unwrap(), recorded, "{at}: usage is reported once");
    }
}

/// Cancels at one event, some times in a row.
struct Cancelling {
    seen: Seen,
    left: usize,
    times: usize,
    cancel: CancellationToken,
    /// From then on: a subagent has five seconds to stop.
    still: Option<Still>,
}

#[async_trait]
impl Observer for Cancelling {
    async fn custom(&mut self, event: &Json) {
        self.seen.custom(event).await;
        self.left = self.left.saturating_sub(1);
        if self.left == 0 {
            self.still.get_or_insert_with(Still::begin);
            for _ in 0..self.times {
                self.cancel.cancel();
                tokio::task::yield_now().await;
            }
        }
    }

    fn used(&mut self, usage: &WorkUsage) {
        self.seen.used(usage);
    }
}
