//! What Python objects are made of.
//!
//! The key of an object is the addresses of its immutable parts and the types and sizes of what holds them. As long as the
//! parts are alive, an object with the same key has the same contents: if it was changed, some part is another one. What is
//! not made of such parts has no key, nor has a model that is dumped by code of its own ([`dump`]): what that code looks at is
//! not known.

mod classes;
mod copy;
mod dump;
mod parts;
mod same;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PySet, PyString, PyTuple};

use classes::{Classes, Kind};
use dump::Dump;
use same::Weak;

pub(crate) use classes::Current;
pub(crate) use parts::Parts;
pub(crate) use same::{AT_ONCE, is_same, is_same_and_unheld};

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
    /// `gc.get_referents`.
    referents: Py<PyAny>,
    weak: Weak,
    dump: Dump,
    classes: Classes,
}

impl Shapes {
    pub(crate) fn new(py: Python<'_>) -> PyResult<Self> {
        let object = py.import("builtins")?.getattr("object")?;
        Ok(Self {
            set_attribute: object.getattr("__setattr__")?.unbind(),
            new_object: object.getattr("__new__")?.unbind(),
            referents: py.import("gc")?.getattr("get_referents")?.unbind(),
            weak: Weak::new(py)?,
            dump: Dump::new(py)?,
            classes: Classes::default(),
        })
    }

    /// Whether it is a dictionary or a model, which are worth a key.
    pub(crate) fn is_object(&self, value: &Bound<'_, PyAny>) -> bool {
        value.is_exact_instance_of::<PyDict>() || self.kind(value) != Kind::Other
    }

    /// Whether it is a model whose parts say how it is dumped.
    fn has_parts(&self, value: &Bound<'_, PyAny>) -> bool {
        matches!(self.kind(value), Kind::Model | Kind::Plain)
    }

    fn kind(&self, value: &Bound<'_, PyAny>) -> Kind {
        let of = value.get_type();
        if let Some(kind) = self.classes.known(&of) {
            return kind;
        }
        // Only models have all, and only of version 2.
        let model = of.hasattr(intern!(of.py(), "__pydantic_validator__")).unwrap_or(false)
            && of.hasattr(intern!(of.py(), "__pydantic_fields__")).unwrap_or(false)
            && of.hasattr(intern!(of.py(), "model_dump")).unwrap_or(false);
        let kind = match model {
            false => Kind::Other,
            // If it cannot be found out, it may be anything.
            true if self.dump.is_own(&of).unwrap_or(true) => Kind::Own,
            true if self.shows_parts(value).unwrap_or(false) => Kind::Plain,
            true => Kind::Model,
        };
        self.classes.learn(&of, kind);
        kind
    }

    /// Writes the key of an object. Returns whether it has one.
    pub(crate) fn key(&self, value: &Bound<'_, PyAny>, key: &mut Vec<usize>) -> PyResult<bool> {
        key.clear();
        self.walk(value, key, DEPTH)
    }

    /// The key of an object, and what has to stay alive so that it means this object; `None` if it has no key.
    pub(crate) fn parts(&self, value: &Bound<'_, PyAny>) -> PyResult<Option<Parts>> {
        let mut parts = Parts::default();
        if !self.walk(value, &mut parts, DEPTH)? {
            return Ok(None);
        }
        parts.plain = parts.key.first() == Some(&MODEL) && self.kind(value) == Kind::Plain;
        Ok(Some(parts))
    }

    fn walk(&self, value: &Bound<'_, PyAny>, visit: &mut impl Visit, depth: usize) -> PyResult<bool> {
        if is_leaf(value) {
            return Ok(visit.leaf(value));
        }
        if depth == 0 {
            return Ok(false);
        }
        if let Ok(dict) = value.cast_exact::<PyDict>() {
            return self.walk_dict(dict, visit, depth);
        }
        if let Ok(list) = value.cast_exact::<PyList>() {
            if !visit.word(LIST) || !visit.word(list.len()) {
                return Ok(false);
            }
            for item in list {
                if !self.walk(&item, visit, depth - 1)? {
                    return Ok(false);
                }
            }
            return Ok(true);
        }
        if let Ok(tuple) = value.cast_exact::<PyTuple>() {
            // It does not change, but what is in it may.
            if !visit.word(TUPLE) || !visit.word(tuple.len()) {
                return Ok(false);
            }
            for item in tuple {
                if !self.walk(&item, visit, depth - 1)? {
                    return Ok(false);
                }
            }
            return Ok(true);
        }
        self.walk_model(value, visit, depth)
    }

