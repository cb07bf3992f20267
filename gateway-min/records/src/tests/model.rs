//! Random operations on two threads, compared with a small model of who holds what.

use std::collections::{BTreeSet, HashMap};

use proptest::prelude::*;

use super::support::*;
use crate::MultitaskStrategy::{Enqueue, Interrupt, Reject, Rollback};
use crate::*;

#[derive(Clone, Debug)]
enum Step {
    Admit(MultitaskStrategy),
    Start(usize),
    Cancel(usize, CancelAction),
    Finish(usize, RunStatus),
    Reserve(WriterKind),
    Release,
    Delete,
    Recover,
}

fn step() -> impl Strategy<Value = Step> {
    let run = 0..6usize;
    let end = prop_oneof![Just(RunStatus::Success), Just(RunStatus::Error), Just(RunStatus::Interrupted)];
    prop_oneof![
        6 => prop_oneof![Just(Reject), Just(Interrupt), Just(Rollback), Just(Enqueue), Just(Enqueue)].prop_map(Step::Admit),
        3 => run.clone().prop_map(Step::Start),
        2 => (run.clone(), prop_oneof![Just(CancelAction::Interrupt), Just(CancelAction::Rollback)])
            .prop_map(|(run, action)| Step::Cancel(run, action)),
        4 => (run, end).prop_map(|(run, status)| Step::Finish(run, status)),
        2 => prop_oneof![Just(WriterKind::Delete), Just(WriterKind::CheckpointWrite)].prop_map(Step::Reserve),
        2 => Just(Step::Release),
        1 => Just(Step::Delete),
        1 => Just(Step::Recover),
    ]
}

/// The expected state of one thread.
#[derive(Default)]
struct Model {
    holder: Option<String>,
    /// In order of admission.
    waiting: Vec<String>,
    reservation: Option<Reservation>,
    /// Status and cancellation of every run.
    runs: HashMap<String, (RunStatus, Option<CancelAction>)>,
    admitted: usize,
}

impl Model {
    /// The run `back` admissions ago, or one that does not exist.
    fn run_id(&self, thread_id: &str, back: usize) -> String {
        format!("{thread_id}-{}", self.admitted.wrapping_sub(back))
    }

    fn end(&mut self, run_id: &str, status: RunStatus) -> Option<String> {
        self.runs.get_mut(run_id).unwrap().0 = status;
        self.waiting.retain(|waiting| waiting != run_id);
        if self.holder.as_deref() == Some(run_id) {
            return self.pass_on();
        }
        None
    }

    /// The thread passes to the run that has waited longest.
    fn pass_on(&mut self) -> Option<String> {
        self.holder = (!self.waiting.is_empty()).then(|| self.waiting.remove(0));
        self.holder.clone()
    }

    /// The holder of the thread, as reported to others.
    fn holding(&self) -> Option<OperationKind> {
        let reserved = self.reservation.as_ref().map(|reservation| reservation.kind().into());
        self.holder.as_ref().map(|_| OperationKind::Run).or(reserved)
    }

    /// Whether the thread's run is being cancelled and nobody waits for the thread.
    fn is_leaving(&self) -> bool {
        let cancelled = self.holder.as_ref().is_some_and(|holder| self.runs[holder].1.is_some());
        cancelled && self.waiting.is_empty()
    }

    async fn apply(&mut self, records: &Records, thread_id: &str, step: Step) {
        match step {
            Step::Admit(strategy) => self.admit(records, thread_id, strategy).await,
            Step::Start(back) => self.start(records, &self.run_id(thread_id, back)).await,
            Step::Cancel(back, action) => self.cancel(records, &self.run_id(thread_id, back), action).await,
            Step::Finish(back, status) => self.finish(records, &self.run_id(thread_id, back), status).await,
            Step::Reserve(kind) => {
                let result = records.runs().reserve(thread_id, kind).await;
                match (result, self.holding()) {
                    (Ok(reservation), None) => self.reservation = Some(reservation),
                    (Err(RecordsError::Conflict { holder, .. }), Some(expected)) => {
                        assert_eq!(holder, expected);
                    }
                    (result, holder) => panic!("{result:?} where {holder:?} holds the thread"),
                }
            }
            Step::Release => {
                if let Some(reservation) = self.reservation.take() {
                    reservation.release().await.unwrap();
                    self.pass_on();
                }
            }
            Step::Delete => {
                if let Some(reservation) = self.reservation.take_if(|held| held.kind() == WriterKind::Delete)
                {
                    let deleted = records.delete_thread(reservation).await.unwrap();
                    assert_eq!(deleted.runs, self.runs.len() as u64);
                    self.runs.clear();
                    create_thread(records, thread_id).await;
                }
            }
            Step::Recover => {} // Applied to all threads at once, below.
        }
    }

