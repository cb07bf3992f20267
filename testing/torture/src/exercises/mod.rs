//! The exercises, one a file.

pub mod conversions;
pub mod cut_answers;
pub mod failovers;
pub mod killed;
pub mod lost;
pub mod patroni;
pub mod power_loss;
pub mod processes;
pub mod programs;
pub mod properties;
pub mod readers;
pub mod refused;
pub mod registers;
pub mod statements;
pub mod storms;

use futures::future::BoxFuture;

use crate::exercise::{About, Exercise, Turn};
use crate::storage::Kind;

type Run = fn(Turn) -> BoxFuture<'static, anyhow::Result<()>>;

const fn exercise(name: &'static str, saver: Kind, about: About, run: Run) -> Exercise {
    Exercise { name, saver, about, run }
}

/// All of them, in the order in which `make torture` runs them.
pub const ALL: &[Exercise] = &[
    exercise("power loss", Kind::Sqlite, power_loss::ABOUT, |turn| Box::pin(power_loss::run(turn))),
    exercise("killed", Kind::Sqlite, killed::ABOUT, |turn| Box::pin(killed::run(turn))),
    exercise("killed", Kind::Postgres, killed::ABOUT, |turn| Box::pin(killed::run(turn))),
    exercise("failing files", Kind::Sqlite, statements::ABOUT, |turn| Box::pin(statements::run(turn))),
    exercise("failing statements", Kind::Postgres, refused::ABOUT, |turn| Box::pin(refused::run(turn))),
    exercise("storms", Kind::Memory, storms::ABOUT, |turn| Box::pin(storms::run(turn))),
    exercise("storms", Kind::Sqlite, storms::ABOUT, |turn| Box::pin(storms::run(turn))),
    exercise("storms", Kind::Postgres, storms::ABOUT, |turn| Box::pin(storms::run(turn))),
    exercise("two processes", Kind::Sqlite, processes::ABOUT, |turn| Box::pin(processes::run(turn))),
    exercise("two processes", Kind::Postgres, processes::ABOUT, |turn| Box::pin(processes::run(turn))),
    exercise("cut answers", Kind::Memory, cut_answers::ABOUT, |turn| Box::pin(cut_answers::run(turn))),
    exercise("cut answers", Kind::Sqlite, cut_answers::ABOUT, |turn| Box::pin(cut_answers::run(turn))),
    exercise("cut answers", Kind::Postgres, cut_answers::ABOUT, |turn| Box::pin(cut_answers::run(turn))),
    exercise("reads beside rewrites", Kind::Memory, readers::ABOUT, |turn| Box::pin(readers::run(turn))),
    exercise("reads beside rewrites", Kind::Sqlite, readers::ABOUT, |turn| Box::pin(readers::run(turn))),
    exercise("reads beside rewrites", Kind::Postgres, readers::ABOUT, |turn| Box::pin(readers::run(turn))),
    exercise("registers", Kind::Postgres, registers::ABOUT, |turn| Box::pin(registers::run(turn))),
    exercise("open writers", Kind::Memory, conversions::ABOUT, |turn| Box::pin(conversions::run(turn))),
    exercise("open writers", Kind::Sqlite, conversions::ABOUT, |turn| Box::pin(conversions::run(turn))),
    exercise("open writers", Kind::Postgres, conversions::ABOUT, |turn| Box::pin(conversions::run(turn))),
    exercise("properties", Kind::Memory, properties::ABOUT, |turn| Box::pin(properties::run(turn))),
    exercise("properties", Kind::Sqlite, properties::ABOUT, |turn| Box::pin(properties::run(turn))),
    exercise("properties", Kind::Postgres, properties::ABOUT, |turn| Box::pin(properties::run(turn))),
    exercise("random programs", Kind::Memory, programs::ABOUT, |turn| Box::pin(programs::run(turn))),
    exercise("random programs", Kind::Sqlite, programs::ABOUT, |turn| Box::pin(programs::run(turn))),
    exercise("random programs", Kind::Postgres, programs::ABOUT, |turn| Box::pin(programs::run(turn))),
    exercise("failovers", Kind::Postgres, failovers::ABOUT, |turn| Box::pin(failovers::run(turn))),
    exercise("lost histories", Kind::Sqlite, lost::ABOUT, |turn| Box::pin(lost::run(turn))),
    exercise("lost histories", Kind::Postgres, lost::ABOUT, |turn| Box::pin(lost::run(turn))),
    exercise("patroni", Kind::Postgres, patroni::ABOUT, |turn| Box::pin(patroni::run(turn))),
];
