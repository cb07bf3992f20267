//! The bodies of the engine's fuzz targets. Each accepts any bytes, must not panic, and asserts invariants.
#![allow(clippy::expect_used, missing_docs, reason = "a fuzz target fails by panicking")]

use serde_json::{Map, Value as Json};

use crate::metadata::Metadata;
use crate::value::{ChannelValue, Codec, Element, Encoded};

/// The bytes of a channel value: cut into elements, put together, decoded.
pub fn value(data: &[u8]) {
    let encoded = Encoded { codec: Codec::MessagePack, bytes: data.to_vec().into() };
    let Ok(value) = ChannelValue::from_encoded(encoded) else { return };
    let whole = value.to_encoded();
    assert_eq!(whole.bytes.len(), value.encoded_len(), "the reported length");
    let again = ChannelValue::from_encoded(whole).expect("what was cut can be cut again");
    assert_eq!(again, value, "cut, put together and cut again");
    if let Some(mut list) = value.as_list().cloned() {
        for (place, element) in list.clone().iter().enumerate() {
            assert_eq!(*element.hash(), Element::hash_of(element.bytes()), "the hash of element {place}");
            if let Some(id) = element.id() {
                let found = list.position(id).and_then(|at| list.get(at)).and_then(Element::id);
                assert_eq!(found, Some(id), "the element that is found by its id");
            }
        }
    }
    let Ok(json) = value.to_json() else { return };
    let Ok(canonical) = ChannelValue::from_json(&json) else { return };
    assert_eq!(canonical.to_json().as_ref(), Ok(&json), "JSON that went through MessagePack");
}

/// The JSON of a checkpoint's metadata.
pub fn metadata(data: &[u8]) {
    let Ok(map) = serde_json::from_slice::<Map<String, Json>>(data) else { return };
    let Ok(metadata) = Metadata::from_json(map) else { return };
    let told = metadata.to_json();
    assert!(metadata.matches(&told), "metadata matches itself");
    assert_eq!(Metadata::from_json(told), Ok(metadata), "metadata written and read");
}

#[cfg(test)]
mod tests {
    /// All inputs of the corpus.
    fn replay(target: &str, body: fn(&[u8])) {
        let corpus = format!("{}/../fuzz/corpus/{target}", env!("CARGO_MANIFEST_DIR"));
        let files: Vec<_> = std::fs::read_dir(&corpus).unwrap().map(|file| file.unwrap().path()).collect();
        assert!(!files.is_empty(), "{corpus} is empty");
        for file in files {
            body(&std::fs::read(file).unwrap());
        }
    }

    #[test]
    fn the_corpus_of_values_is_harmless() {
        replay("value", super::value);
    }

    #[test]
    fn the_corpus_of_metadata_is_harmless() {
        replay("metadata", super::metadata);
    }
}
