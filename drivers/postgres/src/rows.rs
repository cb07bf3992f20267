//! Rows of the tables: decoded and verified when read, sealed when written.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};

use threadkeep::id::{ChannelName, CheckpointId, Namespace, ThreadId};
use threadkeep::{Error, Result};
use threadkeep_layout::{Malformed, PART, decode_names};
use tokio_postgres::Row;
use uuid::Uuid;

use crate::aside::aside;
use crate::change::StoredRow;
use crate::element::{Elements, Space};
use crate::error::{Trouble, corrupt};
use crate::history::{History, Mark};
use crate::keys;
use crate::record::{CheckpointRecord, TaskRecord, ThreadBody, decode_tasks, encode_tasks};
use crate::seal::Seal;

/// The row of a thread.
#[derive(Debug, Clone)]
pub(crate) struct ThreadRow {
    pub(crate) history: History,
    pub(crate) next: [u32; 3],
}

impl ThreadRow {
    fn seal(key: Uuid, name: &[u8], mark: Mark) -> Seal {
        let seal = Seal::of("thread").and(key.as_bytes()).and(name);
        let seal = seal.and(&mark.epoch.to_le_bytes()).and(&mark.revision.to_le_bytes());
        // Rows from before version 4 of the format have no nonce.
        if mark.nonce.is_nil() { seal } else { seal.and(mark.nonce.as_bytes()) }
    }

    /// The sealed body.
    pub(crate) fn body(&self, thread: &ThreadId) -> Vec<u8> {
        let past = Some((self.history.life, self.history.trail.clone()));
        Self::seal(keys::of_thread(thread), thread.as_str().as_bytes(), self.history.mark)
            .close(ThreadBody { next: self.next, past }.encode())
    }

    fn open(key: Uuid, name: &[u8], mark: Mark, body: &[u8]) -> Result<Self, Malformed> {
        let ThreadBody { next, past } = ThreadBody::decode(Self::seal(key, name, mark).open(body)?)?;
        if !mark.has_successor() {
            return Err(Malformed("the count of its writes is out of range"));
        }
        let (life, trail) = past.unwrap_or_else(|| (mark.epoch, Vec::new()));
        Ok(Self { history: History { life, mark, trail }, next })
    }
}

impl ThreadRow {
    /// The row `(id, epoch, revision, name, body, nonce)` of a thread.
    pub(crate) fn of(thread: &ThreadId, row: &Row) -> Result<Self> {
        let (key, mark, name, body) = columns(row)?;
        Self::open(key, name, mark, body).map_err(|reason| corrupt("thread", thread, "its row", reason))
    }

    /// The lives that a thread whose row is damaged may be in: the one that its body says, if that can be read, and the one of
    /// a thread that a version before 4 of the format wrote.
    pub(crate) fn possible_lives(row: &Row) -> Result<Vec<i64>> {
        let (_, mark, _, body) = columns(row)?;
        let said = Seal::unchecked(body).and_then(|body| ThreadBody::decode(body).ok()?.past);
        Ok(said.map(|(life, _)| life).into_iter().chain([mark.epoch]).collect())
    }
}

/// The columns that make the row of a thread.
fn columns(row: &Row) -> Result<(Uuid, Mark, &[u8], &[u8])> {
    let mark = Mark { epoch: column(row, 1)?, revision: column(row, 2)?, nonce: column(row, 5)? };
    Ok((column(row, 0)?, mark, column(row, 3)?, column(row, 4)?))
}

/// The id of a thread, from the row `(id, epoch, revision, name, body, nonce)`.
pub(crate) fn thread_name(row: &Row) -> Result<ThreadId> {
    let (key, mark, name, body) = columns(row)?;
    let wrong = |reason: Malformed| Error::corrupt(format!("table threadkeep_thread, id {key}"), reason);
    ThreadRow::open(key, name, mark, body).map_err(wrong)?;
    std::str::from_utf8(name).map(ThreadId::from).map_err(|_| wrong(Malformed("the name is not UTF-8")))
}

/// The seal of the row that names the newest checkpoint of a namespace.
pub(crate) fn head_sum(thread: Uuid, ns: &[u8], name: &[u8], head: Uuid) -> Vec<u8> {
    Seal::of("head").and(thread.as_bytes()).and(ns).and(name).and(head.as_bytes()).close(Vec::new())
}

