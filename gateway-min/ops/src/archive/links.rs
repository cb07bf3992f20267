//! A first look at a file: which checkpoints it has, and which of them have children far after them.

use std::collections::{BTreeSet, HashMap};
use std::io::{Read, Seek};

use serde::Deserialize;
use threadkeep::checkpoint::CheckpointTuple;
use threadkeep::id::{CheckpointId, Namespace};
use threadkeep::saver::LocalKey;

use super::ArchiveError;
use super::lines::Lines;

/// What it reads of a line. What is wrong with a line, a reader says.
#[derive(Deserialize)]
struct Glance {
    #[serde(default)]
    checkpoint: Option<Link>,
}

#[derive(Deserialize)]
struct Link {
    id: CheckpointId,
    namespace: String,
    parent: Option<CheckpointId>,
}

/// The last children of checkpoints whose next line is not their only child's.
#[derive(Debug, Default)]
pub struct Links(HashMap<LocalKey, CheckpointId>);

impl Links {
    /// Those of a file that is at its beginning.
    ///
    /// # Errors
    /// [`ArchiveError::Io`] if it cannot be read.
    pub fn of(from: impl Read + Seek) -> Result<Self, ArchiveError> {
        let (mut links, mut last) = (Self::default(), None);
        each(from, |place, parent| {
            if let Some(parent) = parent
                && last.as_ref() != Some(&(place.0.clone(), parent))
            {
                links.0.insert((place.0.clone(), parent), place.1);
            }
            last = Some(place);
        })?;
        Ok(links)
    }

    /// The last child of a checkpoint, after which `next` comes.
    pub fn last_child(
        &self,
        tuple: &CheckpointTuple,
        next: Option<&CheckpointTuple>,
    ) -> Option<CheckpointId> {
        let id = tuple.checkpoint.id;
        let next = next.filter(|next| next.namespace == tuple.namespace && next.parent == Some(id));
        let later = self.0.get(&(tuple.namespace.clone(), id)).copied();
        later.max(next.map(|next| next.checkpoint.id))
    }
}

/// The places of all checkpoints of a file that is at its beginning.
///
/// # Errors
/// [`ArchiveError::Io`] if it cannot be read.
pub fn places(from: impl Read + Seek) -> Result<BTreeSet<LocalKey>, ArchiveError> {
    let mut places = BTreeSet::new();
    each(from, |place, _| {
        places.insert(place);
    })?;
    Ok(places)
}

fn each(
    from: impl Read + Seek,
    mut found: impl FnMut(LocalKey, Option<CheckpointId>),
) -> Result<(), ArchiveError> {
    let mut lines = Lines::new(from);
    loop {
        match lines.next() {
            Ok(true) => {}
            Err(error @ ArchiveError::Io { .. }) => return Err(error),
            // A reader says what is wrong.
            Ok(false) | Err(_) => return Ok(()),
        }
        let glance = serde_json::from_slice::<Glance>(lines.text());
        if let Ok(Glance { checkpoint: Some(Link { id, namespace, parent }) }) = glance {
            found((Namespace::from(namespace), id), parent);
        }
    }
}
