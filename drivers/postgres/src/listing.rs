//! The contract's `list`. All rows of a listing are of one moment: those of two could contradict each other.

use std::sync::Arc;

use threadkeep::checkpoint::CheckpointTuple;
use threadkeep::id::CheckpointId;
use threadkeep::saver::ListQuery;
use threadkeep::{Error, Result};
use tokio_postgres::types::Type;
use uuid::Uuid;

use crate::aside::aside;
use crate::error::{BUSY, Trouble, unavailable};
use crate::keys;
use crate::pool::{Param, Transaction};
use crate::read::{ROUNDS, check_heads, check_parents};
use crate::rows::{Node, Snapshot};
use crate::store::Store;
use crate::view::{Values, metadata};

/// Rows that a filtered listing reads at first; each further page has four times as many.
const PAGE: usize = 64;

/// A namespace and a checkpoint in it.
type Place = (Vec<u8>, CheckpointId);

impl Store {
    /// The contract's `list`.
    pub(crate) async fn list(&self, query: &ListQuery) -> Result<Vec<CheckpointTuple>, Trouble> {
        if query.limit == Some(0) {
            return Ok(Vec::new());
        }
        for _ in 0..ROUNDS {
            let (snapshot, chosen) = self.choose(query).await?;
            let (thread, load) = (query.thread.clone(), query.load.clone());
            let make = move |snapshot: &Snapshot, values: &mut Values<'_>| {
                // From the oldest on, so that a list that grew is built from the previous one.
                let tuples = chosen.iter().rev().filter_map(|(ns, id)| {
                    let namespace = &snapshot.heads.get(ns)?.0;
                    let node = snapshot.nodes.get(ns)?.get(id)?;
                    Some(values.tuple(&thread, namespace, node, &load))
                });
                let mut tuples = tuples.collect::<Result<Vec<_>>>()?;
                tuples.reverse();
                Ok(tuples)
            };
            if let Some(tuples) = self.with_values(&query.thread, snapshot, Arc::new(make)).await? {
                return Ok(tuples);
            }
        }
        Err(unavailable(BUSY).into())
    }

    /// The checkpoints that match a query, newest first, and a snapshot that has them.
    async fn choose(&self, query: &ListQuery) -> Result<(Snapshot, Vec<Place>), Trouble> {
        let mut listing = Listing::of(query);
        if query.filter.is_empty() {
            // Every row matches, so one page is enough.
            let snapshot = self.snapshot(&query.thread, &self.sql.newest, &listing.next.params()).await?;
            listing = listing.add(snapshot).await?;
        } else {
            listing = self.pages(query, listing).await?;
        }
        listing.done().await
    }

    /// Reads pages until enough rows match, in one transaction that sees the database as it was at the first one.
    async fn pages(&self, query: &ListQuery, mut listing: Listing) -> Result<Listing, Trouble> {
        let remembered = self.remembered(&query.thread);
        let transaction = Transaction::on(self.connections.lease().await?);
        let params = listing.next.params();
        let rows = transaction.begin_reading(transaction.query(&self.sql.newest, &params)).await?;
        let mut snapshot = Snapshot::of(&query.thread, rows).await?;
        self.compare(&mut &transaction, &query.thread, remembered, snapshot.thread.as_ref()).await?;
        loop {
            listing = listing.add(snapshot).await?;
            if listing.is_complete() {
                break;
            }
            let rows = transaction.query(&self.sql.newest, &listing.next.params()).await?;
            snapshot = Snapshot::of(&query.thread, rows).await?;
        }
        transaction.roll_back().await?;
        Ok(listing)
    }
}

/// What to read next: the parameters of [`crate::sql::Sql::newest`].
struct Page {
    thread: Uuid,
    ns: Option<Vec<u8>>,
    /// The last row of the page before this one.
    before: Option<Uuid>,
    before_ns: Option<Vec<u8>>,
    rows: Option<i64>,
}

impl Page {
    fn params(&self) -> [Param<'_>; 5] {
        [
            (&self.thread, Type::UUID),
            (&self.ns, Type::BYTEA),
            (&self.before, Type::UUID),
            (&self.before_ns, Type::BYTEA),
            (&self.rows, Type::INT8),
        ]
    }
}

/// The pages of a listing so far.
struct Listing {
    query: ListQuery,
    limit: usize,
    /// The rows of the next page.
    size: usize,
    next: Page,
    /// Whether a page was added.
    begun: bool,
    all: Snapshot,
    chosen: Vec<Place>,
}

