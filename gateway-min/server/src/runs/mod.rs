//! Runs: admission, the worker of a run, its stream, its events.

pub(crate) mod admission;
pub(crate) mod branch;
pub mod bridge;
mod cancel;
pub(crate) mod control;
pub(crate) mod delivery;
mod error;
#[cfg(test)]
mod faults;
#[cfg(test)]
mod fences;
pub(crate) mod frames;
#[cfg(test)]
mod golden;
pub(crate) mod instance;
pub(crate) mod interrupted_title;
pub(crate) mod journal;
pub(crate) mod lineage;
#[cfg(test)]
mod many;
mod mirror;
#[cfg(test)]
mod older;
pub(crate) mod ownership;
pub(crate) mod progress;
pub(crate) mod relay;
mod report;
pub mod request;
pub(crate) mod resume;
#[cfg(test)]
mod shape;
#[cfg(test)]
mod tests;
mod usage;
pub(crate) mod worker;
