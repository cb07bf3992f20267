//! What a call returns before it is decoded: decoding calls Python, which must not happen while a store is waited for.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use serde_json::Value as Json;
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::saver::LocalKey;
use threadkeep::value::{ChannelValue, Element, ElementHash};
use threadkeep_langgraph::{ChannelReplay, Label, Pending, Tuple, elements};

use crate::codec::Codec;
use crate::lists::Channel;

/// The result of a call.
pub(crate) enum Output {
    Nothing,
    Flag(bool),
    Tuple(Option<Box<Tuple>>),
    Tuples(Vec<Tuple>),
    Written(BTreeMap<LocalKey, BTreeSet<(String, bool)>>),
    History(BTreeMap<String, ChannelReplay>),
}

impl Output {
    pub(crate) fn into_python(self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        match self {
            Self::Nothing | Self::Tuple(None) => Ok(py.None()),
            Self::Flag(flag) => flag.into_py_any(py),
            Self::Tuple(Some(tuple)) => RawTuple(*tuple).into_py_any(py),
            Self::Tuples(tuples) => {
                let tuples = tuples.into_iter().map(|tuple| Py::new(py, RawTuple(tuple)));
                PyList::new(py, tuples.collect::<PyResult<Vec<_>>>()?).map(|list| list.into_any().unbind())
            }
            Self::Written(written) => {
                let written = written.into_iter().map(|((namespace, id), tasks)| {
                    (namespace.to_string(), id.to_string(), tasks.into_iter().collect::<Vec<_>>())
                });
                written.collect::<Vec<_>>().into_py_any(py)
            }
            Self::History(history) => RawHistory(history).into_py_any(py),
        }
    }
}

/// A stored checkpoint that was not decoded yet.
#[pyclass(frozen)]
pub(crate) struct RawTuple(Tuple);

#[pymethods]
impl RawTuple {
    /// Thread, namespace, id, and the parent's id.
    fn place(&self) -> (String, String, String, Option<String>) {
        let Tuple { place, id, parent, .. } = &self.0;
        (
            place.thread.to_string(),
            place.namespace.to_string(),
            id.to_string(),
            parent.map(|parent| parent.to_string()),
        )
    }

    /// The head that a put has to name that goes on from it, or from its parent, if it has to.
    fn head(&self) -> Option<String> {
        self.0.head.map(|head| head.to_string())
    }

    /// The checkpoint, its metadata and its pending writes.
    fn decode<'py>(&self, py: Python<'py>, decoder: &Decoder) -> PyResult<Bound<'py, PyTuple>> {
        let tuple = &self.0;
        let checkpoint = PyDict::new(py);
        if let Some(v) = tuple.frame.v {
            checkpoint.set_item("v", v)?;
        }
        checkpoint.set_item("id", tuple.id.to_string())?;
        if let Some(ts) = &tuple.frame.ts {
            checkpoint.set_item("ts", ts)?;
        }
        let values = PyDict::new(py);
        for (channel, value) in &tuple.values {
            let at = (tuple.place.clone(), channel.clone());
            let mut decoded = decoder.decode(py, value, Some(&at))?;
            if tuple.foreign && channel == MESSAGES_CHANNEL {
                decoded = decoder.messages(&decoded)?;
            }
            if tuple.snapshots.contains(channel) {
                decoded = decoder.snapshot(decoded)?;
            }
            values.set_item(channel, decoded)?;
        }
        checkpoint.set_item("channel_values", values)?;
        checkpoint.set_item("channel_versions", labels(py, &tuple.versions)?)?;
        let seen = PyDict::new(py);
        for (node, versions) in &tuple.frame.seen {
            seen.set_item(node, labels(py, versions)?)?;
        }
        checkpoint.set_item("versions_seen", seen)?;
        if let Some(updated) = &tuple.frame.updated {
            checkpoint.set_item("updated_channels", updated.as_ref())?;
        }
        if let Some(rest) = &tuple.frame.rest {
            checkpoint.update(decoder.decode(py, rest, None)?.cast::<PyDict>()?.as_mapping())?;
        }
        let metadata = PyDict::new(py);
        for (key, value) in &tuple.metadata {
            metadata.set_item(key, json(py, value)?)?;
        }
        let writes = decoder.pending(py, &tuple.writes)?;
        PyTuple::new(py, [checkpoint.into_any(), metadata.into_any(), writes.into_any()])
    }
}

