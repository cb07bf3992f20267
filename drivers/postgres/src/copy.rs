//! The contract's `copy_thread`: rows as they are stored, sealed for their new thread, and elements within the server.
//!
//! One statement reads all rows of the source but its elements, at one moment. Elements do not change within an epoch of their
//! thread, and none is removed; so those that the rows refer to are copied afterwards, piece by piece, and if the source has
//! the same epoch then, they are those of that moment. Nobody waits for the copy: the source is not locked.

use std::collections::HashSet;
use std::time::Instant;

use threadkeep::Error;
use threadkeep::id::ThreadId;
use threadkeep::saver::Flush;
use tokio_postgres::Row;
use tokio_postgres::types::Type;
use uuid::Uuid;

use crate::aside::aside;
use crate::change::{Change, StoredRow};
use crate::create::{Made, Making};
use crate::element::SPACES;
use crate::error::Trouble;
use crate::history::History;
use crate::keys;
use crate::pool::{Param, Transaction};
use crate::rewrite::{PAUSE, PIECE};
use crate::rows::{CHECKPOINT, Snapshot, ThreadRow, column, moved};
use crate::store::Store;

/// Elements that one statement copies. What it adds to the server's log is flushed with the next commit of anybody.
const ELEMENTS: i64 = 250;

/// A copy of a thread.
pub(crate) struct Copying<'a> {
    from: &'a ThreadId,
    to: &'a ThreadId,
    /// The checkpoints that were copied.
    pub(crate) count: usize,
}

/// What was read of a thread.
struct Source {
    /// Its row and its heads.
    snapshot: Snapshot,
    /// Its checkpoints, as rows of the copy.
    rows: Vec<StoredRow>,
}

impl<'a> Copying<'a> {
    pub(crate) fn new(from: &'a ThreadId, to: &'a ThreadId) -> Self {
        Self { from, to, count: 0 }
    }

    /// Reads the source.
    async fn read(&self, store: &Store, transaction: &Transaction) -> Result<Source, Trouble> {
        let key = keys::of_thread(self.from);
        let remembered = store.remembered(self.from);
        let rows = transaction.query(&store.sql.rows, &[(&key, Type::UUID)]).await?;
        let (from, to) = (self.from.clone(), keys::of_thread(self.to));
        let source = aside(rows.len(), move || source(&from, to, rows)).await?;
        store.compare(&mut &*transaction, self.from, remembered, source.snapshot.thread.as_ref()).await?;
        Ok(source)
    }

    /// Copies the elements that the source had then, and pauses after each piece for as long as it took.
    async fn elements(
        &self,
        store: &Store,
        transaction: &Transaction,
        next: [u32; 3],
    ) -> Result<(), Trouble> {
        let (from, to) = (keys::of_thread(self.from), keys::of_thread(self.to));
        let ends: Vec<i64> = SPACES.into_iter().zip(next).map(|(space, next)| space.seq(next)).collect();
        let mut first = 0;
        loop {
            let began = Instant::now();
            let params: [Param<'_>; 5] = [
                (&from, Type::UUID),
                (&to, Type::UUID),
                (&first, Type::INT8),
                (&ends, Type::INT8_ARRAY),
                (&ELEMENTS, Type::INT8),
            ];
            let rows = transaction.query(&store.sql.copy_elements, &params).await?;
            let copied = rows.first().map(|row| Ok::<_, Error>((column(row, 0)?, column(row, 1)?)));
            match copied.transpose()? {
                Some((ELEMENTS, Some(last))) => first = i64::saturating_add(last, 1),
                _ => return Ok(()),
            }
            tokio::time::sleep(began.elapsed().min(PAUSE)).await;
        }
    }

    /// Whether the source has this epoch now.
    async fn is_in(&self, store: &Store, transaction: &Transaction, epoch: i64) -> Result<bool, Trouble> {
        let key = keys::of_thread(self.from);
        let rows = transaction.query(&store.sql.thread, &[(&key, Type::UUID)]).await?;
        let now = rows.first().map(|row| ThreadRow::of(self.from, row)).transpose()?;
        Ok(now.is_some_and(|now| now.history.mark.epoch == epoch))
    }
}

impl Making for Copying<'_> {
    async fn write(&mut self, store: &Store, transaction: &Transaction) -> Result<Made, Trouble> {
        let Source { snapshot, rows } = self.read(store, transaction).await?;
        self.count = rows.len();
        let Some(thread) = snapshot.thread else { return Ok(Made::Nothing) };
        let to = History::first(Flush::Now);
        let mut change = Change::created(self.to, &to, thread.next, rows)?;
        for (namespace, head) in snapshot.heads.values() {
            change.head(namespace, keys::uuid(*head));
        }
        let pieces = change.pieces(PIECE);
        pieces.iter().chain([&change]).try_for_each(|piece| piece.check(self.to))?;
        if !store.write_pieces(transaction, pieces.into_iter().chain([change])).await? {
            return Ok(Made::Parts);
        }
        self.elements(store, transaction, thread.next).await?;
        let is_same = self.is_in(store, transaction, thread.history.mark.epoch).await?;
        Ok(if is_same { Made::Thread(to) } else { Made::Parts })
    }

    async fn is_nothing(&mut self, store: &Store, transaction: &Transaction) -> Result<bool, Trouble> {
        self.count = 0;
        Ok(store.look_if_there(transaction, self.from).await?.thread.is_none())
    }
}

fn source(from: &ThreadId, to: Uuid, rows: Vec<Row>) -> Result<Source, Error> {
    let (mut of_thread, mut checkpoints) = (Vec::new(), Vec::new());
    for row in rows {
        if column::<i32>(&row, 0)? == CHECKPOINT {
            checkpoints.push(moved(&row, from, to)?);
        } else {
            of_thread.push(row);
        }
    }
    let snapshot = Snapshot::parse(from, &of_thread)?;
    snapshot.check_owners(from, checkpoints.iter().map(|row| &row.ns))?;
    let there: HashSet<(&[u8], Uuid)> = checkpoints.iter().map(|row| (&row.ns[..], row.id)).collect();
    for (ns, (_, head)) in &snapshot.heads {
        if !there.contains(&(&ns[..], keys::uuid(*head))) {
            return Err(Error::broken(from, *head, "it is the newest one, and it is missing"));
        }
    }
    Ok(Source { snapshot, rows: checkpoints })
}