/// The row of a checkpoint, decoded.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Node {
    pub(crate) id: CheckpointId,
    pub(crate) record: CheckpointRecord,
    pub(crate) tasks: Vec<TaskRecord>,
}

/// The columns of a checkpoint's row that its body's seal covers.
struct Covered<'a> {
    thread: Uuid,
    ns: &'a [u8],
    id: Uuid,
    parent: Option<Uuid>,
    seed: Option<Uuid>,
    names: u32,
    extra: Option<u32>,
}

impl<'a> Covered<'a> {
    /// Those of the row of a checkpoint of the thread with this key.
    fn of(row: &'a Row, thread: Uuid, wrong: impl Fn(Malformed) -> Error) -> Result<Self> {
        let number = |n: i64| u32::try_from(n).map_err(|_| wrong(Malformed("a number is out of range")));
        let (names, extra): (i64, Option<i64>) = (column(row, 5)?, column(row, 6)?);
        Ok(Self {
            thread,
            ns: column(row, 1)?,
            id: column(row, 2)?,
            parent: column(row, 3)?,
            seed: column(row, 4)?,
            names: number(names)?,
            extra: extra.map(number).transpose()?,
        })
    }

    fn seal(&self) -> Seal {
        let number = |n: u32| i64::from(n).to_le_bytes();
        let seal = Seal::of("checkpoint").and(self.thread.as_bytes()).and(self.ns).and(self.id.as_bytes());
        let seal = seal.and_maybe(self.parent.as_ref().map(|id| &id.as_bytes()[..]));
        let seal = seal.and_maybe(self.seed.as_ref().map(|id| &id.as_bytes()[..]));
        seal.and(&number(self.names)).and_maybe(self.extra.map(number).as_ref().map(|n| &n[..]))
    }

    fn tasks_seal(&self) -> Seal {
        Seal::of("checkpoint").and(b"tasks").and(self.thread.as_bytes()).and(self.ns).and(self.id.as_bytes())
    }
}

impl Node {
    /// The same checkpoint, with these tasks.
    pub(crate) fn with(&self, tasks: Vec<TaskRecord>) -> Self {
        Self { id: self.id, record: self.record.clone(), tasks }
    }

    /// Its bytes in memory, roughly. Its tasks may be thousands, and so may the writes of one of them.
    pub(crate) fn weight(&self) -> usize {
        let Self { record, tasks, .. } = self;
        let writes = tasks.iter().map(|task| task.writes.len()).sum::<usize>();
        let parts = record.channels.len() + record.counters.len() + record.next.len() + tasks.len() + writes;
        let maps = record.extra.maps.iter().map(|(_, runs)| size_of_val(runs.as_slice())).sum::<usize>();
        parts * PART + size_of_val(record.applied.as_slice()) + maps
    }

    /// The sealed body, and the sealed tasks if there are any.
    pub(crate) fn bodies(&self, thread: Uuid, ns: &[u8], names: u32) -> (Vec<u8>, Option<Vec<u8>>) {
        let covered = Covered {
            thread,
            ns,
            id: keys::uuid(self.id),
            parent: self.record.parent.map(keys::uuid),
            seed: self.record.seed().map(keys::uuid),
            names,
            extra: self.record.extra_element(),
        };
        let tasks = (!self.tasks.is_empty()).then(|| covered.tasks_seal().close(encode_tasks(&self.tasks)));
        (covered.seal().close(self.record.encode()), tasks)
    }
}

