//! Opening connections to one of several servers, and driving them.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc::UnboundedSender;
use tokio_postgres::config::{Host, SslMode, TargetSessionAttrs};
use tokio_postgres::error::{DbError, SqlState};
use tokio_postgres::{AsyncMessage, Client, Config, Connection, Error, Notification};
use tokio_util::task::AbortOnDropHandle;

use crate::tls::Tls;

/// How long to wait for the other servers after the first one has answered as a primary.
const GRACE: Duration = Duration::from_millis(250);

/// The timeline that a primary writes to; an error on a standby. Each promotion begins a new one.
const TIMELINE: &str =
    "SELECT pg_catalog.substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()), 1, 8)";

/// Whether a server that does not say its timeline is a primary.
const IS_PRIMARY: &str = "SELECT NOT pg_catalog.pg_is_in_recovery()";

/// The task that drives a connection. Dropped, it closes the connection at once, whatever is under way on it: a client that
/// says goodbye waits for the answers first.
pub(crate) type Driver = AbortOnDropHandle<()>;

/// Opens connections.
#[derive(Clone)]
pub(crate) struct Connector {
    tls: Tls,
    /// Receives what the connections hear after a `LISTEN`.
    heard: Option<UnboundedSender<Notification>>,
    /// Whether it has warned that a connection is not encrypted.
    warned: Arc<AtomicBool>,
}

impl Connector {
    pub(crate) fn new(tls: Tls) -> Self {
        Self { tls, heard: None, warned: Arc::default() }
    }

    /// Passes on what its connections hear.
    pub(crate) fn heard_by(self, heard: Option<UnboundedSender<Notification>>) -> Self {
        Self { heard, ..self }
    }

    /// Connects to the server, or to the primary of several. All are asked at once, so that a hanging one delays
    /// nothing. If two claim to be the primary, the one promoted last is chosen.
    pub(crate) async fn open(&self, config: &Config) -> Result<(Client, Driver), Error> {
        let hosts = hosts(config);
        if hosts.len() < 2 {
            return self.connect(config).await;
        }
        let mut tries: FuturesUnordered<_> = hosts.iter().map(|config| self.primary(config)).collect();
        let (mut best, mut failed) = (None::<Primary>, None);
        loop {
            let next = match &best {
                None => tries.next().await,
                Some(_) => tokio::time::timeout(GRACE, tries.next()).await.unwrap_or(None),
            };
            match next {
                None => break,
                Some(Ok(found)) if best.as_ref().is_none_or(|best| best.timeline < found.timeline) => {
                    best = Some(found);
                }
                Some(Ok(_)) => {}
                // What another server says, mostly that it is a standby, is no reason to leave one that is full.
                Some(Err(error)) => failed = failed.filter(is_full).or(Some(error)),
            }
        }
        match (best, failed) {
            (Some(Primary { client, driver, .. }), _) => Ok((client, driver)),
            (None, Some(error)) => Err(error),
            // There are several, and each one answered in one of these ways.
            (None, None) => self.connect(config).await,
        }
    }

    async fn connect(&self, config: &Config) -> Result<(Client, Driver), Error> {
        let tls = self.tls.for_one();
        let (client, connection) = config.connect(tls.clone()).await?;
        let is_plain = config.get_ssl_mode() == SslMode::Prefer && !tls.was_used();
        if let Some(host) = remote(config).filter(|_| is_plain)
            && !self.warned.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(
                host,
                "the connection to the database is not encrypted, because the server offers no TLS: enable it there, and \
                 set sslmode=verify-full to accept no other connection; sslmode=disable accepts this one silently"
            );
        }
        Ok((client, Driver::new(tokio::spawn(drive(connection, self.heard.clone())))))
    }

    async fn primary(&self, config: &Config) -> Result<Primary, Error> {
        let (client, driver) = self.connect(config).await?;
        let timeline = match client.query_typed_one(TIMELINE, &[]).await {
            Ok(row) => row.try_get(0)?,
            // It may have none that a role can see, as in Aurora.
            Err(refused) if refused.as_db_error().is_some() => {
                let primary: bool = client.query_typed_one(IS_PRIMARY, &[]).await?.try_get(0)?;
                if !primary {
                    return Err(refused);
                }
                String::new()
            }
            Err(error) => return Err(error),
        };
        Ok(Primary { client, driver, timeline })
    }
}

struct Primary {
    client: Client,
    driver: Driver,
    /// In hexadecimal digits, the same number for each; empty if the server does not say it.
    timeline: String,
}

