//! Checking a whole database, row by row, and deleting what nothing refers to.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;

use threadkeep::id::ThreadId;
use threadkeep::{Error, Result};
use threadkeep_layout::Run;

use crate::care::used::Used;
use crate::rows::checkpoints;
use crate::rows::directory::{self, ChainKey, Scope, ThreadKey};
use crate::rows::element::{self, Elements, SPACES};
use crate::rows::names::Names;
use crate::rows::pack;
use crate::rows::record::{CheckpointRecord, NameKey, Ordinal, StoredChannel, TaskRecord};
use crate::rows::seal::{RowKey, join_key};
use crate::sql::{Db, integer, text};
use crate::write::commit::WriterState;

const INTEGRITY: &str = "PRAGMA integrity_check(100)";
const CHAINS: &str = "SELECT key FROM checkpoint WHERE key >= ?1 ORDER BY key LIMIT 1";
const THREADS: &str = "SELECT key FROM element WHERE key >= ?1 ORDER BY key LIMIT 1";
const DROP_CHECKPOINTS: &str = "DELETE FROM checkpoint WHERE key BETWEEN ?1 AND ?2";
const DROP_ELEMENTS: &str = "DELETE FROM element WHERE key BETWEEN ?1 AND ?2";

/// A defect that the check found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Its thread and namespace, as far as known.
    pub scope: Option<(String, String)>,
    /// The table and key.
    pub place: String,
    /// What was found.
    pub what: String,
    /// Whether it only takes space: nothing refers to it, and [`crate::SqliteSaver::sweep`] deletes it.
    pub orphan: bool,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((thread, namespace)) = &self.scope {
            write!(f, "thread {thread}, ")?;
            if !namespace.is_empty() {
                write!(f, "namespace {namespace}, ")?;
            }
        }
        write!(f, "{}: {}", self.place, self.what)
    }
}

/// All defects of the database.
pub(crate) fn check(db: &Db, names: &Names) -> Result<Vec<Finding>> {
    let mut check = Check { db, names, found: Vec::new() };
    check.integrity()?;
    for (place, error) in pack::broken_dictionaries(db)? {
        check.broken(None, place, &error);
    }
    let scopes = check.scopes()?;
    let known: HashSet<u32> = scopes.iter().map(|scope| scope.key).collect();
    for (statement, table) in [(CHAINS, "checkpoint"), (THREADS, "element")] {
        for scope in numbers(db, statement)?.into_iter().filter(|scope| !known.contains(scope)) {
            let what = "rows of a thread or namespace that does not exist";
            check.report(None, format!("table {table}, scope {scope}"), what, true);
        }
    }
    for (thread, chains) in by_thread(&scopes) {
        check.thread(thread, &chains)?;
    }
    Ok(check.found)
}

/// The threads, each with its namespaces. Looks at each row of the directory once, however many threads there are.
fn by_thread(scopes: &[Scope]) -> Vec<(&Scope, Vec<&Scope>)> {
    let mut chains: HashMap<ThreadKey, Vec<&Scope>> = HashMap::new();
    for scope in scopes {
        chains.entry(scope.owner).or_default().push(scope);
    }
    let threads = chains.remove(&0).unwrap_or_default();
    threads.into_iter().map(|thread| (thread, chains.remove(&thread.key).unwrap_or_default())).collect()
}

/// Whether a row of the directory is a thread, becomes one, or was one whose rows are being deleted.
fn is_thread(scope: &Scope) -> bool {
    scope.owner == 0 || directory::is_being_made(scope) || directory::is_deleted(scope)
}

/// Whether a row of the directory is a namespace of a thread, or was one.
fn is_chain(scope: &Scope) -> bool {
    !is_thread(scope) && !directory::is_abandoned(scope)
}

/// The numbers whose rows a table holds. Reads one row of each.
fn numbers(db: &Db, statement: &str) -> Result<Vec<u32>> {
    let (mut numbers, mut from) = (Vec::new(), 0);
    while let Some(key) = db.one(statement, [from], |row| integer(row, 0))? {
        numbers.extend(u32::try_from(key >> 32).ok());
        let Some(next) = (key | i64::from(u32::MAX)).checked_add(1) else { break };
        from = next;
    }
    Ok(numbers)
}

