//! Commits of several threads in one statement: while a few are under way, others wait for each other, and go together
//! with one round trip, one transaction and one flush.
//!
//! A commit that travels with others is hardly worse off than alone. None of them waits for a lock on another's thread
//! for more than a moment, after which the server refuses the statement. If it does, nothing of it was written, and
//! each is sent again alone; one that has waited too long to be sent goes alone. The statement is sent by a task of its
//! own, so a caller that stops waiting takes nobody with it; the task stops when nobody waits any more.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::future::{join_all, select};
use futures::pin_mut;
use tokio::sync::oneshot;

use crate::change::answers;
use crate::error::{SILENT, Trouble};
use crate::pool::Connections;
use crate::sql::Statement;
use crate::step::{MOST, Step, statement};

/// Statements under way from which on further commits wait for each other.
const WIDTH: usize = 2;
/// How long a commit waits to be sent with others.
const WAIT: Duration = Duration::from_millis(50);
/// A statement takes no more commits once they have this many bytes.
const LARGE: usize = 1 << 20;

/// The way of usual commits to the server.
pub(crate) struct Convoys {
    connections: Arc<Connections>,
    /// For each number of commits.
    statements: Vec<Statement>,
    /// [`WAIT`], except in tests.
    wait: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Statements under way.
    sent: usize,
    waiting: VecDeque<Waiting>,
    /// The number of the next one that waits.
    next: u64,
}

struct Waiting {
    number: u64,
    step: Box<Step>,
    reply: oneshot::Sender<Outcome>,
}

/// When a commit is sent.
enum Turn {
    /// Now, alone.
    Now(Box<Step>, Permit),
    /// With others, unless it is withdrawn by its number.
    Later(u64, oneshot::Receiver<Outcome>),
}

/// What became of a commit that was to go with others.
enum Outcome {
    /// Whether its thread was as expected.
    Answered(bool),
    /// It was not carried out: it has to go alone.
    Alone(Box<Step>),
    /// The connection went away, as in [`Trouble::Again`].
    Again { reason: String, in_doubt: bool, renew: bool },
}

impl Convoys {
    pub(crate) fn new(schema: &str, connections: Arc<Connections>) -> Arc<Self> {
        Self::waiting(schema, connections, WAIT)
    }

    fn waiting(schema: &str, connections: Arc<Connections>, wait: Duration) -> Arc<Self> {
        let statements = (1..=MOST).map(|commits| Statement::call(statement(schema, commits))).collect();
        Arc::new(Self { connections, statements, wait, state: Mutex::default() })
    }

    /// Carries out a commit. Returns whether the thread was as expected.
    pub(crate) async fn commit(self: &Arc<Self>, step: Box<Step>) -> Result<bool, Trouble> {
        let (number, mut answer) = match self.turn(step) {
            Turn::Now(step, _permit) => return self.alone(&step).await,
            Turn::Later(number, answer) => (number, answer),
        };
        let answered = match tokio::time::timeout(self.wait, &mut answer).await {
            Ok(answered) => answered,
            Err(_) => match self.withdraw(number) {
                Some(step) => return self.alone(&step).await,
                None => answer.await,
            },
        };
        match answered {
            Ok(Outcome::Answered(won)) => Ok(won),
            Ok(Outcome::Alone(step)) => self.alone(&step).await,
            Ok(Outcome::Again { reason, in_doubt, renew }) => Err(Trouble::Again { reason, in_doubt, renew }),
            // The runtime of the task that sent it has ended.
            Err(_) => Err(Trouble::Again { reason: SILENT.to_owned(), in_doubt: true, renew: false }),
        }
    }

    /// Takes a permit to send it now, or a place in the queue.
    fn turn(self: &Arc<Self>, step: Box<Step>) -> Turn {
        let mut state = self.lock();
        if state.sent < WIDTH {
            state.sent += 1;
            return Turn::Now(step, Permit(self.clone()));
        }
        let (reply, answer) = oneshot::channel();
        let number = state.next;
        state.next += 1;
        state.waiting.push_back(Waiting { number, step, reply });
        Turn::Later(number, answer)
    }

