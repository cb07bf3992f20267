//! What only the gateway may note on a message, in a state that a client writes.

use std::collections::HashMap;

use serde_json::Value;
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::id::{ChannelName, CheckpointId, ThreadId};
use threadkeep::saver::Load;
use threadkeep::state::StateAccessor;
use threadkeep_subagents::owned;

use super::run_body::SERVER_OWNED;

/// Removes what only the gateway may note on a message, unless the thread already has the message with the same note: a
/// client may write back what it has read, but not claim that a message belongs to a run.
///
/// # Errors
/// The accessor's.
pub(super) async fn remove_forged_stamps(
    accessor: &StateAccessor,
    thread: &ThreadId,
    at: Option<CheckpointId>,
    messages: &mut Value,
) -> threadkeep::Result<()> {
    let sent = match messages {
        Value::Array(list) => list.as_mut_slice(),
        message => std::slice::from_mut(message),
    };
    let is_noted = |message: &Value| {
        let mut clean = message.clone();
        owned::strip_message(&mut clean);
        clean != *message || SERVER_OWNED.iter().any(|key| stamp(message, key).is_some())
    };
    if !sent.iter().any(is_noted) {
        return Ok(());
    }
    let load = Load::Only([ChannelName::from(MESSAGES_CHANNEL)].into());
    let base = accessor.get_loading(thread, at, load).await?;
    let held = base.map(|base| base.json(MESSAGES_CHANNEL)).transpose()?.flatten();
    strip_changed(sent, held.as_ref().and_then(Value::as_array).into_iter().flatten());
    Ok(())
}

/// Removes from each message what is not noted in the same way on the first message of `held` with its id. Both lists
/// may have any length, so `held` can be gone through only once.
fn strip_changed<'h>(sent: &mut [Value], held: impl Iterator<Item = &'h Value>) {
    let mut by_id: HashMap<&str, &Value> = HashMap::new();
    for message in held {
        if let Some(id) = message["id"].as_str() {
            by_id.entry(id).or_insert(message);
        }
    }
    for message in sent {
        let same = message["id"].as_str().and_then(|id| by_id.get(id).copied());
        owned::strip_changed(message, same);
        for key in SERVER_OWNED {
            if same.and_then(|same| stamp(same, key)) != stamp(message, key)
                && let Some(kwargs) = message.get_mut("additional_kwargs").and_then(Value::as_object_mut)
            {
                kwargs.remove(key);
            }
        }
    }
}

/// What a message has noted under a key.
fn stamp(message: &Value, key: &str) -> Option<Value> {
    message["additional_kwargs"].get(key).cloned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn noted(id: Value, run: &str) -> Value {
        json!({"type": "human", "content": "x", "id": id, "additional_kwargs": {"run_id": run, "mine": 1}})
    }

    #[test]
    fn each_message_is_compared_with_the_first_that_has_its_id_and_the_thread_is_gone_through_once() {
        const LEN: usize = 1000;
        let id = |number: usize| json!(format!("m{number}"));
        let mut held: Vec<Value> = (0..LEN).map(|number| noted(id(number), "r")).collect();
        held.extend([noted(id(0), "second"), noted(json!(7), "r"), json!("text"), noted(json!(null), "r")]);
        // What was read, in another order and twice.
        let mut sent: Vec<Value> = (0..2 * LEN).map(|n| noted(id((2 * LEN - n) * 7 % LEN), "r")).collect();
        let read = sent.clone();
        let forged =
            [(id(1), "other"), (id(0), "second"), (id(LEN), "r"), (json!(7), "r"), (json!(null), "r")];
        sent.extend(forged.map(|(id, run)| noted(id, run)));
        sent.push(json!("text"));

        let mut looked_at = 0;
        strip_changed(&mut sent, held.iter().inspect(|_| looked_at += 1));
        assert_eq!(looked_at, held.len());
        assert_eq!(sent[..2 * LEN], read);
        for message in &sent[2 * LEN..2 * LEN + 5] {
            assert_eq!(message["additional_kwargs"], json!({"mine": 1}), "{message}");
        }
        assert_eq!(sent[2 * LEN + 5], "text");
    }
}