    fn walk_model(&self, value: &Bound<'_, PyAny>, visit: &mut impl Visit, depth: usize) -> PyResult<bool> {
        if !self.has_parts(value) {
            return Ok(false);
        }
        let py = value.py();
        if !visit.word(MODEL) || !visit.model(value) {
            return Ok(false);
        }
        let fields = value.getattr(intern!(py, "__dict__"))?;
        let extra = value.getattr(intern!(py, "__pydantic_extra__"))?;
        if !self.walk_fields(&fields, &extra, visit, depth)? {
            return Ok(false);
        }
        let set = value.getattr(intern!(py, "__pydantic_fields_set__"))?;
        if !walk_names(&set, visit)? {
            return Ok(false);
        }
        // Nothing is known of private attributes.
        Ok(value.getattr(intern!(py, "__pydantic_private__"))?.is_none())
    }

    /// The fields of a model.
    fn walk_fields(
        &self,
        fields: &Bound<'_, PyAny>,
        extra: &Bound<'_, PyAny>,
        visit: &mut impl Visit,
        depth: usize,
    ) -> PyResult<bool> {
        let Ok(fields) = fields.cast_exact::<PyDict>() else { return Ok(false) };
        Ok(self.walk_dict(fields, visit, depth)?
            && if extra.is_none() { visit.word(NO_EXTRA) } else { self.walk(extra, visit, depth - 1)? })
    }

    fn walk_dict(&self, dict: &Bound<'_, PyDict>, visit: &mut impl Visit, depth: usize) -> PyResult<bool> {
        let len = dict.len();
        if !visit.word(DICT) || !visit.word(len) {
            return Ok(false);
        }
        // Many are empty.
        if len == 0 {
            return Ok(true);
        }
        for (name, value) in still(dict)? {
            if !is_leaf(&name) || !visit.leaf(&name) || !self.walk(&value, visit, depth - 1)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// The names of the fields that were set, in the order of their addresses: a set has none of its own.
fn walk_names(set: &Bound<'_, PyAny>, visit: &mut impl Visit) -> PyResult<bool> {
    let Ok(set) = set.cast_exact::<PySet>() else { return Ok(false) };
    let names = names(set)?;
    Ok(walk_sorted(&mut names.iter().map(|name| name.as_borrowed()).collect::<Vec<_>>(), visit))
}

fn walk_sorted(names: &mut [Borrowed<'_, '_, PyAny>], visit: &mut impl Visit) -> bool {
    names.sort_unstable_by_key(|name| name.as_ptr());
    visit.word(names.len())
        && names.iter().all(|name| name.is_exact_instance_of::<PyString>() && visit.leaf(name))
}

/// Sees what an object is made of. Each method returns whether to go on.
trait Visit {
    /// What kind of thing holds the next parts, how many there are, of which type.
    fn word(&mut self, word: usize) -> bool;
    /// A model, of which the next parts are.
    fn model(&mut self, model: &Bound<'_, PyAny>) -> bool {
        self.word(model.get_type_ptr() as usize)
    }
    /// A part that never changes.
    fn leaf(&mut self, leaf: &Bound<'_, PyAny>) -> bool {
        self.word(leaf.as_ptr() as usize)
    }
}

impl Visit for Vec<usize> {
    fn word(&mut self, word: usize) -> bool {
        self.push(word);
        self.len() <= PARTS
    }
}

/// A dictionary that does not change while it is iterated: PyO3 panics if one does. Under the interpreter's lock none does as
/// long as no Python runs.
pub(crate) fn still<'py>(dict: &Bound<'py, PyDict>) -> PyResult<Bound<'py, PyDict>> {
    if cfg!(Py_GIL_DISABLED) { dict.copy() } else { Ok(dict.clone()) }
}

/// What is in a set. Under the interpreter's lock nobody changes it meanwhile; without, an iteration beside a change fails.
pub(crate) fn names<'py>(set: &Bound<'py, PySet>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let copy = if cfg!(Py_GIL_DISABLED) { Some(set.call_method0(intern!(set.py(), "copy"))?) } else { None };
    let iterated = copy.as_ref().unwrap_or(set).try_iter()?;
    // Collected, each iterator would be asked how long it is, which takes longer than all of its names.
    let mut names = Vec::with_capacity(set.len());
    for name in iterated {
        names.push(name?);
    }
    Ok(names)
}

/// The references to an object.
#[expect(deprecated, reason = "what replaces it is unsafe code")]
fn references(value: &Bound<'_, PyAny>) -> isize {
    value.get_refcnt()
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
