//! Access to Postgres: the checkpoints, and the records next to them.

use threadkeep_config::{Database, Secret};
use threadkeep_postgres::Options;
use threadkeep_records::{PostgresTarget, RecordsError};

/// The default schema of the Postgres tables.
const SCHEMA: &str = "public";

/// The URL of the Postgres server; a configuration with this backend but no URL is refused.
pub(crate) fn url(database: &Database) -> &str {
    database.postgres_url.as_ref().map_or("", Secret::expose)
}

/// The options for the checkpoints.
pub(crate) fn options(database: &Database) -> Options {
    Options {
        schema: database.postgres_schema.clone().unwrap_or_else(|| SCHEMA.to_owned()),
        connections: usize::try_from(database.pool_size).unwrap_or(usize::MAX),
        ..Options::default()
    }
}

/// The options for the gateway's records: next to the checkpoints, with their own pool.
pub(crate) fn records(database: &Database) -> Result<PostgresTarget, RecordsError> {
    let schema = database.postgres_schema.as_deref().unwrap_or(SCHEMA);
    PostgresTarget::new(url(database), schema, database.pool_size)
}

/// The database that a URL names, without its secrets.
pub(crate) fn name(url: &str) -> String {
    let Ok(config) = url.parse::<tokio_postgres::Config>() else { return "Postgres".to_owned() };
    let host = config.get_hosts().first().map(|host| match host {
        tokio_postgres::config::Host::Tcp(name) => name.clone(),
        #[cfg(unix)]
        tokio_postgres::config::Host::Unix(path) => path.display().to_string(),
    });
    let part = |part: Option<&str>| part.unwrap_or("default").to_owned();
    format!("Postgres {}, database {}", part(host.as_deref()), part(config.get_dbname()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_postgres_database_has_no_secrets() {
        let shown = name("postgres://ann:hidden@db.example:5433/threads?sslmode=require");
        assert_eq!(shown, "Postgres db.example, database threads");
        assert_eq!(name("port=none"), "Postgres");
    }
}
