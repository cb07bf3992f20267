#![doc = include_str!("../README.md")]

mod case;
mod cases;
mod factory;
mod kit;
mod model;
mod run;

pub use case::{Case, Claim, Level};
pub use cases::cases;
pub use factory::{BoxError, Damage, Factory};
pub use run::{CaseReport, Report, Verdict, main, run};
