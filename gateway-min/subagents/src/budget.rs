//! The token budget of an agent, and of everything it delegates.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use serde_json::{Map, Value as Json, json};
use threadkeep_agent::model::message;
use threadkeep_agent::summary::Cut;
use threadkeep_agent::{After, AgentError, Before, Middleware, Tokens, View};
use threadkeep_config::TokenBudget;

use crate::batches::Sharing;
use crate::contract::StopReason;

/// The name of the message that warns a model of its budget.
const WARNING_NAME: &str = "budget_warning";
/// The key of a question's metadata with what the messages of its turn used that a summary has replaced.
pub(crate) const SUMMARIZED: &str = "summarized_token_usage";
/// The key of a question's metadata with the id of the first answer to it, which a summary has replaced; and of the
/// result of a call whose answer came before the question, with the id of that answer. It begins as the other keys do
/// that only the runtime may write.
pub(crate) const FIRST_ANSWER: &str = "subagent_first_answer";

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
        let limits = [
            Some(Share { used: tokens.total, limit: self.settings.max_tokens, of: "tokens" }),
            self.settings.max_input_tokens.map(|limit| Share {
                used: tokens.input,
                limit,
                of: "input tokens",
            }),
            self.settings.max_output_tokens.map(|limit| Share {
                used: tokens.output,
                limit,
                of: "output tokens",
            }),
        ];
        let first = Share { used: tokens.total, limit: self.settings.max_tokens, of: "tokens" };
        limits
            .into_iter()
            .flatten()
            .fold(first, |most, share| if share.part() > most.part() { share } else { most })
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

/// The tokens of a turn: of its answers, of the subagents whose results are in it, and of the messages of it that a summary
/// has replaced.
pub(crate) fn used_in(turn: &[Json]) -> Tokens {
    turn.iter().fold(Tokens::default(), |mut sum, message| {
        sum += match message::kind(message) {
            "tool" => {
                Tokens::of(&json!({"usage_metadata": message["additional_kwargs"]["subagent_token_usage"]}))
            }
            "ai" => Tokens::of(message),
            "human" => Tokens::of(&json!({"usage_metadata": message["additional_kwargs"][SUMMARIZED]})),
            _ => Tokens::default(),
        };
        sum
    })
}

/// The id of a turn's first answer, also if a summary has replaced it, or of the one before it by which its batches
/// have their limit.
pub(crate) fn first_answer(turn: &[Json]) -> Option<&str> {
    turn.iter().find_map(|message| match message::kind(message) {
        "human" | "tool" => message["additional_kwargs"][FIRST_ANSWER].as_str(),
        "ai" => message["id"].as_str(),
        _ => None,
    })
}

/// Keeps in a turn's question what these messages of the turn used, which a summary replaces: a run that goes on with the
/// turn would have that much more to spend. The same with the first answer, by which the turn's batches know their limit.
fn keep(question: &mut Json, removed: &[Json]) {
    let mut used = used_in(std::slice::from_ref(question));
    used += used_in(removed);
    let first = first_answer(std::slice::from_ref(question)).or_else(|| first_answer(removed));
    let first = first.map(str::to_owned);
    if used == Tokens::default() && first.is_none() {
        return;
    }
    if let Json::Object(message) = question {
        let kwargs = message.entry("additional_kwargs").or_insert_with(|| json!({}));
        if !kwargs.is_object() {
            *kwargs = json!({});
        }
        if used != Tokens::default() {
            kwargs[SUMMARIZED] =
                json!({"input_tokens": used.input, "output_tokens": used.output, "total_tokens": used.total});
        }
        if let Some(first) = first {
            kwargs[FIRST_ANSWER] = json!(first);
        }
    }
}

/// The same for a summary of these messages that no run asks for.
pub fn keep_summarized(messages: &[Json], cut: &mut Cut) {
    if let Some(question) = message::turn_start(messages).filter(|question| *question < cut.at)
        && let Some(kept) = cut.preserved.first_mut()
    {
        keep(kept, &messages[question + 1..cut.at]);
    }
}

/// Keeps an agent within its budget: warns its model once, then ends the run with what it has.
pub struct Budgeting {
    budget: Arc<Budget>,
    /// Whether what was used before is read from the turn, and from nothing else.
    of_turn: bool,
    /// The warning for the next call; it stays until a call has succeeded with it.
    warning: Mutex<Option<String>>,
    /// Whether a model was called, or is about to be.
    begun: AtomicBool,
}