/// Whether the server refused a connection because it, or the role, has as many as it may have.
pub(crate) fn is_full(error: &Error) -> bool {
    error.code() == Some(&SqlState::TOO_MANY_CONNECTIONS)
}

/// The number of servers.
pub(crate) fn servers(config: &Config) -> usize {
    config.get_hosts().len().max(config.get_hostaddrs().len())
}

/// The first host that is not this machine.
fn remote(config: &Config) -> Option<&str> {
    let is_here = |name: &str| {
        name == "localhost" || name.parse().is_ok_and(|address: std::net::IpAddr| address.is_loopback())
    };
    config.get_hosts().iter().find_map(|host| match host {
        Host::Tcp(name) if !is_here(name) => Some(name.as_str()),
        _ => None,
    })
}

/// The configuration of each server, if there are several.
fn hosts(config: &Config) -> Vec<Config> {
    let (names, addresses) = (config.get_hosts(), config.get_hostaddrs());
    let one = |n: usize| {
        let mut one = Config::new();
        if let Some(user) = config.get_user() {
            one.user(user);
        }
        if let Some(password) = config.get_password() {
            one.password(password);
        }
        if let Some(database) = config.get_dbname() {
            one.dbname(database);
        }
        if let Some(options) = config.get_options() {
            one.options(options);
        }
        if let Some(name) = config.get_application_name() {
            one.application_name(name);
        }
        if let Some(timeout) = config.get_connect_timeout() {
            one.connect_timeout(*timeout);
        }
        if let Some(timeout) = config.get_tcp_user_timeout() {
            one.tcp_user_timeout(*timeout);
        }
        if let Some(interval) = config.get_keepalives_interval() {
            one.keepalives_interval(interval);
        }
        if let Some(retries) = config.get_keepalives_retries() {
            one.keepalives_retries(retries);
        }
        one.ssl_mode(config.get_ssl_mode())
            .ssl_negotiation(config.get_ssl_negotiation())
            .channel_binding(config.get_channel_binding())
            .keepalives(config.get_keepalives())
            .keepalives_idle(config.get_keepalives_idle())
            .target_session_attrs(TargetSessionAttrs::Any);
        match names.get(n) {
            Some(Host::Tcp(name)) => drop(one.host(name)),
            #[cfg(unix)]
            Some(Host::Unix(path)) => drop(one.host_path(path)),
            None => {}
        }
        if let Some(address) = addresses.get(n) {
            one.hostaddr(*address);
        }
        if let Some(port) = config.get_ports().get(n).or(config.get_ports().first()) {
            one.port(*port);
        }
        one
    };
    (0..servers(config)).map(one).collect()
}

/// Drives the connection until it ends.
///
/// A server whose wait for its synchronous standby is cancelled acknowledges the commit, with a warning. This ends the
/// connection then, so that everything in progress on it is in doubt.
async fn drive<S, T>(mut connection: Connection<S, T>, heard: Option<UnboundedSender<Notification>>)
where
    S: AsyncRead + AsyncWrite + Unpin,
    T: AsyncRead + AsyncWrite + Unpin,
{
    loop {
        match poll_fn(|cx| connection.poll_message(cx)).await {
            Some(Ok(AsyncMessage::Notice(notice))) if is_without_standby(&notice) => {
                tracing::warn!("a commit did not wait for the synchronous standby: {}", notice.message());
                return;
            }
            Some(Ok(AsyncMessage::Notification(notification))) => {
                // Nobody may be interested any more.
                let _ = heard.as_ref().map(|heard| heard.send(notification));
            }
            Some(Ok(_)) => {}
            Some(Err(error)) => {
                tracing::debug!(%error, "a connection to the database ended");
                return;
            }
            None => return,
        }
    }
}

/// The name of the server's routine is the same in every language.
fn is_without_standby(notice: &DbError) -> bool {
    notice.routine() == Some("SyncRepWaitForLSN") || notice.message().contains("synchronous replication")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_is_not_this_machine_is_remote() {
        let of = |address: &str| remote(&address.parse().unwrap()).map(str::to_owned);
        for here in
            ["host=localhost", "host=127.0.0.1", "host=::1", "host=/run/postgresql", "hostaddr=127.0.0.2"]
        {
            assert_eq!(of(here), None, "{here}");
        }
        for there in ["host=db", "host=10.0.0.1", "host=127.0.0.1,db", "host=localhost.example"] {
            assert!(of(there).is_some(), "{there}");
        }
    }
}
