//! A disk that is full.

use chrono::TimeDelta;

use super::batches::{batch, failed, submit, succeeded};
use super::support::*;
use crate::query::Sql;
use crate::*;

/// Lets the file have this many pages; no fewer than it has.
async fn allow(records: &Records, pages: i64) {
    let text = format!("PRAGMA max_page_count = {pages}");
    let sql = Sql { text: text.into(), values: Vec::new() };
    let set = records
        .db
        .write_rows(move |tx| Box::pin(async move { tx.fetch_optional::<(i64,)>(sql).await.map(drop) }));
    set.await.unwrap();
}

/// A batch is stored whole or not at all, and an end that finds no room is none: the claim holds, and the end is written once
/// there is room.
#[tokio::test]
async fn s48_a_full_disk_takes_no_part_of_a_batch_and_no_part_of_an_end() {
    const LEASE: TimeDelta = TimeDelta::seconds(35);
    let fixture = fixture().await;
    let (records, batches) = (&fixture.records, fixture.records.batches());
    let large = || {
        let mut large = batch("large", 2_000, 100, 3);
        for item in &mut large.items {
            item.prompt = "x".repeat(2_000);
        }
        large
    };
    submit(records, batch("b", 2, 2, 2)).await;
    let claimed = batches.claim("b", "a", LEASE, 2, true).await.unwrap().unwrap().items;
    let before = dump(records).await;
    allow(records, 1).await;
    let error = batches.submit(large()).await.unwrap_err();
    assert!(matches!(error, RecordsError::Unavailable { .. }), "{error}");
    assert!(error.to_string().contains("disk is full; free some space, then retry"), "{error}");
    let long = succeeded(&"x".repeat(1_000_000));
    batches.finalize(&claimed[0].claim, long.clone(), None).await.unwrap_err();
    batches.finalize(&claimed[1].claim, failed(&"x".repeat(1_000_000)), None).await.unwrap_err();
    assert_eq!(dump(records).await, before);
    allow(records, 1_000_000).await;
    assert!(batches.submit(large()).await.unwrap().is_new);
    for (item, end) in claimed.iter().zip([long, succeeded("short")]) {
        assert!(batches.finalize(&item.claim, end, None).await.unwrap(), "the claim still holds");
    }
    let status = batches.get("b").await.unwrap().unwrap().status;
    assert_eq!(status, BatchStatus::Completed);
}
