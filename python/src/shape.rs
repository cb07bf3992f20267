//! What Python objects are made of.
//!
//! The key of an object is the addresses of its immutable parts and the types and sizes of what holds them. As long as the
//! parts are alive, an object with the same key has the same contents: if it was changed, some part is another one. What is
//! not made of such parts has no key.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PySet, PyString, PyTuple, PyType};

/// The deepest nesting of an object with a key.
const DEPTH: usize = 12;
/// The greatest number of parts.
const PARTS: usize = 512;

// What holds parts. Addresses are multiples of the size of a word.
const DICT: usize = 1;
const LIST: usize = 2;
const TUPLE: usize = 3;
const MODEL: usize = 5;
const NO_EXTRA: usize = 6;

/// Knows types.
pub(crate) struct Shapes {
    /// `object.__setattr__`, which models do not override.
    set_attribute: Py<PyAny>,
    /// `object.__new__`.
    new_object: Py<PyAny>,
    /// Whether a type, by its address, is that of models of pydantic. A known type is kept alive.
    types: Mutex<HashMap<usize, (Py<PyType>, bool)>>,
    /// The address of the type of models that was seen last, 0 at first.
    last: AtomicUsize,
}

impl Shapes {
    pub(crate) fn new(py: Python<'_>) -> PyResult<Self> {
        let object = py.import("builtins")?.getattr("object")?;
        Ok(Self {
            set_attribute: object.getattr("__setattr__")?.unbind(),
            new_object: object.getattr("__new__")?.unbind(),
            types: Mutex::default(),
            last: AtomicUsize::new(0),
        })
    }

    /// Whether it is a dictionary or a model, which are worth a key.
    pub(crate) fn is_object(&self, value: &Bound<'_, PyAny>) -> bool {
        value.is_exact_instance_of::<PyDict>() || self.is_model(value)
    }

    fn is_model(&self, value: &Bound<'_, PyAny>) -> bool {
        let address = value.get_type_ptr() as usize;
        // Elements of a list are of few types.
        if self.last.load(Ordering::Relaxed) == address {
            return true;
        }
        if let Some((_, is)) = self.types.lock().unwrap_or_else(PoisonError::into_inner).get(&address) {
            if *is {
                self.last.store(address, Ordering::Relaxed);
            }
            return *is;
        }
        let of = value.get_type();
        // Only models have both, and only of version 2.
        let is = of.hasattr(intern!(of.py(), "__pydantic_validator__")).unwrap_or(false)
            && of.hasattr(intern!(of.py(), "__pydantic_fields__")).unwrap_or(false)
            && of.hasattr(intern!(of.py(), "model_dump")).unwrap_or(false);
        let mut types = self.types.lock().unwrap_or_else(PoisonError::into_inner);
        types.insert(address, (of.clone().unbind(), is));
        is
    }

    /// Writes the key of an object. Returns whether it has one.
    pub(crate) fn key(&self, value: &Bound<'_, PyAny>, key: &mut Vec<usize>) -> PyResult<bool> {
        key.clear();
        self.walk(value, key, DEPTH)
    }

    fn walk(&self, value: &Bound<'_, PyAny>, key: &mut Vec<usize>, depth: usize) -> PyResult<bool> {
        if is_leaf(value) {
            key.push(value.as_ptr() as usize);
            return Ok(key.len() <= PARTS);
        }
        if depth == 0 {
            return Ok(false);
        }
        if let Ok(dict) = value.cast_exact::<PyDict>() {
            return self.walk_dict(dict, key, depth);
        }
        if let Ok(list) = value.cast_exact::<PyList>() {
            key.extend([LIST, list.len()]);
            for item in list {
                if !self.walk(&item, key, depth - 1)? {
                    return Ok(false);
                }
            }
            return Ok(true);
        }
        if let Ok(tuple) = value.cast_exact::<PyTuple>() {
            key.extend([TUPLE, tuple.len()]);
            for item in tuple {
                if !self.walk(&item, key, depth - 1)? {
                    return Ok(false);
                }
            }
            return Ok(true);
        }
        if !self.is_model(value) {
            return Ok(false);
        }
        let py = value.py();
        key.extend([MODEL, value.get_type_ptr() as usize]);
        let fields = value.getattr(intern!(py, "__dict__"))?;
        let Ok(fields) = fields.cast_exact::<PyDict>() else { return Ok(false) };
        if !self.walk_dict(fields, key, depth)? {
            return Ok(false);
        }
        let extra = value.getattr(intern!(py, "__pydantic_extra__"))?;
        if extra.is_none() {
            key.push(NO_EXTRA);
        } else if !self.walk(&extra, key, depth - 1)? {
            return Ok(false);
        }
        // Nothing is known of private attributes.
        Ok(value.getattr(intern!(py, "__pydantic_private__"))?.is_none())
    }

    fn walk_dict(&self, dict: &Bound<'_, PyDict>, key: &mut Vec<usize>, depth: usize) -> PyResult<bool> {
        key.extend([DICT, dict.len()]);
        for (name, value) in dict {
            if !is_leaf(&name) {
                return Ok(false);
            }
            key.push(name.as_ptr() as usize);
            if !self.walk(&value, key, depth - 1)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// A copy of an object with a key: it shares the immutable parts and nothing else.
    pub(crate) fn copy<'py>(&self, value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = value.py();
        if is_leaf(value) {
            return Ok(value.clone());
        }
        if let Ok(dict) = value.cast_exact::<PyDict>() {
            return Ok(self.copy_dict(dict)?.into_any());
        }
        if let Ok(list) = value.cast_exact::<PyList>() {
            let copy = PyList::empty(py);
            for item in list {
                copy.append(self.copy(&item)?)?;
            }
            return Ok(copy.into_any());
        }
        if let Ok(tuple) = value.cast_exact::<PyTuple>() {
            let items = tuple.iter().map(|item| self.copy(&item)).collect::<PyResult<Vec<_>>>()?;
            return Ok(PyTuple::new(py, items)?.into_any());
        }
        let copy = self.new_object.bind(py).call1((value.get_type(),))?;
        let set = |name: &Bound<'py, PyString>, part: Bound<'py, PyAny>| {
            self.set_attribute.bind(py).call1((&copy, name, part)).map(drop)
        };
        let part = |name: &Bound<'py, PyString>| value.getattr(name);
        let name = intern!(py, "__dict__");
        set(name, self.copy(&part(name)?)?)?;
        let name = intern!(py, "__pydantic_extra__");
        set(name, self.copy(&part(name)?)?)?;
        let name = intern!(py, "__pydantic_fields_set__");
        let fields = part(name)?;
        let fields = fields.cast::<PySet>()?.call_method0(intern!(py, "copy"))?;
        set(name, fields)?;
        set(intern!(py, "__pydantic_private__"), py.None().into_bound(py))?;
        Ok(copy)
    }

    fn copy_dict<'py>(&self, dict: &Bound<'py, PyDict>) -> PyResult<Bound<'py, PyDict>> {
        let copy = dict.copy()?;
        for (name, value) in dict {
            if !is_leaf(&value) {
                copy.set_item(name, self.copy(&value)?)?;
            }
        }
        Ok(copy)
    }
}

/// Whether an object never changes.
fn is_leaf(value: &Bound<'_, PyAny>) -> bool {
    value.is_exact_instance_of::<PyString>()
        || value.is_none()
        || value.is_exact_instance_of::<PyInt>()
        || value.is_exact_instance_of::<PyBool>()
        || value.is_exact_instance_of::<PyFloat>()
        || value.is_exact_instance_of::<PyBytes>()
}
