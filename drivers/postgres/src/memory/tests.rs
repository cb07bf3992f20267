//! What is remembered is what was read, as long as the history of its thread goes on; and it is bounded.

use std::collections::BTreeSet;

use proptest::prelude::*;
use serde_json::json;
use threadkeep::saver::Flush;
use threadkeep::value::Element;

use super::*;

const KEY: &str = "run_durations";
const NS: &[u8] = b"";

fn thread(n: u8) -> Uuid {
    Uuid::from_bytes([n; 16])
}

/// The entry that is stored under a number, with some text.
fn element(n: u32, text: &str) -> Element {
    Element::from_json(&json!({ format!("run {n}"): text })).unwrap()
}

/// Elements that have these entries, as a server sent them.
fn sent(numbers: impl IntoIterator<Item = u32>, text: &str) -> Elements {
    let mut elements = Elements::new(&"t".into());
    for n in numbers {
        let element = element(n, text);
        elements.add(Space::Entries.seq(n), *element.hash(), None, element.bytes()).unwrap();
    }
    elements
}

fn run(numbers: std::ops::Range<u32>) -> Run {
    Run { start: numbers.start, len: numbers.end - numbers.start }
}

/// What a read of these entries teaches.
fn read(memory: &Memory, of: Uuid, ns: &[u8], found: &History, numbers: std::ops::Range<u32>, text: &str) {
    let elements = sent(numbers.clone(), text);
    elements.object(KEY, &[run(numbers)]).unwrap();
    memory.learn((of, ns), found, [KEY], &elements);
}

fn writes(history: &History, writes: usize) -> History {
    (0..writes).fold(history.clone(), |history, _| history.next(Flush::Now))
}

fn length(memory: &Memory, of: Uuid, ns: &[u8]) -> Option<usize> {
    memory.of(of, ns).map(|remembered| remembered.content.entries.len())
}

#[test]
fn only_large_objects_are_remembered() {
    let (memory, history) = (Memory::default(), History::first(Flush::Now));
    let least = u32::try_from(SMALLEST).unwrap();
    read(&memory, thread(1), NS, &history, 0..least - 1, "");
    assert_eq!(length(&memory, thread(1), NS), None);
    read(&memory, thread(1), NS, &history, 0..least, "");
    assert_eq!(length(&memory, thread(1), NS), Some(SMALLEST));
    assert!(memory.of(thread(1), b"another").is_none() && memory.of(thread(2), NS).is_none());
}

/// It is used if the history that was found proves that it holds, and the server leaves it out only where it can prove that.
#[test]
fn it_holds_in_histories_that_go_on_from_its_moment() {
    let (memory, then) = (Memory::default(), writes(&History::first(Flush::Now), 20));
    read(&memory, thread(1), NS, &then, 0..100, "");
    let remembered = memory.of(thread(1), NS).unwrap();
    let holds = |found: &History| (remembered.was_left_out(found), remembered.holds_in(found));
    for later in 0..=16 {
        let next = |flush| writes(&then, later).next(flush);
        for found in [writes(&then, later), next(Flush::WithNext), next(Flush::Now)] {
            let proven = found.mark.revision >> 1 <= (then.mark.revision >> 1) + 16;
            assert_eq!(holds(&found), (proven, proven), "after {later} writes: {found:?}");
        }
    }
    assert_eq!(holds(&writes(&then, 17)), (false, false), "too long ago");
    assert_eq!(holds(&then.rewritten(rand::random())), (false, false), "other numbers");
    assert_eq!(holds(&writes(&History::first(Flush::Now), 20)), (false, false), "another life");

    // A server that lost the newest writes, and others that wrote in their place.
    let backup = writes(&History::first(Flush::Now), 10);
    let lost = writes(&backup, 3);
    let memory = Memory::default();
    read(&memory, thread(1), NS, &lost, 0..100, "");
    let remembered = memory.of(thread(1), NS).unwrap();
    for others in 0..30 {
        let found = writes(&backup, others);
        assert!(!remembered.holds_in(&found), "{others} others' writes");
        assert_eq!(remembered.was_left_out(&found), (3..=19).contains(&others), "{others} others' writes");
    }
}

#[test]
fn what_this_process_writes_keeps_it_provable() {
    let (memory, mut history) = (Memory::default(), History::first(Flush::Now));
    read(&memory, thread(1), NS, &history, 0..100, "");
    read(&memory, thread(1), b"inner", &history, 0..100, "");
    for n in 0..100 {
        history = writes(&history, 1 + n % 16);
        memory.goes_on(thread(1), &history);
        memory.goes_on(thread(2), &history);
    }
    for ns in [NS, b"inner"] {
        assert!(memory.of(thread(1), ns).unwrap().holds_in(&writes(&history, 16)));
    }
    // Others have written too much meanwhile, or lost what is remembered: neither makes it provable again.
    for other in [writes(&history, 17), History::first(Flush::Now), history.rewritten(1)] {
        memory.goes_on(thread(1), &other);
        assert!(!memory.of(thread(1), NS).unwrap().holds_in(&other));
    }
    assert!(memory.of(thread(1), NS).unwrap().holds_in(&history));
}

