//! Values between Python and the store: serialized by the graph's serializer, and not again while nothing changed.

use bytes::Bytes;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyType};
use threadkeep::value::{ChannelValue, Element};
use threadkeep_langgraph::{elements as elements_of, is_message_pack, list, stored, typed};

use crate::errors::exception;
use crate::known::Known;
use crate::shape::Shapes;

/// A serializer, and the elements that it has serialized.
#[pyclass(frozen)]
pub(crate) struct Codec {
    dumps: Py<PyAny>,
    loads: Py<PyAny>,
    /// LangGraph's class that marks a snapshot.
    pub(crate) snapshot: Py<PyType>,
    /// Makes messages of the objects that the gateway stores for them.
    messages: Py<PyAny>,
    /// `None` if the serializer may not give a list the bytes of its elements.
    elements: Option<Elements>,
}

struct Elements {
    shapes: Shapes,
    known: Known,
}

#[pymethods]
impl Codec {
    #[new]
    fn new(
        py: Python<'_>,
        serde: &Bound<'_, PyAny>,
        snapshot: Py<PyType>,
        messages: Py<PyAny>,
        elements: bool,
    ) -> PyResult<Self> {
        let elements = if elements {
            Some(Elements { shapes: Shapes::new(py)?, known: Known::default() })
        } else {
            None
        };
        Ok(Self {
            dumps: serde.getattr("dumps_typed")?.unbind(),
            loads: serde.getattr("loads_typed")?.unbind(),
            snapshot,
            messages,
            elements,
        })
    }
}

impl Codec {
    /// The value to store.
    pub(crate) fn encode(&self, value: &Bound<'_, PyAny>) -> PyResult<ChannelValue> {
        if let Some(elements) = &self.elements
            && let Ok(items) = value.cast_exact::<PyList>()
            && let Some(encoded) = self.encode_elements(elements, items)?
        {
            return Ok(encoded);
        }
        let (tag, bytes) = self.dump(value)?;
        stored(&tag, bytes).map_err(exception)
    }

    /// A list, of which only unknown elements are serialized; `None` if it cannot be serialized so.
    fn encode_elements(
        &self,
        elements: &Elements,
        items: &Bound<'_, PyList>,
    ) -> PyResult<Option<ChannelValue>> {
        let mut encoded = Vec::with_capacity(items.len());
        let mut unknown = Vec::new();
        let mut key = Vec::new();
        for item in items {
            // Short elements are serialized faster than they are looked up.
            if !elements.shapes.is_object(&item) {
                return Ok(None);
            }
            let has_key = elements.shapes.key(&item, &mut key)?;
            let known = if has_key { elements.known.element(&key) } else { None };
            if known.is_none() {
                unknown.push((item, has_key.then(|| std::mem::take(&mut key))));
            }
            encoded.push(known);
        }
        if unknown.is_empty() {
            return Ok((!encoded.is_empty()).then(|| list(encoded.into_iter().flatten())));
        }
        // In one call: the bytes of a list are those of its elements.
        let whole = PyList::new(items.py(), unknown.iter().map(|(item, _)| item))?;
        let (tag, bytes) = self.dump(whole.as_any())?;
        if !is_message_pack(&tag) {
            return Ok(None);
        }
        let serialized = stored(&tag, bytes).map_err(exception)?;
        let Some(serialized) = serialized.as_list().filter(|list| list.len() == unknown.len()) else {
            return Ok(None);
        };
        for ((item, key), element) in unknown.into_iter().zip(serialized.iter()) {
            // Unless the serializer has changed it, or another thread.
            if let Some(key) = key
                && let Some(parts) = elements.shapes.parts(&item)?.filter(|parts| parts.key == key)
            {
                elements.known.serialized(parts, element.clone());
            }
        }
        let mut serialized = serialized.iter().cloned();
        let all = encoded.into_iter().filter_map(|known| known.or_else(|| serialized.next()));
        Ok(Some(list(all)))
    }

