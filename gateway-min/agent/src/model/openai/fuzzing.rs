//! The body of a fuzz target: the events of a model's answer.

use super::AnswerParser;
use crate::model::ChunkAssembler;

/// Parses each line as the data of an event, and folds the result into a message.
pub(crate) fn fuzz(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let mut parser = AnswerParser::default();
    let mut assembler = ChunkAssembler::new("id", "model");
    for line in text.lines() {
        match parser.read(line) {
            Ok(Some(chunk)) => drop(assembler.push(&chunk)),
            Ok(None) => {}
            Err(_) => return,
        }
    }
    if let Some(chunk) = parser.end() {
        assembler.push(&chunk);
    }
    let message = assembler.finish();
    assert_eq!(message["type"], "ai", "what an answer becomes");
}