impl Budgeting {
    /// Keeps to this budget, of which the turn shows what was used before.
    pub fn new(budget: Arc<Budget>) -> Self {
        Self { budget, of_turn: true, warning: Mutex::default(), begun: AtomicBool::default() }
    }

    /// Keeps to this budget, which knows what was used before.
    pub(crate) fn knowing(budget: Arc<Budget>) -> Self {
        Self { of_turn: false, ..Self::new(budget) }
    }

    /// Takes over the warning of the process that had this turn before.
    fn go_on_warning(&self, turn: &[Json]) {
        // Without what a summary has used in this process: after the next answer it counts.
        let known = less(self.budget.used(), self.budget.spent());
        let used_at = |at: usize| {
            if self.of_turn { used_in(&turn[..=at]) } else { less(known, used_in(&turn[at + 1..])) }
        };
        let mut answers = (0..turn.len()).rev().filter(|at| message::kind(&turn[*at]) == "ai");
        let Some(last) = answers.next() else { return };
        // The question has what earlier answers used that a summary has replaced.
        let earlier = answers.next().or((last > 0).then_some(0)).map(used_at);
        if let Some(share) = self.budget.left_to_warn(earlier, used_at(last)) {
            *self.warning.lock().unwrap_or_else(PoisonError::into_inner) = Some(share.warning());
        }
    }
}

#[async_trait]
impl Middleware for Budgeting {
    async fn exchange(&self, turn: &[Json]) {
        self.budget.exchange(self.of_turn.then_some(turn)).await;
    }

    fn before_model(&self, view: &View<'_>) -> Result<Before, AgentError> {
        self.budget.go_on_from(used_in(view.turn));
        if !self.begun.swap(true, Ordering::Relaxed) {
            self.go_on_warning(view.turn);
        }
        if self.budget.is_exhausted() {
            let stop = Some(StopReason::TokenCapped.as_str().to_owned());
            return Ok(Before { stop, ..Before::default() });
        }
        let warning = self.warning.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let messages = warning.map(|text| message::hidden(WARNING_NAME, text)).into_iter().collect();
        Ok(Before { messages, ..Before::default() })
    }

    fn summarized(&self, question: &mut Json, removed: &[Json]) {
        if self.of_turn {
            keep(question, removed);
        }
    }

    fn after_summary(&self, _: &View<'_>, _: &str, answer: &Json) -> Result<Map<String, Json>, AgentError> {
        // A turn does not show it: a run that goes on would not know it.
        if !self.of_turn {
            self.budget.spend(Tokens::of(answer));
        }
        Ok(Map::new())
    }

    fn after_model(&self, _: &View<'_>, answer: &mut Json) -> Result<After, AgentError> {
        self.budget.spend(Tokens::of(answer));
        let mut warning = self.warning.lock().unwrap_or_else(PoisonError::into_inner);
        *warning = None;
        match self.budget.standing() {
            Standing::Within => {}
            Standing::Warn(share) => *warning = Some(share.warning()),
            // The final answer was given in time.
            Standing::Exhausted(_) if message::tool_calls(answer).is_empty() => {}
            Standing::Exhausted(Share { used, limit, of }) => {
                let notice = format!(
                    "[stopped: {used} of {limit} {of} are used, so the run ended with the results so far]"
                );
                *answer = message::strip_tool_calls(answer, &notice);
                let stop_reason = Some(StopReason::TokenCapped.as_str().to_owned());
                return Ok(After { stop_reason, ..After::default() });
            }
        }
        Ok(After::default())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use threadkeep::id::IdSource;

    use super::*;

    fn settings(max_tokens: u64) -> TokenBudget {
        TokenBudget { enabled: true, max_tokens, warn_threshold: 0.7, ..TokenBudget::default() }
    }

    fn answer(tokens: i64) -> Json {
        json!({
            "type": "ai", "content": "so far", "tool_calls": [{"name": "ls", "args": {}, "id": "c"}],
            "usage_metadata": {"input_tokens": tokens - 1, "output_tokens": 1, "total_tokens": tokens},
        })
    }

    fn view() -> View<'static> {
        static IDS: LazyLock<IdSource> = LazyLock::new(IdSource::default);
        View { run_id: "r", state: None, ids: &IDS, turn: &[], stop_reason: None }
    }

