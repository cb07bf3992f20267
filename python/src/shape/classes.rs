//! What is known of classes.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::types::{PyType, PyWeakrefMethods, PyWeakrefReference};

/// What is known of a class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Its objects are not models of pydantic.
    Other,
    /// Its models are dumped by code of their own ([`super::dump`]).
    Own,
    /// Its models are dumped by pydantic.
    Model,
    /// ... and the interpreter shows their parts ([`super::Shapes::shows_parts`]).
    Plain,
}

/// The classes that were seen.
#[derive(Default)]
pub(super) struct Classes(Mutex<Seen>);

/// By address. They are not kept alive: a program may make them while it runs.
#[derive(Default)]
struct Seen {
    known: HashMap<usize, (Py<PyWeakrefReference>, Kind)>,
    /// How many there may be before those that ended are looked for.
    room: usize,
}

/// The number of classes before any is looked for.
const CLASSES: usize = 64;

impl Classes {
    pub(super) fn known(&self, of: &Bound<'_, PyType>) -> Option<Kind> {
        self.lock().known(of)
    }

    pub(super) fn learn(&self, of: &Bound<'_, PyType>, kind: Kind) {
        if let Ok(weak) = PyWeakrefReference::new(of) {
            let weak = weak.unbind();
            let gone = self.lock().learn(of, weak, kind);
            // Not under the lock: Python may run then.
            drop(gone);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seen {
    fn known(&self, of: &Bound<'_, PyType>) -> Option<Kind> {
        let (weak, kind) = self.known.get(&(of.as_ptr() as usize))?;
        // Another class may have had its address.
        weak.bind(of.py()).upgrade().is_some_and(|found| found.is(of)).then_some(*kind)
    }

    /// Returns what is no longer needed, to be dropped without the lock.
    #[must_use]
    fn learn(
        &mut self,
        of: &Bound<'_, PyType>,
        weak: Py<PyWeakrefReference>,
        kind: Kind,
    ) -> Vec<(Py<PyWeakrefReference>, Kind)> {
        let mut gone: Vec<_> = self.known.insert(of.as_ptr() as usize, (weak, kind)).into_iter().collect();
        if self.known.len() > self.room {
            let ended = |weak: &Py<PyWeakrefReference>| weak.bind(of.py()).upgrade().is_none();
            gone.extend(self.known.extract_if(|_, (weak, _)| ended(weak)).map(|(_, old)| old));
            self.room = CLASSES.max(2 * self.known.len());
        }
        gone
    }
}

/// Which classes are those that their modules have, as long as nothing else runs.
#[derive(Default)]
pub(crate) struct Current(Vec<(usize, bool)>);

impl Current {
    /// Whether models of these classes would be of the same ones if they were made now. A module that is loaded again
    /// has other classes of the same names, and so has a notebook of which a cell is run again.
    pub(crate) fn has(&mut self, py: Python<'_>, classes: &[Py<PyType>]) -> bool {
        classes.iter().all(|class| {
            let address = class.as_ptr() as usize;
            if let Some((_, is)) = self.0.iter().find(|(seen, _)| *seen == address) {
                return *is;
            }
            let is = is_current(class.bind(py)).unwrap_or(true);
            self.0.push((address, is));
            is
        })
    }
}

/// Also true of one that a module does not have by its name, as a class within another one.
fn is_current(class: &Bound<'_, PyType>) -> PyResult<bool> {
    let modules = class.py().import("sys")?.getattr("modules")?;
    let found = modules.get_item(class.module()?)?.getattr_opt(class.name()?)?;
    Ok(found.is_none_or(|found| found.is(class)))
}
