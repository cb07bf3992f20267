//! A change of a thread: one call of the function `threadkeep_write`, which stores all of it or nothing. The usual commit
//! has a function of its own: see [`Step`].

use threadkeep::id::{Namespace, ThreadId};
use threadkeep::{Error, Result};
use tokio_postgres::types::Type;
use uuid::Uuid;

use crate::draft::Drafted;
use crate::element::pack;
use crate::error::{STRAY, Trouble, unavailable};
use crate::history::{History, Mark};
use crate::keys;
use crate::pool::{Ask, Param};
use crate::record::needs;
use crate::rows::{Node, ThreadRow, head_sum};
use crate::sql::Sql;
use crate::step::Step;

/// The most bytes of a change; few in tests, which then need no gigabyte. A server closes the connection on a message
/// of a gigabyte, and the change would be in doubt. The rest is for commits of other threads in the same statement.
const MOST: usize = if cfg!(test) { 4 << 20 } else { (1 << 30) - (1 << 26) };
/// What an element, a row and a number have in a message at most besides their bytes: keys, hashes, lengths.
const ELEMENT: usize = 64;
const ROW: usize = 192;
const NUMBER: usize = 24;

/// What is written. Nothing is written unless the thread is unchanged.
pub(crate) struct Change {
    thread: Uuid,
    name: Vec<u8>,
    /// Its mark before; none if it did not exist.
    from: Option<Mark>,
    to: Mark,
    body: Vec<u8>,
    seqs: Vec<i64>,
    hashes: Vec<Uuid>,
    sizes: Vec<Option<i32>>,
    elements: Vec<Vec<u8>>,
    rows: Vec<StoredRow>,
    heads: Vec<Head>,
}

/// A row of a checkpoint.
pub(crate) struct StoredRow {
    pub(crate) ns: Vec<u8>,
    pub(crate) id: Uuid,
    pub(crate) parent: Option<Uuid>,
    pub(crate) seed: Option<Uuid>,
    pub(crate) names: i32,
    pub(crate) extra: Option<i32>,
    pub(crate) needs: Option<Vec<i64>>,
    pub(crate) body: Vec<u8>,
    pub(crate) tasks: Option<Vec<u8>>,
}

impl StoredRow {
    fn bytes(&self) -> usize {
        self.body.len() + self.tasks.as_ref().map_or(0, Vec::len)
    }
}

/// The newest checkpoint of a namespace.
struct Head {
    ns: Vec<u8>,
    name: Vec<u8>,
    id: Uuid,
    sum: Vec<u8>,
}

impl Change {
    /// A change that creates a thread with these rows, whose numbers go on from `next`.
    pub(crate) fn created(
        thread: &ThreadId,
        to: &History,
        next: [u32; 3],
        rows: Vec<StoredRow>,
    ) -> Result<Self> {
        Ok(Self { rows, ..Self::new(thread, None, to, &Drafted::nothing(next))? })
    }

    /// A change that moves a thread from one mark (none: it does not exist) to another, with these new elements.
    pub(crate) fn new(
        thread: &ThreadId,
        from: Option<Mark>,
        to: &History,
        drafted: &Drafted,
    ) -> Result<Self> {
        let elements = &drafted.elements;
        let packed = elements.iter().map(|(_, element)| pack(element.bytes()));
        let packed: Vec<_> =
            packed.collect::<Result<_, _>>().map_err(|error| unavailable(format!("zstd: {error}")))?;
        let (sizes, bodies) = packed.into_iter().unzip();
        Ok(Self {
            thread: keys::of_thread(thread),
            name: thread.as_str().into(),
            from,
            to: to.mark,
            body: ThreadRow { history: to.clone(), next: drafted.next }.body(thread),
            seqs: elements.iter().map(|(seq, _)| *seq).collect(),
            hashes: elements.iter().map(|(_, element)| Uuid::from_bytes(*element.hash())).collect(),
            sizes,
            elements: bodies,
            rows: Vec::new(),
            heads: Vec::new(),
        })
    }

    /// Stores a checkpoint, replacing the one with its id, if any. `names` is the element with its names.
    pub(crate) fn put(&mut self, namespace: &Namespace, node: &Node, names: u32) {
        let ns = keys::of_namespace(namespace);
        let (body, tasks) = node.bodies(self.thread, &ns, names);
        let needs = needs(&node.record, &node.tasks);
        self.rows.push(StoredRow {
            ns,
            id: keys::uuid(node.id),
            parent: node.record.parent.map(keys::uuid),
            seed: node.record.seed().map(keys::uuid),
            // Numbers end far below the limit of either type.
            names: names.cast_signed(),
            extra: node.record.extra_element().map(u32::cast_signed),
            needs: (!needs.is_empty()).then_some(needs),
            body,
            tasks,
        });
    }