    async fn admit(&mut self, records: &Records, thread_id: &str, strategy: MultitaskStrategy) {
        self.admitted += 1;
        let run_id = self.run_id(thread_id, 0);
        let result = records.runs().admit(new_run(thread_id, &run_id), strategy).await;
        let action = match strategy {
            Reject | Enqueue => None,
            Interrupt => Some(CancelAction::Interrupt),
            Rollback => Some(CancelAction::Rollback),
        };
        match (result, self.holder.clone(), action) {
            (Ok(Admission::Admitted(_)), None, _) if self.reservation.is_none() => {
                self.holder = Some(run_id.clone());
                self.runs.insert(run_id, (RunStatus::Pending, None));
            }
            (
                Ok(Admission::Waiting { predecessor, action: said, superseded, .. }),
                Some(holder),
                Some(action),
            ) => {
                let cancelled = self.runs.get_mut(&holder).unwrap().1.get_or_insert(action);
                assert_eq!((predecessor, said), (holder, *cancelled));
                assert_eq!(superseded, std::mem::take(&mut self.waiting));
                for superseded in superseded {
                    let (_, cancelled) = self.runs[&superseded];
                    let cancelled = cancelled.or(Some(CancelAction::Interrupt));
                    self.runs.insert(superseded, (RunStatus::Interrupted, cancelled));
                }
                self.waiting.push(run_id.clone());
                self.runs.insert(run_id, (RunStatus::Pending, None));
            }
            (Ok(Admission::Queued(row)), Some(_), None) if strategy == Reject => {
                assert_eq!(row.run_id, run_id);
                assert!(self.is_leaving());
                self.waiting.push(run_id.clone());
                self.runs.insert(run_id, (RunStatus::Pending, None));
            }
            (Ok(Admission::Queued(row)), _, None) if strategy == Enqueue => {
                assert_eq!(row.run_id, run_id);
                assert!(!matches!(self.holding(), None | Some(OperationKind::Delete)));
                self.waiting.push(run_id.clone());
                self.runs.insert(run_id, (RunStatus::Pending, None));
            }
            (Err(RecordsError::Conflict { holder: OperationKind::Run, .. }), Some(_), None) => {
                assert_eq!(strategy, Reject);
                assert!(!self.is_leaving());
            }
            (Err(RecordsError::Conflict { holder, .. }), None, _) => {
                assert_eq!(self.holding(), Some(holder));
                assert!(holder == OperationKind::Delete || strategy != Enqueue);
            }
            (result, holder, _) => panic!("{strategy}: {result:?} where {holder:?} holds the thread"),
        }
    }

    async fn start(&mut self, records: &Records, run_id: &str) {
        let result = records.runs().start(run_id).await;
        match (self.runs.get_mut(run_id), result) {
            (None, Err(error)) => assert!(error.is_not_found()),
            (Some((RunStatus::Pending, Some(action))), Ok(StartOutcome::Cancelled(said))) => {
                assert_eq!(said, *action);
            }
            (Some((RunStatus::Pending, None)), Ok(StartOutcome::Waiting)) => {
                assert!(self.waiting.iter().any(|waiting| waiting == run_id));
            }
            (Some((status @ RunStatus::Pending, None)), Ok(StartOutcome::Started { .. })) => {
                assert_eq!(self.holder.as_deref(), Some(run_id));
                *status = RunStatus::Running;
            }
            (Some((status, _)), Ok(StartOutcome::NotPending(said))) => assert_eq!(said, *status),
            (state, result) => panic!("{result:?} for {state:?}"),
        }
    }

    async fn cancel(&mut self, records: &Records, run_id: &str, action: CancelAction) {
        let outcome = records.runs().request_cancel(run_id, action).await.unwrap();
        let expected = match self.runs.get_mut(run_id) {
            None => CancelOutcome::NotFound,
            Some((RunStatus::Interrupted, _)) => CancelOutcome::AlreadyInterrupted,
            Some((status, cancel)) if status.is_active() => match cancel.replace(action) {
                None => CancelOutcome::Accepted,
                first => {
                    *cancel = first;
                    CancelOutcome::AlreadyInterrupted
                }
            },
            Some((status, _)) => CancelOutcome::AlreadyTerminal(*status),
        };
        assert_eq!(outcome, expected);
    }

