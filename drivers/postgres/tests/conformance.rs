//! The conformance suite on the Postgres saver, directly and through PgBouncer.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::process::ExitCode;
use std::sync::Arc;

use async_trait::async_trait;
use common::damage;
use threadkeep::saver::Saver;
use threadkeep_conformance::savers::Postgres;
use threadkeep_conformance::{BoxError, Claim, Damage, Factory, child, main as suite};
use threadkeep_testing::Database;

/// The factory of the suite, and damage.
struct Breakable(Postgres);

#[async_trait]
impl Factory for Breakable {
    type Place = Database;

    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn claims(&self) -> &'static [Claim] {
        &[Claim::Durable, Claim::Killable, Claim::LoseCheckpoint, Claim::LoseWrites, Claim::LoseParentLink]
    }

    async fn create(&self) -> Result<Database, BoxError> {
        self.0.create().await
    }

    async fn open(&self, place: &Database) -> Result<Arc<dyn Saver>, BoxError> {
        self.0.open(place).await
    }

    async fn damage(&self, place: &Database, damage: &Damage) -> Result<(), BoxError> {
        damage::inflict(place.url(), damage).await
    }

    fn address(&self, place: &Database) -> Result<String, BoxError> {
        self.0.address(place)
    }

    async fn open_at(&self, address: &str) -> Result<Arc<dyn Saver>, BoxError> {
        self.0.open_at(address).await
    }
}

fn main() -> ExitCode {
    let [direct, pooled] = [false, true].map(|pooled| Breakable(Postgres { pooled }));
    if let Some(code) = child(&direct).or_else(|| child(&pooled)) {
        return code;
    }
    let direct = suite(direct);
    let pooled = suite(pooled);
    if direct == ExitCode::SUCCESS { pooled } else { direct }
}