struct Check<'a> {
    db: &'a Db,
    names: &'a Names,
    found: Vec<Finding>,
}

/// A decoded row of a chain.
type Row = (CheckpointRecord, Vec<TaskRecord>);

impl Check<'_> {
    fn report(
        &mut self,
        scope: Option<(&str, &str)>,
        place: impl fmt::Display,
        what: impl fmt::Display,
        orphan: bool,
    ) {
        let scope = scope.map(|(thread, namespace)| (thread.to_owned(), namespace.to_owned()));
        let (place, what) = (place.to_string(), what.to_string());
        self.found.push(Finding { scope, place, what, orphan });
    }

    fn broken(&mut self, scope: Option<(&str, &str)>, place: RowKey, error: &Error) {
        let reason = match error {
            Error::Corrupt { reason, .. } => reason.clone(),
            other => other.to_string(),
        };
        self.report(scope, place, reason, false);
    }

    fn integrity(&mut self) -> Result<()> {
        let mut lines = Vec::new();
        self.db.each(INTEGRITY, [], |row| {
            lines.push(text(row, 0)?.to_owned());
            Ok(())
        })?;
        for line in lines.into_iter().filter(|line| line != "ok") {
            self.report(None, "the file", line, false);
        }
        Ok(())
    }

    fn scopes(&mut self) -> Result<Vec<Scope>> {
        let (mut scopes, mut broken) = (Vec::new(), Vec::new());
        directory::each(self.db, |place, scope| match scope {
            Ok(scope) => scopes.push(scope),
            Err(error) => broken.push((place, error)),
        })?;
        for (place, error) in broken {
            self.broken(None, place, &error);
        }
        let threads: HashSet<u32> =
            scopes.iter().filter(|scope| is_thread(scope)).map(|scope| scope.key).collect();
        for scope in scopes.iter().filter(|scope| !is_thread(scope) && !threads.contains(&scope.owner)) {
            let what = format!("namespace {:?} of a thread that does not exist", scope.text);
            self.report(None, format!("table scope, key {}", scope.key), what, true);
        }
        Ok(scopes)
    }

    fn thread(&mut self, thread: &Scope, chains: &[&Scope]) -> Result<()> {
        let mut there: [Vec<u32>; 3] = Default::default();
        let mut broken = Vec::new();
        element::each(self.db, thread.key, |place, element| match element {
            Ok((space, seq)) => there[space as usize].push(seq),
            Err(error) => broken.push((place, error)),
        })?;
        // A broken element is reported once, and not again for everything that refers to it.
        let mut silent: [HashSet<u32>; 3] = Default::default();
        for (place, error) in &broken {
            self.broken(Some((&thread.text, "")), *place, error);
            if let Some((space, seq)) = element::space_of(*place) {
                silent[space as usize].insert(seq);
            }
        }
        let mut used = Used::default();
        let mut complete = broken.is_empty();
        for chain in chains {
            complete &= self.chain(thread, chain, &mut used)?;
        }
        for space in SPACES {
            let have: HashSet<u32> = there[space as usize].iter().copied().collect();
            let runs = used.runs(space);
            for seq in runs.iter().flat_map(|run| run.numbers()) {
                if !have.contains(&seq) && !silent[space as usize].contains(&seq) {
                    let place = element::place(thread.key, space, seq);
                    self.report(Some((&thread.text, "")), place, "the row is missing", false);
                }
            }
            let orphans = have.iter().filter(|seq| !contains(&runs, **seq)).count();
            // What a broken row referred to is unknown.
            if complete && orphans > 0 {
                let what = format!("{orphans} elements that nothing refers to");
                self.report(Some((&thread.text, "")), format!("table element, space {space:?}"), what, true);
            }
        }
        Ok(())
    }

    /// Checks a namespace. Returns whether everything that it refers to is noted.
    fn chain(&mut self, thread: &Scope, chain: &Scope, used: &mut Used) -> Result<bool> {
        let scope = Some((thread.text.as_str(), chain.text.as_str()));
        let (mut all, mut broken) = (HashMap::new(), Vec::new());
        let mut last = None;
        checkpoints::each(self.db, chain.key, |place, row| {
            let decoded = row.and_then(|row| Ok((row.ordinal, row.id, row.record()?, row.tasks()?)));
            match decoded {
                Ok((ordinal, id, record, tasks)) => {
                    if last.replace(id) >= Some(id) {
                        broken.push((
                            place,
                            place.corrupt("its id is not greater than that of the one before it"),
                        ));
                    }
                    all.insert(ordinal, (record, tasks));
                }
                Err(error) => broken.push((place, error)),
            }
        })?;
        if all.is_empty() && broken.is_empty() {
            self.report(scope, format!("table scope, key {}", chain.key), "it has no checkpoints", true);
        }
        let mut elements = Elements::new(self.db, thread.key);
        let mut complete = broken.is_empty();
        for (place, error) in &broken {
            self.broken(scope, *place, error);
        }
        let mut ordinals: Vec<&Ordinal> = all.keys().collect();
        ordinals.sort_unstable();
        for ordinal in ordinals {
            let place = checkpoints::place(chain.key, *ordinal);
            let (record, tasks) = &all[ordinal];
            for what in self.references(&all, record, tasks)? {
                self.report(scope, place, what, false);
            }
            if let Err(error) = used.note(record, tasks, &mut elements) {
                complete = false;
                self.report(scope, place, error, false);
            }
        }
        Ok(complete)
    }

    /// What a row refers to, in its chain and in the table of names, that is missing.
    fn references(
        &self,
        all: &HashMap<Ordinal, Row>,
        record: &CheckpointRecord,
        tasks: &[TaskRecord],
    ) -> Result<Vec<String>> {
        let mut missing = Vec::new();
        let parent = record.parent.map(|parent| (parent, all.get(&parent)));
        if let Some((ordinal, None)) = parent {
            missing.push(format!("its parent, ordinal {ordinal}, is missing"));
        }
        if let Some((_, Some((_, rows)))) = parent {
            for place in record.applied.iter().filter(|place| **place as usize >= rows.len()) {
                missing.push(format!("the writes of a task that it applied are missing (number {place})"));
            }
        }
        let mut names: HashSet<NameKey> = record.next.iter().copied().collect();
        for (name, entry) in &record.channels {
            names.insert(*name);
            if let StoredChannel::At(origin) = entry {
                let holder = all.get(origin).and_then(|(holder, _)| holder.entry(*name));
                if !matches!(holder, Some(StoredChannel::Own(..))) {
                    missing.push(format!("the entry that it holds from ordinal {origin} is missing"));
                }
            }
        }
        names.extend(record.counters.iter().map(|(name, _)| *name));
        for task in tasks {
            names.insert(task.node);
            names.extend(task.writes.iter().map(|write| write.channel));
        }
        for name in names {
            match self.names.text(self.db, name) {
                Ok(_) => {}
                Err(error @ Error::Corrupt { .. }) => missing.push(error.to_string()),
                Err(error) => return Err(error),
            }
        }
        Ok(missing)
    }
}

fn contains(runs: &[Run], seq: u32) -> bool {
    let behind = runs.partition_point(|run| run.start <= seq);
    behind > 0 && seq < runs[behind - 1].end()
}

/// The threads that hold something that nothing refers to.
///
/// # Errors
/// [`Error::Corrupt`] if a row is damaged: what it referred to is unknown.
pub(crate) fn untidy(db: &Db) -> Result<Vec<ThreadId>> {
    let scopes = directory(db)?;
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
    let scopes = directory(db)?;
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

/// Every row of the directory, if none is damaged.
fn directory(db: &Db) -> Result<Vec<Scope>> {
    let mut scopes = Vec::new();
    let mut broken = None;
    directory::each(db, |_, scope| match scope {
        Ok(scope) => scopes.push(scope),
        Err(error) => broken = Some(error),
    })?;
    broken.map_or(Ok(scopes), Err)
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
        ];
        let found: Vec<(u32, Vec<u32>)> = by_thread(&scopes)
            .into_iter()
            .map(|(thread, chains)| (thread.key, chains.iter().map(|chain| chain.key).collect()))
            .collect();
        assert_eq!(found, [(1, vec![2, 4]), (3, vec![5]), (7, vec![])]);
    }
}
