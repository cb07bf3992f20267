//! The channel `messages`: chunks of messages as the protocol has them, a message of blocks that begin, grow and end.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use serde_json::{Value, json};
use threadkeep_agent::model::is_cut_off;

use super::block::{Block, blocks, call_chunk};
use super::event::{Data, Said, Speaker};

/// The slots of a frame: the end of the message before, the start, and three for each piece or two for each whole block.
const CLOSING: u64 = 0;
const START: u64 = 2;
const PIECES: u64 = 3;
const PER_PIECE: u64 = 3;
const PER_BLOCK: u64 = 2;
/// The ends of messages that the run left open.
const LEFT_OPEN: Range<u64> = 82..98;

/// The messages of a run's stream. There is one at a time at each node.
#[derive(Debug, Default)]
pub(super) struct Messages {
    open: BTreeMap<(Vec<String>, String), Open>,
    /// Messages whose beginning this stream does not have: they are said as a whole once they are complete.
    missed: BTreeSet<String>,
}

/// A message of which more may come.
#[derive(Debug)]
struct Open {
    id: String,
    /// The block that grows, and its index.
    block: Option<(usize, Block)>,
    /// How many blocks have begun.
    begun: usize,
    /// Calls that have ended, with their indexes: calls of a message may grow in turns.
    calls: Vec<(usize, Block)>,
    usage: Value,
}

/// One frame's events, all of one message.
struct Saying<'a> {
    speaker: &'a Speaker<'a>,
    namespace: &'a [String],
    node: &'a str,
    said: Vec<Said>,
}

impl Saying<'_> {
    fn say(&mut self, slot: u64, data: Value) {
        let said = self.speaker.say(slot, "messages", self.namespace, Data::Json(data));
        self.said.push(said.at(Some(self.node)));
    }

    fn block_start(&mut self, slot: u64, index: usize, block: &Value) {
        self.say(slot, json!({ "event": "content-block-start", "index": index, "content": block }));
    }

    fn block_finish(&mut self, slot: u64, index: usize, block: &Value) {
        self.say(slot, json!({ "event": "content-block-finish", "index": index, "content": block }));
    }

    fn start(&mut self, slot: u64, role: &str, id: &str, metadata: &Value) {
        let mut data = json!({ "event": "message-start", "role": role, "id": id });
        let mut known = serde_json::Map::new();
        for (name, key) in [
            ("provider", "ls_provider"),
            ("model", "ls_model_name"),
            ("model_type", "ls_model_type"),
            ("run_id", "run_id"),
            ("thread_id", "thread_id"),
        ] {
            known.extend(metadata.get(key).map(|value| (name.to_owned(), value.clone())));
        }
        data["metadata"] = known.into();
        self.say(slot, data);
    }

    fn finish(&mut self, slot: u64, usage: &Value, reason: &Value) {
        let mut data = json!({ "event": "message-finish" });
        for (name, value) in [("usage", usage), ("reason", reason)] {
            if !value.is_null() {
                data[name] = value.clone();
            }
        }
        self.say(slot, data);
    }
}

impl Messages {
    /// The events of a frame `[message, metadata]`. Unless `from_start`, a message whose first chunk this is may have begun
    /// before.
    pub(super) fn frame(
        &mut self,
        speaker: &Speaker<'_>,
        namespace: &[String],
        frame: &Value,
        from_start: bool,
    ) -> Vec<Said> {
        let (message, metadata) = (&frame[0], &frame[1]);
        let (Some(id), Some(kind)) = (message["id"].as_str(), message["type"].as_str()) else {
            return Vec::new();
        };
        let node = metadata["langgraph_node"].as_str().unwrap_or_default();
        let mut saying = Saying { speaker, namespace, node, said: Vec::new() };
        match kind {
            "AIMessageChunk" => self.chunk(&mut saying, id, message, metadata, from_start),
            "ai" | "human" | "system" => whole(&mut saying, kind, message, metadata),
            // Results of tools are on the channel `tools`; the protocol has no such role.
            _ => {}
        }
        saying.said
    }

    fn chunk(
        &mut self,
        saying: &mut Saying<'_>,
        id: &str,
        message: &Value,
        metadata: &Value,
        from_start: bool,
    ) {
        if self.missed.contains(id) {
            return;
        }
        let place = (saying.namespace.to_vec(), saying.node.to_owned());
        if self.open.get(&place).is_none_or(|open| open.id != id) {
            // A model that is asked again begins another message.
            if let Some(before) = self.open.remove(&place) {
                before.close(saying, CLOSING, &Value::Null);
            }
            if !from_start {
                self.missed.insert(id.to_owned());
                return;
            }
            saying.start(START, "ai", id, metadata);
            let id = id.to_owned();
            let open = Open { id, block: None, begun: 0, calls: Vec::new(), usage: Value::Null };
            self.open.insert(place.clone(), open);
        }
        let Some(open) = self.open.get_mut(&place) else { return };
        let mut slot = PIECES;
        for piece in pieces(message) {
            open.grow(saying, slot, &piece);
            slot += PER_PIECE;
        }
        if !message["usage_metadata"].is_null() {
            open.usage = message["usage_metadata"].clone();
        }
        if message["chunk_position"] == "last"
            && let Some(open) = self.open.remove(&place)
        {
            open.close(saying, slot, &message["response_metadata"]["finish_reason"]);
        }
    }

