//! What is remembered is bounded, and what cannot be read again is kept.

use std::convert::Infallible;

use threadkeep::id::{Namespace, Version};
use threadkeep::saver::Flush;
use threadkeep_layout::{HASH, Manifest, Run, Shape};

use super::*;
use crate::element::Space;

#[test]
fn the_memory_is_bounded_whatever_is_done_with_its_threads() {
    let threads = Threads::default();
    for n in 0..3000 {
        threads.slot(&ThreadId::from(n.to_string()));
    }
    assert!(threads.0.lock().unwrap().slots.len() <= THREADS);
    assert!(threads.existing(&"2999".into()).is_some() && threads.existing(&"0".into()).is_none());
}

/// A list that was edited much has thousands of runs, and each of its last versions has them.
#[tokio::test]
async fn a_thread_weighs_what_the_shapes_of_its_lists_take() {
    let runs = (0..10_000).map(|n| Run { start: 2 * n, len: 1 }).collect();
    let manifest = Manifest { chunks: Vec::new(), tail: runs };
    let Ok(shape) = Shape::stored(&manifest, |_| Ok::<_, Infallible>(Vec::new()));
    let threads = Threads::of(3 * shape.bytes());
    let names = ["0", "1", "2", "3"].map(ThreadId::from);
    for thread in &names {
        let mut state = ThreadState::absent();
        let version = Version { counter: 1, random: 1 };
        state.shapes.put((Namespace::root(), "messages".into(), version), shape.clone());
        assert!(state.weight() > shape.bytes());
        threads.slot(thread).hold(&threads, thread).await.put(state);
    }
    let mut whole = Vec::new();
    for thread in &names {
        let slot = threads.existing(thread).unwrap();
        whole.push(slot.hold(&threads, thread).await.take().is_some());
    }
    assert_eq!(whole, [false, false, true, true]);
}

/// Without what is known to be flushed, or not to be, a flush would acknowledge what the server has lost.
#[tokio::test]
async fn what_cannot_be_read_again_is_kept_whatever_else_is_too_much() {
    let heavy = || {
        let mut state = ThreadState::absent();
        (0..9_u8).for_each(|n| state.index.note(Space::Values, n.into(), [n; 16]));
        state
    };
    let threads = Threads::of(20 * HASH);
    let moment = History::first(Flush::WithNext).moment();
    let names = ["0", "1", "2", "3", "4"].map(ThreadId::from);
    for thread in &names {
        let slot = threads.slot(thread);
        slot.acknowledged(moment);
        slot.hold(&threads, thread).await.put(heavy());
    }
    assert_eq!(threads.0.lock().unwrap().weight, 18 * HASH);
    let mut whole = Vec::new();
    for thread in &names {
        let slot = threads.existing(thread).unwrap();
        assert_eq!(slot.known().newest(), Some(moment));
        whole.push(slot.hold(&threads, thread).await.take().is_some());
    }
    assert_eq!(whole, [false, false, false, true, true]);
}

/// A flush that does not know what it has to reach would acknowledge what the server has lost.
#[tokio::test]
async fn a_thread_that_waits_for_a_flush_is_remembered_whatever_else_is_written_to() {
    let threads = Threads::default();
    let many = |n: usize| {
        for n in 0..n {
            threads.slot(&ThreadId::from(n.to_string()));
        }
    };
    let moment = History::first(Flush::WithNext).moment();
    let (waiting, used) = (ThreadId::from("waiting"), ThreadId::from("used"));
    threads.slot(&waiting).acknowledged(moment);
    let slot = threads.slot(&used);
    let mut held = slot.hold(&threads, &used).await;
    many(3000);
    // What it put back could be read again, and nobody would ever forget it.
    held.put(ThreadState::absent());
    assert!(held.take().is_none());
    drop(held);
    slot.acknowledged(moment);
    drop(slot);
    for thread in [&waiting, &used] {
        assert_eq!(threads.existing(thread).unwrap().known().newest(), Some(moment));
        assert_eq!(threads.slot(thread).known().newest(), Some(moment));
    }
    assert_eq!(threads.0.lock().unwrap().waiting.len(), 0, "both have places again");
    many(3000);
    threads.forget(&waiting);
    assert!(threads.existing(&waiting).is_none(), "what the server lost is forgotten once it was reported");
    assert_eq!(threads.existing(&used).unwrap().known().newest(), Some(moment));

    for n in 0..WAITING + 2 * THREADS {
        threads.slot(&ThreadId::from(n.to_string())).acknowledged(moment);
    }
    let places = threads.0.lock().unwrap();
    assert_eq!((places.slots.len(), places.waiting.len()), (THREADS, WAITING), "there is an end to it");
}

/// What is put back into a place that was given to others is not counted.
#[tokio::test]
async fn what_is_forgotten_while_it_is_in_use_weighs_nothing() {
    let threads = Threads::default();
    let heavy = || {
        let mut state = ThreadState::absent();
        (0..9).for_each(|n| state.index.note(Space::Values, n, [1; 16]));
        state
    };
    let thread = ThreadId::from("t");
    let slot = threads.slot(&thread);
    let mut held = slot.hold(&threads, &thread).await;
    threads.forget(&thread);
    held.put(heavy());
    assert_eq!(threads.0.lock().unwrap().weight, 0);
    // Another place by then.
    let again = threads.slot(&thread);
    again.hold(&threads, &thread).await.put(heavy());
    let weight = threads.0.lock().unwrap().weight;
    assert!(weight > 0);
    held.put(heavy());
    assert_eq!(threads.0.lock().unwrap().weight, weight);
    threads.forget(&thread);
    assert_eq!(threads.0.lock().unwrap().weight, 0);
}
