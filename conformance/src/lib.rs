#![doc = include_str!("../README.md")]

mod case;
mod cases;
mod child;
mod command;
mod difference;
mod factory;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod kit;
mod live;
mod model;
mod report;
mod run;
pub mod savers;
mod settings;
mod waits;

pub use case::{Case, Claim, Level};
pub use cases::cases;
pub use child::child;
pub use command::ReportArguments;
pub use factory::{BoxError, Damage, Factory, Failing};
pub use model::naive::{Naive, Refusal};
pub use report::{CaseReport, Report, Verdict};
pub use run::{main, run};
pub use settings::Settings;
