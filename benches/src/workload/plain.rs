//! `plain`: realistic messages, two a turn, in one line.

use threadkeep::metadata::Source;

use super::{Emit, Script, Start, Step, Turn};
use crate::transcript::Transcript;

pub(super) struct Plain(Transcript);

impl Plain {
    pub(super) fn new(seed: u64) -> Self {
        Self(Transcript::new(seed))
    }
}

impl Script for Plain {
    fn turn(&mut self) -> Turn {
        let (human, ai) = (self.0.human(), self.0.ai());
        let steps = vec![
            Step { node: "input".into(), source: Source::Input, emit: Emit::Messages(vec![human]) },
            Step { node: "model".into(), source: Source::Loop, emit: Emit::Messages(vec![ai]) },
        ];
        Turn { start: Start::Head, steps, note: true }
    }
}
