//! A batch beside interactive work, in virtual time: a worker that takes a slot before each item.

use std::sync::Mutex;

use super::*;

const ITEMS: u32 = 1_000;
const ITEM: Duration = Duration::from_secs(1);
/// How long an interactive delegation takes; one arrives each second.
const DELEGATION: Duration = Duration::from_millis(500);

/// Works on the items in 3 slots, as the worker of a process does, beside interactive delegations or alone. Returns how
/// long the batch took, and how long each delegation waited.
async fn worked(beside: bool) -> (Duration, Vec<Duration>) {
    let admission = Admission::new(&settings(3, 64, AdmissionPolicy::Queue));
    let waits = Arc::new(Mutex::new(Vec::new()));
    let started = Instant::now();
    let interactive = beside.then(|| {
        let (admission, waits) = (admission.clone(), Arc::clone(&waits));
        tokio::spawn(async move {
            loop {
                let (admission, waits) = (admission.clone(), Arc::clone(&waits));
                tokio::spawn(async move {
                    let slot = admission.acquire(&Class::Interactive).await.unwrap();
                    waits.lock().unwrap().push(slot.waited());
                    tokio::time::sleep(DELEGATION).await;
                });
                tokio::time::sleep(Duration::from_millis(1_003)).await;
            }
        })
    });
    let mut items = tokio::task::JoinSet::new();
    for _ in 0..ITEMS {
        let slot = admission.acquire(&Class::Batch("b".into())).await.unwrap();
        items.spawn(async move {
            tokio::time::sleep(ITEM).await;
            drop(slot);
        });
    }
    items.join_all().await;
    let took = started.elapsed();
    if let Some(interactive) = interactive {
        interactive.abort();
    }
    let waits = waits.lock().unwrap().clone();
    (took, waits)
}

/// Check 6 of the delegation design.
#[tokio::test(start_paused = true)]
async fn a_batch_of_1000_items_delays_nobody_by_more_than_an_item_and_keeps_its_share() {
    let (alone, _) = worked(false).await;
    let (beside, mut waits) = worked(true).await;
    waits.sort_unstable();
    let worst = waits[waits.len() * 99 / 100];
    assert!(waits.len() > 300, "{} delegations", waits.len());
    assert!(worst <= ITEM, "one in a hundred waited {worst:?}");
    let share = alone.as_secs_f64() / beside.as_secs_f64();
    assert!(share >= 0.8, "the batch had {share} of its throughput alone: {alone:?}, {beside:?}");
}
