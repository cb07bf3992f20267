//! Processes whose clocks differ.

use chrono::TimeDelta;

use super::batches::{batch, execution, submit, succeeded};
use super::support::*;
use crate::*;

/// Leases are measured with the server's clock: of processes whose clocks are hours apart none steals or loses a claim, and
/// an expired one has expired for all.
#[tokio::test]
async fn s51_clocks_that_are_hours_apart_change_no_lease() {
    const LEASE: TimeDelta = TimeDelta::seconds(35);
    let fixture = fixture().await;
    let open = async |hours: i64| {
        let clock = Clock::from_fn(move || chrono::Utc::now() + TimeDelta::hours(hours));
        fixture.place.open(RecordsOptions { clock, ..RecordsOptions::default() }).await
    };
    let processes = [open(-3).await, open(3).await];
    let [late, early] = processes.each_ref().map(Records::batches);
    submit(&processes[0], batch("b", 3, 3, 3)).await;
    let mut claims = Vec::new();
    for (number, batches) in [late, early, late].into_iter().enumerate() {
        let claimed = batches.claim("b", &format!("w{number}"), LEASE, 1, true).await.unwrap().unwrap();
        let [item] = &claimed.items[..] else { panic!("one item is free") };
        assert_eq!(item.claim.attempt, 1, "no earlier claim has expired");
        claims.push(item.claim.clone());
    }
    for batches in [late, early] {
        assert_eq!(batches.held(claims.clone()).await.unwrap(), claims);
        assert!(batches.claimable().await.unwrap().is_empty());
    }
    for (batches, claim) in [(early, &claims[1]), (late, &claims[0])] {
        assert!(batches.renew(claim, LEASE).await.unwrap());
        assert!(batches.launch(claim, LEASE, execution(&fixture, claim)).await.unwrap().is_some());
        assert!(batches.finalize(claim, succeeded("x"), None).await.unwrap());
    }
    fixture.pass_seconds(40).await;
    for batches in [late, early] {
        assert!(!batches.finalize(&claims[2], succeeded("late"), None).await.unwrap());
    }
    let again = early.claim("b", "w3", LEASE, 1, true).await.unwrap().unwrap().items.remove(0);
    assert_eq!((&again.claim.item_id, again.claim.attempt), (&claims[2].item_id, 2));
}
