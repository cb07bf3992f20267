//! Whether objects still have the keys that they had.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PySet, PyTuple};

use super::{DICT, LIST, MODEL, NO_EXTRA, Parts, Shapes, TUPLE, names, references, still};

/// Objects that are looked at in one call of the interpreter.
pub(crate) const AT_ONCE: usize = 128;
/// What the interpreter shows of a model whose type is plain ([`Shapes::shows_parts`]).
pub(super) const SHOWN: usize = 5;

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
            let alike = self.each(&objects, parts, false)?.into_iter().take_while(|is| *is).count();
            same += alike;
            if alike < parts.len() {
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
        self.each(objects, parts, true)
    }

    /// Whether each object still has its key.
    fn each(&self, objects: &Bound<'_, PyTuple>, parts: &[&Parts], unheld: bool) -> PyResult<Vec<bool>> {
        // Made before the objects are looked at: where something is made, the interpreter may collect garbage, and run
        // destructors.
        let weak = if unheld { Some(self.weak.of_each(objects)?) } else { None };
        let Some(shown) = self.shown(objects, parts)? else {
            let is_same = |(object, parts): (Borrowed<'_, '_, PyAny>, &&Parts)| {
                let mut same = Same { key: &parts.key, unheld, names: unheld };
                Ok(same.is_free(&object) && same.any(&object)? && same.key.is_empty())
            };
            return objects.iter_borrowed().zip(parts).map(is_same).collect();
        };
        let mut shown = shown.iter_borrowed();
        let mut all = Vec::with_capacity(parts.len());
        let mut sets = Vec::new();
        for (object, parts) in objects.iter_borrowed().zip(parts) {
            let mut same = Same { key: &parts.key, unheld, names: unheld };
            let mut is_same = false;
            if let [Some(extra), Some(set), Some(private), Some(fields), _] =
                [(); SHOWN].map(|()| shown.next())
                && same.is_free(&object)
                && same.word(MODEL)
                && same.word(object.get_type_ptr() as usize)
                && same.parts(&fields, &extra, &private)?
                && let Some((_, names)) = same.set(&set)
            {
                is_same = same.key.is_empty();
                if unheld {
                    sets.push((all.len(), set, names));
                }
            }
            all.push(is_same);
        }
        if let Some(weak) = weak {
            if self.weak.are_any(&weak)? {
                for (is_same, object) in all.iter_mut().zip(objects.iter_borrowed()) {
                    *is_same = *is_same && is_found_by_none(&object)?;
                }
            }
            // From here nobody else can change those that are the same.
            self.same_names(objects.py(), &sets, &mut all)?;
        }
        Ok(all)
    }

    /// Which of the models at these places have these names of fields that were set, of which they have as many. Asked one by
    /// one, the sets take several times as long.
    fn same_names(
        &self,
        py: Python<'_>,
        sets: &[(usize, Borrowed<'_, '_, PyAny>, &[usize])],
        all: &mut [bool],
    ) -> PyResult<()> {
        let found = {
            let sets = PyTuple::new(py, sets.iter().map(|(_, set, _)| set))?;
            self.referents.bind(py).call1(sets)?.cast_exact::<PyList>()?.to_tuple()
        };
        let is_whole = found.len() == sets.iter().map(|(.., names)| names.len()).sum::<usize>();
        let mut found = found.iter_borrowed();
        for (place, _, names) in sets {
            // No other set of as many has all of them.
            let found = found.by_ref().take(names.len());
            let unknown = found.filter(|name| !names.contains(&(name.as_ptr() as usize))).count();
            all[*place] &= is_whole && unknown == 0;
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

impl<'k> Same<'k> {
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
        if !self.is_free(model) || (self.unheld && !is_found_by_none(model)?) {
            return Ok(false);
        }
        let fields = model.getattr(intern!(py, "__dict__"))?;
        let extra = model.getattr(intern!(py, "__pydantic_extra__"))?;
        let set = model.getattr(intern!(py, "__pydantic_fields_set__"))?;
        let private = model.getattr(intern!(py, "__pydantic_private__"))?;
        Ok(self.parts(&fields, &extra, &private)? && self.names(&set)?)
    }

    /// The parts of a model, but for the names of the fields that were set.
    fn parts(
        &mut self,
        fields: &Bound<'_, PyAny>,
        extra: &Bound<'_, PyAny>,
        private: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        let Ok(fields) = fields.cast_exact::<PyDict>() else { return Ok(false) };
        // Nothing is known of private attributes.
        Ok(private.is_none()
            && self.word(DICT)
            && self.dict(fields)?
            && if extra.is_none() { self.word(NO_EXTRA) } else { self.any(extra)? })
    }

    /// A set of names, and those that the key has at this place, if they are as many.
    fn set<'s, 'py>(&mut self, set: &'s Bound<'py, PyAny>) -> Option<(&'s Bound<'py, PySet>, &'k [usize])> {
        let set = set.cast_exact::<PySet>().ok()?;
        let len = set.len();
        if !self.is_free(set) || !self.word(len) {
            return None;
        }
        let (expected, rest) = self.key.split_at_checked(len)?;
        self.key = rest;
        Some((set, expected))
    }

    /// The names of the fields that were set.
    fn names(&mut self, set: &Bound<'_, PyAny>) -> PyResult<bool> {
        let Some((set, expected)) = self.set(set) else { return Ok(false) };
        if !self.names {
            return Ok(true);
        }
        // No other set of as many has all of them.
        let found = names(set)?;
        let has = |name: &Bound<'_, PyAny>| expected.contains(&(name.as_ptr() as usize));
        Ok(found.len() == expected.len() && found.iter().all(has))
    }
}

/// Whether no weak reference finds a model again.
fn is_found_by_none(model: &Bound<'_, PyAny>) -> PyResult<bool> {
    let weak = model.getattr_opt(intern!(model.py(), "__weakref__"))?;
    Ok(weak.is_none_or(|weak| weak.is_none()))
}

/// Counts weak references.
pub(super) struct Weak {
    /// `weakref.getweakrefcount`.
    count: Py<PyAny>,
    map: Py<PyAny>,
    any: Py<PyAny>,
}

impl Weak {
    pub(super) fn new(py: Python<'_>) -> PyResult<Self> {
        let builtins = py.import("builtins")?;
        Ok(Self {
            count: py.import("weakref")?.getattr("getweakrefcount")?.unbind(),
            map: builtins.getattr("map")?.unbind(),
            any: builtins.getattr("any")?.unbind(),
        })
    }

    /// An iterator over how many there are to each object, which counts them when it is asked.
    fn of_each<'py>(&self, objects: &Bound<'py, PyTuple>) -> PyResult<Bound<'py, PyAny>> {
        let py = objects.py();
        self.map.bind(py).call1((&self.count, objects))
    }

    /// Whether there is any.
    fn are_any(&self, of_each: &Bound<'_, PyAny>) -> PyResult<bool> {
        self.any.bind(of_each.py()).call1((of_each,))?.is_truthy()
    }
}
