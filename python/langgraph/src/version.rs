//! LangGraph's channel versions, and the versions of the engine.
//!
//! LangGraph only compares versions, and a graph takes them from its saver ([`next`]). Ours have the text of an engine
//! [`Version`], so that nothing has to be stored besides. Versions of another form (integers, texts of other savers) are
//! stored beside an engine version of the same counter: LangGraph lets one version stand for several values, the engine
//! does not.

use rand::RngExt;
use serde_json::Value as Json;
use threadkeep::id::Version;

/// A channel version as LangGraph has it: an integer, a float or a text.
pub type Label = Json;

/// The version after `current`: a text that sorts after it.
pub fn next(current: Option<&Label>) -> String {
    fresh(current.map_or(0, counter) + 1).to_string()
}

/// An engine version with this counter that names no other value.
pub(crate) fn fresh(counter: u64) -> Version {
    Version { counter, random: rand::rng().random() }
}

/// The counter of a label: 0 if it has none.
pub(crate) fn counter(label: &Label) -> u64 {
    match label {
        Json::Number(number) => {
            // Truncated: a float only serves to order versions.
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates")]
            number.as_u64().unwrap_or_else(|| number.as_f64().map_or(0, |float| float as u64))
        }
        Json::String(text) => text.split('.').next().and_then(|digits| digits.parse().ok()).unwrap_or(0),
        _ => 0,
    }
}

/// The engine version whose text this label is.
pub(crate) fn parse(label: &Label) -> Option<Version> {
    let text = label.as_str()?;
    let (counter, random) = text.split_once('.')?;
    if (counter.len(), random.len()) != (32, 16) {
        return None;
    }
    let version = Version { counter: counter.parse().ok()?, random: u64::from_str_radix(random, 16).ok()? };
    (version.to_string() == text).then_some(version)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn our_labels_are_engine_versions_and_sort_after_their_predecessors() {
        let mut label: Option<Label> = None;
        for n in 1..200_u64 {
            let text = next(label.as_ref());
            assert!(label.as_ref().is_none_or(|old| old.as_str().unwrap() < text.as_str()));
            let new = json!(text);
            assert_eq!(parse(&new).unwrap().counter, n);
            assert_eq!(parse(&new).unwrap().to_string(), text);
            label = Some(new);
        }
    }

    #[test]
    fn labels_of_others_are_not_engine_versions_but_have_counters() {
        let theirs = json!("00000000000000000000000000000012.0.24379884883851");
        for (label, expected) in
            [(theirs, 12), (json!(7), 7), (json!(7.9), 7), (json!("x"), 0), (json!(-1), 0)]
        {
            assert_eq!((parse(&label), counter(&label)), (None, expected), "{label}");
            assert_eq!(parse(&json!(next(Some(&label)))).unwrap().counter, expected + 1);
        }
        // Upper case would come back in lower case.
        assert_eq!(parse(&json!("00000000000000000000000000000001.000000000000000A")), None);
    }
}
