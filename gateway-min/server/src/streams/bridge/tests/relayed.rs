//! Events of another process.

use super::*;

fn event(seq: u64) -> Event {
    Event { id: EventId { unix_ms: 500 + seq, seq }, name: "custom".into(), data: "null".into() }
}

#[tokio::test(start_paused = true)]
async fn events_of_another_process_keep_their_ids_and_come_once() {
    let bridge = bridge(8);
    let run = bridge.open_relayed("r").unwrap();
    assert!(bridge.open_relayed("r").is_none(), "one at a time");
    let mut subscription = bridge.subscribe("r", None);
    for seq in [0, 1, 1, 0, 2] {
        run.repeat(event(seq));
    }
    run.caught_up();
    let found: Vec<_> = (0..3).map(|_| now(&mut subscription).unwrap()).collect();
    assert_eq!(found, [0, 1, 2].map(|seq| Frame::Event(event(seq))));
    // Events added by this process follow.
    assert_eq!(run.publish("values", &json!({})).unwrap().seq, 3);
    run.end();
    run.repeat(event(4));
    assert_eq!(read(&mut subscription), (vec![3], Some(Frame::End)));
}

/// It received them from the process that publishes them.
#[tokio::test(start_paused = true)]
async fn a_client_that_comes_from_another_process_gets_what_follows_what_it_has() {
    let bridge = bridge(4);
    let run = bridge.open_relayed("r").unwrap();
    let mut ahead = bridge.subscribe("r", Some(&event(5).id.to_string()));
    let mut behind = bridge.subscribe("r", Some(&event(1).id.to_string()));
    let mut new = bridge.subscribe("r", Some("-1"));
    assert_eq!(now(&mut ahead), None);
    for seq in 3..8 {
        run.repeat(event(seq));
    }
    assert_eq!(read(&mut ahead), (vec![6, 7], None));
    let gap = |requested: Option<u64>| Gap {
        run_id: "r".into(),
        requested: requested.map(|seq| event(seq).id),
        earliest: event(4).id,
        latest: event(7).id,
    };
    assert_eq!(read(&mut behind), (vec![], None), "the newest is not known yet");
    assert_eq!(read(&mut new), (vec![], None), "the oldest is not known yet");
    run.caught_up();
    assert_eq!(read(&mut behind), (vec![], Some(Frame::Gap(gap(Some(1))))));
    assert_eq!(read(&mut new), (vec![4, 5, 6, 7], None));
    run.repeat(event(8));
    assert_eq!(read(&mut new), (vec![8], None));
    assert_eq!(read(&mut bridge.subscribe("r", None)), (vec![5, 6, 7, 8], None));
}

#[tokio::test(start_paused = true)]
async fn where_events_of_another_process_are_missing_a_subscriber_gets_a_gap() {
    let bridge = bridge(8);
    let run = bridge.open_relayed("r").unwrap();
    run.repeat(event(0));
    run.caught_up();
    let (mut late, mut slow) = (bridge.subscribe("r", None), bridge.subscribe("r", None));
    assert_eq!(read(&mut late), (vec![0], None));
    run.repeat(event(5));
    let gap = |requested| Gap { run_id: "r".into(), requested, earliest: event(5).id, latest: event(5).id };
    assert_eq!(read(&mut late), (vec![], Some(Frame::Gap(gap(Some(event(0).id))))));
    assert_eq!(read(&mut slow), (vec![], Some(Frame::Gap(gap(None)))));
    assert_eq!(read(&mut bridge.subscribe("r", None)), (vec![5], None));
}