/// The row `(kind, ns, id, parent, seed, names, extra, body, tasks, needs)` of a checkpoint of thread `from`, verified and
/// sealed as one of the thread with key `to`. It is not decoded: nothing in it depends on the thread.
pub(crate) fn moved(row: &Row, from: &ThreadId, to: Uuid) -> Result<StoredRow> {
    let id: Uuid = column(row, 2)?;
    let wrong = |reason| corrupt("checkpoint", from, format_args!("checkpoint {id}"), reason);
    let old = Covered::of(row, keys::of_thread(from), wrong)?;
    let body = old.seal().open(column(row, 7)?).map_err(wrong)?.to_vec();
    let tasks: Option<&[u8]> = column(row, 8)?;
    let tasks =
        tasks.map(|tasks| old.tasks_seal().open(tasks).map(<[u8]>::to_vec)).transpose().map_err(wrong)?;
    let new = Covered { thread: to, ..old };
    Ok(StoredRow {
        ns: new.ns.to_vec(),
        id,
        parent: new.parent,
        seed: new.seed,
        names: new.names.cast_signed(),
        extra: new.extra.map(u32::cast_signed),
        needs: column(row, 9)?,
        body: new.seal().close(body),
        tasks: tasks.map(|tasks| new.tasks_seal().close(tasks)),
    })
}

/// The rows of a thread that a statement returned, from one snapshot. Every row is verified.
pub(crate) struct Snapshot {
    pub(crate) thread: Option<ThreadRow>,
    /// The newest checkpoints, by namespace.
    pub(crate) heads: BTreeMap<Vec<u8>, (Namespace, CheckpointId)>,
    /// The requested checkpoints, by namespace and id.
    pub(crate) nodes: BTreeMap<Vec<u8>, BTreeMap<CheckpointId, Node>>,
    pub(crate) elements: Elements,
    /// Sequence numbers and hashes of stored elements, if requested.
    pub(crate) hashes: Vec<(Space, u32, [u8; 16])>,
}

// The kind of a row in the common shape of all statements on a thread.
const THREAD: i32 = 0;
const HEAD: i32 = 1;
pub(crate) const CHECKPOINT: i32 = 2;
const ELEMENT: i32 = 3;
const HASH: i32 = 4;

impl Snapshot {
    /// A snapshot of a thread that does not exist.
    pub(crate) fn absent(thread: &ThreadId) -> Self {
        Self {
            thread: None,
            heads: BTreeMap::new(),
            nodes: BTreeMap::new(),
            elements: Elements::new(thread),
            hashes: Vec::new(),
        }
    }

    /// Parses the rows `(kind, ns, k1, k2, k3, n1, n2, b1, b2)` of a statement of module `sql`.
    pub(crate) async fn of(thread: &ThreadId, rows: Vec<Row>) -> Result<Self, Trouble> {
        let thread = thread.clone();
        aside(rows.len(), move || Self::parse(&thread, &rows)).await
    }

    pub(crate) fn parse(thread: &ThreadId, rows: &[Row]) -> Result<Self> {
        let mut this = Self::absent(thread);
        let key = keys::of_thread(thread);
        let mut checkpoints = Vec::new();
        for row in rows {
            match column::<i32>(row, 0)? {
                THREAD => {
                    let mark =
                        Mark { epoch: column(row, 5)?, revision: column(row, 6)?, nonce: column(row, 2)? };
                    let (name, body): (&[u8], &[u8]) = (column(row, 7)?, column(row, 8)?);
                    let wrong = |reason| corrupt("thread", thread, "its row", reason);
                    if name != thread.as_str().as_bytes() {
                        return Err(wrong(Malformed("it has the name of another thread")));
                    }
                    this.thread = Some(ThreadRow::open(key, name, mark, body).map_err(wrong)?);
                }
                HEAD => {
                    let (ns, head): (&[u8], Uuid) = (column(row, 1)?, column(row, 2)?);
                    let (name, sum): (&[u8], &[u8]) = (column(row, 7)?, column(row, 8)?);
                    let text =
                        std::str::from_utf8(name).ok().filter(|_| *sum == head_sum(key, ns, name, head));
                    let text = text.ok_or_else(|| {
                        corrupt("head", thread, format_args!("head {head}"), "the checksum does not match")
                    })?;
                    this.heads.insert(ns.to_vec(), (text.into(), keys::id(head)));
                }
                CHECKPOINT => checkpoints.push(row),
                ELEMENT => {
                    let hash: Uuid = column(row, 2)?;
                    this.elements.add(column(row, 5)?, *hash.as_bytes(), column(row, 6)?, column(row, 7)?)?;
                }
                HASH => {
                    let (seq, hash): (i64, Uuid) = (column(row, 5)?, column(row, 2)?);
                    let (space, n) = Space::split(seq)
                        .ok_or_else(|| this.elements.corrupt(seq, "the number is out of range"))?;
                    this.hashes.push((space, n, *hash.as_bytes()));
                }
                kind => {
                    return Err(Error::corrupt("an answer of the database", format!("unknown kind {kind}")));
                }
            }
        }
        let mut names = HashMap::new();
        for row in checkpoints {
            this.add_checkpoint(thread, key, row, &mut names)?;
        }
        this.check_owners(thread, this.nodes.keys())?;
        Ok(this)
    }

