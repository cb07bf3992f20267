//! The directory of threads and namespaces, as far as it can be read.

use std::collections::{BTreeMap, HashMap};

use threadkeep::id::ThreadId;
use threadkeep::{Error, Result};

use crate::rows::directory::{self, Order, Scope, ThreadKey};
use crate::rows::seal::RowKey;
use crate::sql::{Db, integer};

pub(super) const CHAINS: &str = "SELECT key FROM checkpoint WHERE key >= ?1 ORDER BY key LIMIT 1";
pub(super) const THREADS: &str = "SELECT key FROM element WHERE key >= ?1 ORDER BY key LIMIT 1";

/// What can be read of the directory.
pub(super) struct Directory {
    pub(super) scopes: Vec<Scope>,
    /// The rows that are damaged.
    pub(super) broken: Vec<(RowKey, Error)>,
    /// Why a part of it cannot be read at all.
    pub(super) unreadable: Option<Error>,
}

impl Directory {
    /// Reads it from both ends up to pages that cannot be read.
    pub(super) fn read(db: &Db) -> Result<Self> {
        let (mut rows, mut unreadable) = (BTreeMap::new(), None);
        for order in [Order::Upwards, Order::Downwards] {
            let read = directory::each(db, order, |place, scope| {
                rows.insert(place.key, (place, scope));
            });
            match read {
                Ok(()) => break,
                Err(error @ Error::Corrupt { .. }) => unreadable = Some(error),
                Err(error) => return Err(error),
            }
        }
        let mut directory = Self { scopes: Vec::new(), broken: Vec::new(), unreadable };
        for (place, scope) in rows.into_values() {
            match scope {
                Ok(scope) => directory.scopes.push(scope),
                Err(error) => directory.broken.push((place, error)),
            }
        }
        Ok(directory)
    }

    /// Every row, if none is damaged.
    pub(super) fn whole(db: &Db) -> Result<Vec<Scope>> {
        let mut directory = Self::read(db)?;
        let broken = directory.broken.pop().map(|(_, error)| error);
        directory.unreadable.or(broken).map_or(Ok(directory.scopes), Err)
    }

    /// Whether what it does not name does not exist.
    pub(super) fn is_complete(&self) -> bool {
        self.broken.is_empty() && self.unreadable.is_none()
    }
}

/// Every thread that the directory names, as far as it can be read, in order.
pub(crate) fn readable_threads(db: &Db) -> Result<Vec<ThreadId>> {
    let scopes = Directory::read(db)?.scopes;
    let mut threads: Vec<ThreadId> =
        scopes.iter().filter(|scope| scope.owner == 0).map(|scope| scope.text.as_str().into()).collect();
    threads.sort_unstable();
    Ok(threads)
}

/// The threads, each with its namespaces. Looks at each row of the directory once, however many threads there are.
pub(super) fn by_thread(scopes: &[Scope]) -> Vec<(&Scope, Vec<&Scope>)> {
    with_chains(scopes, |scope| scope.owner == 0)
}

/// The same of deleted threads of which rows may be left.
pub(super) fn deleted(scopes: &[Scope]) -> Vec<(&Scope, Vec<&Scope>)> {
    with_chains(scopes, directory::is_deleted)
}

fn with_chains(scopes: &[Scope], wanted: impl Fn(&Scope) -> bool) -> Vec<(&Scope, Vec<&Scope>)> {
    let mut chains: HashMap<ThreadKey, Vec<&Scope>> = HashMap::new();
    for scope in scopes {
        chains.entry(scope.owner).or_default().push(scope);
    }
    let threads = scopes.iter().filter(|scope| wanted(scope));
    threads.map(|thread| (thread, chains.remove(&thread.key).unwrap_or_default())).collect()
}

/// Whether a row of the directory is a thread, becomes one, or was one whose rows are being deleted.
pub(super) fn is_thread(scope: &Scope) -> bool {
    scope.owner == 0 || directory::is_being_made(scope) || directory::is_deleted(scope)
}

/// Whether a row of the directory is a namespace of a thread, or was one.
pub(super) fn is_chain(scope: &Scope) -> bool {
    !is_thread(scope) && !directory::is_abandoned(scope)
}

/// The numbers whose rows a table holds. Reads one row of each.
pub(super) fn numbers(db: &Db, statement: &str) -> Result<Vec<u32>> {
    let (mut numbers, mut from) = (Vec::new(), 0);
    while let Some(key) = db.one(statement, [from], |row| integer(row, 0))? {
        numbers.extend(u32::try_from(key >> 32).ok());
        let Some(next) = (key | i64::from(u32::MAX)).checked_add(1) else { break };
        from = next;
    }
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_found_with_their_namespaces_in_one_pass() {
        let scope = |key, owner, text: &str| Scope { key, owner, text: text.to_owned() };
        let scopes = [
            scope(1, 0, "a"),
            scope(2, 1, ""),
            scope(3, 0, "b"),
            scope(4, 1, "inner"),
            scope(5, 3, ""),
            scope(6, 99, "of a thread that does not exist"),
            scope(7, 0, "c"),
            scope(8, u32::MAX, "without a name"),
            scope(9, 8, "of that"),
            scope(10, u32::MAX - 1, "10"),
            scope(11, 10, "of a deleted one"),
        ];
        let numbers = |found: Vec<(&Scope, Vec<&Scope>)>| -> Vec<(u32, Vec<u32>)> {
            let found = found.into_iter();
            found
                .map(|(thread, chains)| (thread.key, chains.iter().map(|chain| chain.key).collect()))
                .collect()
        };
        assert_eq!(numbers(by_thread(&scopes)), [(1, vec![2, 4]), (3, vec![5]), (7, vec![])]);
        assert_eq!(numbers(deleted(&scopes)), [(10, vec![11])]);
    }
}
