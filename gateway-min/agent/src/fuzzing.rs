//! The body of a fuzz target: input from a model. Accepts any bytes, must not panic, and asserts invariants.

/// The events of a model's answer.
pub fn answer(data: &[u8]) {
    crate::model::fuzz(data);
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_corpus_of_answers_is_harmless() {
        for input in threadkeep_testing::corpus("answer").unwrap() {
            super::answer(&input);
        }
    }
}
