//! Values between Python and the store: serialized by the graph's serializer, and not again while nothing changed.

use bytes::Bytes;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyType};
use threadkeep::value::{ChannelValue, Element};
use threadkeep_langgraph::{is_message_pack, list, stored, typed};

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
    fn new(py: Python<'_>, serde: &Bound<'_, PyAny>, snapshot: Py<PyType>, elements: bool) -> PyResult<Self> {
        let elements = if elements {
            Some(Elements { shapes: Shapes::new(py)?, known: Known::default() })
        } else {
            None
        };
        Ok(Self {
            dumps: serde.getattr("dumps_typed")?.unbind(),
            loads: serde.getattr("loads_typed")?.unbind(),
            snapshot,
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

    /// A list, element by element; `None` if it cannot be serialized so.
    fn encode_elements(
        &self,
        elements: &Elements,
        items: &Bound<'_, PyList>,
    ) -> PyResult<Option<ChannelValue>> {
        // Short elements are serialized faster than they are looked up.
        if items.is_empty() || !items.iter().all(|item| elements.shapes.is_object(&item)) {
            return Ok(None);
        }
        let mut encoded = Vec::with_capacity(items.len());
        let mut key = Vec::new();
        for item in items {
            let has_key = elements.shapes.key(&item, &mut key)?;
            if has_key && let Some(known) = elements.known.element(&key) {
                encoded.push(known);
                continue;
            }
            let (tag, bytes) = self.dump(&item)?;
            if !is_message_pack(&tag) {
                return Ok(None);
            }
            let element = Element::from_bytes(bytes);
            if has_key {
                // The key of the copy, which keeps its parts alive.
                let copy = elements.shapes.copy(&item)?;
                let same = std::mem::take(&mut key);
                if elements.shapes.key(&copy, &mut key)? && key == same {
                    elements.known.serialized(&key, copy.unbind(), element.clone());
                }
            }
            encoded.push(element);
        }
        Ok(Some(list(encoded)))
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
        if let (Some(elements), Some(stored)) = (&self.elements, value.as_list()) {
            let items = PyList::empty(py);
            for element in stored.iter() {
                items.append(self.decode_element(py, elements, element)?)?;
            }
            return Ok(items.into_any());
        }
        let (tag, bytes) = typed(value).map_err(exception)?;
        self.load(py, &tag, &bytes)
    }

    /// An element of a list: a copy of the object that it was deserialized to before, if it was.
    fn decode_element<'py>(
        &self,
        py: Python<'py>,
        elements: &Elements,
        element: &Element,
    ) -> PyResult<Bound<'py, PyAny>> {
        if let Some(known) = elements.known.object(py, element) {
            return elements.shapes.copy(known.bind(py));
        }
        let item = self.load(py, "msgpack", element.bytes())?;
        let mut key = Vec::new();
        if elements.shapes.is_object(&item) && elements.shapes.key(&item, &mut key)? {
            let copy = elements.shapes.copy(&item)?;
            if elements.shapes.key(&copy, &mut key)? {
                elements.known.deserialized(&key, copy.unbind(), element.clone());
            }
        }
        Ok(item)
    }

    /// Whether elements of lists are decoded one by one.
    pub(crate) fn has_elements(&self) -> bool {
        self.elements.is_some()
    }

    /// One element.
    pub(crate) fn element<'py>(&self, py: Python<'py>, element: &Element) -> PyResult<Bound<'py, PyAny>> {
        match &self.elements {
            Some(elements) => self.decode_element(py, elements, element),
            None => self.load(py, "msgpack", element.bytes()),
        }
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
