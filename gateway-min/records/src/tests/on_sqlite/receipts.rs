//! Feeds in files: the end of a run finds out whether the run has its receipt.

use serde_json::Value;

use super::support::*;
use crate::*;

/// Records whose feeds are files, and a run `r` on the thread `t`.
async fn with_run() -> Fixture {
    let fixture = fixture_with(EventBackend::Jsonl).await;
    create_thread(&fixture.records, "t").await;
    admit(&fixture.records, "t", "r").await;
    fixture
}

fn event(event_type: &str) -> NewEvent {
    NewEvent::new(event_type, "context", Value::Null)
}

/// Otherwise the runs of a long thread cost the square of its length.
#[tokio::test]
async fn the_end_of_a_run_reads_nothing_of_the_earlier_runs() {
    let fixture = with_run().await;
    let events = fixture.records.events();
    events.append("t", "r", vec![event("run.start"), event("x")]).await.unwrap();
    let file = fixture.place.event_directory().join("t.jsonl");
    let before = std::fs::metadata(&file).unwrap().len();
    fixture.records.runs().finish("r", &end(RunStatus::Success)).await.unwrap();
    admit(&fixture.records, "t", "next").await;
    events.append("t", "next", vec![event("run.start"), event("x")]).await.unwrap();
    // An event that is read shows that it is damaged.
    let whole = std::fs::read(&file).unwrap();
    let mut damaged = whole.clone();
    damaged[..usize::try_from(before).unwrap() - 1].fill(b'x');
    std::fs::write(&file, damaged).unwrap();
    let receipt = || event("run.delivery");
    assert_eq!(events.append_if_absent("t", "next", receipt()).await.unwrap(), Some(5));
    assert!(
        events.append_if_absent("t", "next", receipt()).await.is_err(),
        "its start is not remembered any more"
    );
    let mut mended = std::fs::read(&file).unwrap();
    mended[..whole.len()].copy_from_slice(&whole);
    std::fs::write(&file, mended).unwrap();
    assert_eq!(events.append_if_absent("t", "next", receipt()).await.unwrap(), None);
}

/// The file of a thread is written again when one of its runs is deleted, here or by another process.
#[tokio::test]
async fn a_run_has_one_receipt_though_the_place_of_its_start_changes() {
    for here in [true, false] {
        let fixture = with_run().await;
        let events = fixture.records.events();
        events.append("t", "r", vec![event("run.start"), event("x")]).await.unwrap();
        fixture.records.runs().finish("r", &end(RunStatus::Success)).await.unwrap();
        admit(&fixture.records, "t", "next").await;
        events.append("t", "next", vec![event("run.start"), event("run.delivery")]).await.unwrap();
        events.append("t", "next", vec![event("x")]).await.unwrap();
        if here {
            fixture.records.delete_run("t", "r").await.unwrap();
        } else {
            let other = fixture
                .place
                .try_open(RecordsOptions { event_backend: EventBackend::Jsonl, ..RecordsOptions::default() });
            let other = other.await.unwrap();
            other.delete_run("t", "r").await.unwrap();
            other.close().await;
        }
        assert_eq!(events.append_if_absent("t", "next", event("run.delivery")).await.unwrap(), None);
    }
}
