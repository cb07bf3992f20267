//! Ends attempts together: those that end while an earlier end is written share the next transaction of their batch, which
//! takes the batch's row and waits for the disk once for all of them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use threadkeep_records::{Batches, Ended, RecordsError, persistently};
use tokio::sync::oneshot;

/// How many attempts one transaction ends.
const MOST: usize = 32;

/// What is to be written, by batch. A batch that is in it has somebody who writes.
#[derive(Clone)]
pub(super) struct Endings {
    batches: Batches,
    waiting: Arc<Mutex<HashMap<String, Vec<Waiting>>>>,
}

struct Waiting {
    ended: Ended,
    answer: oneshot::Sender<Result<bool, Unwritten>>,
}

/// Why an end may not be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unwritten {
    pub(super) error: String,
    /// Whether it may be later.
    pub(super) may_pass: bool,
}

impl From<RecordsError> for Unwritten {
    fn from(error: RecordsError) -> Self {
        Self { error: error.to_string(), may_pass: error.may_pass() }
    }
}

impl Endings {
    pub(super) fn new(batches: Batches) -> Self {
        Self { batches, waiting: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Vec<Waiting>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends an attempt as [`Batches::finalize`] does, also if the future is dropped.
    ///
    /// # Errors
    /// Why it may not be written.
    pub(super) async fn end(&self, ended: Ended) -> Result<bool, Unwritten> {
        let batch_id = ended.claim.batch_id.clone();
        let (answer, answered) = oneshot::channel();
        let waiting = Waiting { ended, answer };
        let is_first = {
            let mut all = self.lock();
            let of_batch = all.get_mut(&batch_id);
            let is_first = of_batch.is_none();
            match of_batch {
                Some(of_batch) => of_batch.push(waiting),
                None => drop(all.insert(batch_id.clone(), vec![waiting])),
            }
            is_first
        };
        if is_first {
            tokio::spawn(self.clone().write(batch_id));
        }
        let stops = || Unwritten { error: "the process stops".to_owned(), may_pass: false };
        answered.await.unwrap_or_else(|_| Err(stops()))
    }

    /// Writes the ends of a batch until no more are waiting.
    async fn write(self, batch_id: String) {
        loop {
            let next = {
                let mut all = self.lock();
                let of_batch = all.get_mut(&batch_id).filter(|waiting| !waiting.is_empty());
                let Some(of_batch) = of_batch else {
                    all.remove(&batch_id);
                    return;
                };
                of_batch.drain(..of_batch.len().min(MOST)).collect::<Vec<_>>()
            };
            let ended: Vec<Ended> = next.iter().map(|waiting| waiting.ended.clone()).collect();
            match persistently(|| self.batches.finalize_all(&batch_id, ended.clone())).await {
                Ok(done) => {
                    for (waiting, done) in next.into_iter().zip(done) {
                        // It may not wait any more.
                        let _ = waiting.answer.send(Ok(done));
                    }
                }
                // One that the database refuses costs no other.
                Err(error) if next.len() > 1 && !error.is_unavailable() => {
                    for Waiting { ended, answer } in next {
                        let _ = answer.send(self.alone(&ended).await.map_err(Unwritten::from));
                    }
                }
                Err(error) => {
                    let unwritten = Unwritten::from(error);
                    for waiting in next {
                        let _ = waiting.answer.send(Err(unwritten.clone()));
                    }
                }
            }
        }
    }

    async fn alone(&self, ended: &Ended) -> Result<bool, RecordsError> {
        let Ended { claim, end, execution } = ended;
        persistently(|| self.batches.finalize(claim, end.clone(), execution.clone())).await
    }
}

#[cfg(test)]
mod tests {
    use chrono::TimeDelta;
    use threadkeep_records::{BatchStatus, ItemEnd, ItemResult, Records, RecordsOptions};

    use super::*;
    use crate::batches::{begin_run, new_batch};

    const ITEMS: usize = 40;

    /// Ends that come at once take a few transactions, each is answered, and one whose caller is gone is written, too.
    #[tokio::test]
    async fn ends_that_come_together_are_written_together() {
        let records = Records::open_memory(RecordsOptions::default()).await.unwrap();
        let batches = records.batches();
        begin_run(&records).await;
        batches.submit(new_batch(ITEMS)).await.unwrap();
        let claimed = batches.claim("b", "w", TimeDelta::hours(1), ITEMS, true).await.unwrap().unwrap();
        let endings = Endings::new(batches.clone());
        let before = records.commits().all();
        let end = ItemEnd {
            result: ItemResult::Failed { error: "no".into() },
            model_name: None,
            stop_reason: None,
            token_usage: None,
        };
        let ended =
            |at: usize| Ended { claim: claimed.items[at].claim.clone(), end: end.clone(), execution: None };
        // Nobody waits for the first one.
        {
            let mut gone = std::pin::pin!(endings.end(ended(0)));
            assert!(futures::poll!(&mut gone).is_pending());
        }
        let rest = futures::future::join_all((1..ITEMS).map(|at| endings.end(ended(at)))).await;
        assert_eq!(rest, vec![Ok(true); ITEMS - 1]);
        assert_eq!(endings.end(ended(0)).await, Ok(false), "it has ended before");
        let commits = records.commits().all() - before;
        assert!(commits <= 5, "{commits} transactions for {ITEMS} ends");
        assert_eq!(batches.get("b").await.unwrap().unwrap().status, BatchStatus::Failed);
        let written = async {
            while !endings.lock().is_empty() {
                tokio::task::yield_now().await;
            }
        };
        let patience = std::time::Duration::from_mins(10);
        tokio::time::timeout(patience, written).await.expect("nobody waits any more");
    }
}
