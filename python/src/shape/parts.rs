//! What objects are made of, so that it is known later whether they have changed.

use pyo3::prelude::*;
use pyo3::types::{PyList, PySet, PyTuple, PyType};

use super::classes::Kind;
use super::same::SHOWN;
use super::{AT_ONCE, DEPTH, MODEL, Shapes, Visit, walk_sorted};

/// A key, and what it is of.
#[derive(Default)]
pub(crate) struct Parts {
    pub(crate) key: Vec<usize>,
    /// Never read: alive, they keep their addresses.
    pub(crate) leaves: Vec<Py<PyAny>>,
    /// The classes of the models among them. One that is made while the program runs may end, and another one have its
    /// address.
    pub(crate) classes: Vec<Py<PyType>>,
    /// Whether it is of a model whose type is plain.
    pub(super) plain: bool,
}

impl Visit for Parts {
    fn word(&mut self, word: usize) -> bool {
        self.key.word(word)
    }

    fn model(&mut self, model: &Bound<'_, PyAny>) -> bool {
        let of = model.get_type();
        if !self.classes.iter().any(|class| class.bind(of.py()).is(&of)) {
            self.classes.push(of.unbind());
        }
        self.key.model(model)
    }

    fn leaf(&mut self, leaf: &Bound<'_, PyAny>) -> bool {
        self.leaves.push(leaf.clone().unbind());
        self.key.leaf(leaf)
    }
}

impl Parts {
    /// Empty, with room for as much as another object has: the messages of a list are alike.
    fn with_room_of(other: Option<&Self>) -> Self {
        let Some(Self { key, leaves, classes, .. }) = other else { return Self::default() };
        Self {
            key: Vec::with_capacity(key.len()),
            leaves: Vec::with_capacity(leaves.len()),
            classes: Vec::with_capacity(classes.len()),
            plain: false,
        }
    }
}

impl Shapes {
    /// What dictionaries and models are made of, and `None` for what has no key. Most models are looked at in a few calls of
    /// the interpreter: asking each for its attributes takes three times as long.
    pub(crate) fn parts_of_each(&self, objects: &[Bound<'_, PyAny>]) -> PyResult<Vec<Option<Parts>>> {
        let mut all = Vec::with_capacity(objects.len());
        // The objects keep their types alive, so these keep their addresses.
        let mut plain: Vec<(usize, bool)> = Vec::new();
        for objects in objects.chunks(AT_ONCE) {
            let mut models = Vec::with_capacity(objects.len());
            for object in objects {
                let of = object.get_type_ptr() as usize;
                let known = plain.iter().find(|(seen, _)| *seen == of).map(|(_, plain)| *plain);
                let is_plain = known.unwrap_or_else(|| {
                    let is_plain = self.kind(object) == Kind::Plain;
                    plain.push((of, is_plain));
                    is_plain
                });
                if is_plain {
                    models.push(object);
                }
            }
            let mut models = self.parts_of_models(&models)?.map(IntoIterator::into_iter);
            for object in objects {
                let of = object.get_type_ptr() as usize;
                let parts = match &mut models {
                    Some(models) if plain.contains(&(of, true)) => models.next().flatten(),
                    _ if self.is_object(object) => self.parts(object)?,
                    _ => None,
                };
                all.push(parts);
            }
        }
        Ok(all)
    }

    /// Those of models of plain types. `None` unless the interpreter shows all.
    fn parts_of_models(&self, models: &[&Bound<'_, PyAny>]) -> PyResult<Option<Vec<Option<Parts>>>> {
        let Some(first) = models.first() else { return Ok(Some(Vec::new())) };
        // Without the lock of the interpreter, others may be changing them.
        if cfg!(Py_GIL_DISABLED) {
            return Ok(None);
        }
        let py = first.py();
        let shown = self.shown_by(PyTuple::new(py, models)?)?;
        if shown.len() != SHOWN * models.len() {
            return Ok(None);
        }
        let mut shown = shown.iter_borrowed();
        let mut of_each = Vec::with_capacity(models.len());
        while let [Some(extra), Some(set), Some(private), Some(fields), Some(_)] =
            [(); SHOWN].map(|()| shown.next())
        {
            let Ok(set) = set.cast_exact::<PySet>() else { return Ok(None) };
            of_each.push((extra, set.to_owned(), private, fields));
        }
        let names = self.shown_by(PyTuple::new(py, of_each.iter().map(|(_, set, ..)| set))?)?;
        let lens: Vec<_> = of_each.iter().map(|(_, set, ..)| set.len()).collect();
        if names.len() != lens.iter().sum::<usize>() {
            return Ok(None);
        }
        let mut names = names.iter_borrowed();
        let mut all: Vec<Option<Parts>> = Vec::with_capacity(models.len());
        let mut sorted = Vec::new();
        for ((model, (extra, _, private, fields)), len) in models.iter().zip(of_each).zip(lens) {
            sorted.clear();
            sorted.extend(names.by_ref().take(len));
            let mut parts = Parts::with_room_of(all.last().and_then(Option::as_ref));
            parts.plain = true;
            let has_key = parts.word(MODEL)
                && parts.model(model)
                && self.walk_fields(&fields, &extra, &mut parts, DEPTH)?
                && walk_sorted(&mut sorted, &mut parts)
                // Nothing is known of private attributes.
                && private.is_none();
            all.push(has_key.then_some(parts));
        }
        Ok(Some(all))
    }
    /// What the interpreter shows of some objects to its collector of garbage. A tuple gives its items without counting
    /// references.
    fn shown_by<'py>(&self, objects: Bound<'py, PyTuple>) -> PyResult<Bound<'py, PyTuple>> {
        let referents = self.referents.bind(objects.py());
        let shown = referents.call1(objects)?;
        Ok(shown.cast_exact::<PyList>()?.to_tuple())
    }
}
