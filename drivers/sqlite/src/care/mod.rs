//! Looking after a database: checking and sweeping it, copying it, giving back room, training its dictionary.

pub(crate) mod backup;
pub(crate) mod check;
pub(crate) mod space;
pub(crate) mod train;
pub(crate) mod used;
