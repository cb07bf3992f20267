use std::sync::LazyLock;

use serde_json::json;
use threadkeep::id::IdSource;
use threadkeep_agent::summary::Cut;
use threadkeep_agent::{After, Before, Middleware as _, View};

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
    assert_eq!(guard.after_model(&view(), &mut last).unwrap().stop_reason.as_deref(), Some("token_capped"));
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
    let messages = [json!({"type": "human"}), answer(600), json!({"type": "human"}), answer(7), answer(2)];
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