    /// The number of its rows, but for those of the thread and its heads.
    pub(crate) fn size(&self) -> usize {
        self.nodes.values().map(BTreeMap::len).sum::<usize>() + self.elements.len() + self.hashes.len()
    }

    /// Adds a page of the same moment.
    pub(crate) fn join(&mut self, more: Self) {
        self.thread = more.thread.or(self.thread.take());
        for (ns, nodes) in more.nodes {
            self.nodes.entry(ns).or_default().extend(nodes);
        }
        self.heads.extend(more.heads);
        self.elements.join(more.elements);
    }

    /// `names` are those of the elements that rows before it name: most rows of a thread share one.
    fn add_checkpoint(
        &mut self,
        thread: &ThreadId,
        key: Uuid,
        row: &Row,
        names: &mut HashMap<u32, Vec<ChannelName>>,
    ) -> Result<()> {
        let id: Uuid = column(row, 2)?;
        let wrong = |reason| corrupt("checkpoint", thread, format_args!("checkpoint {id}"), reason);
        let covered = Covered::of(row, key, wrong)?;
        let body = covered.seal().open(column(row, 7)?).map_err(wrong)?;
        let names =
            match names.entry(covered.names) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(unknown) => {
                    let element = self.elements.get(Space::Structure, covered.names)?;
                    unknown.insert(decode_names(element.bytes()).map_err(|reason| {
                        self.elements.corrupt(Space::Structure.seq(covered.names), reason)
                    })?)
                }
            };
        let parent = covered.parent.map(keys::id);
        let record = CheckpointRecord::decode(body, parent, names, covered.extra).map_err(wrong)?;
        let tasks: Option<&[u8]> = column(row, 8)?;
        let tasks = tasks.map(|tasks| decode_tasks(covered.tasks_seal().open(tasks)?)).transpose();
        let tasks = tasks.map_err(wrong)?.unwrap_or_default();
        let id = keys::id(id);
        self.nodes.entry(covered.ns.to_vec()).or_default().insert(id, Node { id, record, tasks });
        Ok(())
    }

    /// A row without its owner is damage: a lost row never makes a thread or namespace look unknown. `namespaces` are those
    /// of the checkpoints.
    pub(crate) fn check_owners<'a>(
        &self,
        thread: &ThreadId,
        mut namespaces: impl Iterator<Item = &'a Vec<u8>>,
    ) -> Result<()> {
        let unowned = namespaces.find(|ns| self.thread.is_none() || !self.heads.contains_key(*ns));
        if self.thread.is_none() && !(self.heads.is_empty() && unowned.is_none()) {
            return Err(corrupt(
                "thread",
                thread,
                "its row",
                "it is missing, and others of the thread are there",
            ));
        }
        match unowned {
            Some(ns) => {
                Err(corrupt("head", thread, format_args!("namespace key {ns:02x?}"), "the row is missing"))
            }
            None => Ok(()),
        }
    }

    /// The checkpoint that is the head of a namespace.
    ///
    /// # Errors
    /// [`Error::BrokenLineage`] if it is missing.
    pub(crate) fn head(&self, thread: &ThreadId, ns: &[u8]) -> Result<Option<&Node>> {
        let Some((_, head)) = self.heads.get(ns) else { return Ok(None) };
        let node = self.nodes.get(ns).and_then(|nodes| nodes.get(head));
        node.map(Some).ok_or_else(|| Error::broken(thread, *head, "it is the newest one, and it is missing"))
    }
}

/// A column of an answer.
pub(crate) fn column<'r, T: tokio_postgres::types::FromSql<'r>>(row: &'r Row, index: usize) -> Result<T> {
    row.try_get(index)
        .map_err(|error| Error::corrupt("an answer of the database", format!("column {index}: {error}")))
}