/// What delta channels are replayed from, not decoded yet.
#[pyclass(frozen)]
pub(crate) struct RawHistory(BTreeMap<String, ChannelReplay>);

#[pymethods]
impl RawHistory {
    /// For each channel the writes, and the seed if there is one.
    fn decode<'py>(&self, py: Python<'py>, decoder: &Decoder) -> PyResult<Bound<'py, PyDict>> {
        let all = PyDict::new(py);
        for (channel, replay) in &self.0 {
            let one = PyDict::new(py);
            one.set_item("writes", decoder.pending(py, &replay.writes)?)?;
            if let Some(seed) = &replay.seed {
                let value = decoder.decode(py, &seed.value, None)?;
                let value = if seed.foreign { decoder.messages(&value)? } else { value };
                let value = if seed.snapshot { decoder.snapshot(value)? } else { value };
                one.set_item("seed", value)?;
            }
            all.set_item(channel, one)?;
        }
        Ok(all)
    }
}

/// Decodes the values of one call. If it shares, equal elements of lists are one object.
#[pyclass(frozen)]
pub(crate) struct Decoder {
    codec: Py<Codec>,
    shared: Option<Mutex<HashMap<ElementHash, Py<PyAny>>>>,
}

#[pymethods]
impl Decoder {
    #[new]
    fn new(codec: Py<Codec>, share: bool) -> Self {
        let shared = (share && codec.get().has_elements()).then(Mutex::default);
        Self { codec, shared }
    }
}

impl Decoder {
    fn decode<'py>(
        &self,
        py: Python<'py>,
        value: &ChannelValue,
        at: Option<&Channel>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let codec = self.codec.get();
        let (Some(shared), Some(stored)) = (&self.shared, elements(value)) else {
            return codec.decode(py, value, at);
        };
        // The lock is not held while Python runs.
        let missing: Vec<&Element> = {
            let shared = lock(shared);
            let mut seen = HashSet::new();
            let missing = stored.iter().filter(|element| !shared.contains_key(element.hash()));
            missing.filter(|element| seen.insert(*element.hash())).collect()
        };
        let made = codec.elements(py, &missing)?;
        let mut shared = lock(shared);
        for (element, item) in missing.into_iter().zip(made) {
            shared.insert(*element.hash(), item.unbind());
        }
        let found = stored.iter().filter_map(|element| shared.get(element.hash()));
        let items: Vec<_> = found.map(|item| item.clone_ref(py)).collect();
        drop(shared);
        let items = PyList::new(py, items)?;
        Ok(items.into_any())
    }

    fn messages<'py>(&self, list: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        self.codec.get().messages(list)
    }

    fn snapshot<'py>(&self, value: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        self.codec.get().snapshot(value)
    }

    fn pending<'py>(&self, py: Python<'py>, writes: &[Pending]) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        for (task, channel, value) in writes {
            list.append((task, channel, self.decode(py, value, None)?))?;
        }
        Ok(list)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn labels<'py>(py: Python<'py>, versions: &BTreeMap<String, Label>) -> PyResult<Bound<'py, PyDict>> {
    let all = PyDict::new(py);
    for (channel, label) in versions {
        all.set_item(channel, json(py, label)?)?;
    }
    Ok(all)
}

/// JSON as Python has it.
fn json<'py>(py: Python<'py>, value: &Json) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Json::Null => py.None().into_bound(py),
        Json::Bool(value) => value.into_pyobject(py)?.to_owned().into_any(),
        Json::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(number), ..) => number.into_pyobject(py)?.into_any(),
            (_, Some(number), _) => number.into_pyobject(py)?.into_any(),
            (.., number) => number.into_pyobject(py)?.into_any(),
        },
        Json::String(text) => text.into_pyobject(py)?.into_any(),
        Json::Array(items) => {
            let list = PyList::empty(py);
            for item in items {
                list.append(json(py, item)?)?;
            }
            list.into_any()
        }
        Json::Object(map) => {
            let dict = PyDict::new(py);
            for (key, value) in map {
                dict.set_item(key, json(py, value)?)?;
            }
            dict.into_any()
        }
    })
}
