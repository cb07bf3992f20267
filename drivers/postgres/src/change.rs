//! A change of a thread, as one statement that stores all of it or nothing.

use threadkeep::Result;
use threadkeep::id::{Namespace, ThreadId};
use threadkeep::saver::Flush;
use tokio_postgres::Client;
use tokio_postgres::types::Type;
use uuid::Uuid;

use crate::draft::Drafted;
use crate::element::pack;
use crate::error::{Trouble, unavailable};
use crate::keys;
use crate::pool::Param;
use crate::record::needs;
use crate::rows::{Mark, Node, ThreadRow, head_sum};
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

/// What is written, in the columns of the statement. Nothing is written unless the thread is still as it was.
pub(crate) struct Change {
    thread: Uuid,
    name: Vec<u8>,
    from: Option<Mark>,
    to: Mark,
    flush: Flush,
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
    /// A change that brings a thread from one mark (none: it is not there) to another, with these new elements.
    pub(crate) fn new(thread: &ThreadId, from: Option<Mark>, to: Mark, drafted: &Drafted) -> Result<Self> {
        let elements = &drafted.elements;
        let packed = elements.iter().map(|(_, element)| pack(element.bytes()));
        let packed: Vec<_> =
            packed.collect::<Result<_, _>>().map_err(|error| unavailable(format!("zstd: {error}")))?;
        let (sizes, bodies) = packed.into_iter().unzip();
        Ok(Self {
            thread: keys::of_thread(thread),
            name: thread.as_str().into(),
            from,
            to,
            flush: Flush::Now,
            body: ThreadRow { mark: to, next: drafted.next }.body(thread),
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

    /// Stores a checkpoint, in place of the one with its id if there is one. `names` is the element with its names.
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

    /// When it is on the disk, if that is not before it is acknowledged.
    pub(crate) fn flushed(&mut self, flush: Flush) {
        self.flush = flush;
    }

    /// Removes rows too. Only a thread that is there has any.
    pub(crate) fn remove(&mut self, removal: Removal) {
        self.removal = Some(removal);
    }

    /// The statement that writes it; it returns a row if the thread was as it had to be.
    pub(crate) fn statement<'a>(&'a self, sql: &'a Sql) -> (&'a str, Vec<Param<'a>>) {
        let mut params: Vec<Param<'a>> = vec![
            (&self.thread, Type::UUID),
            (&self.to.epoch, Type::INT8),
            (&self.to.revision, Type::INT8),
            (&self.body, Type::BYTEA),
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
        ];
        let Some(from) = &self.from else {
            params.push((&self.name, Type::BYTEA));
            return (sql.create.of(self.flush), params);
        };
        params.push((&from.epoch, Type::INT8));
        params.push((&from.revision, Type::INT8));
        let Some(removal) = &self.removal else { return (sql.advance.of(self.flush), params) };
        params.push((&removal.ns, Type::BYTEA_ARRAY));
        params.push((&removal.ids, Type::UUID_ARRAY));
        params.push((&removal.first, Type::INT8_ARRAY));
        params.push((&removal.last, Type::INT8_ARRAY));
        params.push((&removal.headless, Type::BYTEA_ARRAY));
        (&sql.rewrite, params)
    }

    /// Writes it inside a transaction. Answers whether the thread was as it had to be.
    pub(crate) async fn write_in(&self, sql: &Sql, client: &Client) -> Result<bool, Trouble> {
        let (statement, params) = self.statement(sql);
        Ok(!client.query_typed(statement, &params).await?.is_empty())
    }
}
