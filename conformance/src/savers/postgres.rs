use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use threadkeep::saver::Saver;
use threadkeep_postgres::{Options, PostgresSaver, setup};
use threadkeep_testing::{Database, pgbouncer, postgres};

use crate::{BoxError, Claim, Factory};

/// How long a call waits for a connection, and for a server that gets no time on a busy machine: less than a case may
/// take.
const PATIENCE: Duration = Duration::from_mins(5);

fn options() -> Options {
    Options { connections: 4, patience: PATIENCE, ..Options::default() }
}

/// The Postgres saver, each store in its own database on the test server.
#[derive(Debug, Clone, Copy)]
pub struct Postgres {
    /// Whether it is reached through PgBouncer in transaction mode.
    pub pooled: bool,
}

#[async_trait]
impl Factory for Postgres {
    type Storage = Database;

    fn name(&self) -> &'static str {
        if self.pooled { "postgres-pgbouncer" } else { "postgres" }
    }

    fn claims(&self) -> &'static [Claim] {
        &[Claim::Durable, Claim::Killable, Claim::WritesAsItComes]
    }

    async fn create(&self) -> Result<Database, BoxError> {
        let database = postgres()?.database().await?;
        setup(&self.address(&database)?, &options()).await?;
        Ok(database)
    }

    async fn open(&self, place: &Database) -> Result<Arc<dyn Saver>, BoxError> {
        self.open_at(&self.address(place)?).await
    }

    fn address(&self, place: &Database) -> Result<String, BoxError> {
        Ok(if self.pooled { pgbouncer()?.url(place) } else { place.url().to_owned() })
    }

    async fn open_at(&self, address: &str) -> Result<Arc<dyn Saver>, BoxError> {
        Ok(Arc::new(PostgresSaver::connect(address, options()).await?))
    }
}
