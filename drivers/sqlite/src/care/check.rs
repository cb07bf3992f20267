//! Checking a whole database, or some of its threads, row by row.
//!
//! A page that cannot be read does not end the check: what is on it is reported, and everything else is checked.

use std::collections::{HashMap, HashSet};
use std::fmt;

use threadkeep::id::ThreadId;
use threadkeep::{Error, Result};
use threadkeep_layout::Run;

use crate::care::scopes::{CHAINS, Directory, THREADS, by_thread, deleted, is_thread, numbers};
use crate::care::used::Used;
use crate::rows::checkpoints;
use crate::rows::directory::Scope;
use crate::rows::element::{self, Elements, SPACES};
use crate::rows::names::Names;
use crate::rows::pack;
use crate::rows::record::{CheckpointRecord, NameKey, Ordinal, StoredChannel, TaskRecord};
use crate::rows::seal::RowKey;
use crate::sql::{Db, text};

const INTEGRITY: &str = "PRAGMA integrity_check(100)";

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
    let mut check = Check::new(db, names);
    check.integrity()?;
    check.dictionaries()?;
    check.names()?;
    let directory = check.directory()?;
    if directory.is_complete() {
        check.strays(&directory.scopes)?;
    }
    check.threads(&directory, |_| true)?;
    for (thread, chains) in deleted(&directory.scopes) {
        check.deleted(thread, &chains)?;
    }
    Ok(check.found)
}

/// The defects of these threads. Other rows are not read, but for the lists of names and of threads.
pub(crate) fn check_threads(db: &Db, names: &Names, threads: &[ThreadId]) -> Result<Vec<Finding>> {
    let mut check = Check::new(db, names);
    check.names()?;
    let directory = check.directory()?;
    check.threads(&directory, |scope| threads.iter().any(|thread| thread.as_str() == scope.text))?;
    check.found.retain(|finding| finding.scope.is_some());
    Ok(check.found)
}

struct Check<'a> {
    db: &'a Db,
    names: &'a Names,
    found: Vec<Finding>,
    /// Whether all names can be read.
    has_names: bool,
    /// Whether a page could not be read. What follows is of later moments, and nothing is swept: orphans are not reported.
    unreadable: bool,
}

/// A decoded row of a chain.
type Row = (CheckpointRecord, Vec<TaskRecord>);

impl<'a> Check<'a> {
    fn new(db: &'a Db, names: &'a Names) -> Self {
        Self { db, names, found: Vec::new(), has_names: true, unreadable: false }
    }

    fn threads(&mut self, directory: &Directory, is_wanted: impl Fn(&Scope) -> bool) -> Result<()> {
        for (thread, chains) in
            by_thread(&directory.scopes).into_iter().filter(|(thread, _)| is_wanted(thread))
        {
            // A page that could not be read has ended the transaction. A thread is checked as it is at one moment.
            if self.db.is_autocommit() {
                self.db.execute("BEGIN", [])?;
            }
            self.thread(thread, &chains)?;
        }
        Ok(())
    }

