use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Wake, Waker};

use futures::{FutureExt, StreamExt};
use serde_json::json;
use tokio::time::{Instant, advance, sleep};

use super::*;

mod bytes;
mod model;
mod relayed;

/// Returns its numbers in order, then the last one forever.
struct Times(Vec<u64>, AtomicU64);

impl Clock for Times {
    fn now_ms(&self) -> u64 {
        let turn = usize::try_from(self.1.fetch_add(1, Ordering::Relaxed)).unwrap();
        self.0[turn.min(self.0.len() - 1)]
    }
}

fn times(times: &[u64]) -> Times {
    Times(times.to_vec(), AtomicU64::new(0))
}

/// A bridge that keeps `size` events, with its clock at millisecond 1000.
fn bridge(size: usize) -> StreamBridge {
    let options = BridgeOptions { queue_maxsize: size, ..BridgeOptions::default() };
    StreamBridge::with_clock(options, times(&[1000]))
}

fn publish(publisher: &Publisher, count: u64) {
    for _ in 0..count {
        publisher.publish("custom", &json!(null)).unwrap();
    }
}

/// The current frame; `None` if the subscriber has to wait or the stream is over.
fn now(subscription: &mut Subscription) -> Option<Frame> {
    subscription.next().now_or_never().flatten()
}

fn over(subscription: &mut Subscription) -> bool {
    subscription.next().now_or_never() == Some(None)
}

/// The numbers of the available events, and a following frame that is not an event.
fn read(subscription: &mut Subscription) -> (Vec<u64>, Option<Frame>) {
    let mut seqs = Vec::new();
    loop {
        match now(subscription) {
            Some(Frame::Event(event)) => seqs.push(event.id.seq),
            other => return (seqs, other),
        }
    }
}

/// Advances the paused clock, which only moves when no task is ready: cleanups that became due have run afterwards.
async fn pass(time: Duration) {
    sleep(time + Duration::from_millis(1)).await;
}

#[tokio::test(start_paused = true)]
async fn ids_count_from_zero_and_their_time_never_runs_backwards() {
    let bridge = StreamBridge::with_clock(BridgeOptions::default(), times(&[1000, 1005, 900, 1006]));
    let run = bridge.open("r");
    let ids: Vec<_> = (0..4).map(|_| run.publish("values", &json!({})).unwrap().to_string()).collect();
    assert_eq!(ids, ["1000-0", "1005-1", "1005-2", "1006-3"]);
    let other = bridge.open("other").publish("values", &json!({})).unwrap();
    assert_eq!(other.seq, 0);
}

