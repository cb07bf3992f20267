//! Access to Postgres: the checkpoints, and the records next to them.

use threadkeep_config::{Database, Secret};
use threadkeep_postgres::{Address, Options};
use threadkeep_records::{PostgresTarget, RecordsError};
use tokio_postgres::config::Host;

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
    let invalid = |problem: String| RecordsError::Invalid { field: "database.postgres_url", problem };
    let address = Address::parse(url(database)).map_err(|error| invalid(error.to_string()))?;
    if address.config.get_hosts().is_empty() {
        return Err(invalid("it names no host".to_owned()));
    }
    let place = place(&address.config);
    let opener = address.opener().map_err(|error| invalid(error.to_string()))?;
    Ok(PostgresTarget::new(opener, place, schema, database.pool_size))
}

/// The database and its servers, without secrets.
fn place(config: &tokio_postgres::Config) -> String {
    let database = config.get_dbname().or(config.get_user()).unwrap_or_default();
    let ports = config.get_ports();
    let servers = config.get_hosts().iter().enumerate().map(|(n, host)| {
        let port = ports.get(n).or(ports.first()).copied().unwrap_or(5432);
        match host {
            Host::Tcp(name) => format!("{name}:{port}"),
            #[cfg(unix)]
            Host::Unix(path) => format!("{}:{port}", path.display()),
        }
    });
    format!("{database} on {}", servers.collect::<Vec<_>>().join(", "))
}

/// The database that a URL names, without its secrets.
pub(crate) fn name(url: &str) -> String {
    let Ok(Address { config, .. }) = Address::parse(url) else { return "Postgres".to_owned() };
    let host = config.get_hosts().first().map(|host| match host {
        Host::Tcp(name) => name.clone(),
        #[cfg(unix)]
        Host::Unix(path) => path.display().to_string(),
    });
    let part = |part: Option<&str>| part.unwrap_or("default").to_owned();
    format!("Postgres {}, database {}", part(host.as_deref()), part(config.get_dbname()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_place_of_the_records_is_read_in_both_forms_and_has_no_secrets() {
        let target = |address: &str| {
            let secret = Some(Secret::new(address.to_owned()));
            records(&Database { postgres_url: secret, ..Database::default() })
        };
        for address in ["postgres://u:hunter2@h:5433/d", "host=h port=5433 user=u password=hunter2 dbname=d"]
        {
            let shown = format!("{:?}", target(address).unwrap());
            assert!(shown.contains("d on h:5433") && !shown.contains("hunter2"), "{shown}");
        }
        let several = "postgres://u:hunter2@a,b:5433/d?target_session_attrs=read-write";
        assert!(format!("{:?}", target(several).unwrap()).contains("d on a:5432, b:5433"));
        for address in ["postgres://u:hunter2@h/d?nonsense=1", "mysql://u:hunter2@h/d", "hunter2", "user=u"] {
            let error = target(address).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn the_name_of_a_postgres_database_has_no_secrets() {
        let shown = name("postgres://ann:hidden@db.example:5433/threads?sslmode=require");
        assert_eq!(shown, "Postgres db.example, database threads");
        assert_eq!(
            name("postgres://ann:hidden@db/threads?sslmode=verify-full&sslrootcert=/r"),
            "Postgres db, database threads"
        );
        assert_eq!(name("port=none"), "Postgres");
    }
}
