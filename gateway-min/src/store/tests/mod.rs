//! Tests of the store as its users see it, and of what races, faults and dropped futures leave.

mod admission;
mod deletion;
mod dropped;
mod events;
pub(super) mod fault;
mod faults;
mod lifecycle;
mod model;
mod open;
mod recovery;
mod reservation;
mod search;
mod send;
mod support;
mod threads;
