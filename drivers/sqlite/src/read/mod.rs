//! Reading: the connections, the reading methods of the contract, and what the readers remember.

pub(crate) mod memory;
pub(crate) mod pool;
pub(crate) mod queries;
pub(crate) mod summary;
pub(crate) mod view;