    /// Makes a checkpoint the newest of its namespace.
    pub(crate) fn head(&mut self, namespace: &Namespace, head: Uuid) {
        let (ns, name) = (keys::of_namespace(namespace), namespace.as_str().as_bytes());
        let sum = head_sum(self.thread, &ns, name, head);
        self.heads.push(Head { ns, name: name.to_vec(), id: head, sum });
    }

    /// Refuses what no server takes.
    pub(crate) fn check(&self, thread: &ThreadId) -> Result<()> {
        let size = self.size();
        if size <= MOST {
            return Ok(());
        }
        Err(Error::InvalidInput(format!(
            "thread {thread}: a change of {size} bytes is too large for Postgres, which takes {MOST} in one statement; \
             write less at a time, or keep large values outside of the thread"
        )))
    }

    /// The bytes of a statement with it, or somewhat more.
    fn size(&self) -> usize {
        let elements = self.elements.iter().map(|element| ELEMENT + element.len());
        let rows = self
            .rows
            .iter()
            .map(|row| ROW + row.ns.len() + row.bytes() + NUMBER * row.needs.as_ref().map_or(0, Vec::len));
        let heads = self.heads.iter().map(|head| ROW + head.ns.len() + head.name.len() + head.sum.len());
        let parts = elements.chain(rows).chain(heads).sum::<usize>();
        ROW + self.name.len() + self.body.len() + parts
    }

    /// A change that commits one checkpoint without pending rows, and maybe adds tasks to its parent, in a namespace
    /// that has a head.
    ///
    /// # Errors
    /// The change itself if it is another one.
    pub(crate) fn into_step(mut self: Box<Self>) -> Result<Box<Step>, Box<Self>> {
        let Some(from) = self.from else { return Err(self) };
        let ([head], [.., new @ StoredRow { tasks: None, .. }]) = (&mut self.heads[..], &mut self.rows[..])
        else {
            return Err(self);
        };
        let (head_sum, id) = (std::mem::take(&mut head.sum), new.id);
        let is_packed = self.sizes.iter().any(Option::is_some);
        let mut step = Box::new(Step {
            thread: self.thread,
            from,
            to: self.to,
            body: self.body,
            seqs: some(self.seqs),
            hashes: some(self.hashes),
            sizes: is_packed.then_some(self.sizes),
            elements: some(self.elements),
            ns: std::mem::take(&mut new.ns),
            id,
            parent: new.parent,
            tasks: None,
            parent_needs: None,
            seed: new.seed,
            names: new.names,
            extra: new.extra,
            needs: new.needs.take(),
            row: std::mem::take(&mut new.body),
            head_sum,
        });
        if let [parent, _] = &mut self.rows[..] {
            (step.tasks, step.parent_needs) = (parent.tasks.take(), parent.needs.take());
        }
        Ok(step)
    }

    /// Splits off pieces until at most `most` checkpoints and elements remain, of at most `bytes` each. The caller
    /// writes the pieces in order and then the rest, in one transaction: the first piece creates the thread, and each
    /// later one checks that the mark is still that of the first. A change of an existing thread is not split,
    /// because its other writers wait until the transaction ends; one that goes on with the thread that its transaction
    /// created is.
    pub(crate) fn pieces(&mut self, (most, bytes): (usize, usize)) -> Vec<Self> {
        let mut pieces = Vec::new();
        if self.from.is_some_and(|from| from != self.to) {
            return pieces;
        }
        loop {
            let rows = that_fit(self.rows.iter().map(StoredRow::bytes), (most, bytes));
            let elements = that_fit(self.elements.iter().map(Vec::len), (most, bytes));
            if rows == self.rows.len() && elements == self.elements.len() {
                return pieces;
            }
            pieces.push(Self {
                thread: self.thread,
                name: self.name.clone(),
                from: self.from.replace(self.to),
                to: self.to,
                body: self.body.clone(),
                seqs: end_of(&mut self.seqs, elements),
                hashes: end_of(&mut self.hashes, elements),
                sizes: end_of(&mut self.sizes, elements),
                elements: end_of(&mut self.elements, elements),
                rows: end_of(&mut self.rows, rows),
                heads: Vec::new(),
            });
        }
    }

