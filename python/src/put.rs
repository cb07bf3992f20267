//! Python's arguments of a put.

use std::collections::{BTreeMap, BTreeSet};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFloat, PyInt, PyString};
use serde_json::{Map, Number, Value as Json, json};
use threadkeep_langgraph::{Frame, Label};

use crate::codec::Codec;
use crate::errors::InvalidInputError;
use crate::shape::still;

/// Parses metadata, which Python wrote as JSON. An integer that does not fit into 64 bits is refused.
pub(crate) fn metadata(text: &[u8]) -> PyResult<Map<String, Json>> {
    threadkeep::json::from_slice(text)
        .map_err(|error| InvalidInputError::new_err(format!("metadata: {error}")))
}

/// What a checkpoint holds besides its channels.
pub(crate) fn frame(checkpoint: &Bound<'_, PyDict>, codec: &Codec) -> PyResult<Frame> {
    let mut frame = Frame::default();
    let rest = PyDict::new(checkpoint.py());
    for (key, value) in still(checkpoint)? {
        let name = key.cast::<PyString>()?.to_str()?.to_owned();
        match name.as_str() {
            "id" | "channel_values" | "channel_versions" => {}
            "v" => frame.v = Some(value.extract()?),
            "ts" => frame.ts = Some(value.extract()?),
            "updated_channels" => frame.updated = Some(value.extract()?),
            "versions_seen" => {
                for (node, versions) in still(value.cast()?)? {
                    frame.seen.insert(node.extract()?, labels(versions.cast::<PyDict>()?)?);
                }
            }
            _ => rest.set_item(key, value)?,
        }
    }
    if !rest.is_empty() {
        frame.rest = Some(codec.rest(rest)?);
    }
    Ok(frame)
}

/// Versions by channel.
pub(crate) fn labels(versions: &Bound<'_, PyDict>) -> PyResult<BTreeMap<String, Label>> {
    still(versions)?.iter().map(|(channel, version)| Ok((channel.extract()?, label(&version)?))).collect()
}

fn label(version: &Bound<'_, PyAny>) -> PyResult<Label> {
    if version.is_instance_of::<PyString>() {
        return Ok(json!(version.extract::<String>()?));
    }
    if version.is_instance_of::<PyInt>() {
        return Ok(json!(version.extract::<i64>()?));
    }
    if version.is_instance_of::<PyFloat>() {
        // Not one that no JSON has: it would come back as no version.
        let number = Number::from_f64(version.extract()?);
        return number.map(Json::Number).ok_or_else(|| {
            PyValueError::new_err(format!("a channel version is a finite number, not {version}"))
        });
    }
    Err(PyTypeError::new_err(format!("a channel version is a str, an int or a float, not {version}")))
}

/// The keys of a dictionary.
pub(crate) fn keys(dict: &Bound<'_, PyDict>) -> PyResult<BTreeSet<String>> {
    dict.keys().iter().map(|key| key.extract()).collect()
}
