//! Cancellation at every point where an execution can be suspended, in every order that a scheduler could choose.
//!
//! Each transition of the queue happens under one lock, so the orders in which tasks are polled and cancelled are all
//! the orders that there are, also on several threads.

use futures::FutureExt as _;
use futures::future::BoxFuture;
use tokio_util::sync::CancellationToken;

use super::*;

/// Chooses what happens next: every possibility in turn, by repeating a run with the next choice.
#[derive(Default)]
struct Choices {
    /// The choice at each point, and how many there were.
    path: Vec<(usize, usize)>,
    depth: usize,
}

impl Choices {
    fn choose(&mut self, options: usize) -> usize {
        if self.depth == self.path.len() {
            self.path.push((0, options));
        }
        let (choice, then) = self.path[self.depth];
        assert_eq!(then, options, "a run with the same choices takes the same course");
        self.depth += 1;
        choice
    }

    /// Goes on to the next run; false if this was the last one.
    fn advance(&mut self) -> bool {
        self.depth = 0;
        while let Some((choice, options)) = self.path.pop() {
            if choice + 1 < options {
                self.path.push((choice + 1, options));
                return true;
            }
        }
        false
    }
}

struct Task {
    future: Option<BoxFuture<'static, ()>>,
    cancel: CancellationToken,
    cancels_left: u32,
    woken: Arc<Woken>,
}

impl Task {
    /// An execution: it queues, runs, and ends, and is cancelled by its token or by being dropped.
    fn new(
        admission: &Admission,
        class: Class,
        cancels: u32,
        reports: &Arc<Mutex<Vec<usize>>>,
        index: usize,
    ) -> Self {
        let (admission, reports) = (admission.clone(), Arc::clone(reports));
        let cancel = CancellationToken::new();
        let token = cancel.clone();
        let future = async move {
            let slot = tokio::select! {
                biased;
                () = token.cancelled() => return,
                slot = admission.acquire(&class) => slot.unwrap(),
            };
            assert!(admission.counts().running <= admission.capacity());
            // It runs until it is polled again.
            let mut suspended = false;
            let running = std::future::poll_fn(|context| {
                if suspended {
                    return Poll::Ready(());
                }
                suspended = true;
                context.waker().wake_by_ref();
                Poll::Pending
            });
            tokio::select! {
                biased;
                () = token.cancelled() => {}
                () = running => {}
            }
            drop(slot);
            reports.lock().unwrap().push(index);
        };
        let woken = Arc::new(Woken::default());
        woken.clone().wake();
        Self { future: Some(future.boxed()), cancel, cancels_left: cancels, woken }
    }

    /// Whether it can be polled with an effect.
    fn is_ready(&self) -> bool {
        self.future.is_some() && self.woken.0.load(Ordering::Relaxed)
    }

    fn poll(&mut self) {
        self.woken.taken();
        if let Some(future) = &mut self.future
            && future.as_mut().poll(&mut Context::from_waker(&self.woken.clone().into())).is_ready()
        {
            self.future = None;
        }
    }

    /// Cancels once more: by its token, the last time by dropping it.
    fn cancel(&mut self) {
        self.cancels_left -= 1;
        self.cancel.cancel();
        if self.cancels_left == 0 {
            self.future = None;
        }
    }
}

/// Runs tasks to their end, with cancellations, as `choose` decides among the actions that are possible.
fn run(admission: &Admission, classes: &[Class], cancels: u32, mut choose: impl FnMut(usize) -> usize) {
    let reports = Arc::default();
    let tasks = classes.iter().enumerate();
    let mut tasks: Vec<Task> =
        tasks.map(|(index, class)| Task::new(admission, class.clone(), cancels, &reports, index)).collect();
    loop {
        let ready =
            tasks.iter().enumerate().filter(|(_, task)| task.is_ready()).map(|(index, _)| (index, false));
        let alive =
            tasks.iter().enumerate().filter(|(_, task)| task.future.is_some() && task.cancels_left > 0);
        let actions: Vec<(usize, bool)> = ready.chain(alive.map(|(index, _)| (index, true))).collect();
        let Some((index, cancels)) = (!actions.is_empty()).then(|| actions[choose(actions.len())]) else {
            break;
        };
        if cancels {
            tasks[index].cancel();
        } else {
            tasks[index].poll();
        }
        let counts = admission.counts();
        assert!(counts.running <= admission.capacity());
        assert!(counts.waiting() == 0 || counts.running == admission.capacity());
    }
    assert!(tasks.iter().all(|task| task.future.is_none()), "a task waits for ever");
    assert_eq!(admission.counts(), idle(), "a slot or a place is lost");
    let mut reports: Vec<usize> = reports.lock().unwrap().clone();
    let all = reports.len();
    reports.dedup();
    assert_eq!(reports.len(), all, "each reports once");
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap()
}

#[test]
fn no_order_of_two_executions_and_their_cancellations_loses_a_slot() {
    let runtime = runtime();
    let _entered = runtime.enter();
    let mut schedules = 0;
    for classes in [[Class::Interactive, Class::Interactive], [Class::Interactive, batch("b")]] {
        let mut choices = Choices::default();
        loop {
            run(&queueing(1), &classes, 3, |options| choices.choose(options));
            schedules += 1;
            if !choices.advance() {
                break;
            }
        }
    }
    assert!(schedules >= 1000, "{schedules}");
}

#[test]
fn twenty_thousand_orders_of_five_executions_and_three_cancellations_each_lose_no_slot() {
    let runtime = runtime();
    let _entered = runtime.enter();
    let classes = [Class::Interactive, Class::Interactive, batch("a"), batch("b"), Class::Interactive];
    // A linear congruential generator: the schedules are the same each time.
    let mut state: u64 = 1;
    for schedule in 0..20_000_u32 {
        let admission = queueing(1 + schedule % 3);
        run(&admission, &classes, schedule % 4, |options| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            usize::try_from(state >> 33).unwrap() % options
        });
    }
}

#[test]
fn threads_that_take_and_drop_slots_at_a_time_lose_none() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_time().build().unwrap();
    let admission = queueing(3);
    runtime.block_on(async {
        let mut tasks = tokio::task::JoinSet::new();
        for number in 0..2000_u32 {
            let admission = admission.clone();
            tasks.spawn(async move {
                let class = if number % 3 == 0 { batch("b") } else { Class::Interactive };
                let ticket = admission.enter(&class).unwrap();
                if number % 5 == 0 {
                    tokio::task::yield_now().await;
                    return drop(ticket);
                }
                let slot = ticket.await.unwrap();
                assert!(admission.counts().running <= 3);
                tokio::task::yield_now().await;
                drop(slot);
            });
        }
        while let Some(done) = tasks.join_next().await {
            done.unwrap();
        }
    });
    assert_eq!(admission.counts(), idle());
}