    async fn alone(&self, step: &Step) -> Result<bool, Trouble> {
        let mut lease = self.connections.lease().await?;
        let (flushed, mut params) = (step.is_flushed(), Vec::new());
        step.add(&mut params, flushed);
        let rows = lease.query(&self.statements[0], &params).await?;
        Ok(answers(&rows, (1, step.to.nonce))?[0])
    }

    /// Takes a commit back that has not been sent.
    fn withdraw(&self, number: u64) -> Option<Box<Step>> {
        let mut state = self.lock();
        let place = state.waiting.iter().position(|waiting| waiting.number == number)?;
        state.waiting.remove(place).map(|waiting| waiting.step)
    }

    /// Sends commits together, and answers them.
    async fn together(self: Arc<Self>, mut convoy: Vec<Waiting>) {
        let flushed = convoy.iter().any(|waiting| waiting.step.is_flushed());
        let (steps, mut replies): (Vec<_>, Vec<_>) =
            convoy.drain(..).map(|waiting| (waiting.step, waiting.reply)).unzip();
        let mut is_connected = false;
        let sent = {
            let sending = async {
                let mut lease = self.connections.lease().await?;
                is_connected = true;
                let mut params = Vec::new();
                for step in &steps {
                    step.add(&mut params, flushed);
                }
                let rows = lease.query(&self.statements[steps.len() - 1], &params).await?;
                answers(&rows, (steps.len(), steps[0].to.nonce))
            };
            let deserted = join_all(replies.iter_mut().map(oneshot::Sender::closed));
            pin_mut!(sending, deserted);
            match select(sending, deserted).await {
                futures::future::Either::Left((sent, _)) => sent,
                futures::future::Either::Right(_) => return,
            }
        };
        for (place, (step, reply)) in steps.into_iter().zip(replies).enumerate() {
            let outcome = match &sent {
                Ok(won) => Outcome::Answered(won[place]),
                // The server refused it, as for a thread that is locked.
                Err(Trouble::Again { in_doubt: false, renew: false, .. }) if is_connected => {
                    Outcome::Alone(step)
                }
                Err(Trouble::Again { reason, in_doubt, renew }) => {
                    Outcome::Again { reason: reason.clone(), in_doubt: *in_doubt, renew: *renew }
                }
                Err(Trouble::Final(_) | Trouble::Lost(_)) => Outcome::Alone(step),
            };
            // The caller may have stopped waiting.
            drop(reply.send(outcome));
        }
    }

    /// Takes what waits, as much as one statement carries.
    fn take(state: &mut State) -> Vec<Waiting> {
        let (mut convoy, mut bytes) = (Vec::new(), 0);
        while convoy.len() < MOST && bytes < LARGE {
            let Some(next) = state.waiting.pop_front() else { break };
            // Nothing was sent for a caller that has stopped waiting.
            if !next.reply.is_closed() {
                bytes += next.step.bytes();
                convoy.push(next);
            }
        }
        convoy
    }

    // Each change is whole before anything can fail, so a poisoned lock guards nothing half done.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Permits a statement under way. Whatever ends the statement, what waits goes next.
struct Permit(Arc<Convoys>);

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        let convoy = Convoys::take(&mut state);
        if convoy.is_empty() {
            state.sent -= 1;
            return;
        }
        drop(state);
        let permit = Self(self.0.clone());
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn(async move {
                let convoys = permit.0.clone();
                convoys.together(convoy).await;
                drop(permit);
            })),
            // Dropped outside of a runtime: they are sent by their callers.
            Err(_) => convoy.into_iter().for_each(|waiting| {
                drop(waiting.reply.send(Outcome::Alone(waiting.step)));
            }),
        }
    }
}

#[cfg(test)]
mod tests;
