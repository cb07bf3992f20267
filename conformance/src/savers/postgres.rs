use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use threadkeep::saver::Saver;
use threadkeep_postgres::{Options, PostgresSaver, setup};
use threadkeep_testing::{Database, pgbouncer, postgres};

use crate::{BoxError, Claim, Factory};

/// The Postgres saver, each store in its own database on the test server.
#[derive(Debug, Clone, Copy)]
pub struct Postgres {
    /// Whether it is reached through PgBouncer in transaction mode.
    pub pooled: bool,
}

/// Options that wait as long as a busy machine needs.
fn patient() -> Options {
    Options { patience: Duration::from_mins(10), ..Options::default() }
}

#[async_trait]
impl Factory for Postgres {
    type Storage = Database;

    fn name(&self) -> &'static str {
        if self.pooled { "postgres-pgbouncer" } else { "postgres" }
    }

    fn claims(&self) -> &'static [Claim] {
        &[Claim::Durable, Claim::Killable]
    }

    async fn create(&self) -> Result<Database, BoxError> {
        let database = postgres()?.database().await?;
        setup(&self.address(&database)?, &patient()).await?;
        Ok(database)
    }

    async fn open(&self, place: &Database) -> Result<Arc<dyn Saver>, BoxError> {
        self.open_at(&self.address(place)?).await
    }

    fn address(&self, place: &Database) -> Result<String, BoxError> {
        Ok(if self.pooled { pgbouncer()?.url(place) } else { place.url().to_owned() })
    }

    async fn open_at(&self, address: &str) -> Result<Arc<dyn Saver>, BoxError> {
        let options = Options { connections: 4, ..patient() };
        Ok(Arc::new(PostgresSaver::connect(address, options).await?))
    }
}
