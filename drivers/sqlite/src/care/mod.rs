//! Maintenance of a database: checking, sweeping and copying it, returning free space, training its dictionary.

pub(crate) mod backup;
pub(crate) mod check;
pub(crate) mod scopes;
pub(crate) mod space;
pub(crate) mod sweep;
pub(crate) mod train;
pub(crate) mod used;