    fn report(
        &mut self,
        scope: Option<(&str, &str)>,
        place: impl fmt::Display,
        what: impl fmt::Display,
        orphan: bool,
    ) {
        if orphan && self.unreadable {
            return;
        }
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

    /// Whether all of it was read. A page that cannot be read is reported.
    fn read(
        &mut self,
        scope: Option<(&str, &str)>,
        place: impl fmt::Display,
        read: Result<()>,
    ) -> Result<bool> {
        match read {
            Ok(()) => Ok(true),
            Err(Error::Corrupt { reason, .. }) => {
                self.unreadable = true;
                self.report(scope, place, reason, false);
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    fn integrity(&mut self) -> Result<()> {
        let mut texts = Vec::new();
        let read = self.db.each(INTEGRITY, [], |row| {
            texts.push(text(row, 0)?.to_owned());
            Ok(())
        });
        for line in texts.iter().flat_map(|text| text.lines()) {
            if line != "ok" && !line.starts_with("***") {
                self.report(None, "the file", line, false);
            }
        }
        self.read(None, "the file", read).map(|_| ())
    }

    fn dictionaries(&mut self) -> Result<()> {
        let mut broken = Vec::new();
        let read = pack::each_broken_dictionary(self.db, |place, error| broken.push((place, error)));
        for (place, error) in broken {
            self.broken(None, place, &error);
        }
        self.read(None, "table dictionary", read).map(|_| ())
    }

    /// All threads need the names: what is wrong with them is reported once.
    fn names(&mut self) -> Result<()> {
        match self.names.read(self.db) {
            Ok(()) => {}
            Err(error @ Error::Corrupt { .. }) => {
                (self.has_names, self.unreadable) = (false, true);
                self.report(None, "table name", error, false);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn directory(&mut self) -> Result<Directory> {
        let mut directory = Directory::read(self.db)?;
        for (place, error) in &directory.broken {
            self.broken(None, *place, error);
        }
        if let Some(error) = directory.unreadable.take() {
            self.read(None, "table scope, so threads may be missing here", Err(error.clone()))?;
            directory.unreadable = Some(error);
        }
        Ok(directory)
    }

    /// Rows that belong to nothing in the directory.
    fn strays(&mut self, scopes: &[Scope]) -> Result<()> {
        let threads: HashSet<u32> =
            scopes.iter().filter(|scope| is_thread(scope)).map(|scope| scope.key).collect();
        for scope in scopes.iter().filter(|scope| !is_thread(scope) && !threads.contains(&scope.owner)) {
            let what = format!("namespace {:?} of a thread that does not exist", scope.text);
            self.report(None, format!("table scope, key {}", scope.key), what, true);
        }
        let known: HashSet<u32> = scopes.iter().map(|scope| scope.key).collect();
        for (statement, table) in [(CHAINS, "checkpoint"), (THREADS, "element")] {
            let found = match numbers(self.db, statement) {
                // The threads whose rows these are report the page.
                Err(Error::Corrupt { .. }) => {
                    self.unreadable = true;
                    continue;
                }
                found => found?,
            };
            for scope in found.into_iter().filter(|scope| !known.contains(scope)) {
                let what = "rows of a thread or namespace that does not exist";
                self.report(None, format!("table {table}, scope {scope}"), what, true);
            }
        }
        Ok(())
    }

    fn thread(&mut self, thread: &Scope, chains: &[&Scope]) -> Result<()> {
        let mut there: [Vec<u32>; 3] = Default::default();
        let mut broken = Vec::new();
        let read = element::each(self.db, thread.key, |place, element| match element {
            Ok((space, seq)) => there[space as usize].push(seq),
            Err(error) => broken.push((place, error)),
        });
        let whole = self.read(Some((&thread.text, "")), "table element", read)?;
        // A broken element is reported once, and not again for everything that refers to it.
        let mut silent: [HashSet<u32>; 3] = Default::default();
        for (place, error) in &broken {
            self.broken(Some((&thread.text, "")), *place, error);
            if let Some((space, seq)) = element::space_of(*place) {
                silent[space as usize].insert(seq);
            }
        }
        let mut used = Used::default();
        let mut complete = whole && broken.is_empty();
        for chain in chains {
            complete &= self.chain(thread, chain, &mut used, whole)?;
        }
        if !whole {
            return Ok(()); // Which of its elements are missing is unknown.
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

    /// Pages that keep the rows of a deleted thread from being deleted. What the rows hold does not matter any more.
    fn deleted(&mut self, thread: &Scope, chains: &[&Scope]) -> Result<()> {
        let rows = format!("rows of deleted thread number {}, which are left", thread.key);
        let elements = element::each(self.db, thread.key, |_, _| {});
        self.read(None, format!("table element, {rows}"), elements)?;
        for chain in chains {
            let checkpoints = checkpoints::each(self.db, chain.key, |_, _| {});
            self.read(None, format!("table checkpoint, {rows}"), checkpoints)?;
        }
        Ok(())
    }

    /// Checks a namespace of a thread, whose elements are all read or not. Returns whether everything that it refers to is
    /// noted.
    fn chain(&mut self, thread: &Scope, chain: &Scope, used: &mut Used, has_elements: bool) -> Result<bool> {
        let scope = Some((thread.text.as_str(), chain.text.as_str()));
        let (mut all, mut broken) = (HashMap::new(), Vec::new());
        let mut last = None;
        let read = checkpoints::each(self.db, chain.key, |place, row| {
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
        });
        let whole = self.read(scope, "table checkpoint", read)?;
        if all.is_empty() && broken.is_empty() {
            self.report(scope, format!("table scope, key {}", chain.key), "it has no checkpoints", true);
        }
        let mut elements = Elements::new(self.db, thread.key);
        let mut complete = whole && broken.is_empty();
        for (place, error) in &broken {
            self.broken(scope, *place, error);
        }
        if !whole || !has_elements {
            return Ok(false); // What is missing may be on the page that was reported.
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
        for name in names.into_iter().filter(|_| self.has_names) {
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
