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
    /// Those that the thread has next already.
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
    /// Otherwise it turns away from them: it goes to the model or to its end, or the input changes the calls.
    ///
    /// # Errors
    /// If the input's messages cannot be added to the conversation, or the state cannot be read.
    pub fn goes_on(&self, state: Option<&StateSnapshot>) -> threadkeep::Result<bool> {
        let is_tools = |node: &NodeName| node.as_str() == TOOLS;
        let to_tools = match &self.next {
            Next::Stay => state.is_some_and(|state| state.next.iter().any(is_tools)),
            Next::Go(node) => node.as_ref().is_some_and(is_tools),
        };
        let Some(state) = state.filter(|_| to_tools) else { return Ok(false) };
        let Some(messages) = self.writes.get(MESSAGES_CHANNEL) else { return Ok(true) };
        let before = state.value(MESSAGES_CHANNEL).cloned().unwrap_or_else(|| ListValue::default().into());
        // Those without an id get one that no message of the conversation has.
        let more = Messages.prepare(messages.clone(), &IdSource::default())?;
        let after = Messages.reduce(before.clone(), &ChannelValue::from_json(&more)?)?;
        Ok(last_calls(&before)? == last_calls(&after)?)
    }
}

/// The id of the last answer among messages, and its calls.
fn last_calls(messages: &ChannelValue) -> threadkeep::Result<Option<(Json, Vec<Json>)>> {
    let mut messages = messages.as_list().into_iter().flat_map(ListValue::iter);
    let answer = messages.rfind(|message| message.text("type") == Some("ai"));
    let Some(answer) = answer.map(Element::to_json).transpose()? else { return Ok(None) };
    let calls = tool_calls(&answer).iter().chain(invalid_tool_calls(&answer)).cloned().collect();
    Ok(Some((answer["id"].clone(), calls)))
}