impl Listing {
    fn of(query: &ListQuery) -> Self {
        let limit = query.limit.unwrap_or(usize::MAX);
        let size = if query.filter.is_empty() { limit } else { PAGE };
        let next = Page {
            thread: keys::of_thread(&query.thread),
            ns: query.namespace.as_ref().map(keys::of_namespace),
            before: query.before.map(keys::uuid),
            before_ns: query.before.map(|_| Vec::new()),
            rows: i64::try_from(size).ok(),
        };
        let all = Snapshot::absent(&query.thread);
        Self { query: query.clone(), limit, size, next, begun: false, all, chosen: Vec::new() }
    }

    /// Adds the next page.
    async fn add(self, page: Snapshot) -> Result<Self, Trouble> {
        aside(page.size(), move || self.with(page)).await
    }

    fn with(mut self, page: Snapshot) -> Result<Self> {
        let query = &self.query;
        let mut newest: Vec<(CheckpointId, &Vec<u8>, &Node)> = Vec::new();
        for (ns, nodes) in &page.nodes {
            newest.extend(nodes.iter().map(|(id, node)| (*id, ns, node)));
        }
        newest.sort_unstable_by(|a, b| (b.0, b.1).cmp(&(a.0, a.1)));
        for (id, ns, node) in &newest {
            if self.chosen.len() == self.limit {
                break;
            }
            if query.filter.is_empty() || metadata(node, &page.elements)?.matches(&query.filter) {
                self.chosen.push(((*ns).clone(), *id));
            }
        }
        let rest = newest.last().filter(|_| newest.len() >= self.size);
        let rest = rest.map(|(id, ns, _)| (*id, (*ns).clone()));
        if !self.begun && query.before.is_none() {
            check_heads(&query.thread, &page, rest.as_ref().map(|(id, _)| *id))?;
        }
        self.begun = true;
        (self.next.before, self.next.before_ns) = rest.map(|(id, ns)| (keys::uuid(id), ns)).unzip();
        self.size = self.size.saturating_mul(4);
        self.next.rows = i64::try_from(self.size).ok();
        self.all.join(page);
        Ok(self)
    }

    /// Whether no further page is needed.
    fn is_complete(&self) -> bool {
        self.next.before.is_none() || self.chosen.len() >= self.limit
    }

    async fn done(self) -> Result<(Snapshot, Vec<Place>), Trouble> {
        let rows = self.all.size();
        let check = move || {
            check_parents(&self.query.thread, &self.all, self.next.before.map(keys::id))?;
            Ok::<_, Error>((self.all, self.chosen))
        };
        aside(rows, check).await
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::mpsc;

    use futures::poll;
    use threadkeep::id::ThreadId;
    use threadkeep::metadata::Source;
    use tokio::task::spawn_blocking;

    use super::*;
    use crate::record::{CheckpointRecord, Extra, Rest};

    fn node(n: u8, m: u8) -> Node {
        let record = CheckpointRecord {
            parent: None,
            source: Source::Loop,
            step: n.into(),
            delta_marker: false,
            next: Vec::new(),
            applied: Vec::new(),
            parents: Vec::new(),
            counters: BTreeMap::new(),
            extra: Extra { rest: Rest::Empty, maps: Vec::new() },
            channels: BTreeMap::new(),
        };
        let mut id = [0; 16];
        id[..2].copy_from_slice(&[n, m]);
        Node { id: CheckpointId::from_bytes(id), record, tasks: Vec::new() }
    }

    /// The runtime has one thread for tasks and one for such work. As long as that one is taken, a listing of many rows waits.
    #[test]
    fn many_rows_are_looked_through_on_a_thread_of_its_own() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .max_blocking_threads(1)
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let query = ListQuery::new(&ThreadId::from("t"));
            let mut page = Snapshot::absent(&query.thread);
            let nodes = (0..10).flat_map(|n| (0..60).map(move |m| node(n, m))).map(|node| (node.id, node));
            page.nodes.insert(Vec::new(), nodes.collect());

            let (free, taken) = mpsc::channel();
            let holder = spawn_blocking(move || taken.recv());
            let mut adding = Box::pin(Listing::of(&query).add(page));
            assert!(poll!(&mut adding).is_pending());
            free.send(()).unwrap();
            holder.await.unwrap().unwrap();
            let listing = adding.await.unwrap();

            let (free, taken) = mpsc::channel();
            let holder = spawn_blocking(move || taken.recv());
            let mut ending = Box::pin(listing.done());
            assert!(poll!(&mut ending).is_pending());
            free.send(()).unwrap();
            holder.await.unwrap().unwrap();
            assert_eq!(ending.await.unwrap().1.len(), 600);
        });
    }
}
