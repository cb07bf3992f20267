//! Access to Postgres: the checkpoints, and the records next to them.

use threadkeep::Error;
use threadkeep_config::{Database, Secret};
use threadkeep_postgres::{Address, Options};
use threadkeep_records::{PostgresTarget, RecordsError};
use tokio_postgres::config::Host;

/// The default schema of the Postgres tables.
const SCHEMA: &str = "public";
/// Why a URL with such options is refused.
const SEARCH_PATH: &str = "its options set search_path, which does not say where the tables are; leave it out, and name their \
    schema in database.postgres_schema";

/// The URL of the Postgres server; a configuration with this backend but no URL is refused.
pub(crate) fn url(database: &Database) -> &str {
    database.postgres_url.as_ref().map_or("", Secret::expose)
}

/// The same, unless something in it would be ignored.
pub(crate) fn checked_url(database: &Database) -> threadkeep::Result<&str> {
    let url = url(database);
    if Address::parse(url).is_ok_and(|address| sets_search_path(&address)) {
        return Err(Error::InvalidInput(format!("database.postgres_url: {SEARCH_PATH}")));
    }
    Ok(url)
}

/// Whether the options of the sessions say where to look for tables: `-c search_path=x` or `--search-path=x`.
fn sets_search_path(address: &Address) -> bool {
    let options = address.config.get_options().unwrap_or_default().to_lowercase();
    options.replace('-', "_").contains("search_path=")
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
pub(crate) fn records(database: &Database, is_command: bool) -> Result<PostgresTarget, RecordsError> {
    let schema = database.postgres_schema.as_deref().unwrap_or(SCHEMA);
    let invalid = |problem: String| RecordsError::Invalid { field: "database.postgres_url", problem };
    let address = Address::parse(url(database)).map_err(|error| invalid(error.to_string()))?;
    if sets_search_path(&address) {
        return Err(invalid(SEARCH_PATH.to_owned()));
    }
    if address.config.get_hosts().is_empty() {
        return Err(invalid("it names no host".to_owned()));
    }
    let place = place(&address.config);
    let address = if is_command { address.of_a_command() } else { address };
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
            records(&Database { postgres_url: secret, ..Database::default() }, false)
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

    /// The tables are in the schema that the configuration names, whatever the options of the sessions say.
    #[test]
    fn a_search_path_in_the_url_is_refused() {
        for options in
            ["-csearch_path%3Dx", "--search-path=x", "-c%20lock_timeout=5%20-c%20SEARCH_PATH=x,public"]
        {
            let url = format!("postgres://u:hunter2@h/d?options={options}");
            let database = Database { postgres_url: Some(Secret::new(url)), ..Database::default() };
            let errors = [
                records(&database, false).unwrap_err().to_string(),
                checked_url(&database).unwrap_err().to_string(),
            ];
            for error in errors {
                assert!(error.contains("search_path") && error.contains("postgres_schema"), "{error}");
                assert!(!error.contains("hunter2"), "{error}");
            }
        }
        let url = "postgres://u@h/d?options=-clock_timeout%3D5";
        let database = Database { postgres_url: Some(Secret::new(url)), ..Database::default() };
        assert_eq!(checked_url(&database).unwrap(), url);
        records(&database, false).unwrap();
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
