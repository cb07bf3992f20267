//! States as text, again and again: each message is rendered once.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lru::LruCache;
use serde_json::Value;
use threadkeep::Result;
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::state::StateSnapshot;
use threadkeep::value::{Element, ElementHash, ListValue};

use super::{complete_message, is_runtime};

/// The bytes that are kept. A message that fell out is rendered again.
const KEPT: usize = 32 << 20;
/// What an entry takes beside its text.
const ENTRY: usize = 100;

/// Renders states. Messages that were rendered lately are copied, so that a state costs the bytes of its text, not the
/// decoding of all its messages.
#[derive(Debug)]
pub struct Rendered(Mutex<Messages>);

#[derive(Debug)]
struct Messages {
    texts: LruCache<ElementHash, Arc<str>>,
    bytes: usize,
    most: usize,
}

impl Default for Rendered {
    fn default() -> Self {
        Self::keeping(KEPT)
    }
}

impl Rendered {
    fn keeping(most: usize) -> Self {
        Self(Mutex::new(Messages { texts: LruCache::unbounded(), bytes: 0, most }))
    }

    /// The JSON text of [`super::values`], in one line, after the entries `more`.
    ///
    /// # Errors
    /// [`threadkeep::Error::Corrupt`] if stored bytes do not decode.
    pub fn values(&self, state: &StateSnapshot, more: &[(&str, &Value)]) -> Result<Vec<u8>> {
        let channels = state.loaded().filter(|(name, _)| !is_runtime(name.as_str()));
        let mut text = Vec::new();
        for (name, value) in more {
            key(&mut text, name);
            text.extend(value.to_string().into_bytes());
        }
        for (name, value) in channels {
            key(&mut text, name.as_str());
            match value.as_list().filter(|_| name.as_str() == MESSAGES_CHANNEL) {
                Some(messages) => self.messages(&mut text, messages)?,
                None => text.extend(value.to_json()?.to_string().into_bytes()),
            }
        }
        if text.is_empty() {
            text.push(b'{');
        }
        text.push(b'}');
        Ok(text)
    }

    fn messages(&self, text: &mut Vec<u8>, messages: &ListValue) -> Result<()> {
        let known: Vec<_> = {
            let mut kept = self.lock();
            messages.iter().map(|message| kept.texts.get(message.hash()).cloned()).collect()
        };
        text.reserve(messages.bytes_len());
        text.push(b'[');
        for (index, (message, known)) in messages.iter().zip(known).enumerate() {
            if index > 0 {
                text.push(b',');
            }
            let shown = known.map_or_else(|| self.render(message), Ok)?;
            text.extend_from_slice(shown.as_bytes());
        }
        text.push(b']');
        Ok(())
    }

    fn render(&self, message: &Element) -> Result<Arc<str>> {
        let mut shown = message.to_json()?;
        complete_message(&mut shown);
        let text: Arc<str> = shown.to_string().into();
        self.lock().keep(*message.hash(), text.clone());
        Ok(text)
    }