    /// Whether a message is missing its beginning, so that [`Self::update`] has something to say.
    pub(super) fn has_missed(&self) -> bool {
        !self.missed.is_empty()
    }

    /// The messages in what a node wrote whose beginning this stream does not have.
    pub(super) fn update(
        &mut self,
        speaker: &Speaker<'_>,
        namespace: &[String],
        (node, writes): (&str, &Value),
    ) -> Vec<Said> {
        let mut saying = Saying { speaker, namespace, node, said: Vec::new() };
        for message in writes["messages"].as_array().into_iter().flatten() {
            if message["id"].as_str().is_some_and(|id| self.missed.remove(id)) {
                whole(&mut saying, "ai", message, &Value::Null);
            }
        }
        saying.said
    }

    /// Ends what a run that was stopped or failed left open.
    pub(super) fn end(&mut self, speaker: &Speaker<'_>, failed: Option<&str>) -> Vec<Said> {
        let mut said = Vec::new();
        let speaker = &speaker.only(&LEFT_OPEN);
        for (((namespace, node), open), slot) in
            std::mem::take(&mut self.open).into_iter().zip((0..).step_by(2))
        {
            let mut saying = Saying { speaker, namespace: &namespace, node: &node, said: Vec::new() };
            match failed {
                Some(error) => saying.say(slot, json!({ "event": "error", "message": error })),
                None => open.close(&mut saying, slot, &Value::Null),
            }
            said.extend(saying.said);
        }
        said
    }
}

impl Open {
    /// A piece of the block that is open, of a call that has ended, which begins again at its index, or of a new block.
    fn grow(&mut self, saying: &mut Saying<'_>, slot: u64, piece: &Block) {
        if let Some((index, block)) = self.block.take_if(|(_, block)| !block.continues_with(piece)) {
            saying.block_finish(slot, index, &block.finished());
            if matches!(block, Block::Call { .. }) {
                self.calls.push((index, block));
            }
        }
        let (index, block) = match &mut self.block {
            Some((index, block)) => {
                block.append(piece);
                (*index, block)
            }
            empty => {
                let ended = self.calls.iter().position(|(_, call)| call.continues_with(piece));
                let begun = if let Some(at) = ended {
                    let (index, mut call) = self.calls.swap_remove(at);
                    saying.block_start(slot + 1, index, &call.begun());
                    call.append(piece);
                    (index, call)
                } else {
                    let index = self.begun;
                    self.begun += 1;
                    saying.block_start(slot + 1, index, &piece.begun());
                    (index, piece.clone())
                };
                let (index, block) = empty.insert(begun);
                (*index, block)
            }
        };
        let delta = block.delta(piece);
        saying.say(slot + 2, json!({ "event": "content-block-delta", "index": index, "delta": delta }));
    }

    fn close(self, saying: &mut Saying<'_>, slot: u64, reason: &Value) {
        if let Some((index, block)) = self.block {
            saying.block_finish(slot, index, &block.last(is_cut_off(reason.as_str())));
        }
        saying.finish(slot + 1, &self.usage, reason);
    }
}

/// The pieces of blocks in a chunk, in the order of the blocks.
fn pieces(chunk: &Value) -> Vec<Block> {
    let reasoning = chunk["additional_kwargs"]["reasoning_content"].as_str().unwrap_or_default();
    let text = chunk["content"].as_str().unwrap_or_default();
    let calls = chunk["tool_call_chunks"].as_array().into_iter().flatten().map(call_chunk);
    let texts = [Block::Reasoning(reasoning.to_owned()), Block::Text(text.to_owned())];
    texts.into_iter().filter(|piece| !piece.is_empty()).chain(calls).collect()
}

/// A message that is complete when it is said first.
fn whole(saying: &mut Saying<'_>, role: &str, message: &Value, metadata: &Value) {
    saying.start(START, role, message["id"].as_str().unwrap_or_default(), metadata);
    let mut slot = PIECES;
    for (index, block) in blocks(message).into_iter().enumerate() {
        saying.block_start(slot, index, &block);
        saying.block_finish(slot + 1, index, &block);
        slot += PER_BLOCK;
    }
    saying.finish(slot, &message["usage_metadata"], &message["response_metadata"]["finish_reason"]);
}
