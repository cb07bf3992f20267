//! The contract's `list`. All rows of a listing are of one moment: those of two could contradict each other.

use std::sync::Arc;

use threadkeep::checkpoint::CheckpointTuple;
use threadkeep::id::CheckpointId;
use threadkeep::saver::ListQuery;
use threadkeep::{Error, Result};
use tokio_postgres::types::Type;
use uuid::Uuid;

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
            listing.add(snapshot)?;
        } else {
            self.pages(query, &mut listing).await?;
        }
        Ok(listing.done()?)
    }

    /// Reads pages until enough rows match, in one transaction that sees the database as it was at the first one.
    async fn pages(&self, query: &ListQuery, listing: &mut Listing<'_>) -> Result<(), Trouble> {
        let remembered = self.remembered(&query.thread);
        let transaction = Transaction::on(self.connections.lease().await?);
        let params = listing.next.params();
        let rows = transaction.begin_reading(transaction.query(&self.sql.newest, &params)).await?;
        let mut snapshot = Snapshot::of(&query.thread, rows).await?;
        self.compare(&mut &transaction, &query.thread, remembered, &snapshot).await?;
        while !listing.add(snapshot)? {
            let rows = transaction.query(&self.sql.newest, &listing.next.params()).await?;
            snapshot = Snapshot::of(&query.thread, rows).await?;
        }
        transaction.roll_back().await
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
struct Listing<'a> {
    query: &'a ListQuery,
    limit: usize,
    /// The rows of the next page.
    size: usize,
    next: Page,
    /// Whether a page was added.
    begun: bool,
    all: Snapshot,
    chosen: Vec<Place>,
}

impl<'a> Listing<'a> {
    fn of(query: &'a ListQuery) -> Self {
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
        Self { query, limit, size, next, begun: false, all, chosen: Vec::new() }
    }

    /// Adds the next page. Returns whether it was the last one that is needed.
    fn add(&mut self, page: Snapshot) -> Result<bool> {
        let query = self.query;
        let mut newest: Vec<(CheckpointId, &Vec<u8>, &Node)> = Vec::new();
        for (ns, nodes) in &page.nodes {
            newest.extend(nodes.iter().map(|(id, node)| (*id, ns, node)));
        }
        newest.sort_unstable_by(|a, b| (b.0, b.1).cmp(&(a.0, a.1)));
        for (id, ns, node) in &newest {
            if self.chosen.len() < self.limit && metadata(node, &page.elements)?.matches(&query.filter) {
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
        Ok(self.next.before.is_none() || self.chosen.len() >= self.limit)
    }

    fn done(self) -> Result<(Snapshot, Vec<Place>), Error> {
        check_parents(&self.query.thread, &self.all, self.next.before.map(keys::id))?;
        Ok((self.all, self.chosen))
    }
}