    fn dump(&self, value: &Bound<'_, PyAny>) -> PyResult<(String, Bytes)> {
        let (tag, bytes): (String, Bound<'_, PyAny>) =
            self.dumps.bind(value.py()).call1((value,))?.extract()?;
        let bytes = match bytes.cast::<PyBytes>() {
            Ok(bytes) => Bytes::copy_from_slice(bytes.as_bytes()),
            Err(_) => Bytes::from(bytes.extract::<Vec<u8>>()?),
        };
        Ok((tag, bytes))
    }

    fn load<'py>(&self, py: Python<'py>, tag: &str, bytes: &[u8]) -> PyResult<Bound<'py, PyAny>> {
        self.loads.bind(py).call1(((tag, PyBytes::new(py, bytes)),))
    }

    /// A stored value.
    pub(crate) fn decode<'py>(&self, py: Python<'py>, value: &ChannelValue) -> PyResult<Bound<'py, PyAny>> {
        if let (Some(elements), Some(stored)) = (&self.elements, elements_of(value)) {
            let all: Vec<&Element> = stored.iter().collect();
            return Ok(PyList::new(py, self.decode_elements(py, elements, &all)?)?.into_any());
        }
        let (tag, bytes) = typed(value).map_err(exception)?;
        self.load(py, &tag, &bytes)
    }

    /// Elements of lists: the objects that they were deserialized to before, if nobody holds those any more, or copies of
    /// them. Unknown ones are deserialized in one call.
    fn decode_elements<'py>(
        &self,
        py: Python<'py>,
        elements: &Elements,
        all: &[&Element],
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let mut items = Vec::with_capacity(all.len());
        let mut unknown = Vec::new();
        for element in all {
            let item = match elements.known.entry(element) {
                Some(known) => known.lend(py, &elements.shapes)?,
                None => None,
            };
            if item.is_none() {
                unknown.push(*element);
            }
            items.push(item);
        }
        if unknown.is_empty() {
            return Ok(items.into_iter().flatten().collect());
        }
        let (tag, bytes) = typed(&list(unknown.iter().copied().cloned())).map_err(exception)?;
        let loaded = self.load(py, &tag, &bytes)?;
        let loaded = loaded.cast_exact::<PyList>()?;
        if loaded.len() != unknown.len() {
            let (found, expected) = (loaded.len(), unknown.len());
            return Err(PyValueError::new_err(format!(
                "the serializer made {found} objects of a list of {expected}"
            )));
        }
        for (element, item) in unknown.into_iter().zip(loaded) {
            if elements.shapes.is_object(&item)
                && let Some(parts) = elements.shapes.parts(&item)?
            {
                elements.known.deserialized(parts, element.clone(), item.unbind());
            }
        }
        let mut loaded = loaded.iter();
        Ok(items.into_iter().filter_map(|item| item.or_else(|| loaded.next())).collect())
    }

    /// Whether elements of lists are decoded one by one.
    pub(crate) fn has_elements(&self) -> bool {
        self.elements.is_some()
    }

    /// Some elements.
    pub(crate) fn elements<'py>(
        &self,
        py: Python<'py>,
        all: &[&Element],
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        match &self.elements {
            Some(elements) => self.decode_elements(py, elements, all),
            None => all.iter().map(|element| self.load(py, "msgpack", element.bytes())).collect(),
        }
    }

    /// The messages in a list that the gateway made longer.
    pub(crate) fn messages<'py>(&self, list: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        self.messages.bind(list.py()).call1((list,))
    }

    /// A snapshot of a delta channel.
    pub(crate) fn snapshot<'py>(&self, value: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        self.snapshot.bind(value.py()).call1((value,))
    }

    /// The object under which other keys of a checkpoint are stored.
    pub(crate) fn rest(&self, rest: Bound<'_, PyDict>) -> PyResult<ChannelValue> {
        self.encode(&rest.into_any())
    }
}
