//! The token budget of an agent, and of everything it delegates.

mod guard;
mod turn;

use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value as Json;
use threadkeep_agent::Tokens;
use threadkeep_config::TokenBudget;

use crate::batches::Sharing;

pub(crate) use guard::Budgeting;
pub use turn::keep_summarized;
pub(crate) use turn::{FIRST_ANSWER, SUMMARIZED, first_answer, used_in};

/// Tokens that an agent and its subagents have used. Budgets are a tree: what a subagent uses counts for the agent that
/// delegated to it as well.
#[derive(Debug)]
pub struct Budget {
    settings: TokenBudget,
    used: Mutex<Spent>,
    parent: Option<Arc<Budget>>,
    /// For a run that may have batches, which its limit binds, too.
    sharing: Option<Sharing>,
}

#[derive(Debug, Default)]
struct Spent {
    tokens: Tokens,
    /// What the run's batches have used, as far as it is known.
    batches: Tokens,
    /// What this process has spent of it.
    own: Tokens,
    warned: bool,
    /// Whether what was used before has been counted.
    goes_on: bool,
}

impl Spent {
    /// What counts against the limit.
    fn all(&self) -> Tokens {
        let mut all = self.tokens;
        all += self.batches;
        all
    }
}

/// Where a budget stands.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Standing {
    Within,
    /// It has just reached the share at which the model is warned.
    Warn(Share),
    Exhausted(Share),
}

/// The share of a limit that is used.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Share {
    used: i64,
    limit: u64,
    of: &'static str,
}

impl Share {
    #[allow(clippy::cast_precision_loss, reason = "a share")]
    fn part(self) -> f64 {
        self.used as f64 / self.limit as f64
    }

    /// What a model is warned with.
    fn warning(self) -> String {
        let Self { used, limit, of } = self;
        format!(
            "[budget warning] {used} of {limit} {of} are used. Finish the most important part, and give your final answer \
             soon."
        )
    }
}

impl Budget {
    /// A budget with these settings, within its parent's.
    pub fn new(settings: TokenBudget, parent: Option<Arc<Budget>>) -> Arc<Self> {
        Arc::new(Self { settings, used: Mutex::default(), parent, sharing: None })
    }

    /// The budget of a run, which binds its batches if it may have any.
    pub(crate) fn of_run(settings: TokenBudget, sharing: Option<Sharing>) -> Arc<Self> {
        Arc::new(Self { settings, used: Mutex::default(), parent: None, sharing })
    }

    /// Exchanges with the batches of the run what it and they have used. `turn` is the run's, if the caller has it.
    pub(crate) async fn exchange(&self, turn: Option<&[Json]>) {
        let mut of_run = self;
        while let Some(above) = of_run.parent.as_deref() {
            of_run = above;
        }
        let Some(sharing) = &of_run.sharing else { return };
        if let Some(batches) = sharing.exchange(of_run.used(), turn).await {
            let mut spent = of_run.used.lock().unwrap_or_else(PoisonError::into_inner);
            spent.batches = most(spent.batches, batches);
        }
    }

    /// The run has submitted a batch, whose limit has the name of this answer.
    pub(crate) async fn submitted(&self, answer: &str) {
        if let Some(sharing) = &self.sharing {
            sharing.submitted(answer).await;
        }
    }

    /// Counts tokens, here and in every budget above.
    pub fn spend(&self, tokens: Tokens) {
        let mut budget = Some(self);
        while let Some(here) = budget {
            let mut used = here.used.lock().unwrap_or_else(PoisonError::into_inner);
            used.tokens += tokens;
            used.own += tokens;
            drop(used);
            budget = here.parent.as_deref();
        }
    }

    /// Whether this budget or one above it is used up.
    pub fn is_exhausted(&self) -> bool {
        self.exhausted().is_some()
    }

    /// Counts what was used before somebody went on with the work: once, and here alone. A budget above counts that
    /// itself.
    pub(crate) fn go_on_from(&self, used: Tokens) {
        let mut spent = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        if !spent.goes_on {
            spent.goes_on = true;
            spent.tokens += used;
        }
    }

    /// Counts what is known to be used, unless it has counted that much already: here alone.
    pub(crate) fn at_least(&self, used: Tokens) {
        let mut spent = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        spent.tokens = most(spent.tokens, used);
    }

    /// What this process has spent of it.
    pub(crate) fn spent(&self) -> Tokens {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).own
    }

    /// What this process has spent of it since [`Self::spent`] was this.
    pub(crate) fn spent_since(&self, earlier: Tokens) -> Tokens {
        less(self.spent(), earlier)
    }

    /// What is used of it, without what batches of its run have used.
    pub(crate) fn used(&self) -> Tokens {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).tokens
    }

    /// The limit that is used up, of this budget or of one above it.
    fn exhausted(&self) -> Option<Share> {
        let share = self.highest(self.used.lock().unwrap_or_else(PoisonError::into_inner).all());
        let exhausted = self.settings.enabled && share.part() >= self.settings.hard_stop_threshold;
        exhausted.then_some(share).or_else(|| self.parent.as_deref()?.exhausted())
    }

    /// The limit of which the largest share is used.
    fn highest(&self, tokens: Tokens) -> Share {
        let share = |used, limit, of| Share { used, limit, of };
        let all = share(tokens.total, self.settings.max_tokens, "tokens");
        let input = self.settings.max_input_tokens.map(|limit| share(tokens.input, limit, "input tokens"));
        let output =
            self.settings.max_output_tokens.map(|limit| share(tokens.output, limit, "output tokens"));
        let others = input.into_iter().chain(output);
        others.fold(all, |most, share| if share.part() > most.part() { share } else { most })
    }

    fn standing(&self) -> Standing {
        if let Some(share) = self.exhausted() {
            return Standing::Exhausted(share);
        }
        let mut spent = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        match self.due(spent.all()) {
            Some(share) if !spent.warned => {
                spent.warned = true;
                Standing::Warn(share)
            }
            _ => Standing::Within,
        }
    }

    /// The share of which the model is warned when this much is used.
    fn due(&self, used: Tokens) -> Option<Share> {
        let share = self.highest(used);
        (self.settings.enabled && share.part() >= self.settings.warn_threshold).then_some(share)
    }

    /// What the model still has to be warned of when somebody goes on with the work: it was not warned yet if the last
    /// answer was the one that reached the share, and it was if an earlier one did. Of both the use at that time.
    fn left_to_warn(&self, earlier: Option<Tokens>, last: Tokens) -> Option<Share> {
        let mut spent = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let due = self.due(last)?;
        spent.warned = true;
        earlier.and_then(|earlier| self.due(earlier)).is_none().then_some(due)
    }
}

/// Of each kind the larger number.
pub(crate) fn most(tokens: Tokens, other: Tokens) -> Tokens {
    Tokens {
        input: tokens.input.max(other.input),
        output: tokens.output.max(other.output),
        total: tokens.total.max(other.total),
    }
}

fn less(tokens: Tokens, other: Tokens) -> Tokens {
    Tokens {
        input: tokens.input - other.input,
        output: tokens.output - other.output,
        total: tokens.total - other.total,
    }
}

#[cfg(test)]
mod tests;
