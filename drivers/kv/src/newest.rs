//! The checkpoints of a thread, newest first, whatever their namespaces: a short page of a long thread reads few rows.
//!
//! Rows are in the order of namespaces, so each namespace is read from its end on, in pieces, and the newest of all is
//! the newest of their next ones.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::ops::{ControlFlow, Range};

use threadkeep::Result;
use threadkeep::id::{CheckpointId, Namespace};
use threadkeep::saver::ListQuery;

use crate::keys::{self, Key, ThreadNumber, under};
use crate::queries::place;
use crate::store::{Order, Snapshot};

/// The most rows that are read at once.
const PIECE: usize = 64;

/// A row of a checkpoint.
pub(crate) struct Row {
    pub(crate) namespace: Namespace,
    pub(crate) id: CheckpointId,
    pub(crate) key: Key,
    pub(crate) value: Vec<u8>,
}

/// A namespace.
struct Chain {
    /// The keys of the rows that were not read yet.
    left: Range<Key>,
    /// Rows that were read and not taken, newest first.
    read: VecDeque<Row>,
}

/// The rows that a query is about, newest first; at the same id, by namespace.
pub(crate) struct Newest<'a> {
    rows: &'a dyn Snapshot,
    number: ThreadNumber,
    piece: usize,
    chains: Vec<Chain>,
    /// The next row of each chain.
    next: BinaryHeap<(CheckpointId, Reverse<Namespace>, usize)>,
    /// The chain whose row was taken last. It may not be asked for another one.
    taken: Option<usize>,
}

impl<'a> Newest<'a> {
    pub(crate) fn new(rows: &'a dyn Snapshot, number: ThreadNumber, query: &ListQuery) -> Result<Self> {
        // What a filter leaves out is not known before it is read.
        let enough = query.limit.filter(|_| query.filter.is_empty());
        let piece = enough.unwrap_or(PIECE).clamp(1, PIECE);
        let namespaces = match &query.namespace {
            Some(namespace) => vec![namespace.clone()],
            None => namespaces(rows, number)?,
        };
        let (chains, next) = (Vec::with_capacity(namespaces.len()), BinaryHeap::new());
        let mut newest = Self { rows, number, piece, chains, next, taken: None };
        for namespace in namespaces {
            let mut left = under(keys::chain(number, &namespace));
            if let Some(before) = query.before {
                left.end = keys::checkpoint(number, &namespace, before);
            }
            newest.chains.push(Chain { left, read: VecDeque::new() });
            newest.queue(newest.chains.len() - 1)?;
        }
        Ok(newest)
    }

    /// Takes the newest row.
    pub(crate) fn take(&mut self) -> Result<Option<Row>> {
        if let Some(chain) = self.taken.take() {
            self.queue(chain)?;
        }
        let Some((_, _, chain)) = self.next.pop() else { return Ok(None) };
        self.taken = Some(chain);
        Ok(self.chains.get_mut(chain).and_then(|chain| chain.read.pop_front()))
    }

    /// Queues the next row of a chain, if there is one.
    fn queue(&mut self, at: usize) -> Result<()> {
        let (number, piece) = (self.number, self.piece);
        let Some(Chain { left, read }) = self.chains.get_mut(at) else { return Ok(()) };
        if read.is_empty() && left.start < left.end {
            self.rows.range(&left.start..&left.end, Order::Descending, &mut |key, value| {
                let (namespace, id) = place(number, key)?;
                read.push_back(Row { namespace, id, key: key.to_vec(), value: value.to_vec() });
                Ok(if read.len() < piece { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
            })?;
            left.end = match read.back() {
                Some(last) if read.len() == piece => last.key.clone(),
                // They were the last ones.
                _ => left.start.clone(),
            };
        }
        if let Some(row) = read.front() {
            self.next.push((row.id, Reverse(row.namespace.clone()), at));
        }
        Ok(())
    }
}

/// The namespaces of a thread. Their rows are skipped.
fn namespaces(rows: &dyn Snapshot, number: ThreadNumber) -> Result<Vec<Namespace>> {
    let mut left = under(keys::checkpoints(number));
    let mut found = Vec::new();
    loop {
        let mut next = None;
        rows.range(&left.start..&left.end, Order::Ascending, &mut |key, _| {
            next = Some(key.to_vec());
            Ok(ControlFlow::Break(()))
        })?;
        let Some(key) = next else { return Ok(found) };
        let (namespace, _) = place(number, &key)?;
        left.start = under(keys::chain(number, &namespace)).end;
        found.push(namespace);
    }
}