/// What this process says of a run has no place among the events of the process that is gone.
#[tokio::test(start_paused = true)]
async fn a_failure_that_is_found_here_comes_to_a_client_that_is_ahead() {
    let bridge = bridge(8);
    let run = bridge.open_relayed("r").unwrap();
    run.repeat(event(0));
    let ahead = |seq: u64| bridge.subscribe("r", Some(&event(seq).id.to_string()));
    let mut waiting = [ahead(1), ahead(2), ahead(3), ahead(90), ahead(u64::MAX - 500)];
    run.publish("values", &json!({}));
    run.fail(&json!({"message": "no", "name": "RunError"}));
    run.fail(&json!({"message": "again", "name": "RunError"}));
    run.end();
    for waiting in &mut waiting {
        assert_eq!(read(waiting), (vec![2], Some(Frame::End)));
        assert!(over(waiting));
    }
    for last in [90, u64::MAX - 500] {
        assert_eq!(read(&mut ahead(last)), (vec![2], Some(Frame::End)));
    }
    let seen = bridge.subscribe("r", Some("1000-2")).collect::<Vec<_>>().await;
    assert_eq!(seen, [Frame::End]);
}

/// Its process has emptied the buffer after the end.
#[tokio::test(start_paused = true)]
async fn what_the_other_process_has_lost_is_a_gap_as_it_is_there() {
    let bridge = bridge(8);
    let own = bridge.open("own");
    publish(&own, 7);
    own.end();
    own.run.empty();
    let run = bridge.open_relayed("r").unwrap();
    let mut waiting = bridge.subscribe("r", Some(&event(1).id.to_string()));
    run.lose(event(6).id);
    run.lose(event(3).id);
    run.end();
    let gap = |requested: u64| {
        let (requested, newest) = (Some(event(requested).id), event(6).id);
        Frame::Gap(Gap { run_id: "r".into(), requested, earliest: newest, latest: newest })
    };
    assert_eq!(read(&mut waiting), (vec![], Some(gap(1))));
    for (last, after) in [(None, Frame::End), (Some(0), gap(0)), (Some(5), gap(5)), (Some(6), Frame::End)] {
        let id = last.map(|seq: u64| event(seq).id.to_string());
        let shown = read(&mut bridge.subscribe("r", id.as_deref()));
        let there = last.map(|seq| format!("1000-{seq}"));
        let there = read(&mut bridge.subscribe("own", there.as_deref()));
        let is_gap = |frame: Option<&Frame>| matches!(frame, Some(Frame::Gap(_)));
        assert_eq!(is_gap(there.1.as_ref()), is_gap(shown.1.as_ref()), "{last:?}");
        assert_eq!(shown, (vec![], Some(after)), "{last:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_is_handed_on_once_and_known_as_ended_until_then() {
    let bridge = bridge(8);
    let own = bridge.open("own");
    let other = bridge.open_relayed("other").unwrap();
    publish(&own, 2);
    assert_eq!(bridge.ended_alone(9), [""; 0], "it is at work");
    own.end();
    other.end();
    assert_eq!(bridge.ended_alone(9), ["own"]);
    assert!(bridge.has_ended_alone("own") && !bridge.has_ended_alone("other"));
    assert_eq!(read(&mut bridge.hand_on("own").unwrap()), (vec![0, 1], Some(Frame::End)));
    assert!(["own", "other", "none"].iter().all(|run| bridge.hand_on(run).is_none()));
    assert_eq!(bridge.ended_alone(9), [""; 0]);
    assert!(!bridge.has_ended_alone("own"));
}

/// Each is asked about twice a second, and a process may keep those of thousands.
#[tokio::test(start_paused = true)]
async fn the_streams_that_ended_last_are_asked_about_first_and_not_all() {
    let bridge = bridge(8);
    let runs = ["a", "b", "c", "d"].map(|id| (id, bridge.open(id)));
    for ended in ["c", "a", "d"] {
        let (_, run) = runs.iter().find(|(id, _)| *id == ended).unwrap();
        run.end();
    }
    assert_eq!(bridge.ended_alone(2), ["d", "a"]);
    assert!(bridge.hand_on("d").is_some());
    assert_eq!(bridge.ended_alone(2), ["a", "c"]);
    assert_eq!(bridge.ended_alone(0), [""; 0]);
}
