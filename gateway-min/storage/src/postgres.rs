//! How Postgres is reached: the checkpoints and the records beside them.

use threadkeep_config::{Database, Secret};
use threadkeep_postgres::{Address, Options};
use threadkeep_records::{PostgresTarget, StoreError};

/// The schema of the Postgres tables where the configuration names none.
const SCHEMA: &str = "public";

/// The address of the Postgres server; a configuration of that backend without one is refused.
pub(crate) fn url(database: &Database) -> &str {
    database.postgres_url.as_ref().map_or("", Secret::expose)
}

/// How the checkpoints are reached.
pub(crate) fn options(database: &Database) -> Options {
    Options {
        schema: database.postgres_schema.clone().unwrap_or_else(|| SCHEMA.to_owned()),
        connections: usize::try_from(database.pool_size).unwrap_or(usize::MAX),
        ..Options::default()
    }
}

/// How the gateway's records are reached: beside the checkpoints, with a pool of their own.
pub(crate) fn records(database: &Database) -> Result<PostgresTarget, StoreError> {
    let schema = database.postgres_schema.as_deref().unwrap_or(SCHEMA);
    let address = Address::parse(url(database)).map_err(|error| StoreError::Invalid {
        field: "database.postgres_url",
        problem: error.to_string(),
    })?;
    let roots = address.root_certificates.as_deref();
    PostgresTarget::new(&address.config, roots, schema, database.pool_size)
}

/// Which database a URL names, for people, without what is secret in it.
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
