//! Deleting what nothing refers to.

use std::collections::{BTreeSet, HashSet};

use threadkeep::Result;
use threadkeep::id::ThreadId;

use crate::care::scopes::{CHAINS, Directory, THREADS, by_thread, is_chain, is_thread, numbers};
use crate::care::used::Used;
use crate::rows::checkpoints;
use crate::rows::directory::{self, ChainKey, Scope, ThreadKey};
use crate::rows::element::Elements;
use crate::rows::seal::join_key;
use crate::sql::Db;
use crate::write::commit::WriterState;

const DROP_CHECKPOINTS: &str = "DELETE FROM checkpoint WHERE key BETWEEN ?1 AND ?2";
const DROP_ELEMENTS: &str = "DELETE FROM element WHERE key BETWEEN ?1 AND ?2";

/// The threads that hold something that nothing refers to.
///
/// # Errors
/// [`Error::Corrupt`] if a row is damaged: what it referred to is unknown.
pub(crate) fn untidy(db: &Db) -> Result<Vec<ThreadId>> {
    let scopes = Directory::whole(db)?;
    let mut untidy = Vec::new();
    for (thread, chains) in by_thread(&scopes) {
        let (used, empty) = used(db, thread.key, chains.iter().map(|chain| chain.key))?;
        if !empty.is_empty() || used.lacks_any(db, thread.key)? {
            untidy.push(thread.text.as_str().into());
        }
    }
    Ok(untidy)
}

/// The numbers that have rows which belong to no thread.
///
/// # Errors
/// [`Error::Corrupt`] if a row of the directory is damaged.
pub(crate) fn lost(db: &Db) -> Result<Vec<u32>> {
    let scopes = Directory::whole(db)?;
    let (chains, threads): (Vec<&Scope>, Vec<&Scope>) = scopes.iter().partition(|scope| is_chain(scope));
    let abandoned = threads.iter().filter(|scope| directory::is_abandoned(scope)).map(|scope| scope.key);
    let mut lost: BTreeSet<u32> = abandoned.collect();
    let threads: HashSet<ThreadKey> = threads.iter().map(|thread| thread.key).collect();
    let (owned, unowned): (Vec<&Scope>, Vec<&Scope>) =
        chains.into_iter().partition(|chain| threads.contains(&chain.owner));
    lost.extend(unowned.iter().map(|chain| chain.key));
    let chains: HashSet<ChainKey> = owned.iter().map(|chain| chain.key).collect();
    for (statement, known) in [(CHAINS, &chains), (THREADS, &threads)] {
        lost.extend(numbers(db, statement)?.into_iter().filter(|number| !known.contains(number)));
    }
    Ok(lost.into_iter().collect())
}

/// The elements that these chains of a thread refer to, and which of the chains have no checkpoint.
fn used(db: &Db, thread: ThreadKey, chains: impl Iterator<Item = ChainKey>) -> Result<(Used, Vec<ChainKey>)> {
    let (mut used, mut empty) = (Used::default(), Vec::new());
    let mut elements = Elements::new(db, thread);
    for chain in chains {
        let rows = checkpoints::all(db, chain)?;
        for row in &rows {
            used.note(&row.record()?, &row.tasks()?, &mut elements)?;
        }
        if rows.is_empty() {
            empty.push(chain);
        }
    }
    Ok((used, empty))
}

impl WriterState {
    /// Deletes what [`lost`] found. Others may have written since: each number is looked at again.
    pub(crate) fn sweep(&mut self, numbers: &[u32]) -> Result<()> {
        for number in numbers {
            let scope = directory::at(&self.db, *number)?;
            let has_elements = match &scope {
                Some(scope) if directory::is_abandoned(scope) => {
                    self.threads.forget(&scope.text.as_str().into());
                    self.leave_to_be_cleared(*number)?;
                    true
                }
                scope => scope.as_ref().is_some_and(is_thread),
            };
            let has_checkpoints = match scope.filter(|_| !has_elements) {
                None => false,
                Some(chain) => {
                    let owner = directory::at(&self.db, chain.owner)?;
                    let has_owner = owner.is_some_and(|owner| !is_chain(&owner));
                    if !has_owner {
                        directory::drop_chain(&self.db, *number)?;
                    }
                    has_owner
                }
            };
            let rows = [join_key(*number, 0), join_key(*number, u32::MAX)];
            for (drop, keeps) in [(DROP_CHECKPOINTS, has_checkpoints), (DROP_ELEMENTS, has_elements)] {
                if !keeps {
                    self.db.execute(drop, rows)?;
                }
            }
        }
        Ok(())
    }

    /// Deletes what nothing in a thread refers to.
    pub(crate) fn tidy(&mut self, id: &ThreadId) -> Result<()> {
        self.threads.forget(id);
        let Some(thread) = directory::find_thread(&self.db, id)? else { return Ok(()) };
        let chains = directory::chains(&self.db, thread)?;
        let (used, empty) = used(&self.db, thread, chains.iter().map(|(_, chain)| chain.key))?;
        for chain in &empty {
            directory::drop_chain(&self.db, *chain)?;
        }
        let dropped = used.keep_only(&self.db, thread)?;
        if empty.len() == chains.len() {
            directory::drop_thread(&self.db, thread)
        } else if dropped > 0 {
            directory::rewritten(&self.db, id)
        } else {
            Ok(())
        }
    }
}
