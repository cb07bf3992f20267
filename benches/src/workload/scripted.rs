//! `lean` and `lead`: the operations that the Python savers receive as well.
//!
//! LangGraph stores the input in its own checkpoint, then one checkpoint per node, each after the node's writes. Here a
//! checkpoint and the writes that created it are one commit, so a turn of `lean` is three commits (its three
//! checkpoints) instead of five calls, and one of `lead` 21 instead of 41.

use serde_json::{Value as Json, json};
use threadkeep::metadata::Source;

use super::{Emit, Script, Start, Step, Turn};

/// The vocabulary of the texts.
const WORDS: [&str; 48] = [
    "the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "with", "on", "be", "this", "by", "are",
    "at", "from", "or", "an", "have", "not", "agent", "thread", "state", "store", "write", "read", "value",
    "model", "tool", "message", "result", "search", "file", "plan", "error", "token", "cache", "query",
    "index", "table", "page", "commit", "replay", "history", "snapshot", "channel",
];
/// Hooks of `lead` before and after the model.
const BEFORE: usize = 7;
const AFTER: usize = 11;
/// The hook after the model that sends the answer again, with its usage.
const COUNTS_TOKENS: usize = 6;

/// A conversation of `lean` or `lead`.
pub(super) struct Scripted {
    lead: bool,
    size: usize,
    turn: usize,
}

impl Scripted {
    pub(super) fn new(lead: bool, size: usize) -> Self {
        Self { lead, size, turn: 0 }
    }
}

impl Script for Scripted {
    fn turn(&mut self) -> Turn {
        let human = json!({"type": "human", "id": format!("h-{:08}", self.turn), "content": text(self.turn, 0, self.size)});
        let ai = json!({"type": "ai", "id": format!("a-{:08}", self.turn), "content": text(self.turn, 1, self.size)});
        self.turn += 1;
        let step = |node: &str, emit| Step { node: node.into(), source: Source::Loop, emit };
        let mut steps = vec![
            Step { source: Source::Input, ..step("__input__", Emit::Nothing) },
            step("__start__", Emit::Messages(vec![human.clone()])),
        ];
        if self.lead {
            for hook in 0..BEFORE {
                let emit = if hook == 0 { Emit::All(stamped(&human)) } else { Emit::Nothing };
                steps.push(step(&format!("Middleware{hook:02}.before_model"), emit));
            }
        }
        steps.push(step("model", Emit::Messages(vec![ai.clone()])));
        if self.lead {
            for hook in 0..AFTER {
                let emit = match hook {
                    COUNTS_TOKENS => Emit::Messages(vec![counted(&ai)]),
                    _ => Emit::Nothing,
                };
                steps.push(step(&format!("Middleware{hook:02}.after_model"), emit));
            }
        }
        Turn { start: Start::Live, steps, note: false }
    }
}

fn stamped(human: &Json) -> Json {
    let mut message = human.clone();
    message["name"] = json!("user-input");
    message["additional_kwargs"] = json!({"run_id": null, "timestamp": "2025-01-01T00:00:00.000000+00:00"});
    message
}

fn counted(ai: &Json) -> Json {
    let mut message = ai.clone();
    message["usage_metadata"] = json!({"input_tokens": 1000, "output_tokens": 100, "total_tokens": 1100});
    message
}

/// `size` bytes of words picked by a linear congruential generator; role 0 is the human, 1 the model.
fn text(turn: usize, role: usize, size: usize) -> String {
    let mut x = u32::try_from((2 * turn + role + 1) & 0xffff_ffff).unwrap_or_default();
    let mut text = String::with_capacity(size + 12);
    while text.len() < size {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        text.push_str(WORDS[(x >> 16) as usize % WORDS.len()]);
        text.push(' ');
    }
    // The reference drops the trailing space and pads with a dot.
    text.pop();
    text.truncate(size);
    format!("{text:.<size$}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::Workload;

    #[test]
    fn the_digest_of_a_hundred_turns_is_the_agreed_one() {
        for workload in [Workload::Lean, Workload::Lead] {
            let model = workload.expected(128, 0, 100);
            assert_eq!(model.digest(), "7aa17c5e3160bfc7", "{workload}");
            assert_eq!(model.messages().len(), 200);
        }
    }

    #[test]
    fn turns_have_as_many_checkpoints_as_langgraph_makes() {
        assert_eq!(Scripted::new(false, 128).turn().steps.len(), 3);
        assert_eq!(Scripted::new(true, 128).turn().steps.len(), 21);
    }

    #[test]
    fn texts_have_their_size_to_the_byte() {
        for size in [1, 2, 127, 128, 129, 2048] {
            assert!((0..50).all(|turn| text(turn, 0, size).len() == size), "{size}");
        }
    }
}