#[tokio::test(start_paused = true)]
async fn a_run_begins_after_the_end_of_the_run_before_it_unless_the_clock_was_set_back() {
    let bridge = bridge(8);
    for (ended, first) in
        [(999, "1000-0"), (1000, "1001-0"), (1400, "1401-0"), (61_000, "61001-0"), (61_001, "1000-0")]
    {
        let run = bridge.open("r");
        assert_eq!(run.latest(), None);
        run.begin_after(time(ended));
        let id = run.publish("values", &json!({})).unwrap();
        assert_eq!((id.to_string().as_str(), run.latest()), (first, Some(time(id.unix_ms))), "{ended}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_event_is_encoded_once_on_one_line_and_shared() {
    let bridge = bridge(8);
    let run = bridge.open("r");
    let mut subscribers = [bridge.subscribe("r", None), bridge.subscribe("r", None)];
    run.publish("values", &json!({"text": "z\u{fc}\n\u{2028}\r"}));
    let [a, b] = subscribers.each_mut().map(|s| match now(s) {
        Some(Frame::Event(event)) => event,
        other => panic!("{other:?}"),
    });
    assert_eq!(&*a.name, "values");
    assert_eq!(a.data, "{\"text\":\"z\u{fc}\\n\u{2028}\\r\"}");
    assert_eq!(a.data.as_ptr(), b.data.as_ptr());
    assert!(!format!("{a:?}").contains("text"), "{a:?}");
}

#[tokio::test(start_paused = true)]
async fn a_subscriber_gets_what_it_missed_then_what_comes_then_the_end() {
    let bridge = bridge(8);
    let run = bridge.open("r");
    publish(&run, 2);
    let mut subscriber = bridge.subscribe("r", None);
    assert_eq!(read(&mut subscriber), (vec![0, 1], None));
    publish(&run, 1);
    assert_eq!(read(&mut subscriber), (vec![2], None));
    run.end();
    assert_eq!(read(&mut subscriber), (vec![], Some(Frame::End)));
    assert!(over(&mut subscriber));
    run.end();
    assert_eq!(run.publish("values", &json!({})), None);
    assert_eq!(read(&mut bridge.subscribe("r", Some("1000-1"))), (vec![2], Some(Frame::End)));
}

#[tokio::test(start_paused = true)]
async fn a_run_without_a_stream_is_one_end_at_once() {
    let mut subscriber = bridge(8).subscribe("nobody", Some("1000-3"));
    assert_eq!(now(&mut subscriber), Some(Frame::End));
    assert!(over(&mut subscriber));
    assert_eq!(bridge(8).subscribe("nobody", None).ended().now_or_never(), Some(()));
}

/// The ids a client reconnects with, on a buffer that holds 6, 7, 8 and 9 of ten events.
#[tokio::test(start_paused = true)]
async fn a_reconnect_continues_after_its_id_or_says_what_it_cannot_replay() {
    let bridge = bridge(4);
    let run = bridge.open("r");
    publish(&run, 10);
    let all = vec![6, 7, 8, 9];
    for (last, expected) in [
        (None, all.clone()),
        // Kept.
        (Some("1000-6"), vec![7, 8, 9]),
        (Some("1000-8"), vec![9]),
        (Some("1000-9"), vec![]),
        // Evicted, but the client misses nothing.
        (Some("1000-5"), all.clone()),
        // Never published.
        (Some("1000-10"), all.clone()),
        (Some("1001-7"), all.clone()),
        (Some("1000-18446744073709551615"), all.clone()),
        // Malformed.
        (Some("-1"), all.clone()),
        (Some(""), all.clone()),
        (Some("7"), all.clone()),
        (Some("1000-"), all.clone()),
        (Some("1000-7-1"), all.clone()),
        (Some("1000-07"), all.clone()),
        (Some("+1000-7"), all.clone()),
        (Some(" 1000-7"), all.clone()),
        (Some("1000-18446744073709551616"), all.clone()),
    ] {
        assert_eq!(read(&mut bridge.subscribe("r", last)), (expected, None), "{last:?}");
    }
    for seq in [0, 4] {
        let requested = EventId { unix_ms: 1000, seq };
        let mut subscriber = bridge.subscribe("r", Some(&requested.to_string())).owning();
        let gap = Gap {
            run_id: "r".into(),
            requested: Some(requested),
            earliest: EventId { unix_ms: 1000, seq: 6 },
            latest: EventId { unix_ms: 1000, seq: 9 },
        };
        assert_eq!(now(&mut subscriber), Some(Frame::Gap(gap)));
        assert!(over(&mut subscriber));
    }
    assert!(!run.abandoned().is_cancelled(), "a client that leaves after a gap does not cancel the run");
    assert!(run.publish("values", &json!({})).is_some(), "the run continues");
}

#[tokio::test(start_paused = true)]
async fn a_slow_subscriber_gets_a_gap_and_the_others_do_not_notice() {
    let bridge = bridge(4);
    let run = bridge.open("r");
    let mut silent = bridge.subscribe("r", None);
    let mut slow = bridge.subscribe("r", None);
    let mut quick = bridge.subscribe("r", None);
    publish(&run, 1);
    assert_eq!(read(&mut slow), (vec![0], None));
    publish(&run, 4);
    assert_eq!(read(&mut quick), (vec![], Some(gap(None, 1, 4))));
    let mut quick = bridge.subscribe("r", None);
    assert_eq!(read(&mut quick), (vec![1, 2, 3, 4], None));
    publish(&run, 1);
    assert_eq!(read(&mut quick), (vec![5], None));
    assert_eq!(read(&mut slow), (vec![], Some(gap(Some(0), 2, 5))));
    assert_eq!(read(&mut silent), (vec![], Some(gap(None, 2, 5))));
    assert!(over(&mut slow));
}

fn gap(requested: Option<u64>, earliest: u64, latest: u64) -> Frame {
    let id = |seq| EventId { unix_ms: 1000, seq };
    let (earliest, latest) = (id(earliest), id(latest));
    Frame::Gap(Gap { run_id: "r".into(), requested: requested.map(id), earliest, latest })
}

#[tokio::test(start_paused = true)]
async fn a_full_buffer_is_still_no_gap() {
    let bridge = bridge(4);
    let run = bridge.open("r");
    let mut subscriber = bridge.subscribe("r", None);
    publish(&run, 4);
    assert_eq!(read(&mut subscriber), (vec![0, 1, 2, 3], None));
}

#[tokio::test(start_paused = true)]
async fn the_smallest_buffer_keeps_one_event() {
    let bridge = bridge(0);
    let run = bridge.open("r");
    publish(&run, 3);
    assert_eq!(read(&mut bridge.subscribe("r", None)), (vec![2], None));
}

#[tokio::test(start_paused = true)]
async fn a_heartbeat_comes_fifteen_seconds_after_the_last_frame() {
    let bridge = bridge(4);
    let run = bridge.open("r");
    let mut subscriber = bridge.subscribe("r", None);
    let start = Instant::now();
    for seconds in [15, 30] {
        assert_eq!(subscriber.next().await, Some(Frame::Heartbeat));
        assert_eq!(start.elapsed().as_secs(), seconds);
    }
    assert_eq!(now(&mut subscriber), None);
    advance(Duration::from_secs(14)).await;
    assert_eq!(now(&mut subscriber), None);
    publish(&run, 1);
    assert!(matches!(now(&mut subscriber), Some(Frame::Event(_))));
    assert_eq!(subscriber.next().await, Some(Frame::Heartbeat));
    assert_eq!(start.elapsed().as_secs(), 30 + 14 + 15);
    run.end();
    assert_eq!(subscriber.next().await, Some(Frame::End));
    assert_eq!(subscriber.next().await, None);
}

#[tokio::test(start_paused = true)]
async fn the_events_are_kept_for_the_cleanup_delay_after_the_end() {
    let bridge = bridge(4);
    let run = bridge.open("r");
    publish(&run, 2);
    pass(Duration::from_mins(5)).await;
    let mut early = bridge.subscribe("r", None);
    assert!(matches!(now(&mut early), Some(Frame::Event(_))), "a live run is never reaped");
    run.end();
    run.end();
    drop(run);
    pass(Duration::from_secs(59)).await;
    assert_eq!(read(&mut bridge.subscribe("r", Some("1000-0"))), (vec![1], Some(Frame::End)));
    pass(Duration::from_secs(1)).await;
    assert_eq!(read(&mut bridge.subscribe("r", Some("1000-0"))), (vec![], Some(Frame::End)));
    assert_eq!(read(&mut early), (vec![1], Some(Frame::End)), "an earlier subscriber keeps its stream");
}

#[tokio::test(start_paused = true)]
async fn the_cleanup_of_a_run_spares_a_new_stream_under_its_id() {
    let bridge = bridge(4);
    bridge.open("r").end();
    let again = bridge.open("r");
    pass(Duration::from_mins(1)).await;
    publish(&again, 1);
    assert_eq!(read(&mut bridge.subscribe("r", None)), (vec![0], None));
}

#[tokio::test(start_paused = true)]
async fn a_thousand_runs_leave_nothing_behind() {
    let bridge = bridge(4);
    for n in 0..1000 {
        let run = bridge.open(&format!("run-{n}"));
        publish(&run, 300);
        assert_eq!(lock(&run.run.state).events.len(), 4);
    }
    assert_eq!(lock(&bridge.shared.runs).len(), 1000);
    pass(Duration::from_mins(1)).await;
    assert_eq!(lock(&bridge.shared.runs).len(), 0);
    assert_eq!(
        format!("{bridge:?}"),
        "StreamBridge { options: BridgeOptions { queue_maxsize: 4, queue_max_bytes: 8388608, \
         total_max_bytes: 268435456, cleanup_delay: 60s }, runs: 0 }"
    );
}

#[test]
fn outside_a_runtime_an_ended_run_is_forgotten_at_once() {
    let bridge = bridge(4);
    bridge.open("r").end();
    assert_eq!(lock(&bridge.shared.runs).len(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_publisher_that_dies_ends_the_stream_with_an_error_unless_there_is_one() {
    for failed in [false, true] {
        let bridge = bridge(4);
        let run = bridge.open("r");
        publish(&run, 1);
        if failed {
            run.fail(&json!("boom"));
        }
        let mut subscriber = bridge.subscribe("r", None);
        drop(run);
        assert!(matches!(now(&mut subscriber), Some(Frame::Event(event)) if event.id.seq == 0));
        let Some(Frame::Event(error)) = now(&mut subscriber) else { panic!("no error") };
        assert_eq!((&*error.name, error.data == "\"boom\""), ("error", failed));
        assert_eq!(now(&mut subscriber), Some(Frame::End));
    }
}

#[tokio::test(start_paused = true)]
async fn only_an_owner_that_leaves_a_live_run_abandons_it() {
    let bridge = bridge(4);
    // Owning, the end of the run, frames read before leaving, abandoned.
    for (owning, ended, frames, abandoned) in [
        (true, false, 0, true),
        (true, false, 1, true),
        (false, false, 1, false),
        (true, true, 0, false),
        (true, true, 2, false),
    ] {
        let run = bridge.open("r");
        let mut subscriber = bridge.subscribe("r", None);
        if owning {
            subscriber = subscriber.owning();
        }
        publish(&run, 1);
        if ended {
            run.end();
        }
        for _ in 0..frames {
            assert!(now(&mut subscriber).is_some());
        }
        let token = run.abandoned();
        drop(subscriber);
        assert_eq!(token.is_cancelled(), abandoned, "{owning} {ended} {frames}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_run_is_told_of_its_abandonment_while_it_waits() {
    let bridge = bridge(4);
    let run = bridge.open("r");
    let owner = bridge.subscribe("r", None).owning();
    let worker = tokio::spawn(async move { run.abandoned().cancelled().await });
    tokio::task::yield_now().await;
    drop(bridge.subscribe("r", None));
    assert!(!worker.is_finished());
    drop(owner);
    worker.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn waiting_for_the_end_reads_nothing_and_cannot_fall_behind() {
    let bridge = bridge(4);
    let run = bridge.open("r");
    let mut waiting = Box::pin(bridge.subscribe("r", None).owning().ended());
    assert_eq!(waiting.as_mut().now_or_never(), None);
    publish(&run, 100);
    assert_eq!(waiting.as_mut().now_or_never(), None);
    run.end();
    assert_eq!(waiting.as_mut().now_or_never(), Some(()));
    assert!(!run.abandoned().is_cancelled());

    let run = bridge.open("r");
    let mut waiting = Box::pin(bridge.subscribe("r", None).owning().ended());
    assert_eq!(waiting.as_mut().now_or_never(), None);
    drop(waiting);
    assert!(run.abandoned().is_cancelled(), "a wait request that is dropped abandons the run as well");
}

#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[tokio::test(start_paused = true)]
async fn a_waiting_subscriber_is_woken_once_per_change_and_leaves_no_waker_behind() {
    let bridge = bridge(4);
    let run = bridge.open("r");
    let count = Arc::new(Count::default());
    let waker = Waker::from(Arc::clone(&count));
    let mut cx = Context::from_waker(&waker);
    let mut subscriber = bridge.subscribe("r", None);
    for _ in 0..3 {
        assert!(subscriber.poll_next_unpin(&mut cx).is_pending());
    }
    publish(&run, 3);
    assert_eq!(count.0.load(Ordering::Relaxed), 1);
    assert_eq!(read(&mut subscriber), (vec![0, 1, 2], None));
    assert!(subscriber.poll_next_unpin(&mut cx).is_pending());
    run.end();
    assert_eq!(count.0.load(Ordering::Relaxed), 2);

    let run = bridge.open("r");
    let mut subscriber = bridge.subscribe("r", None);
    assert!(subscriber.poll_next_unpin(&mut cx).is_pending());
    assert_eq!(lock(&run.run.state).waiting.len(), 1);
    drop(subscriber);
    assert_eq!(lock(&run.run.state).waiting.len(), 0);
}

/// A subscriber reads at its own pace while the run publishes from another thread: nothing is lost, doubled or
/// reordered.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn subscribers_on_other_threads_get_every_event_once() {
    let bridge = StreamBridge::new(BridgeOptions { queue_maxsize: 2000, ..BridgeOptions::default() });
    let run = bridge.open("r");
    let readers: Vec<_> = (0..4)
        .map(|_| {
            let subscription = bridge.subscribe("r", None);
            tokio::spawn(subscription.collect::<Vec<_>>())
        })
        .collect();
    tokio::task::spawn_blocking(move || {
        for n in 0..2000 {
            run.publish("custom", &json!(n));
        }
        run.end();
    })
    .await
    .unwrap();
    for reader in readers {
        let mut frames = reader.await.unwrap();
        assert_eq!(frames.pop(), Some(Frame::End));
        let data: Vec<_> = frames
            .iter()
            .map(|frame| match frame {
                Frame::Event(event) => {
                    (event.id.seq.to_string(), String::from_utf8_lossy(&event.data).into_owned())
                }
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(data, (0..2000).map(|n| (n.to_string(), n.to_string())).collect::<Vec<_>>());
    }
}
