//! Stored data: the rows of each table, their encodings and checksums, and the values in them.

pub(crate) mod checkpoints;
pub(crate) mod directory;
pub(crate) mod element;
pub(crate) mod extra;
pub(crate) mod names;
pub(crate) mod pack;
pub(crate) mod record;
pub(crate) mod seal;
pub(crate) mod value;
