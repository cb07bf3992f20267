//! Random operations, compared with rules that a list of who waits is enough to check.

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone, Copy)]
enum Operation {
    /// Arrive: 0 is interactive, others are batches.
    Enter(u8),
    /// Cancel one that waits, or that was handed a slot and has not seen it.
    Cancel(usize),
    /// End one that runs.
    End(usize),
    /// Time passes, in seconds.
    Pass(u64),
    /// Everyone who was woken looks.
    Look,
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        6 => (0..4_u8).prop_map(Operation::Enter),
        2 => any::<usize>().prop_map(Operation::Cancel),
        4 => any::<usize>().prop_map(Operation::End),
        1 => (0..200_u64).prop_map(Operation::Pass),
        2 => Just(Operation::Look),
    ]
}

const SLOTS: usize = 16;

struct Waiting {
    number: usize,
    class: u8,
    ticket: Ticket,
    woken: Arc<Woken>,
}

/// The admission under test beside what its rules say.
struct Model {
    admission: Admission,
    arrivals: usize,
    /// Who holds a slot.
    running: Vec<Slot>,
    /// Who has not got a slot as far as the test knows, in the order of arrival.
    waiting: Vec<Waiting>,
    /// Who should be handed the slots that are freed, by the naive rule, and has not looked yet.
    granted: Vec<usize>,
    /// Grants to interactive ones since a batch had one, while a batch waited.
    in_a_row: u32,
    /// When each batch had its last grant; what was never granted counts from its arrival.
    turns: [usize; 4],
    clock: usize,
}

impl Model {
    /// Who is next by the rules, of those who wait and were not granted a slot.
    fn next(&mut self) -> Option<usize> {
        let candidates: Vec<&Waiting> =
            self.waiting.iter().filter(|one| !self.granted.contains(&one.number)).collect();
        let first = |class: u8| candidates.iter().find(|one| one.class == class).map(|one| one.number);
        // The batch that has waited for its turn the longest.
        let batch = (1..4)
            .filter(|batch| first(*batch).is_some())
            .min_by_key(|batch| self.turns[usize::from(*batch)]);
        let (class, contested) = match (first(0), batch) {
            (Some(_), Some(_)) if self.in_a_row < 3 => (0, true),
            (_, Some(batch)) => (batch, true),
            (Some(_), None) => (0, false),
            (None, None) => {
                self.in_a_row = 0;
                return None;
            }
        };
        let next = first(class);
        self.in_a_row = if class == 0 && contested { self.in_a_row + 1 } else { 0 };
        self.turn(class);
        next
    }

    fn turn(&mut self, class: u8) {
        self.clock += 1;
        self.turns[usize::from(class)] = self.clock;
    }

    /// A slot is freed.
    fn freed(&mut self) {
        let next = self.next();
        self.granted.extend(next);
    }

    fn waits(&self, class: u8) -> bool {
        self.waiting.iter().any(|one| one.class == class && !self.granted.contains(&one.number))
    }

    fn enter(&mut self, class: u8) {
        let kind = if class == 0 { Class::Interactive } else { batch(&class.to_string()) };
        let everyone = self.waiting.len() - self.granted.len();
        let mut ticket = self.admission.enter(&kind).unwrap();
        let taken = self.running.len() + self.granted.len();
        if taken < SLOTS {
            assert_eq!(everyone, 0, "nobody waits while a slot is free");
            self.running.push(poll(&mut ticket).expect("a slot is free").unwrap());
            return;
        }
        if !self.waits(class) {
            // A batch that comes back queues after the others.
            self.turn(class);
        }
        let woken = Arc::new(Woken::default());
        // Its first look.
        woken.clone().wake();
        self.waiting.push(Waiting { number: self.arrivals, class, ticket, woken });
        self.arrivals += 1;
    }

    fn cancel(&mut self, index: usize) {
        if self.waiting.is_empty() {
            return;
        }
        let one = self.waiting.remove(index % self.waiting.len());
        let was_granted = self.granted.contains(&one.number);
        self.granted.retain(|number| *number != one.number);
        drop(one);
        if was_granted {
            self.freed();
        }
    }

    /// Everyone who was woken looks: exactly those who were granted a slot have one, and those whose time is over none.
    fn look(&mut self) {
        for one in std::mem::take(&mut self.waiting) {
            let granted = self.granted.contains(&one.number);
            let Waiting { mut ticket, woken, .. } = one;
            if !woken.taken() {
                assert!(!granted, "{} was granted a slot and not woken", one.number);
                self.waiting.push(Waiting { ticket, woken, ..one });
                continue;
            }
            match Pin::new(&mut ticket).poll(&mut Context::from_waker(&woken.clone().into())) {
                Poll::Ready(Ok(slot)) => {
                    assert!(granted, "{} overtakes", one.number);
                    self.granted.retain(|number| *number != one.number);
                    self.running.push(slot);
                }
                Poll::Ready(Err(refused)) => {
                    assert!(!granted, "{} was granted a slot, and {refused}", one.number);
                }
                Poll::Pending => {
                    assert!(!granted, "{} was granted a slot and does not have it", one.number);
                    self.waiting.push(Waiting { ticket, woken, ..one });
                }
            }
        }
    }

    fn check(&self) {
        let counts = self.admission.counts();
        assert_eq!(counts.running, self.running.len() + self.granted.len());
        assert_eq!(counts.waiting(), self.waiting.len() - self.granted.len());
        assert!(counts.running <= SLOTS);
        assert!(counts.waiting() == 0 || counts.running == SLOTS, "a slot is free while somebody waits");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20, ..ProptestConfig::default() })]

    /// 10,000 operations and more on 16 slots: in order within a class, none lost, none overtaken.
    #[test]
    fn random_operations_keep_the_rules(operations in prop::collection::vec(operation(), 500..=1000)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let mut model = Model {
                admission: queueing(u32::try_from(SLOTS).unwrap()),
                arrivals: 0,
                running: Vec::new(),
                waiting: Vec::new(),
                granted: Vec::new(),
                in_a_row: 0,
                turns: [0; 4],
                clock: 0,
            };
            for operation in operations {
                match operation {
                    Operation::Enter(class) => model.enter(class),
                    Operation::Cancel(index) => model.cancel(index),
                    Operation::End(index) if !model.running.is_empty() => {
                        let index = index % model.running.len();
                        drop(model.running.remove(index));
                        model.freed();
                    }
                    Operation::Pass(seconds) => tokio::time::advance(Duration::from_secs(seconds)).await,
                    Operation::End(_) | Operation::Look => model.look(),
                }
                model.check();
            }
            let Model { admission, running, waiting, .. } = model;
            drop((waiting, running));
            assert_eq!(admission.counts(), idle(), "nothing is lost");
        });
    }
}
