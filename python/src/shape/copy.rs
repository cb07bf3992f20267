//! Copies of Python objects.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PySet, PyString, PyTuple};

use super::{DEPTH, Shapes, is_leaf};

impl Shapes {
    /// A copy of an object with a key, which nobody else holds: it shares the immutable parts and nothing else. `None` if the
    /// object has no key, perhaps since another thread changed it.
    pub(crate) fn copy<'py>(&self, value: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.copy_within(value, DEPTH)
    }

    fn copy_within<'py>(
        &self,
        value: &Bound<'py, PyAny>,
        depth: usize,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = value.py();
        if is_leaf(value) {
            return Ok(Some(value.clone()));
        }
        if depth == 0 {
            return Ok(None);
        }
        if let Ok(dict) = value.cast_exact::<PyDict>() {
            return self.copy_dict(dict, depth);
        }
        if let Ok(list) = value.cast_exact::<PyList>() {
            let items = list.iter().map(|item| self.copy_within(&item, depth - 1));
            let Some(items) = items.collect::<PyResult<Option<Vec<_>>>>()? else { return Ok(None) };
            return Ok(Some(PyList::new(py, items)?.into_any()));
        }
        if let Ok(tuple) = value.cast_exact::<PyTuple>() {
            let items = tuple.iter().map(|item| self.copy_within(&item, depth - 1));
            let Some(items) = items.collect::<PyResult<Option<Vec<_>>>>()? else { return Ok(None) };
            return Ok(Some(PyTuple::new(py, items)?.into_any()));
        }
        self.copy_model(value, depth)
    }

    fn copy_model<'py>(
        &self,
        value: &Bound<'py, PyAny>,
        depth: usize,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = value.py();
        if !self.has_parts(value) || !value.getattr(intern!(py, "__pydantic_private__"))?.is_none() {
            return Ok(None);
        }
        let fields = value.getattr(intern!(py, "__dict__"))?;
        let Ok(fields) = fields.cast_exact::<PyDict>() else { return Ok(None) };
        let Some(fields) = self.copy_dict(fields, depth)? else { return Ok(None) };
        let extra = value.getattr(intern!(py, "__pydantic_extra__"))?;
        let Some(extra) = self.copy_within(&extra, depth - 1)? else { return Ok(None) };
        let names = value.getattr(intern!(py, "__pydantic_fields_set__"))?;
        let Ok(names) = names.cast_exact::<PySet>() else { return Ok(None) };
        let names = names.call_method0(intern!(py, "copy"))?;
        let copy = self.new_object.bind(py).call1((value.get_type(),))?;
        let set = |name: &Bound<'py, PyString>, part: Bound<'py, PyAny>| {
            self.set_attribute.bind(py).call1((&copy, name, part)).map(drop)
        };
        set(intern!(py, "__dict__"), fields)?;
        set(intern!(py, "__pydantic_extra__"), extra)?;
        set(intern!(py, "__pydantic_fields_set__"), names)?;
        set(intern!(py, "__pydantic_private__"), py.None().into_bound(py))?;
        Ok(Some(copy))
    }

    fn copy_dict<'py>(&self, dict: &Bound<'py, PyDict>, depth: usize) -> PyResult<Option<Bound<'py, PyAny>>> {
        let copy = dict.copy()?;
        let held: Vec<_> = copy.iter().filter(|(_, value)| !is_leaf(value)).collect();
        for (name, value) in held {
            let Some(value) = self.copy_within(&value, depth - 1)? else { return Ok(None) };
            copy.set_item(name, value)?;
        }
        Ok(Some(copy.into_any()))
    }
}
