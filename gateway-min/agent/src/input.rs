//! What a run of the lead agent starts with.

use serde_json::{Map, Value as Json};
use threadkeep::channel::{MESSAGES_CHANNEL, Messages, Reducer as _};
use threadkeep::checkpoint::TaskWrites;
use threadkeep::id::{IdSource, NodeName};
use threadkeep::state::StateSnapshot;
use threadkeep::value::{ChannelValue, Element, ListValue};

use crate::MODEL_NODE;
use crate::agent::TOOLS;
use crate::model::message::{invalid_tool_calls, tool_calls};

/// The first superstep of a run: writes to the state, and the nodes after it.
#[derive(Debug, Clone, PartialEq)]
pub struct Input {
    /// Values, by channel.
    pub writes: Map<String, Json>,
    /// What runs then.
    pub next: Next,
    /// Rows to store on the checkpoint that it makes, from which the run goes on.
    pub rows: Vec<TaskWrites>,
}

/// The nodes after the input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// This node; `None` to end.
    Go(Option<NodeName>),
    /// Those that the thread has next already; of the tools one for each call, also if the input changes the calls.
    Stay,
}

impl From<Map<String, Json>> for Input {
    /// Input for the model.
    fn from(writes: Map<String, Json>) -> Self {
        Self { writes, next: Next::Go(Some(MODEL_NODE.into())), rows: Vec::new() }
    }
}

impl Input {
    /// Whether a run with this input goes on with the tool calls that the conversation in this state waits for.
    /// Otherwise it goes to the model or to its end, or the input changes the calls, and then it makes all of them.
    ///
    /// # Errors
    /// If the input's messages cannot be added to the conversation, or the state cannot be read.
    pub fn goes_on(&self, state: Option<&StateSnapshot>) -> threadkeep::Result<bool> {
        if !self.goes_to_tools(state) || state.is_none() {
            return Ok(false);
        }
        if !self.writes.contains_key(MESSAGES_CHANNEL) {
            return Ok(true);
        }
        let (before, after) = self.conversation(state)?;
        Ok(last_calls(&before)? == last_calls(&after)?)
    }

    /// Whether tool calls come next in this state.
    fn goes_to_tools(&self, state: Option<&StateSnapshot>) -> bool {
        match &self.next {
            Next::Stay => state.is_some_and(|state| state.next.iter().any(is_tools)),
            Next::Go(node) => node.as_ref().is_some_and(is_tools),
        }
    }

    /// The nodes after this input in this state: of the tools one for each call, as the input leaves the calls. One if
    /// there is nothing to call.
    ///
    /// # Errors
    /// As for [`Self::goes_on`].
    pub(crate) fn nodes(&self, state: Option<&StateSnapshot>) -> threadkeep::Result<Vec<NodeName>> {
        let next = match &self.next {
            Next::Go(node) => node.iter().cloned().collect(),
            Next::Stay => state.map(|state| state.next.clone()).unwrap_or_default(),
        };
        let is_unchanged = self.next == Next::Stay && !self.writes.contains_key(MESSAGES_CHANNEL);
        if is_unchanged || !next.first().is_some_and(is_tools) {
            return Ok(next);
        }
        let (_, after) = self.conversation(state)?;
        let calls = last_calls(&after)?.map_or(0, |(_, calls)| calls.len());
        Ok(vec![NodeName::from(TOOLS); calls.max(1)])
    }

    /// The conversation in this state before this input, and after it.
    fn conversation(
        &self,
        state: Option<&StateSnapshot>,
    ) -> threadkeep::Result<(ChannelValue, ChannelValue)> {
        let before = state.and_then(|state| state.value(MESSAGES_CHANNEL).cloned());
        let before = before.unwrap_or_else(|| ListValue::default().into());
        let Some(messages) = self.writes.get(MESSAGES_CHANNEL) else { return Ok((before.clone(), before)) };
        // Those without an id get one that no message of the conversation has.
        let more = Messages.prepare(messages.clone(), &IdSource::default())?;
        let after = Messages.reduce(before.clone(), &ChannelValue::from_json(&more)?)?;
        Ok((before, after))
    }
}

/// The answer whose calls a run from this state makes first: as this input leaves it, or without one where the thread
/// stopped. `None` if the run asks the model first, or ends.
///
/// # Errors
/// As for [`Input::goes_on`].
pub fn pending_answer(
    input: Option<&Input>,
    state: Option<&StateSnapshot>,
) -> threadkeep::Result<Option<Json>> {
    let nothing = Input { writes: Map::new(), next: Next::Stay, rows: Vec::new() };
    let input = input.unwrap_or(&nothing);
    if !input.goes_to_tools(state) {
        return Ok(None);
    }
    let (_, after) = input.conversation(state)?;
    last_answer(&after)
}

fn is_tools(node: &NodeName) -> bool {
    node.as_str() == TOOLS
}

/// The id of the last answer among messages, and its calls.
fn last_calls(messages: &ChannelValue) -> threadkeep::Result<Option<(Json, Vec<Json>)>> {
    let Some(answer) = last_answer(messages)? else { return Ok(None) };
    let calls = tool_calls(&answer).iter().chain(invalid_tool_calls(&answer)).cloned().collect();
    Ok(Some((answer["id"].clone(), calls)))
}

/// The last answer among messages.
fn last_answer(messages: &ChannelValue) -> threadkeep::Result<Option<Json>> {
    let mut messages = messages.as_list().into_iter().flat_map(ListValue::iter);
    let answer = messages.rfind(|message| message.text("type") == Some("ai"));
    answer.map(Element::to_json).transpose()
}
