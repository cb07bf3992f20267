//! Whether objects still have the keys that they had.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PySet, PyTuple};

use super::{DICT, LIST, MODEL, NO_EXTRA, Parts, Shapes, TUPLE, names, references, still};

/// Objects that are looked at in one call of the interpreter.
pub(crate) const AT_ONCE: usize = 128;
/// What the interpreter shows of a model whose type is plain ([`Shapes::shows_parts`]).
const SHOWN: usize = 5;

/// Whether an object still has this key.
pub(crate) fn is_same(value: &Bound<'_, PyAny>, key: &[usize]) -> PyResult<bool> {
    let mut same = Same { key, unheld: false, names: true };
    Ok(same.any(value)? && same.key.is_empty())
}

/// Whether an object still has this key, and nobody holds it or a part of it that can change, apart from `value`: then
/// nobody would notice if it were used for something else.
pub(crate) fn is_same_and_unheld(value: &Bound<'_, PyAny>, key: &[usize]) -> PyResult<bool> {
    // Without the lock of the interpreter, others may be taking references right now.
    if cfg!(Py_GIL_DISABLED) || references(value) > 1 {
        return Ok(false);
    }
    let mut same = Same { key, unheld: true, names: true };
    Ok(same.any(value)? && same.key.is_empty())
}

impl Shapes {
    /// How many of the first objects of a list still have these keys, as far as that matters for their bytes.
    pub(crate) fn same(&self, list: &Bound<'_, PyList>, parts: &[&Parts]) -> PyResult<usize> {
        let mut same = 0;
        for parts in parts[..parts.len().min(list.len())].chunks(AT_ONCE) {
            let objects = list.get_slice(same, same + parts.len()).to_tuple();
            let mut all = true;
            self.each(&objects, parts, false, |is| {
                same += usize::from(is && all);
                all &= is;
                all
            })?;
            if !all || objects.len() < parts.len() {
                break;
            }
        }
        Ok(same)
    }

    /// Which objects still have these keys while nobody holds them or a part of them that can change, apart from the tuple
    /// and one reference more.
    pub(crate) fn unheld(&self, objects: &Bound<'_, PyTuple>, parts: &[&Parts]) -> PyResult<Vec<bool>> {
        // Without the lock of the interpreter, others may be taking references right now.
        if cfg!(Py_GIL_DISABLED) {
            return Ok(vec![false; parts.len()]);
        }
        let mut unheld = Vec::with_capacity(parts.len());
        self.each(objects, parts, true, |is| {
            unheld.push(is);
            true
        })?;
        Ok(unheld)
    }

    /// Says of each object whether it still has its key, as long as it is asked to go on.
    fn each(
        &self,
        objects: &Bound<'_, PyTuple>,
        parts: &[&Parts],
        unheld: bool,
        mut next: impl FnMut(bool) -> bool,
    ) -> PyResult<()> {
        let shown = self.shown(objects, parts)?;
        let mut shown = shown.as_ref().map(|shown| shown.iter_borrowed());
        for (object, parts) in objects.iter_borrowed().zip(parts) {
            let mut same = Same { key: &parts.key, unheld, names: unheld };
            let is = match shown.as_mut().map(|shown| [(); SHOWN].map(|()| shown.next())) {
                Some([Some(extra), Some(set), Some(private), Some(fields), _]) => {
                    same.is_free(&object)
                        && same.word(MODEL)
                        && same.word(object.get_type_ptr() as usize)
                        && same.is_found_by_none(&object)?
                        && same.parts(&fields, &extra, &set, &private)?
                }
                _ => same.is_free(&object) && same.any(&object)?,
            };
            if !next(is && same.key.is_empty()) {
                break;
            }
        }
        Ok(())
    }