    async fn finish(&mut self, records: &Records, run_id: &str, status: RunStatus) {
        if let Some((now, Some(CancelAction::Rollback))) = self.runs.get(run_id)
            && now.is_active()
        {
            let refused = records.runs().finish(run_id, &end(status)).await.unwrap();
            assert_eq!(refused, FinishOutcome::CancelRequested(CancelAction::Rollback));
        }
        let result = records.runs().finish(run_id, &settled(status)).await;
        match (self.runs.get(run_id).copied(), result) {
            (None, Err(error)) => assert!(error.is_not_found()),
            (Some((now, Some(action))), Ok(FinishOutcome::CancelRequested(said))) => {
                assert!(now.is_active() && status == RunStatus::Success && said == action);
            }
            (Some((now, cancel)), Ok(FinishOutcome::Finished { promoted })) => {
                assert!(now.is_active() && (cancel.is_none() || status != RunStatus::Success));
                assert_eq!(promoted, self.end(run_id, status));
            }
            (Some((now, _)), Ok(FinishOutcome::AlreadyTerminal(said))) => {
                assert!(!now.is_active() && said == now);
            }
            (state, result) => panic!("{result:?} for {state:?}"),
        }
    }

    /// The run that holds the thread and is to be rolled back.
    fn rollback(&self) -> Option<String> {
        let asked = |run_id: &&String| self.runs[*run_id].1 == Some(CancelAction::Rollback);
        self.holder.as_ref().filter(asked).cloned()
    }

    /// A restart: everything active has ended, but for what is to be rolled back first.
    fn recover(&mut self) -> usize {
        let (mut recovered, kept) = (0, self.rollback());
        for (run_id, (status, _)) in &mut self.runs {
            if status.is_active() && Some(run_id) != kept.as_ref() {
                *status = RunStatus::Error;
                recovered += 1;
            }
        }
        (self.holder, self.waiting) = (kept, Vec::new());
        if let Some(reservation) = self.reservation.take() {
            reservation.forget();
        }
        recovered
    }

    async fn check(&self, records: &Records, thread_id: &str) {
        let active = records.runs().active_for_thread(thread_id).await.unwrap();
        assert!(self.holder.is_none() || self.reservation.is_none(), "the model lets two hold one thread");
        assert_eq!(active.as_ref().map(|row| row.operation_kind), self.holding());
        if let Some(run_id) = &self.holder {
            assert_eq!(active.unwrap().run_id, *run_id);
        }
        let all = RunQuery { status: None, limit: 1000, offset: 0 };
        let rows = records.runs().list_by_thread(thread_id, &all).await.unwrap();
        assert_eq!(rows.len(), self.runs.len());
        for row in rows {
            assert_eq!((row.status, row.cancel_action), self.runs[&row.run_id], "{}", row.run_id);
            assert_eq!(row.waiting, self.waiting.contains(&row.run_id), "{}", row.run_id);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn store_agrees_with_the_model(steps in prop::collection::vec((any::<bool>(), step()), 1..60)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let clock = TestClock::new();
            let records = lone(options(&clock, EventBackend::Memory)).await;
            let threads = ["t", "u"];
            let mut models = [Model::default(), Model::default()];
            for thread_id in threads {
                create_thread(&records, thread_id).await;
            }
            for (second, step) in steps {
                if let Step::Recover = step {
                    let recovered = records.runs().recover_orphans(clock.now(), chrono::TimeDelta::zero()).await.unwrap();
                    let reserved = models.iter().filter(|model| model.reservation.is_some()).count();
                    assert_eq!(recovered.released.len(), reserved);
                    let rollbacks = models.iter().filter_map(Model::rollback).collect::<BTreeSet<_>>();
                    assert_eq!(recovered.rollbacks.iter().map(|row| row.run_id.clone()).collect::<BTreeSet<_>>(), rollbacks);
                    assert_eq!(recovered.runs.len(), models.iter_mut().map(Model::recover).sum::<usize>());
                    assert!(recovered.promoted.is_empty());
                } else {
                    let which = usize::from(second);
                    models[which].apply(&records, threads[which], step).await;
                }
                for (model, thread_id) in models.iter().zip(threads) {
                    model.check(&records, thread_id).await;
                }
            }
        });
    }
}