    /// Writes it. Returns whether the thread was as expected.
    pub(crate) async fn write(&self, sql: &Sql, asks: &mut impl Ask) -> Result<bool, Trouble> {
        let rows = Columns::of(&self.rows);
        let heads = &self.heads;
        let head_ns: Vec<_> = heads.iter().map(|head| &head.ns[..]).collect();
        let head_ids: Vec<_> = heads.iter().map(|head| head.id).collect();
        let head_names: Vec<_> = heads.iter().map(|head| &head.name[..]).collect();
        let head_sums: Vec<_> = heads.iter().map(|head| &head.sum[..]).collect();
        let from = self.from;
        let (epoch, revision) = (from.map(|from| from.epoch), from.map(|from| from.revision));
        let (nonce, flushed) = (from.map(|from| from.nonce), self.to.is_flushed());
        let params: [Param<'_>; 27] = [
            (&self.thread, Type::UUID),
            (&self.name, Type::BYTEA),
            (&epoch, Type::INT8),
            (&revision, Type::INT8),
            (&nonce, Type::UUID),
            (&self.to.epoch, Type::INT8),
            (&self.to.revision, Type::INT8),
            (&self.to.nonce, Type::UUID),
            (&self.body, Type::BYTEA),
            (&flushed, Type::BOOL),
            (&self.seqs, Type::INT8_ARRAY),
            (&self.hashes, Type::UUID_ARRAY),
            (&self.sizes, Type::INT4_ARRAY),
            (&self.elements, Type::BYTEA_ARRAY),
            (&rows.ns, Type::BYTEA_ARRAY),
            (&rows.ids, Type::UUID_ARRAY),
            (&rows.parents, Type::UUID_ARRAY),
            (&rows.seeds, Type::UUID_ARRAY),
            (&rows.names, Type::INT4_ARRAY),
            (&rows.extras, Type::INT4_ARRAY),
            (&rows.needs, Type::TEXT_ARRAY),
            (&rows.bodies, Type::BYTEA_ARRAY),
            (&rows.tasks, Type::BYTEA_ARRAY),
            (&head_ns, Type::BYTEA_ARRAY),
            (&head_ids, Type::UUID_ARRAY),
            (&head_names, Type::BYTEA_ARRAY),
            (&head_sums, Type::BYTEA_ARRAY),
        ];
        let rows = asks.ask(&sql.write, &params).await?;
        Ok(answers(&rows, (1, self.to.nonce))?[0])
    }
}

#[cfg(test)]
impl Change {
    /// The bytes of its rows, and of its elements.
    pub(crate) fn bytes(&self) -> [usize; 2] {
        [self.rows.iter().map(StoredRow::bytes).sum(), self.elements.iter().map(Vec::len).sum()]
    }

    /// How many elements it stores.
    pub(crate) fn elements(&self) -> usize {
        self.elements.len()
    }
}

/// What has items.
fn some<T>(all: Vec<T>) -> Option<Vec<T>> {
    (!all.is_empty()).then_some(all)
}

/// How many items of these sizes fit into a piece, from the end on. The first of them always does.
fn that_fit(sizes: impl DoubleEndedIterator<Item = usize>, (most, bytes): (usize, usize)) -> usize {
    let mut room = bytes;
    let fits = |(n, size): &(usize, usize)| {
        let fits = *n == 0 || *size <= room;
        room = room.saturating_sub(*size);
        fits
    };
    sizes.rev().take(most).enumerate().take_while(fits).count()
}

/// Splits off at most `most` items from the end, which moves no other.
fn end_of<T>(all: &mut Vec<T>, most: usize) -> Vec<T> {
    all.split_off(all.len().saturating_sub(most))
}

/// The columns of rows of checkpoints.
struct Columns<'a> {
    ns: Vec<&'a [u8]>,
    ids: Vec<Uuid>,
    parents: Vec<Option<Uuid>>,
    seeds: Vec<Option<Uuid>>,
    names: Vec<i32>,
    extras: Vec<Option<i32>>,
    /// Texts: an array of arrays would have to be rectangular.
    needs: Vec<Option<String>>,
    bodies: Vec<&'a [u8]>,
    tasks: Vec<Option<&'a [u8]>>,
}

impl<'a> Columns<'a> {
    fn of(rows: &'a [StoredRow]) -> Self {
        let text = |needs: &Vec<i64>| {
            let numbers: Vec<_> = needs.iter().map(i64::to_string).collect();
            format!("{{{}}}", numbers.join(","))
        };
        Self {
            ns: rows.iter().map(|row| &row.ns[..]).collect(),
            ids: rows.iter().map(|row| row.id).collect(),
            parents: rows.iter().map(|row| row.parent).collect(),
            seeds: rows.iter().map(|row| row.seed).collect(),
            names: rows.iter().map(|row| row.names).collect(),
            extras: rows.iter().map(|row| row.extra).collect(),
            needs: rows.iter().map(|row| row.needs.as_ref().map(text)).collect(),
            bodies: rows.iter().map(|row| &row.body[..]).collect(),
            tasks: rows.iter().map(|row| row.tasks.as_deref()).collect(),
        }
    }
}

/// The answers of a statement that calls a writing function this many times. The first column repeats the nonce that was
/// sent: whatever stands between this process and the server, the answer to another statement acknowledges nothing. The
/// last one is that of [`crate::sql::WARNED`].
pub(crate) fn answers(
    rows: &[tokio_postgres::Row],
    (calls, nonce): (usize, Uuid),
) -> Result<Vec<bool>, Trouble> {
    if let [row] = rows
        && row.len() == 2 + calls
        && row.try_get::<_, Option<Uuid>>(0).is_ok_and(|found| found == Some(nonce))
        && let Ok(answers) = (1..=calls).map(|call| row.try_get(call)).collect()
    {
        return Ok(answers);
    }
    Err(Trouble::Again { reason: STRAY.to_owned(), in_doubt: true, renew: true })
}
