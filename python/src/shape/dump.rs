//! Whether models are dumped by code of their own.
//!
//! Pydantic dumps a model from its fields. A class may do it itself: it may have another `model_dump`, serializers of the
//! model or of its fields, fields that are computed. Such code may show what no key has, such as which fields were set.

use std::collections::HashSet;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString, PyTuple, PyType};

use super::still;

/// The serializations in a schema that are pydantic's own: of whatever is found, or of some items of it.
const PYDANTICS: [&str; 3] = ["any", "include-exclude-sequence", "include-exclude-dict"];
/// What a schema says that has nothing to do with dumping, and may be data of the program.
const ASIDE: [&str; 2] = ["default", "metadata"];

/// Knows how pydantic dumps.
pub(super) struct Dump {
    /// `BaseModel.model_dump`.
    model_dump: Py<PyAny>,
    /// `object.__getattribute__`, with which the serializer finds it.
    get_attribute: Py<PyAny>,
}

impl Dump {
    pub(super) fn new(py: Python<'_>) -> PyResult<Self> {
        Ok(Self {
            model_dump: py.import("pydantic")?.getattr("BaseModel")?.getattr("model_dump")?.unbind(),
            get_attribute: py.import("builtins")?.getattr("object")?.getattr("__getattribute__")?.unbind(),
        })
    }

    /// Whether models of this class are dumped by code of their own, or models that they may have as fields are.
    pub(super) fn is_own(&self, class: &Bound<'_, PyType>) -> PyResult<bool> {
        let py = class.py();
        if !class.getattr(intern!(py, "model_dump"))?.is(&self.model_dump)
            || !class.getattr(intern!(py, "__getattribute__"))?.is(&self.get_attribute)
        {
            return Ok(true);
        }
        let schema = class.getattr(intern!(py, "__pydantic_core_schema__"))?;
        // Of a class that is not complete, there is none yet.
        Ok(!schema.is_exact_instance_of::<PyDict>() || has_code(schema)?)
    }
}

/// Whether a schema has code to dump anything. It may have a part at several places.
fn has_code(schema: Bound<'_, PyAny>) -> PyResult<bool> {
    let mut seen = HashSet::new();
    let mut parts = vec![schema];
    while let Some(part) = parts.pop() {
        if !seen.insert(part.as_ptr() as usize) {
            continue;
        }
        if let Ok(dict) = part.cast::<PyDict>() {
            // The names of fields are keys, too, of dictionaries that have no type of their own.
            let of = dict.get_item("type")?;
            let is_schema = of.is_some_and(|of| of.is_instance_of::<PyString>());
            for (key, value) in still(dict)? {
                let key = key.cast::<PyString>().ok().filter(|_| is_schema);
                let key = key.and_then(|key| key.to_str().ok()).unwrap_or_default();
                let is_code = match key {
                    "serialization" => !is_pydantics(&value)?,
                    "serialization_exclude_if" => !value.is_none(),
                    "computed_fields" => value.cast::<PyList>().is_ok_and(|fields| !fields.is_empty()),
                    _ => false,
                };
                if is_code {
                    return Ok(true);
                }
                if !ASIDE.contains(&key) {
                    parts.push(value);
                }
            }
        } else if let Ok(list) = part.cast::<PyList>() {
            parts.extend(list);
        } else if let Ok(tuple) = part.cast::<PyTuple>() {
            parts.extend(tuple);
        }
    }
    Ok(false)
}

/// Whether a serialization is pydantic's own.
fn is_pydantics(serialization: &Bound<'_, PyAny>) -> PyResult<bool> {
    let Ok(serialization) = serialization.cast::<PyDict>() else { return Ok(false) };
    let Some(of) = serialization.get_item("type")? else { return Ok(false) };
    Ok(of.extract::<&str>().is_ok_and(|of| PYDANTICS.contains(&of)))
}
