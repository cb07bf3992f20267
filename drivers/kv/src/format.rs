//! The version of what a store holds.

use std::ops::ControlFlow;

use threadkeep::saver::Flush;
use threadkeep::{Error, Result};
use threadkeep_layout::{Decoder, put_uint};

use crate::keys;
use crate::rows;
use crate::store::{Changes, Order, Snapshot, Store};

/// The version of the format that is written, and the newest that is read. The table of keys describes it, with the
/// encodings of the rows.
pub const FORMAT_VERSION: u32 = 1;

/// Ensures that a store is empty, or holds what this program can read.
pub(crate) fn prepare(store: &dyn Store) -> Result<()> {
    if check(store.name(), &*store.snapshot()?)? {
        return Ok(());
    }
    store.write(Flush::Now, &mut |stored| {
        let mut changes = Changes::new();
        if !check(store.name(), stored)? {
            let mut body = Vec::new();
            put_uint(&mut body, FORMAT_VERSION);
            let key = keys::format();
            let value = rows::sealed(&key, body);
            changes.insert(key, Some(value));
        }
        Ok(changes)
    })
}

/// Whether the store is prepared; otherwise it is empty.
fn check(name: &'static str, rows: &dyn Snapshot) -> Result<bool> {
    let key = keys::format();
    if let Some(body) = rows::get(rows, &key)? {
        return match Decoder::new(&body).u32() {
            Ok(FORMAT_VERSION) => Ok(true),
            Ok(found) if found > FORMAT_VERSION => {
                Err(Error::NewerFormat { store: name.to_owned(), found, supported: FORMAT_VERSION })
            }
            _ => Err(rows::corrupt(&key, "unknown version of the format")),
        };
    }
    let mut empty = true;
    rows.range(&[]..&[u8::MAX; 64], Order::Ascending, &mut |_, _| {
        empty = false;
        Ok(ControlFlow::Break(()))
    })?;
    if empty {
        return Ok(false);
    }
    Err(Error::InvalidInput(format!("the {name} store holds other data; choose an empty one")))
}
