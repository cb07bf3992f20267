//! The exercises, one a file.

pub mod killed;
pub mod power_loss;
pub mod processes;
pub mod statements;
pub mod storms;

use futures::future::BoxFuture;

use crate::exercise::{Exercise, Turn};
use crate::place::Kind;

type Run = fn(Turn) -> BoxFuture<'static, anyhow::Result<()>>;

const fn exercise(name: &'static str, saver: Kind, about: &'static str, run: Run) -> Exercise {
    Exercise { name, saver, about, run }
}

/// All of them, in the order in which `make torture` runs them.
pub const ALL: &[Exercise] = &[
    exercise("power loss", Kind::Sqlite, power_loss::ABOUT, |turn| Box::pin(power_loss::run(turn))),
    exercise("killed", Kind::Sqlite, killed::ABOUT, |turn| Box::pin(killed::run(turn))),
    exercise("killed", Kind::Postgres, killed::ABOUT, |turn| Box::pin(killed::run(turn))),
    exercise("failing files", Kind::Sqlite, statements::ABOUT, |turn| Box::pin(statements::run(turn))),
    exercise("storms", Kind::Memory, storms::ABOUT, |turn| Box::pin(storms::run(turn))),
    exercise("storms", Kind::Sqlite, storms::ABOUT, |turn| Box::pin(storms::run(turn))),
    exercise("storms", Kind::Postgres, storms::ABOUT, |turn| Box::pin(storms::run(turn))),
    exercise("two processes", Kind::Sqlite, processes::ABOUT, |turn| Box::pin(processes::run(turn))),
    exercise("two processes", Kind::Postgres, processes::ABOUT, |turn| Box::pin(processes::run(turn))),
];