    #[test]
    fn a_model_is_warned_once_and_again_only_if_the_call_failed() {
        let guard = Budgeting::new(Budget::new(settings(1000), None));
        assert_eq!(guard.after_model(&view(), &mut answer(699)).unwrap(), After::default());
        assert_eq!(guard.before_model(&view()).unwrap().messages, Vec::<Json>::new());
        guard.after_model(&view(), &mut answer(1)).unwrap();
        // The first call with the warning fails, so its repetition has it too.
        for _ in 0..2 {
            let shown = guard.before_model(&view()).unwrap().messages;
            assert_eq!((shown.len(), &shown[0]["name"]), (1, &json!("budget_warning")));
        }
        guard.after_model(&view(), &mut answer(10)).unwrap();
        assert!(guard.before_model(&view()).unwrap().messages.is_empty());
    }

    /// Whether the calls after this turn, in another process, have the warning.
    fn warned_after(guard: &Budgeting, turn: &[Json]) -> Vec<bool> {
        let view = View { turn, ..view() };
        let is_warned = |_| {
            let shown = guard.before_model(&view).unwrap().messages;
            guard.after_model(&view, &mut answer(10)).unwrap();
            !shown.is_empty()
        };
        (0..3).map(is_warned).collect()
    }

    #[test]
    fn a_model_is_warned_once_also_if_another_process_goes_on() {
        let human = |summarized: i64| {
            let usage = json!({"input_tokens": summarized, "output_tokens": 0, "total_tokens": summarized});
            json!({"type": "human", "additional_kwargs": {SUMMARIZED: usage}})
        };
        let result = json!({"type": "tool", "additional_kwargs": {"subagent_token_usage":
            {"input_tokens": 300, "output_tokens": 0, "total_tokens": 300}}});
        for (turn, warned) in [
            // No call has followed the answer that reached the share.
            (vec![human(0), answer(600), answer(100), json!({"type": "tool"})], [true, false, false]),
            (vec![human(0), answer(600), result.clone(), answer(1)], [true, false, false]),
            // One has, with the warning.
            (vec![human(0), answer(700), answer(1)], [false; 3]),
            (vec![human(700), answer(1)], [false; 3]),
            // The next answer reaches it, with what a subagent has used meanwhile.
            (vec![human(0), answer(600), result.clone()], [false, true, false]),
            (vec![human(0), answer(689)], [false, false, true]),
            (vec![human(0)], [false; 3]),
        ] {
            let budget = Budget::new(settings(1000), None);
            assert_eq!(warned_after(&Budgeting::new(budget), &turn), warned, "{turn:?}");
            // Nothing in a subagent's turn was delegated.
            if !turn.contains(&result) {
                let budget = Budget::new(settings(1000), None);
                budget.go_on_from(used_in(&turn));
                assert_eq!(warned_after(&Budgeting::knowing(budget), &turn), warned, "{turn:?}");
            }
        }
    }

    #[test]
    fn of_what_a_summary_uses_before_another_process_calls_the_model_is_warned_after_the_answer() {
        let turn = [json!({"type": "human"}), answer(680), answer(5)];
        let budget = Budget::new(settings(1000), None);
        budget.go_on_from(used_in(&turn));
        let guard = Budgeting::knowing(budget);
        guard.after_summary(&view(), "m", &answer(20)).unwrap();
        assert_eq!(warned_after(&guard, &turn), [false, true, false]);
    }

    #[test]
    fn an_exhausted_budget_ends_the_run_with_the_text_so_far() {
        let guard = Budgeting::new(Budget::new(settings(1000), None));
        let mut last = answer(1000);
        assert_eq!(
            guard.after_model(&view(), &mut last).unwrap().stop_reason.as_deref(),
            Some("token_capped")
        );
        assert_eq!(last["tool_calls"], json!([]));
        assert!(
            last["content"].as_str().unwrap().starts_with("so far\n\n[stopped: 1000 of 1000 tokens are used")
        );
        assert_eq!(
            guard.before_model(&view()).unwrap().stop.as_deref(),
            Some("token_capped"),
            "no further model call"
        );
    }

    #[test]
    fn the_highest_share_counts() {
        let limits = TokenBudget { max_output_tokens: Some(2), ..settings(1000) };
        let guard = Budgeting::new(Budget::new(limits, None));
        assert_eq!(guard.after_model(&view(), &mut answer(5)).unwrap().stop_reason, None);
        assert_eq!(
            guard.after_model(&view(), &mut answer(5)).unwrap().stop_reason.as_deref(),
            Some("token_capped")
        );
    }

