//! The conformance suite on the Postgres saver, directly and through PgBouncer.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::process::ExitCode;
use std::sync::Arc;

use async_trait::async_trait;
use common::damage;
use threadkeep::saver::Saver;
use threadkeep_conformance::{BoxError, Claim, Damage, Factory};
use threadkeep_postgres::{Options, PostgresSaver, setup};
use threadkeep_testing::{Database, pgbouncer, postgres};

struct Postgres {
    pooled: bool,
}

impl Postgres {
    fn address(&self, database: &Database) -> Result<String, BoxError> {
        Ok(if self.pooled { pgbouncer()?.url(database) } else { database.url().to_owned() })
    }
}

#[async_trait]
impl Factory for Postgres {
    type Place = Database;

    fn name(&self) -> &'static str {
        if self.pooled { "postgres-pgbouncer" } else { "postgres" }
    }

    fn claims(&self) -> &'static [Claim] {
        &[Claim::Durable, Claim::LoseCheckpoint, Claim::LoseWrites, Claim::LoseParentLink]
    }

    async fn create(&self) -> Result<Database, BoxError> {
        let database = postgres()?.database().await?;
        setup(&self.address(&database)?, &Options::default()).await?;
        Ok(database)
    }

    async fn open(&self, place: &Database) -> Result<Arc<dyn Saver>, BoxError> {
        let options = Options { connections: 4, ..Options::default() };
        Ok(Arc::new(PostgresSaver::connect(&self.address(place)?, options).await?))
    }

    async fn damage(&self, place: &Database, damage: &Damage) -> Result<(), BoxError> {
        damage::inflict(place.url(), damage).await
    }
}

fn main() -> ExitCode {
    let direct = threadkeep_conformance::main(Postgres { pooled: false });
    let pooled = threadkeep_conformance::main(Postgres { pooled: true });
    if direct == ExitCode::SUCCESS { pooled } else { direct }
}
