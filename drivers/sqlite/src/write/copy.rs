//! The contract's `copy_thread`: rows as they are stored, sealed for their new place.
//!
//! All of them are read in one transaction, and written in pieces to a thread without a name, see [`super::stage`]. Ordinals and
//! the numbers of elements stay the same, so no row is decoded.

use threadkeep::Result;
use threadkeep::id::{Namespace, ThreadId};

use crate::error::{SWEPT, unavailable};
use crate::rows::checkpoints::{self, CheckpointRow};
use crate::rows::directory::{self, Chain};
use crate::rows::element::{self, StoredElement};
use crate::rows::record::Ordinal;
use crate::saver::SqliteSaver;
use crate::sql::Db;
use crate::write::commit::{Work, WriterState};
use crate::write::stage::Staging;

/// Rows in a piece, for each checkpoint in a piece of a new thread: a row is copied that much quicker than one is made.
const ROWS: usize = 16;
/// The most bytes of rows in a piece, except for a single one with more.
const BYTES: usize = 512 << 10;

/// A piece of a copy.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    /// Identifies the copy until it has its name.
    token: String,
    /// Whether this is the first piece.
    first: bool,
    checkpoints: Vec<ChainPart>,
    elements: Vec<StoredElement>,
}

/// Checkpoints of one chain.
#[derive(Debug)]
struct ChainPart {
    namespace: Namespace,
    floor: Ordinal,
    rows: Vec<CheckpointRow>,
}

/// Cuts what is read of a thread into pieces.
#[derive(Default)]
struct Cutter {
    /// The most rows of a piece.
    most: usize,
    done: Vec<Rows>,
    /// The piece that may take more, and the rows and bytes in it.
    piece: Rows,
    rows: usize,
    bytes: usize,
}

impl Cutter {
    /// The piece that a row with this many bytes goes to.
    fn piece(&mut self, bytes: usize) -> &mut Rows {
        if self.rows == self.most || self.rows > 0 && self.bytes + bytes > BYTES {
            self.done.push(std::mem::take(&mut self.piece));
            (self.rows, self.bytes) = (0, 0);
        }
        (self.rows, self.bytes) = (self.rows + 1, self.bytes + bytes);
        &mut self.piece
    }

    fn checkpoint(&mut self, namespace: &Namespace, chain: Chain, row: CheckpointRow) {
        let parts = &mut self.piece(row.bytes()).checkpoints;
        if let Some(part) = parts.last_mut().filter(|part| part.namespace == *namespace) {
            part.rows.push(row);
        } else {
            let namespace = namespace.clone();
            parts.push(ChainPart { namespace, floor: chain.floor, rows: vec![row] });
        }
    }
}

/// A whole thread in pieces of at most this many rows, and how many checkpoints it has.
fn cut(db: &Db, thread: &ThreadId, most: usize) -> Result<(Vec<Rows>, usize)> {
    let mut cutter = Cutter { most, ..Cutter::default() };
    let Some(thread) = directory::find_thread(db, thread)? else { return Ok((Vec::new(), 0)) };
    let mut count = 0;
    for (namespace, chain) in directory::chains(db, thread)? {
        let rows = checkpoints::all(db, chain.key)?;
        count += rows.len();
        for row in rows {
            cutter.checkpoint(&namespace, chain, row);
        }
    }
    element::each_stored(db, thread, |element| cutter.piece(element.body.len()).elements.push(element))?;
    cutter.done.push(cutter.piece);
    Ok((cutter.done, count))
}

impl SqliteSaver {
    pub(crate) async fn copied_thread(&self, from: &ThreadId, to: &ThreadId) -> Result<usize> {
        let (source, most) = (from.clone(), ROWS * self.options.piece());
        let (pieces, count) = self.read(move |db| cut(db, &source, most)).await?;
        if count == 0 {
            return Ok(0);
        }
        self.refuse_existing(to).await?;
        let mut staging = Staging::of(self, to);
        for mut rows in pieces {
            (rows.token, rows.first) = staging.next_piece();
            if let Err(error) = staging.store(Work::Copy(Box::new(rows))).await {
                staging.discard().await;
                return Err(error);
            }
        }
        staging.take_new_name().await?;
        Ok(count)
    }
}

impl WriterState {
    /// Writes a piece of a copy.
    pub(crate) fn copy(&mut self, piece: &Rows) -> Result<()> {
        let db = &self.db;
        let thread = match directory::find_unnamed(db, &piece.token)? {
            Some(thread) => thread.key,
            None if piece.first => directory::add_unnamed(db, &piece.token)?.key,
            None => return Err(unavailable(SWEPT)),
        };
        for ChainPart { namespace, floor, rows } in &piece.checkpoints {
            let chain = if let Some(chain) = directory::find_chain(db, thread, namespace)? {
                chain
            } else {
                let chain = Chain { floor: *floor, ..directory::add_chain(db, thread, namespace)? };
                directory::set_floor(db, thread, namespace, chain)?;
                chain
            };
            rows.iter().try_for_each(|row| checkpoints::add_row(db, chain.key, row))?;
        }
        piece.elements.iter().try_for_each(|element| element::add_stored(db, thread, element))
    }
}
