//! A change of a thread: one call of the function `threadkeep_write`, which stores all of it or nothing.

use futures::future::try_join;
use threadkeep::id::{Namespace, ThreadId};
use threadkeep::{Error, Result};
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Row};
use uuid::Uuid;

use crate::draft::Drafted;
use crate::element::pack;
use crate::error::{Trouble, unavailable};
use crate::history::{History, Mark};
use crate::keys;
use crate::pool::Param;
use crate::record::needs;
use crate::rows::{Node, ThreadRow, column, head_sum};
use crate::sql::Sql;

/// What a rewrite removes.
#[derive(Debug, Default)]
pub(crate) struct Removal {
    /// Checkpoints.
    pub(crate) ns: Vec<Vec<u8>>,
    pub(crate) ids: Vec<Uuid>,
    /// Runs of elements.
    pub(crate) first: Vec<i64>,
    pub(crate) last: Vec<i64>,
    /// Namespaces that have no checkpoint any more.
    pub(crate) headless: Vec<Vec<u8>>,
}

/// What is written, as the arguments of the function. Nothing is written unless the thread is unchanged.
pub(crate) struct Change {
    thread: Uuid,
    name: Vec<u8>,
    /// Its epoch, revision and nonce before; none if it did not exist.
    from: (Option<i64>, Option<i64>, Option<Uuid>),
    to: Mark,
    flushed: bool,
    body: Vec<u8>,
    seqs: Vec<i64>,
    hashes: Vec<Uuid>,
    sizes: Vec<Option<i32>>,
    elements: Vec<Vec<u8>>,
    ns: Vec<Vec<u8>>,
    ids: Vec<Uuid>,
    parents: Vec<Option<Uuid>>,
    seeds: Vec<Option<Uuid>>,
    names: Vec<i32>,
    extras: Vec<Option<i32>>,
    needs: Vec<Option<String>>,
    bodies: Vec<Vec<u8>>,
    tasks: Vec<Option<Vec<u8>>>,
    head_ns: Vec<Vec<u8>>,
    heads: Vec<Uuid>,
    head_names: Vec<Vec<u8>>,
    head_sums: Vec<Vec<u8>>,
    removal: Option<Removal>,
}

impl Change {
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
            from: (from.map(|from| from.epoch), from.map(|from| from.revision), from.map(|from| from.nonce)),
            to: to.mark,
            flushed: to.mark.is_flushed(),
            body: ThreadRow { history: to.clone(), next: drafted.next }.body(thread),
            seqs: elements.iter().map(|(seq, _)| *seq).collect(),
            hashes: elements.iter().map(|(_, element)| Uuid::from_bytes(*element.hash())).collect(),
            sizes,
            elements: bodies,
            ns: Vec::new(),
            ids: Vec::new(),
            parents: Vec::new(),
            seeds: Vec::new(),
            names: Vec::new(),
            extras: Vec::new(),
            needs: Vec::new(),
            bodies: Vec::new(),
            tasks: Vec::new(),
            head_ns: Vec::new(),
            heads: Vec::new(),
            head_names: Vec::new(),
            head_sums: Vec::new(),
            removal: None,
        })
    }

    /// Stores a checkpoint, replacing the one with its id, if any. `names` is the element with its names.
    pub(crate) fn put(&mut self, namespace: &Namespace, node: &Node, names: u32) {
        let ns = keys::of_namespace(namespace);
        let (body, tasks) = node.bodies(self.thread, &ns, names);
        let needs = needs(&node.record, &node.tasks);
        let needs = (!needs.is_empty()).then(|| {
            let numbers: Vec<_> = needs.iter().map(i64::to_string).collect();
            format!("{{{}}}", numbers.join(","))
        });
        self.ns.push(ns);
        self.ids.push(keys::uuid(node.id));
        self.parents.push(node.record.parent.map(keys::uuid));
        self.seeds.push(node.record.seed().map(keys::uuid));
        // Numbers end far below the limit of either type.
        self.names.push(names.cast_signed());
        self.extras.push(node.record.extra_element().map(u32::cast_signed));
        self.needs.push(needs);
        self.bodies.push(body);
        self.tasks.push(tasks);
    }

    /// Makes a checkpoint the newest of its namespace.
    pub(crate) fn head(&mut self, namespace: &Namespace, head: Uuid) {
        let (ns, name) = (keys::of_namespace(namespace), namespace.as_str().as_bytes());
        self.head_sums.push(head_sum(self.thread, &ns, name, head));
        self.head_ns.push(ns);
        self.heads.push(head);
        self.head_names.push(name.to_vec());
    }

    /// Also removes rows. Only an existing thread has any.
    pub(crate) fn remove(&mut self, removal: Removal) {
        self.removal = Some(removal);
    }

    /// The arguments of [`Sql::write`].
    pub(crate) fn params(&self) -> Vec<Param<'_>> {
        vec![
            (&self.thread, Type::UUID),
            (&self.name, Type::BYTEA),
            (&self.from.0, Type::INT8),
            (&self.from.1, Type::INT8),
            (&self.from.2, Type::UUID),
            (&self.to.epoch, Type::INT8),
            (&self.to.revision, Type::INT8),
            (&self.to.nonce, Type::UUID),
            (&self.body, Type::BYTEA),
            (&self.flushed, Type::BOOL),
            (&self.seqs, Type::INT8_ARRAY),
            (&self.hashes, Type::UUID_ARRAY),
            (&self.sizes, Type::INT4_ARRAY),
            (&self.elements, Type::BYTEA_ARRAY),
            (&self.ns, Type::BYTEA_ARRAY),
            (&self.ids, Type::UUID_ARRAY),
            (&self.parents, Type::UUID_ARRAY),
            (&self.seeds, Type::UUID_ARRAY),
            (&self.names, Type::INT4_ARRAY),
            (&self.extras, Type::INT4_ARRAY),
            (&self.needs, Type::TEXT_ARRAY),
            (&self.bodies, Type::BYTEA_ARRAY),
            (&self.tasks, Type::BYTEA_ARRAY),
            (&self.head_ns, Type::BYTEA_ARRAY),
            (&self.heads, Type::UUID_ARRAY),
            (&self.head_names, Type::BYTEA_ARRAY),
            (&self.head_sums, Type::BYTEA_ARRAY),
        ]
    }

    /// Writes it inside a transaction that has locked the thread. Returns whether the thread was as expected.
    pub(crate) async fn write_in(&self, sql: &Sql, client: &Client) -> Result<bool, Trouble> {
        let params = self.params();
        let write = client.query_typed(&sql.write, &params);
        let rows = match &self.removal {
            None => write.await?,
            Some(removal) => {
                let params: [Param<'_>; 8] = [
                    (&self.thread, Type::UUID),
                    (&self.to.epoch, Type::INT8),
                    (&self.to.revision, Type::INT8),
                    (&removal.ns, Type::BYTEA_ARRAY),
                    (&removal.ids, Type::UUID_ARRAY),
                    (&removal.first, Type::INT8_ARRAY),
                    (&removal.last, Type::INT8_ARRAY),
                    (&removal.headless, Type::BYTEA_ARRAY),
                ];
                // In the same round trip.
                try_join(write, client.query_typed(&sql.remove, &params)).await?.0
            }
        };
        Ok(won(&rows)?)
    }
}

/// The function's answer.
pub(crate) fn won(rows: &[Row]) -> Result<bool> {
    match rows {
        [row] => column(row, 0),
        _ => Err(Error::corrupt("an answer of the database", format!("{} rows of one", rows.len()))),
    }
}