    // No change is left half done, so a poisoned lock guards nothing broken.
    fn lock(&self) -> MutexGuard<'_, Messages> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Begins an entry of an object.
fn key(text: &mut Vec<u8>, name: &str) {
    text.push(if text.is_empty() { b'{' } else { b',' });
    text.extend(Value::from(name).to_string().into_bytes());
    text.push(b':');
}

impl Messages {
    fn keep(&mut self, message: ElementHash, text: Arc<str>) {
        self.bytes += ENTRY + text.len();
        if let Some(twice) = self.texts.put(message, text) {
            self.bytes -= ENTRY + twice.len();
        }
        while self.bytes > self.most
            && let Some((_, oldest)) = self.texts.pop_lru()
        {
            self.bytes -= ENTRY + oldest.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;
    use threadkeep::channel::Schema;
    use threadkeep::id::IdSource;
    use threadkeep::mode::ChannelMode;
    use threadkeep::state::{StateAccessor, Update};
    use threadkeep_memory::MemorySaver;

    use super::*;

    fn message() -> impl Strategy<Value = Value> {
        let text = prop_oneof![Just(String::new()), "[a-z \"\\\\\n\u{e9}]{0,12}", Just("x".repeat(300))];
        let kind = prop::sample::select(vec!["human", "ai", "tool", "system"]);
        let hidden = any::<bool>().prop_map(|hidden| json!({"additional_kwargs": {"hide_from_ui": hidden}}));
        (text, kind, 0..6_u32, hidden).prop_map(|(text, kind, id, mut message)| {
            let image = json!({"type": "image_url", "image_url": "data:image/png;base64,xx"});
            message["content"] =
                if id == 0 { json!([{"type": "text", "text": text}, image]) } else { json!(text) };
            message["type"] = json!(kind);
            message["tool_call_id"] = json!("call");
            message["id"] = json!(format!("m{id}"));
            message
        })
    }

    proptest! {
        /// Whatever was rendered before, and however little is kept, the text is that of the decoded state.
        #[test]
        fn the_text_of_a_state_is_that_of_its_values(
            turns in prop::collection::vec(prop::collection::vec(message(), 1..5), 1..8),
            most in prop::sample::select(vec![0, 500, 5000, KEPT]),
            title in prop::option::of("[a-z\"]{1,5}"),
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(async {
                let table = Schema::thread_state().compile(ChannelMode::Full, 10).unwrap();
                let saver = Arc::new(MemorySaver::default());
                let accessor = StateAccessor::new(saver, Arc::new(table), Arc::new(IdSource::default()));
                let rendered = Rendered::keeping(most);
                for messages in turns {
                    let mut writes = vec![accessor.write("messages", json!(messages), false).unwrap()];
                    writes.extend(title.iter().map(|title| accessor.write("title", json!(title), false).unwrap()));
                    let update = Update { at: None, node: "n".into(), writes, extra: serde_json::Map::new() };
                    let state = accessor.update(&"t".into(), update).await.unwrap();
                    let expected = super::super::values(&state).unwrap();
                    let text = rendered.values(&state, &[]).unwrap();
                    assert_eq!(String::from_utf8(text).unwrap(), Value::Object(expected.clone()).to_string());
                    let none = json!([]);
                    let more = rendered.values(&state, &[("__interrupt__", &none)]).unwrap();
                    let mut with = expected;
                    with.insert("__interrupt__".to_owned(), none);
                    assert_eq!(String::from_utf8(more).unwrap(), Value::Object(with).to_string());
                    let kept = rendered.lock();
                    let bytes: usize = kept.texts.iter().map(|(_, text)| ENTRY + text.len()).sum();
                    assert!(kept.bytes == bytes && bytes <= most, "{bytes} bytes of {most}");
                }
            });
        }
    }

    #[tokio::test]
    async fn a_message_is_rendered_once() {
        let table = Schema::thread_state().compile(ChannelMode::Full, 10).unwrap();
        let accessor = StateAccessor::new(
            Arc::new(MemorySaver::default()),
            Arc::new(table),
            Arc::new(IdSource::default()),
        );
        let messages: Vec<_> =
            (0..50).map(|n| json!({"type": "human", "id": n.to_string(), "content": "x"})).collect();
        let writes = vec![accessor.write("messages", json!(messages), false).unwrap()];
        let update = Update { at: None, node: "n".into(), writes, extra: serde_json::Map::new() };
        let state = accessor.update(&"t".into(), update).await.unwrap();
        let rendered = Rendered::default();
        assert!(!rendered.values(&state, &[]).unwrap().is_empty());
        // Whatever is kept is what is shown.
        rendered.lock().texts.iter_mut().for_each(|(_, text)| *text = "kept".into());
        let shown = String::from_utf8(rendered.values(&state, &[]).unwrap()).unwrap();
        assert_eq!(shown.matches("kept").count(), 50, "{shown}");
    }
}