#[test]
fn a_read_goes_on_from_what_is_remembered_of_newer_and_older_checkpoints() {
    let (memory, history) = (Memory::default(), History::first(Flush::Now));
    read(&memory, thread(1), NS, &history, 0..100, "");
    // One more entry was sent; then that of an older checkpoint, of another branch, and of the newest one again.
    for (new, runs, length) in [
        (vec![100], vec![run(0..101)], 101),
        (vec![], vec![run(0..90)], 101),
        (vec![], vec![run(0..10)], 101),
        (vec![120, 121], vec![run(0..50), run(120..122)], 103),
        (vec![], vec![run(0..101)], 103),
    ] {
        let mut elements = sent(new, "");
        elements.remember(memory.of(thread(1), NS).unwrap().content);
        let made = elements.object(KEY, &runs).unwrap();
        let expected: BTreeSet<_> =
            runs.iter().flat_map(|run| run.numbers()).map(|n| format!("run {n}")).collect();
        assert_eq!(made.iter().map(|(key, _)| key.to_string()).collect::<BTreeSet<_>>(), expected);
        memory.learn((thread(1), NS), &history, [KEY], &elements);
        let content = memory.of(thread(1), NS).unwrap().content;
        assert_eq!((content.entries.len(), content.objects.len()), (length, 1));
        assert_eq!(memory.lock().bytes, content.weight());
    }
    let remembered = memory.of(thread(1), NS).unwrap();
    let LeftOut { first, last, .. } = remembered.left_out();
    let seq = |n| Space::Entries.seq(n);
    assert_eq!((first, last), (vec![seq(0), seq(120)], vec![seq(100), seq(121)]));
    // What nobody sent and nobody remembers is missing.
    let mut elements = sent([], "");
    elements.remember(remembered.content);
    let error = elements.object(KEY, &[run(0..102)]).unwrap_err();
    assert!(error.to_string().contains("the row is missing"), "{error}");
}

#[test]
fn entries_that_no_object_has_any_more_are_forgotten() {
    let (memory, history) = (Memory::default(), History::first(Flush::Now));
    read(&memory, thread(1), NS, &history, 0..100, "");
    // The object changes all over, again and again.
    for start in (100..2_000).step_by(100) {
        let mut elements = sent(start..start + 100, "");
        elements.remember(memory.of(thread(1), NS).unwrap().content);
        elements.object(KEY, &[run(start..start + 100)]).unwrap();
        memory.learn((thread(1), NS), &history, [KEY], &elements);
        let content = memory.of(thread(1), NS).unwrap().content;
        assert!(content.entries.len() <= 200 + SMALLEST, "{}", content.entries.len());
        assert!((start..start + 100).all(|n| content.entry(n).is_some()));
        let numbers: Vec<u32> = content.runs.iter().flat_map(|run| run.numbers()).collect();
        assert_eq!(numbers, content.entries.keys().copied().collect::<Vec<_>>());
    }
}

/// The slower of two reads found less.
#[test]
fn what_a_later_read_found_stays() {
    let (memory, then) = (Memory::default(), History::first(Flush::Now));
    let now = writes(&then, 1);
    read(&memory, thread(1), NS, &now, 0..101, "");
    let later = memory.of(thread(1), NS).unwrap();
    read(&memory, thread(1), NS, &then, 0..100, "");
    assert_eq!(length(&memory, thread(1), NS), Some(101));

    // It turns out that the later one was lost: it is forgotten, but nothing that others learned since.
    memory.drop_it(thread(1), NS, &later);
    assert!(memory.of(thread(1), NS).is_none() && memory.lock().bytes == 0);
    read(&memory, thread(1), NS, &then, 0..100, "");
    memory.drop_it(thread(1), NS, &later);
    assert_eq!(length(&memory, thread(1), NS), Some(100));

    // After a rewrite the revisions count on, but the entries are others.
    read(&memory, thread(1), NS, &writes(&then, 5), 0..100, "");
    read(&memory, thread(1), NS, &then.rewritten(7), 0..70, "");
    assert_eq!(length(&memory, thread(1), NS), Some(70));
    memory.forget(thread(1));
    assert!(memory.of(thread(1), NS).is_none() && memory.lock().bytes == 0);
}

#[test]
fn what_is_remembered_is_bounded() {
    let (memory, history) = (Memory::default(), History::first(Flush::Now));
    let text = "x".repeat(BYTES / 400);
    for n in 1..=5 {
        read(&memory, thread(n), NS, &history, 0..100, &text);
    }
    let kept: Vec<_> = (1..=5).filter(|n| length(&memory, thread(*n), NS).is_some()).collect();
    assert_eq!(kept, [3, 4, 5]);
    assert!(memory.lock().bytes <= BYTES);
    // The last one, whatever its size; the one before it goes.
    read(&memory, thread(6), NS, &history, 0..500, &text);
    let kept: Vec<_> = (1..=6).filter(|n| length(&memory, thread(*n), NS).is_some()).collect();
    assert_eq!(kept, [6]);

    let memory = Memory::default();
    for n in 0..20_u8 {
        read(&memory, thread(1), &[n], &history, 0..100, "");
    }
    let kept = (0..20).filter(|n| length(&memory, thread(1), &[*n]).is_some()).collect::<Vec<_>>();
    assert_eq!(kept, (12..20).collect::<Vec<_>>());
}

proptest! {
    /// Added in any order, numbers become the runs that they are.
    #[test]
    fn numbers_become_runs(numbers in prop::collection::vec(0..40_u32, 0..60)) {
        let (mut runs, mut all) = (Vec::new(), BTreeSet::new());
        for n in numbers {
            if all.insert(n) {
                add_number(&mut runs, n);
            }
            prop_assert!(runs.is_sorted_by(|a, b| a.end() < b.start), "{:?}", runs);
            prop_assert!(runs.iter().flat_map(|run| run.numbers()).eq(all.iter().copied()));
        }
    }
}