    /// The parts of models, as the interpreter shows them to its collector of garbage: this takes a quarter of the time of asking
    /// each for its four attributes. `None` unless all are models of the types in their keys, and these are plain.
    fn shown<'py>(
        &self,
        objects: &Bound<'py, PyTuple>,
        parts: &[&Parts],
    ) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let plain = |(object, parts): (Borrowed<'_, 'py, PyAny>, &&Parts)| {
            parts.plain && parts.key.get(1) == Some(&(object.get_type_ptr() as usize))
        };
        // Without the lock of the interpreter, others may be changing them.
        if cfg!(Py_GIL_DISABLED) || !objects.iter_borrowed().zip(parts).all(plain) {
            return Ok(None);
        }
        let shown = self.referents.bind(objects.py()).call1(objects)?;
        // A tuple gives its items without counting references. The list holds some, and ends here.
        let shown = shown.cast_exact::<PyList>()?.to_tuple();
        // One that lacks an attribute shows less.
        Ok((shown.len() == SHOWN * objects.len()).then_some(shown))
    }

    /// Whether the interpreter shows of models of the type of this one what they are made of: their extra fields, the names of
    /// the fields that were set, private attributes, fields, and the type.
    pub(super) fn shows_parts(&self, model: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = model.py();
        let shown = self.referents.bind(py).call1((model,))?;
        let shown = shown.cast_exact::<PyList>()?;
        if shown.len() != SHOWN || !shown.get_item(SHOWN - 1)?.is(model.get_type()) {
            return Ok(false);
        }
        let names = [
            intern!(py, "__pydantic_extra__"),
            intern!(py, "__pydantic_fields_set__"),
            intern!(py, "__pydantic_private__"),
            intern!(py, "__dict__"),
        ];
        for (name, part) in names.into_iter().zip(shown) {
            if !model.getattr(name)?.is(&part) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Compares an object with the rest of a key. A part at whose place the key has its own address never changes, so its type
/// is not looked at.
struct Same<'k> {
    key: &'k [usize],
    /// Whether nobody else may hold what can change.
    unheld: bool,
    /// Whether the same fields must have been set, and not only as many. Readers see which; the bytes of what pydantic dumps do
    /// not show it.
    names: bool,
}

impl Same<'_> {
    /// Whether the key goes on with this word.
    fn word(&mut self, word: usize) -> bool {
        let Some((first, rest)) = self.key.split_first() else { return false };
        self.key = rest;
        *first == word
    }

    /// Whether nobody else holds something, as far as that matters. Its only references should be that of what holds it and
    /// this one.
    fn is_free(&self, holder: &Bound<'_, PyAny>) -> bool {
        !self.unheld || references(holder) <= 2
    }

    fn any(&mut self, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        let Some((first, rest)) = self.key.split_first() else { return Ok(false) };
        self.key = rest;
        match *first {
            leaf if leaf == value.as_ptr() as usize => Ok(true),
            DICT => match value.cast_exact::<PyDict>() {
                Ok(dict) => self.dict(dict),
                Err(_) => Ok(false),
            },
            LIST => match value.cast_exact::<PyList>() {
                Ok(list) => {
                    let len = list.len();
                    Ok(self.is_free(list) && self.word(len) && (len == 0 || self.all(list.iter())?))
                }
                Err(_) => Ok(false),
            },
            TUPLE => match value.cast_exact::<PyTuple>() {
                Ok(tuple) => Ok(self.is_free(tuple) && self.word(tuple.len()) && self.all(tuple.iter())?),
                Err(_) => Ok(false),
            },
            // The type in the key is alive, so one with this address is that of a model.
            MODEL => Ok(self.word(value.get_type_ptr() as usize) && self.model(value)?),
            _ => Ok(false),
        }
    }

    fn all<'py>(&mut self, items: impl Iterator<Item = Bound<'py, PyAny>>) -> PyResult<bool> {
        for item in items {
            if !self.any(&item)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn dict(&mut self, dict: &Bound<'_, PyDict>) -> PyResult<bool> {
        let len = dict.len();
        if !self.is_free(dict) || !self.word(len) {
            return Ok(false);
        }
        // Many are empty.
        if len == 0 {
            return Ok(true);
        }
        for (name, value) in still(dict)? {
            match self.key {
                // Most are leaves.
                [first, second, rest @ ..]
                    if *first == name.as_ptr() as usize && *second == value.as_ptr() as usize =>
                {
                    self.key = rest;
                }
                [first, rest @ ..] if *first == name.as_ptr() as usize => {
                    self.key = rest;
                    if !self.any(&value)? {
                        return Ok(false);
                    }
                }
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    fn model(&mut self, model: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = model.py();
        if !self.is_free(model) || !self.is_found_by_none(model)? {
            return Ok(false);
        }
        let fields = model.getattr(intern!(py, "__dict__"))?;
        let extra = model.getattr(intern!(py, "__pydantic_extra__"))?;
        let set = model.getattr(intern!(py, "__pydantic_fields_set__"))?;
        let private = model.getattr(intern!(py, "__pydantic_private__"))?;
        self.parts(&fields, &extra, &set, &private)
    }

    /// Whether no weak reference finds a model again, as far as that matters.
    fn is_found_by_none(&self, model: &Bound<'_, PyAny>) -> PyResult<bool> {
        if !self.unheld {
            return Ok(true);
        }
        let weak = model.getattr_opt(intern!(model.py(), "__weakref__"))?;
        Ok(weak.is_none_or(|weak| weak.is_none()))
    }

    /// The parts of a model.
    fn parts(
        &mut self,
        fields: &Bound<'_, PyAny>,
        extra: &Bound<'_, PyAny>,
        set: &Bound<'_, PyAny>,
        private: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        let (Ok(fields), Ok(set)) = (fields.cast_exact::<PyDict>(), set.cast_exact::<PySet>()) else {
            return Ok(false);
        };
        // Nothing is known of private attributes.
        Ok(private.is_none()
            && self.word(DICT)
            && self.dict(fields)?
            && if extra.is_none() { self.word(NO_EXTRA) } else { self.any(extra)? }
            && self.is_free(set)
            && self.names(set)?)
    }

    /// The names of the fields that were set.
    fn names(&mut self, set: &Bound<'_, PySet>) -> PyResult<bool> {
        let len = set.len();
        if !self.word(len) {
            return Ok(false);
        }
        let Some((expected, rest)) = self.key.split_at_checked(len) else { return Ok(false) };
        self.key = rest;
        if !self.names {
            return Ok(true);
        }
        // No other set of as many has all of them.
        let found = names(set)?;
        let has = |name: &Bound<'_, PyAny>| expected.binary_search(&(name.as_ptr() as usize)).is_ok();
        Ok(found.len() == len && found.iter().all(has))
    }
}
