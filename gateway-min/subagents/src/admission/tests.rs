mod beside;
mod model;
mod schedules;

use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Wake;

use super::*;

/// Whether a task was woken.
#[derive(Default)]
struct Woken(AtomicBool);

impl Woken {
    /// Whether it was woken since the last call.
    fn taken(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn settings(max_running: u32, max_queued: u32, policy: AdmissionPolicy) -> SubagentRuntime {
    SubagentRuntime { max_running, max_queued, admission_policy: policy, queue_timeout_seconds: 300 }
}

fn queueing(max_running: u32) -> Admission {
    Admission::new(&settings(max_running, 10_000, AdmissionPolicy::Queue))
}

fn batch(id: &str) -> Class {
    Class::Batch(id.into())
}

/// Polls once; a ticket that waits is not done.
fn poll(ticket: &mut Ticket) -> Option<Result<Slot, Refused>> {
    match Pin::new(ticket).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => Some(result),
        Poll::Pending => None,
    }
}

fn idle() -> Counts {
    Counts::default()
}

#[tokio::test(start_paused = true)]
async fn s36_slots_go_out_in_the_order_of_arrival_and_nobody_overtakes() {
    let admission = queueing(1);
    let mut slot = admission.acquire(&Class::Interactive).await.unwrap();
    let mut tickets: Vec<Ticket> = (0..2).map(|_| admission.enter(&Class::Interactive).unwrap()).collect();
    assert!(tickets.iter_mut().all(|ticket| poll(ticket).is_none()));
    for _ in 0..100 {
        assert!(admission.try_acquire().is_none(), "somebody waits");
        tickets.push(admission.enter(&Class::Interactive).unwrap());
        drop(slot);
        // Handed over before the next in line even looks.
        assert_eq!((admission.counts().running, admission.counts().waiting()), (1, 2));
        assert!(admission.try_acquire().is_none());
        assert!(
            poll(&mut tickets[1]).is_none() && poll(&mut tickets[2]).is_none(),
            "the third stays pending"
        );
        slot = poll(&mut tickets[0]).expect("it is next").unwrap();
        drop(tickets.remove(0));
    }
    drop((slot, tickets));
    assert_eq!(admission.counts(), idle());
}

#[tokio::test]
async fn s37_a_full_process_refuses_with_its_numbers() {
    for (settings, queued, text) in [
        (
            settings(2, 5, AdmissionPolicy::Reject),
            0,
            "Subagent execution capacity is full (2 running, 0 queued)",
        ),
        (
            settings(1, 0, AdmissionPolicy::Queue),
            0,
            "Subagent execution capacity is full (1 running, 0 queued)",
        ),
        (
            settings(3, 2, AdmissionPolicy::Queue),
            2,
            "Subagent execution capacity is full (3 running, 2 queued)",
        ),
    ] {
        let admission = Admission::new(&settings);
        let held: Vec<Ticket> = (0..settings.max_running as usize + queued)
            .map(|_| admission.enter(&Class::Interactive).unwrap())
            .collect();
        for class in [Class::Interactive, batch("b")] {
            let refused = admission.enter(&class).map(drop).unwrap_err();
            assert_eq!(refused.to_string(), text);
        }
        drop(held);
        assert_eq!(admission.counts(), idle());
        assert!(admission.enter(&Class::Interactive).is_ok());
    }
}

#[tokio::test(start_paused = true)]
async fn s38_a_place_in_the_queue_ends_after_its_time() {
    let admission = queueing(1);
    let slot = admission.acquire(&Class::Interactive).await.unwrap();
    let first = admission.enter(&Class::Interactive).unwrap();
    // The time counts from the arrival, not from when somebody looks.
    tokio::time::advance(Duration::from_secs(299)).await;
    let second = admission.enter(&Class::Interactive).unwrap();
    let before = Instant::now();
    let error = first.await.map(drop).unwrap_err();
    assert_eq!(error.to_string(), "Timed out after 300s waiting for a subagent execution slot");
    assert_eq!(before.elapsed().as_secs(), 1);
    assert_eq!(admission.counts().waiting(), 1);
    // A caller with less patience leaves by itself.
    let impatient = tokio::time::timeout(Duration::from_secs(10), second).await;
    assert!(impatient.is_err());
    assert_eq!(admission.counts(), Counts { running: 1, ..idle() });
    drop(slot);
    assert_eq!(admission.counts(), idle());
}

#[tokio::test(start_paused = true)]
async fn s38_the_time_that_was_waited_is_known() {
    let admission = queueing(1);
    let slot = admission.acquire(&Class::Interactive).await.unwrap();
    assert_eq!(slot.waited(), Duration::ZERO);
    let next = tokio::spawn(admission.enter(&Class::Interactive).unwrap());
    tokio::time::sleep(Duration::from_secs(7)).await;
    drop(slot);
    assert_eq!(next.await.unwrap().unwrap().waited(), Duration::from_secs(7));
}

#[tokio::test(start_paused = true)]
async fn s39_a_cancelled_place_leaves_no_trace_also_at_the_moment_of_the_hand_over() {
    let admission = queueing(1);
    let slot = admission.acquire(&Class::Interactive).await.unwrap();
    let mut tickets: Vec<Ticket> = (0..4).map(|_| admission.enter(&Class::Interactive).unwrap()).collect();
    // Cancelled while it waits.
    drop(tickets.remove(1));
    assert_eq!(admission.counts().waiting(), 3);
    // Handed over, then cancelled before it looked: the next one has it.
    drop(slot);
    assert_eq!((admission.counts().running, admission.counts().waiting()), (1, 2));
    drop(tickets.remove(0));
    let slot = poll(&mut tickets[0]).expect("it is next").unwrap();
    // Handed over at the moment when its time ends: it has the slot, and nobody else.
    assert!(poll(&mut tickets[1]).is_none());
    tokio::time::advance(Duration::from_secs(301)).await;
    drop(slot);
    let last = poll(&mut tickets[1]).expect("it was handed the slot").unwrap();
    assert_eq!(admission.counts(), Counts { running: 1, ..idle() });
    drop(last);
    // Dropping the place again does nothing more.
    drop(tickets);
    assert_eq!(admission.counts(), idle());
}

#[tokio::test]
async fn s39_a_slot_is_given_back_however_its_holder_ends() {
    let admission = queueing(2);
    let holders: Vec<_> = (0..2)
        .map(|_| {
            let admission = admission.clone();
            tokio::spawn(async move {
                let _slot = admission.acquire(&Class::Interactive).await.unwrap();
                std::future::pending::<()>().await;
            })
        })
        .collect();
    while admission.counts().running < 2 {
        tokio::task::yield_now().await;
    }
    for holder in &holders {
        holder.abort();
        holder.abort();
    }
    for holder in holders {
        assert!(holder.await.unwrap_err().is_cancelled());
    }
    assert_eq!(admission.counts(), idle());
    let panicking = admission.clone();
    let panicked = tokio::spawn(async move {
        let _slot = panicking.acquire(&Class::Interactive).await.unwrap();
        panic!("the execution failed");
    });
    assert!(panicked.await.unwrap_err().is_panic());
    assert_eq!(admission.counts(), idle());
}

#[tokio::test]
async fn s40_the_same_configuration_is_fine_and_another_one_is_not_while_busy() {
    let first = settings(1, 5, AdmissionPolicy::Queue);
    let other = SubagentRuntime { max_running: 2, ..first.clone() };
    let admission = Admission::new(&first);
    let slot = admission.acquire(&Class::Interactive).await.unwrap();
    admission.install(&first).unwrap();
    let text = "subagent_runtime is restart-required and cannot change while subagents run or wait";
    assert_eq!(admission.install(&other).unwrap_err().to_string(), text);
    assert_eq!(admission.capacity(), 1);
    let waiting = admission.enter(&Class::Interactive).unwrap();
    drop(slot);
    assert_eq!(admission.install(&other), Err(Busy), "handed over, not free");
    drop(waiting);
    admission.install(&other).unwrap();
    assert_eq!((admission.capacity(), admission.counts()), (2, idle()));
}

/// Frees slots one after the other and returns who got them.
fn served(
    admission: &Admission,
    mut slot: Option<Slot>,
    mut waiting: Vec<(&'static str, Ticket)>,
) -> Vec<&'static str> {
    let mut order = Vec::new();
    while !waiting.is_empty() {
        drop(slot.take());
        let index = waiting.iter_mut().position(|(_, ticket)| match poll(ticket) {
            Some(result) => {
                slot = Some(result.unwrap());
                true
            }
            None => false,
        });
        order.push(waiting.remove(index.expect("a freed slot goes to somebody")).0);
    }
    drop(slot);
    assert_eq!(admission.counts(), idle());
    order
}

#[tokio::test]
async fn interactive_ones_go_first_and_batches_take_turns_with_a_slot_in_four() {
    let admission = queueing(1);
    let slot = admission.acquire(&Class::Interactive).await.unwrap();
    let mut waiting = Vec::new();
    // The large batch is first, and does not starve the small one.
    for (name, count) in [("large", 5), ("small", 2), ("interactive", 8)] {
        let class = if name == "interactive" { Class::Interactive } else { batch(name) };
        waiting.extend((0..count).map(|_| (name, admission.enter(&class).unwrap())));
    }
    assert_eq!(admission.counts(), Counts { running: 1, waiting_interactive: 8, waiting_batch: 7 });
    let order = served(&admission, Some(slot), waiting);
    let i = "interactive";
    assert_eq!(
        order,
        [i, i, i, "large", i, i, i, "small", i, i, "large", "small", "large", "large", "large"]
    );
}
