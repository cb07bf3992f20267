//! Values between Python and the store: serialized by the graph's serializer, and not again while nothing changed.

use bytes::Bytes;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyType};
use threadkeep::value::{ChannelValue, Element};
use threadkeep_langgraph::{elements as elements_of, is_message_pack, list, stored, typed};

use crate::errors::exception;
use crate::known::{Kept, Known, is_extension, lend};
use crate::lists::{Channel, List, Lists};
use crate::shape::{Current, Shapes};

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
    lists: Lists,
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
            Some(Elements { shapes: Shapes::new(py)?, known: Known::default(), lists: Lists::default() })
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
    /// The value to store. `at` is the channel that it is the value of.
    pub(crate) fn encode(&self, value: &Bound<'_, PyAny>, at: Option<&Channel>) -> PyResult<ChannelValue> {
        if let Some(elements) = &self.elements
            && let Ok(items) = value.cast_exact::<PyList>()
            && let Some(encoded) = self.encode_elements(elements, items, at)?
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
        at: Option<&Channel>,
    ) -> PyResult<Option<ChannelValue>> {
        let Elements { shapes, known, lists } = elements;
        let mut list = at.map(|at| lists.take(at)).unwrap_or_default();
        let same = list.same(shapes, items)?;
        list.truncate(same);
        let more = items.iter().skip(same).collect();
        let Some(encoded) = self.encode_each(shapes, known, items.py(), more)? else { return Ok(None) };
        for (element, entry) in encoded {
            list.push(element, entry);
        }
        let value = list.value();
        if let Some(at) = at {
            lists.put(at.clone(), list);
        }
        Ok((!value.is_empty()).then(|| value.into()))
    }

    /// Elements, and what is known of them from now on.
    fn encode_each(
        &self,
        shapes: &Shapes,
        known: &Known,
        py: Python<'_>,
        items: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<Option<Vec<(Element, Kept)>>> {
        let mut encoded = Vec::with_capacity(items.len());
        let mut unknown = Vec::new();
        let mut key = Vec::new();
        for item in items {
            // Short elements are serialized faster than they are looked up.
            if !shapes.is_object(&item) {
                return Ok(None);
            }
            let has_key = shapes.key(&item, &mut key)?;
            let (entry, read) = match if has_key { known.object(&key) } else { None } {
                Some(entry) if entry.is_serialized() => (Some(entry), None),
                // It was read, and is serialized once to learn whether its class filled in something.
                read => (None, read),
            };
            if entry.is_none() {
                // A copy: what is known of an object from now on is that of which these are the bytes, whatever other threads
                // do to the object while it is serialized.
                let copy = if has_key { shapes.copy(&item)? } else { None };
                let is_copy = copy.is_some();
                unknown.push((copy.unwrap_or(item), is_copy, read));
            }
            encoded.push(entry);
        }
        let mut serialized = Vec::with_capacity(unknown.len());
        if !unknown.is_empty() {
            let copies = unknown.iter().filter(|(_, is_copy, _)| *is_copy).map(|(item, ..)| item.clone());
            let mut parts = shapes.parts_of_each(&copies.collect::<Vec<_>>())?.into_iter();
            // In one call: the bytes of a list are those of its elements.
            let whole = PyList::new(py, unknown.iter().map(|(item, ..)| item))?;
            let (tag, bytes) = self.dump(whole.as_any())?;
            if !is_message_pack(&tag) {
                return Ok(None);
            }
            let stored = stored(&tag, bytes).map_err(exception)?;
            let Some(stored) = stored.as_list().filter(|list| list.len() == unknown.len()) else {
                return Ok(None);
            };
            for ((_, is_copy, read), element) in unknown.into_iter().zip(stored.iter()) {
                let parts = if is_copy { parts.next().flatten() } else { None };
                // Another thread may have changed it since its key was looked up.
                let read = read.filter(|read| parts.as_ref().is_some_and(|parts| read.has_key(&parts.key)));
                let read = read.filter(|read| read.is_serialized_to(element));
                let entry = read.or_else(|| parts.map(|parts| known.serialized(parts, element.clone())));
                let element = entry.as_ref().map_or(element, |entry| entry.element()).clone();
                serialized.push((element, entry));
            }
        }
        let mut serialized = serialized.into_iter();
        let encoded = encoded.into_iter().filter_map(|entry| match entry {
            Some(entry) => Some((entry.element().clone(), Some(entry))),
            None => serialized.next(),
        });
        Ok(Some(encoded.collect()))
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

    /// A stored value. `at` is the channel that it is the value of.
    pub(crate) fn decode<'py>(
        &self,
        py: Python<'py>,
        value: &ChannelValue,
        at: Option<&Channel>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (Some(elements), Some(stored)) = (&self.elements, elements_of(value)) else {
            let (tag, bytes) = typed(value).map_err(exception)?;
            return self.load(py, &tag, &bytes);
        };
        let old = at.map(|at| elements.lists.take(at)).unwrap_or_default();
        let all: Vec<&Element> = stored.iter().collect();
        let (items, entries) = self.decode_elements(py, elements, &all, old.entries())?;
        if let Some(at) = at {
            elements.lists.put(at.clone(), List::new(stored.clone(), entries));
        }
        Ok(PyList::new(py, items)?.into_any())
    }

    /// Elements of lists: the objects that they were deserialized to before, if nobody holds those any more, or copies of
    /// them. Unknown ones are deserialized in one call. `guesses` are what is known of elements that may be the same. Also
    /// returns what is known of each.
    fn decode_elements<'py>(
        &self,
        py: Python<'py>,
        elements: &Elements,
        all: &[&Element],
        guesses: &[Kept],
    ) -> PyResult<(Vec<Bound<'py, PyAny>>, Vec<Kept>)> {
        let Elements { shapes, known, .. } = elements;
        let mut current = Current::default();
        let entries = all.iter().enumerate().map(|(place, element)| {
            let guess = guesses.get(place).and_then(Kept::as_ref).filter(|entry| entry.is_from(element));
            let entry = guess.cloned().or_else(|| known.deserialized_from(element))?;
            current.has(py, &entry.parts().classes).then_some(entry)
        });
        let mut entries: Vec<_> = entries.collect();
        let mut items = lend(py, shapes, &entries)?;
        let unknown = items.iter().zip(all).enumerate().filter(|(_, (item, _))| item.is_none());
        let unknown: Vec<_> = unknown.map(|(place, (_, element))| (place, *element)).collect();
        if !unknown.is_empty() {
            let bytes = list(unknown.iter().map(|(_, element)| (*element).clone()));
            let (tag, bytes) = typed(&bytes).map_err(exception)?;
            let loaded = self.load(py, &tag, &bytes)?;
            let loaded = loaded.cast_exact::<PyList>()?;
            if loaded.len() != unknown.len() {
                let (found, expected) = (loaded.len(), unknown.len());
                return Err(PyValueError::new_err(format!(
                    "the serializer made {found} objects of a list of {expected}"
                )));
            }
            let loaded: Vec<_> = loaded.iter().collect();
            let parts = shapes.parts_of_each(&loaded)?;
            for (((place, element), item), parts) in unknown.into_iter().zip(loaded).zip(parts) {
                // A dictionary in place of an object whose class could not be made: it may be there by the next time.
                let parts = parts.filter(|parts| !parts.classes.is_empty() || !is_extension(element));
                entries[place] =
                    parts.map(|parts| known.deserialized(parts, element.clone(), item.clone().unbind()));
                items[place] = Some(item);
            }
        }
        Ok((items.into_iter().flatten().collect(), entries))
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
            Some(elements) => self.decode_elements(py, elements, all, &[]).map(|(items, _)| items),
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
        self.encode(&rest.into_any(), None)
    }
}
