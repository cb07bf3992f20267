//! Bounds of buffers in bytes.

use super::*;

/// A bridge that keeps 10 kB of a run and 30 kB of all.
fn small_bridge() -> StreamBridge {
    let options =
        BridgeOptions { queue_max_bytes: 10_000, total_max_bytes: 30_000, ..BridgeOptions::default() };
    StreamBridge::with_clock(options, times(&[1000]))
}

fn publish_bytes(publisher: &Publisher, bytes: usize) {
    publisher.publish("custom", &json!("x".repeat(bytes))).unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_buffer_is_bounded_in_bytes_and_keeps_the_newest_event() {
    let bridge = small_bridge();
    let run = bridge.open("r");
    let mut slow = bridge.subscribe("r", None);
    for _ in 0..5 {
        publish_bytes(&run, 4000);
    }
    assert_eq!(read(&mut slow), (vec![], Some(gap(None, 3, 4))));
    assert!(bridge.bytes() <= 10_000, "{}", bridge.bytes());
    publish_bytes(&run, 50_000);
    assert_eq!(read(&mut bridge.subscribe("r", None)), (vec![5], None), "a frame is sent whatever its size");
    publish_bytes(&run, 10);
    assert_eq!(read(&mut bridge.subscribe("r", None)), (vec![6], None));
    assert!(bridge.bytes() <= 1000, "{}", bridge.bytes());
}

#[tokio::test(start_paused = true)]
async fn the_buffers_of_all_runs_are_bounded_in_bytes() {
    let bridge = small_bridge();
    let ended: Vec<_> = (0..3)
        .map(|n| {
            let run = bridge.open(&format!("ended-{n}"));
            publish_bytes(&run, 4000);
            publish_bytes(&run, 4000);
            run.end();
            run
        })
        .collect();
    let live = bridge.open("live");
    let mut following = bridge.subscribe("ended-0", None);
    assert!(matches!(now(&mut following), Some(Frame::Event(_))));
    publish_bytes(&live, 4000);
    publish_bytes(&live, 4000);
    assert!(bridge.bytes() <= 30_000, "{}", bridge.bytes());
    let (rest, frame) = read(&mut following);
    assert!(rest.is_empty() && matches!(frame, Some(Frame::Gap(_))), "the first to end is the first to go");
    assert_eq!(read(&mut bridge.subscribe("ended-0", Some("1000-1"))), (vec![], Some(Frame::End)));
    assert_eq!(read(&mut bridge.subscribe("ended-1", None)), (vec![0, 1], Some(Frame::End)));

    // Beyond the limit with live runs alone, each has its newest event.
    let more: Vec<_> = (0..4).map(|n| bridge.open(&format!("more-{n}"))).collect();
    for run in &more {
        publish_bytes(run, 9000);
        publish_bytes(run, 9000);
    }
    for n in 0..4 {
        assert_eq!(read(&mut bridge.subscribe(&format!("more-{n}"), None)), (vec![1], None));
    }
    assert!(bridge.bytes() <= 30_000 + 4 * 9200, "{}", bridge.bytes());
    drop((ended, live, more, following));
    pass(Duration::from_mins(1)).await;
    assert_eq!(bridge.bytes(), 0);
}

/// The reason why a run failed is small, and all that the followers of an ended run still need.
#[tokio::test(start_paused = true)]
async fn why_a_run_failed_is_kept_when_its_buffer_is_emptied() {
    let bridge = small_bridge();
    let run = bridge.open("failed");
    publish_bytes(&run, 4000);
    publish_bytes(&run, 4000);
    run.fail(&json!({"message": "no", "name": "RunError"}));
    let mut following = bridge.subscribe("failed", Some("1000-0"));
    let mut missing = bridge.subscribe("failed", Some("1000-0"));
    assert!(matches!(now(&mut following), Some(Frame::Event(_))));
    run.end();
    let live = bridge.open("live");
    for _ in 0..4 {
        publish_bytes(&live, 9000);
        publish_bytes(&live, 9000);
        publish_bytes(&bridge.open("other"), 9000);
    }
    // Its next event is the failure.
    assert_eq!(read(&mut following), (vec![2], Some(Frame::End)));
    assert!(matches!(now(&mut missing), Some(Frame::Gap(_))));
    assert!(over(&mut missing), "it has lost an event before the failure, and got a gap");
    for (last, expected) in [
        (None, vec![2]),
        (Some("-1"), vec![2]),
        (Some("1000-1"), vec![2]),
        (Some("1000-2"), vec![]),
        (Some("1000-3"), vec![2]),
        (Some("1000-18446744073709551615"), vec![2]),
    ] {
        let mut subscriber = bridge.subscribe("failed", last);
        assert_eq!(read(&mut subscriber), (expected, Some(Frame::End)), "{last:?}");
        assert!(over(&mut subscriber));
    }
    let lost = bridge.subscribe("failed", Some("1000-0")).next().now_or_never().flatten();
    assert!(matches!(lost, Some(Frame::Gap(_))), "{lost:?}");
}

/// A failed edit shows the turn that it restores after the reason, and that may be larger than a buffer.
#[tokio::test(start_paused = true)]
async fn why_a_run_failed_comes_to_a_client_that_finds_only_later_events() {
    let bridge = small_bridge();
    let run = bridge.open("r");
    run.fail(&json!({"message": "no", "name": "RunError"}));
    publish_bytes(&run, 20_000);
    let mut early = bridge.subscribe("r", None);
    assert_eq!(read(&mut early), (vec![0, 1], None));
    run.end();
    assert_eq!(read(&mut early), (vec![], Some(Frame::End)));
    for (last, expected) in [
        (None, vec![0, 1]),
        (Some("-1"), vec![0, 1]),
        (Some("1000-0"), vec![1]),
        (Some("1000-1"), vec![]),
        (Some("1000-2"), vec![0, 1]),
    ] {
        let mut subscriber = bridge.subscribe("r", last);
        assert_eq!(read(&mut subscriber), (expected, Some(Frame::End)), "{last:?}");
        assert!(over(&mut subscriber));
    }
}