    #[test]
    fn a_parents_limit_binds_the_sum_of_its_subagents() {
        let parent = Budget::new(settings(1000), None);
        let child = || Budgeting::new(Budget::new(settings(100_000), Some(Arc::clone(&parent))));
        let (one, other) = (child(), child());
        one.after_model(&view(), &mut answer(600)).unwrap();
        assert_eq!(other.before_model(&view()).unwrap().stop, None);
        let stopped = other.after_model(&view(), &mut answer(400)).unwrap();
        assert_eq!(stopped.stop_reason.as_deref(), Some("token_capped"));
        assert_eq!(one.before_model(&view()).unwrap().stop.as_deref(), Some("token_capped"));
    }

    #[test]
    fn a_run_that_goes_on_counts_what_the_turn_has_used_once() {
        let result = json!({"type": "tool", "additional_kwargs": {"subagent_token_usage":
            {"input_tokens": 300, "output_tokens": 0, "total_tokens": 300}}});
        let turn = [json!({"type": "human"}), answer(600), result, json!({"type": "tool", "content": "x"})];
        assert_eq!(used_in(&turn).total, 900);
        let guard = Budgeting::new(Budget::new(settings(1000), None));
        let view = View { turn: &turn, ..view() };
        guard.before_model(&view).unwrap();
        guard.before_model(&view).unwrap();
        assert_eq!(guard.after_model(&view, &mut answer(99)).unwrap().stop_reason, None);
        let last = guard.after_model(&view, &mut answer(1)).unwrap();
        assert_eq!(last.stop_reason.as_deref(), Some("token_capped"));
    }

    #[test]
    fn what_a_summary_replaces_stays_in_the_question() {
        let result = json!({"type": "tool", "additional_kwargs": {"subagent_token_usage":
            {"input_tokens": 300, "output_tokens": 0, "total_tokens": 300}}});
        let mut turn = vec![json!({"type": "human"}), answer(600), result, answer(50)];
        let guard = Budgeting::new(Budget::new(settings(1000), None));
        for at in [3, 2] {
            let used = used_in(&turn);
            let (question, rest) = turn.split_at_mut(1);
            guard.summarized(&mut question[0], &rest[..at - 1]);
            turn.drain(1..at);
            assert_eq!(used_in(&turn), used, "{turn:?}");
        }
        assert_eq!(turn.len(), 1, "the question alone");
        // Of a summary that no run asks for; the turn before has its own question.
        let messages =
            [json!({"type": "human"}), answer(600), json!({"type": "human"}), answer(7), answer(2)];
        let preserved = vec![messages[2].clone(), messages[4].clone()];
        let mut cut = Cut { at: 4, preserved };
        keep_summarized(&messages, &mut cut);
        assert_eq!(used_in(&cut.preserved).total, 9);
        let mut cut = Cut { at: 2, preserved: messages[2..].to_vec() };
        keep_summarized(&messages, &mut cut);
        assert_eq!(cut.preserved, messages[2..]);
        // A subagent's progress has it.
        let mut question = json!({"type": "human"});
        Budgeting::knowing(Budget::new(settings(1000), None)).summarized(&mut question, &[answer(7)]);
        assert_eq!(question, json!({"type": "human"}));
    }

    #[test]
    fn a_summary_keeps_by_which_answer_a_turn_began() {
        let silent = |id: &str| json!({"type": "ai", "id": id});
        let mut turn = vec![json!({"type": "human"}), silent("a"), silent("b"), silent("c")];
        let guard = Budgeting::new(Budget::new(settings(1000), None));
        for _ in 0..2 {
            assert_eq!(first_answer(&turn), Some("a"), "{turn:?}");
            let (question, rest) = turn.split_at_mut(1);
            guard.summarized(&mut question[0], &rest[..1]);
            turn.remove(1);
        }
        assert_eq!(first_answer(&turn), Some("a"), "{turn:?}");
        assert!(turn[0]["additional_kwargs"].get(SUMMARIZED).is_none());
        assert_eq!(first_answer(&[json!({"type": "human"})]), None);
        let result = json!({"type": "tool", "additional_kwargs": {FIRST_ANSWER: "z"}});
        let added_since = [json!({"type": "human"}), json!({"type": "tool"}), result, silent("a")];
        assert_eq!(first_answer(&added_since), Some("z"));
        assert!(crate::owned::is_owned(FIRST_ANSWER), "no client says which limit a turn has");
    }

    #[test]
    fn a_budget_that_is_off_only_counts() {
        let off = TokenBudget { enabled: false, ..settings(1000) };
        let guard = Budgeting::new(Budget::new(off, None));
        assert_eq!(guard.after_model(&view(), &mut answer(5000)).unwrap(), After::default());
        assert_eq!(guard.before_model(&view()).unwrap(), Before::default());
    }
}
