//! Items and results of batches, page by page.

use super::batches::{batch, claim, items, submit, succeeded};
use super::support::*;
use crate::BatchItemStatus::{Queued, Running, Succeeded};
use crate::*;

/// A result may be as long as a model's answer: pages are cut by their bytes, and are complete.
#[tokio::test]
async fn a_page_of_results_has_a_few_megabytes_however_long_they_are() {
    let fixture = fixture().await;
    let (records, batches) = (&fixture.records, fixture.records.batches());
    submit(records, batch("b", 8, 8, 8)).await;
    // In bytes; a character of the texts has three.
    let lengths = [1_500_000, 1_500_000, 1_500_000, 0, 6_000_000, 3];
    for (claimed, length) in claim(records, "b", "a", 6).await.iter().zip(lengths) {
        let result = "\u{20ac}".repeat(length / 3);
        assert!(batches.finalize(&claimed.claim, succeeded(&result), None).await.unwrap());
    }
    let (mut pages, mut after) = (Vec::new(), None);
    loop {
        let page = batches.results("b", after, 500).await.unwrap();
        let Some((last, _)) = page.last() else { break };
        after = Some(last.position);
        pages.push(page.iter().map(|(_, result)| result.as_ref().map(String::len)).collect::<Vec<_>>());
    }
    let mega = Some(1_500_000);
    assert_eq!(
        pages,
        [vec![mega, mega], vec![mega, Some(0)], vec![Some(6_000_000)], vec![Some(3), None, None]]
    );
}

/// Workers go on while somebody reads: an item that leaves the selection takes no other one out of the next page.
#[tokio::test]
async fn a_page_of_items_skips_none_when_others_change_their_status() {
    let fixture = fixture().await;
    let (records, batches) = (&fixture.records, fixture.records.batches());
    submit(records, batch("b", 6, 6, 6)).await;
    claim(records, "b", "a", 1).await;
    let first = batches.items_after("b", Some(Queued), None, 2).await.unwrap();
    assert_eq!(first.iter().map(|item| item.position).collect::<Vec<_>>(), [1, 2]);
    claim(records, "b", "a", 2).await;
    let second = batches.items_after("b", Some(Queued), Some(2), 2).await.unwrap();
    assert_eq!(second.iter().map(|item| item.position).collect::<Vec<_>>(), [3, 4]);
    assert_eq!(batches.items_after("b", None, Some(3), 500).await.unwrap().len(), 2);
    assert_eq!(batches.items_after("b", None, Some(5), 500).await.unwrap(), []);
}

#[tokio::test]
async fn s58_results_are_in_the_export_alone_and_pages_are_complete() {
    let fixture = fixture().await;
    let (records, batches) = (&fixture.records, fixture.records.batches());
    submit(records, batch("b", 1200, 1200, 1000)).await;
    let first = claim(records, "b", "a", 1).await.remove(0);
    assert!(batches.finalize(&first.claim, succeeded("long result"), None).await.unwrap());
    let item = items(records, "b").await.remove(0);
    assert_eq!(item.result_preview.as_deref(), Some("lo"));
    assert_eq!(item.token_usage.unwrap().total_tokens, 3);
    let mut positions = Vec::new();
    let mut after = None;
    loop {
        let page = batches.results("b", after, 500).await.unwrap();
        let Some((last, _)) = page.last() else { break };
        after = Some(last.position);
        if positions.is_empty() {
            assert_eq!(page[0].1.as_deref(), Some("long result"));
        }
        positions.extend(page.iter().map(|(item, _)| item.position));
    }
    assert_eq!(positions, (0..1200).collect::<Vec<_>>());
    let mut pages = Vec::new();
    for offset in [0, 500, 1000, 1500] {
        pages.extend(
            batches.items("b", None, offset, 500).await.unwrap().into_iter().map(|item| item.position),
        );
    }
    assert_eq!(pages, positions);
    assert_eq!(batches.items("b", Some(Succeeded), 0, 500).await.unwrap().len(), 1);
    assert_eq!(batches.items("b", Some(Running), 0, 500).await.unwrap().len(), 0);
    let newest = NewBatch { submission_key: "other".into(), ..batch("c", 1, 1, 1) };
    submit(records, newest).await;
    assert_eq!(batches.of_thread("t", 20).await.unwrap().len(), 2);
    assert_eq!(batches.of_thread("t", 1).await.unwrap().len(), 1);
    assert_eq!(batches.of_thread("other", 20).await.unwrap().len(), 0);
}
