//! Stores a run's usage in its row while it runs.

use std::convert::Infallible;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval_at};

use threadkeep_records::{RecordsError, RunTotals};

/// How often the row is updated.
pub(crate) const EVERY: Duration = Duration::from_secs(5);

/// Stores the totals every `every`, if they have changed. It never ends by itself; the caller drops it. The run's end
/// overwrites what a push that was dropped half-way may have stored.
pub(crate) async fn report<F>(
    mut totals: watch::Receiver<RunTotals>,
    every: Duration,
    mut push: impl FnMut(RunTotals) -> F,
) -> Infallible
where
    F: Future<Output = Result<(), RecordsError>>,
{
    let mut ticks = interval_at(Instant::now() + every, every);
    // After a slow push, wait the whole interval again.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        // An error means that the totals will not change any more.
        if !totals.has_changed().unwrap_or(false) {
            continue;
        }
        let now = totals.borrow_and_update().clone();
        if let Err(error) = push(now).await {
            tracing::warn!(%error, "cannot store the totals of a run; the next tick tries again");
            totals.mark_changed();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use serde_json::json;
    use tokio::time::{sleep, timeout};

    use super::super::tests::{Gateway, ask};
    use super::*;
    use crate::app::Parts;
    use threadkeep_agent::model::scripted::gate;
    use threadkeep_records::RunStatus;

    fn totals(tokens: i64) -> RunTotals {
        RunTotals { total_tokens: tokens, ..RunTotals::default() }
    }

    /// What was pushed, with the second of its push.
    #[derive(Clone, Default)]
    struct Pushed(Arc<Mutex<Vec<(u64, i64)>>>);

    impl Pushed {
        fn take(&self) -> Vec<(u64, i64)> {
            std::mem::take(&mut self.0.lock().unwrap())
        }
    }

    /// Reports, each push taking `takes` and the first `failures` failing, while `work` runs.
    async fn while_working(
        takes: Duration,
        failures: usize,
        work: impl AsyncFnOnce(&watch::Sender<RunTotals>, &Pushed),
    ) {
        let (sender, receiver) = watch::channel(RunTotals::default());
        let (pushed, start) = (Pushed::default(), Instant::now());
        let (seen, mut left) = (pushed.clone(), failures);
        let push = move |totals: RunTotals| {
            let fails = left > 0;
            left = left.saturating_sub(1);
            let seen = seen.clone();
            async move {
                seen.0.lock().unwrap().push((start.elapsed().as_secs(), totals.total_tokens));
                sleep(takes).await;
                if fails {
                    Err(RecordsError::Unavailable { cause: threadkeep_records::DatabaseError::Closed })
                } else {
                    Ok(())
                }
            }
        };
        tokio::select! {
            biased;
            () = work(&sender, &pushed) => {}
            never = report(receiver, EVERY, push) => match never {},
        }
    }

    #[tokio::test(start_paused = true)]
    async fn totals_are_pushed_every_five_seconds_if_they_changed() {
        while_working(Duration::ZERO, 0, async |totals_of_run, pushed| {
            sleep(Duration::from_secs(6)).await;
            assert_eq!(pushed.take(), [], "nothing to push");
            totals_of_run.send_replace(totals(1));
            totals_of_run.send_replace(totals(2));
            sleep(Duration::from_secs(3)).await;
            assert_eq!(pushed.take(), [], "not before its time");
            sleep(Duration::from_secs(10)).await;
            assert_eq!(pushed.take(), [(10, 2)], "the newest, once");
            totals_of_run.send_replace(totals(3));
            sleep(Duration::from_secs(5)).await;
            assert_eq!(pushed.take(), [(20, 3)]);
        })
        .await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_push_is_made_again_at_the_next_tick() {
        while_working(Duration::ZERO, 1, async |totals_of_run, pushed| {
            totals_of_run.send_replace(totals(1));
            sleep(Duration::from_secs(21)).await;
            assert_eq!(pushed.take(), [(5, 1), (10, 1)]);
        })
        .await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_push_neither_piles_up_nor_holds_up_the_end() {
        let start = Instant::now();
        while_working(Duration::from_secs(7), 0, async |totals_of_run, pushed| {
            for n in 1..=23 {
                totals_of_run.send_replace(totals(n));
                sleep(Duration::from_secs(1)).await;
            }
            let pushed = pushed.take();
            assert_eq!(pushed.iter().map(|(second, _)| *second).collect::<Vec<_>>(), [5, 12, 19]);
        })
        .await;
        assert_eq!(start.elapsed().as_secs(), 23, "the last push would take until 26");
    }

    #[tokio::test]
    async fn the_row_of_a_run_at_work_shows_what_it_has_used() {
        let script = json!({"rules": [{"answers": [
            {"tool_calls": [{"name": "ls"}], "usage": {"input_tokens": 10, "output_tokens": 5}},
            {"text": "late", "gate": {"name": "progress"}, "usage": {"input_tokens": 20, "output_tokens": 2}},
        ]}]});
        let often = Parts { progress_every: Duration::from_millis(10), ..Parts::default() };
        let gateway = Gateway::start_with(("memory", "delta"), 3, &script, often).await;
        let created = gateway.create(ask("hello")).await.unwrap();
        gate("progress").reached().await;
        let runs = gateway.app.records.runs();
        let shown = async {
            loop {
                let row = runs.get(&created.run.run_id).await.unwrap().unwrap();
                if row.totals.llm_call_count > 0 {
                    return row;
                }
                sleep(Duration::from_millis(5)).await;
            }
        };
        let row = timeout(Duration::from_mins(10), shown).await.unwrap();
        assert_eq!(row.status, RunStatus::Running);
        assert_eq!(
            (row.totals.total_tokens, row.totals.lead_agent_tokens, row.totals.llm_call_count),
            (15, 15, 1)
        );
        assert_eq!(row.totals.token_usage_by_model["m"]["input_tokens"], 10);
        gate("progress").open();
        let row = gateway.row(&created.run.run_id).await;
        assert_eq!(
            (row.status, row.totals.total_tokens, row.totals.message_count),
            (RunStatus::Success, 37, 4)
        );
    }
}
