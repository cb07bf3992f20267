//! `agent`: what real threads contain. Tool calls, regenerated and edited turns, forks, an occasional compaction.

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value as Json, json};
use threadkeep::channel::REMOVE_ALL_MESSAGES;
use threadkeep::metadata::Source;

use super::{Emit, Model, Script, Start, Step, Turn};
use crate::transcript::Transcript;

/// How often a turn is regenerated, edited, or forked from an older state, in turns.
const BRANCH_EVERY: usize = 20;
/// How many turns back a fork starts.
const FORK_BACK: usize = 5;
/// The number of messages at which a thread is compacted, and how many of them stay.
const COMPACT_AT: usize = 3_000;
const KEPT: usize = 20;

pub(super) struct Agent {
    transcript: Transcript,
    random: StdRng,
    /// Tracks which messages a compaction keeps.
    model: Model,
    turn: usize,
    /// The previous turn's question.
    asked: Option<Json>,
}

impl Agent {
    pub(super) fn new(seed: u64) -> Self {
        let random = StdRng::seed_from_u64(seed ^ 0x5eed);
        Self { transcript: Transcript::new(seed), random, model: Model::default(), turn: 0, asked: None }
    }

    /// Where the turn starts, and its question.
    fn beginning(&mut self) -> (Start, Json) {
        let number = self.turn;
        let new = self.transcript.human();
        if number % BRANCH_EVERY != BRANCH_EVERY - 1 {
            return (Start::Head, new);
        }
        match (number / BRANCH_EVERY % 3, self.asked.clone()) {
            (0, Some(asked)) => (Start::Turn(number - 1), asked),
            (1, Some(mut asked)) => {
                asked["content"] = new["content"].clone();
                (Start::Turn(number - 1), asked)
            }
            _ => (Start::Turn(number - FORK_BACK), new),
        }
    }

    /// A summary replaces the old messages.
    fn compaction(&mut self) -> Vec<Json> {
        let messages = self.model.messages();
        let kept = messages[messages.len().saturating_sub(KEPT)..].iter().map(|message| (**message).clone());
        let kept: Vec<Json> = kept.collect();
        let mut summary = self.transcript.human();
        summary["name"] = json!("summary");
        let mut emit = vec![json!({"type": "remove", "id": REMOVE_ALL_MESSAGES, "content": ""}), summary];
        emit.extend(kept);
        emit
    }
}

impl Script for Agent {
    fn turn(&mut self) -> Turn {
        let (start, human) = self.beginning();
        self.asked = Some(human.clone());
        let step =
            |node: &str, emit| Step { node: node.into(), source: Source::Loop, emit: Emit::Messages(emit) };
        let mut steps = vec![Step { source: Source::Input, ..step("input", vec![human]) }];
        if start == Start::Head && self.model.messages().len() >= COMPACT_AT {
            steps.insert(0, step("summarization", self.compaction()));
        }
        for _ in 0..[0, 0, 1, 1, 2][self.random.random_range(0..5)] {
            let count = self.random.random_range(1..=2);
            let calls = self.transcript.calls(count);
            let results = (0..count).map(|index| self.transcript.tool(&calls, index)).collect();
            steps.extend([step("model", vec![calls]), step("tools", results)]);
        }
        steps.push(step("model", vec![self.transcript.ai()]));
        let turn = Turn { start, steps, note: true };
        self.model.turn(&turn);
        self.turn += 1;
        turn
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_runs_have_everything_that_happens_to_threads() {
        let mut script = Agent::new(1);
        let turns: Vec<Turn> = (0..1_600).map(|_| script.turn()).collect();
        let forks = turns
            .iter()
            .enumerate()
            .filter(|(number, turn)| turn.start == Start::Turn(number.wrapping_sub(FORK_BACK)));
        assert!(forks.count() > 20);
        let (mut regenerated, mut edited) = (0, 0);
        for (number, pair) in turns.windows(2).enumerate() {
            let [before, turn] = [&pair[0], &pair[1]]
                .map(|turn| turn.steps.iter().find(|s| s.source == Source::Input).unwrap());
            if pair[1].start == Start::Turn(number) {
                let [before, turn] = [before, turn].map(|step| &step.emit.messages()[0]);
                assert_eq!(before["id"], turn["id"]);
                if before == turn { regenerated += 1 } else { edited += 1 }
            }
        }
        assert!(regenerated > 20 && edited > 20, "{regenerated} {edited}");
        let nodes = |name: &str| {
            turns.iter().flat_map(|turn| &turn.steps).filter(|step| step.node.as_str() == name).count()
        };
        assert!(nodes("summarization") >= 1);
        assert!((1_000..2_000).contains(&nodes("tools")));
    }

    #[test]
    fn a_compaction_leaves_the_summary_and_the_newest_messages() {
        let mut script = Agent::new(1);
        let mut model = Model::default();
        loop {
            let before = model.messages().to_vec();
            let turn = script.turn();
            model.turn(&turn);
            if turn.steps[0].node.as_str() == "summarization" {
                assert!(before.len() >= COMPACT_AT);
                assert_eq!(model.messages()[0]["name"], "summary");
                assert_eq!(model.messages()[1..=KEPT], before[before.len() - KEPT..]);
                break;
            }
        }
    }
}
