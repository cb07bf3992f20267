//! Parts of values in a line.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::Value as Json;
use threadkeep::id::Version;
use threadkeep::value::{ChannelValue, Codec, Encoded};

use super::format::Runs;

/// The runs that follow `have`, if these runs begin with it.
pub(super) fn beyond(have: &[(u32, u32)], runs: &[(u32, u32)]) -> Option<Runs> {
    let Some(((start, count), whole)) = have.split_last() else { return Some(runs.to_vec()) };
    let ((next, total), more) = runs.strip_prefix(whole)?.split_first()?;
    let grown = total.checked_sub(*count).filter(|_| next == start)?;
    let first = (grown > 0).then_some((start + count, grown));
    Some(first.into_iter().chain(more.iter().copied()).collect())
}

/// The values in a value; a long text counts as several.
pub(super) fn nodes(value: &Json) -> u64 {
    match value {
        Json::Array(items) => 1 + items.iter().map(nodes).sum::<u64>(),
        Json::Object(map) => 1 + map.values().map(|value| 1 + nodes(value)).sum::<u64>(),
        Json::String(text) => 1 + text.len() as u64 / 32,
        _ => 1,
    }
}

pub(super) fn plain(bytes: bytes::Bytes) -> Result<ChannelValue, String> {
    ChannelValue::from_encoded(Encoded { codec: Codec::MessagePack, bytes })
        .map_err(|error| error.to_string())
}

pub(super) fn bytes(text: &str) -> Result<bytes::Bytes, String> {
    BASE64.decode(text).map(Into::into).map_err(|error| format!("msgpack is not valid base64: {error}"))
}

pub(super) fn parsed<T: std::str::FromStr<Err: std::fmt::Display>>(
    what: &str,
    text: &str,
) -> Result<T, String> {
    text.parse().map_err(|error| format!("{what} '{text}': {error}"))
}

pub(super) fn version_of(text: &str) -> Result<Version, String> {
    let version = || {
        let (counter, random) = text.split_once('.')?;
        let random = u64::from_str_radix(random, 16).ok().filter(|_| random.len() == 16)?;
        let version = Version { counter: counter.parse().ok()?, random };
        (version.to_string() == text).then_some(version)
    };
    version().ok_or_else(|| format!("version '{text}' is not 32 digits, a dot and 16 hexadecimal digits"))
}
