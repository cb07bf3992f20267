#![doc = include_str!("../README.md")]

mod codec;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod outage;

use std::fmt;
use std::num::NonZeroU64;
use std::time::Duration;

use async_trait::async_trait;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, ErrorKind, FromRedisValue, Pipeline, RedisError, RedisResult};
use threadkeep::cache::{CachedHistory, HistoryCache, HistoryKey};
use threadkeep::id::ThreadId;
use tokio::sync::Mutex;

use crate::outage::Outage;

/// How long a call may take by default, including connecting. A slower answer is useless: reading the thread is as fast.
const PATIENCE: Duration = Duration::from_millis(500);

/// The address is that of a node of a cluster.
const OF_A_CLUSTER: &str = "the server is a node of a cluster; name one without cluster mode in redis_url";

/// How entries are stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The prefix of every key. Two stores in one Redis need different prefixes.
    pub key_prefix: String,
    /// How long a thread's entries live after the last write to them, in seconds; `None` until the server needs the
    /// room.
    pub ttl_seconds: Option<NonZeroU64>,
}

/// A URL that is not a usable Redis URL.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the Redis URL cannot be used ({0}); use redis://[user:password@]host[:port][/database], or rediss:// for TLS"
)]
pub struct InvalidUrl(String);

/// The history cache in a Redis server.
///
/// A thread's entries are one hash, `{prefix}{thread}`, with fields for each namespace and channel. It expires as a
/// whole, and purging a thread is one deletion.
///
/// A call without an answer in time is lost, a purge too, and so are calls in the second after it. No answer of a saver
/// depends on them ([`HistoryCache`]); the entries of a thread whose purge is lost stay, unused, until they expire.
pub struct RedisCache {
    client: Client,
    address: String,
    settings: Settings,
    patience: Duration,
    /// The connection that all calls share, with the number of connections that broke before it. Locked while
    /// connecting, so that concurrent calls open only one.
    connection: Mutex<Option<(u64, MultiplexedConnection)>>,
    outage: Outage,
}

impl fmt::Debug for RedisCache {
    /// Omits the URL, which may contain a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, settings, .. } = self;
        f.debug_struct("RedisCache")
            .field("address", address)
            .field("settings", settings)
            .finish_non_exhaustive()
    }
}

impl RedisCache {
    /// A cache in the server at `url`. Does not connect yet; the server need not be up.
    ///
    /// # Errors
    /// [`InvalidUrl`]; its text omits the URL.
    pub fn open(url: &str, settings: Settings) -> Result<Self, InvalidUrl> {
        let client = Client::open(url).map_err(|error| InvalidUrl(error.category().to_owned()))?;
        let address = client.get_connection_info().addr().to_string();
        let (connection, outage) = (Mutex::default(), Outage::default());
        Ok(Self { client, address, settings, patience: PATIENCE, connection, outage })
    }

    /// The same cache, with another bound on how long a call may take (500 ms by default).
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    fn hash(&self, thread: &ThreadId) -> String {
        format!("{}{thread}", self.settings.key_prefix)
    }

    /// Runs commands; `None` if the server does not answer or refuses. Never takes much longer than the patience.
    async fn run<T: FromRedisValue>(&self, commands: &Pipeline) -> Option<T> {
        if !self.outage.may_ask() {
            return None;
        }
        let answer = tokio::time::timeout(self.patience, self.ask(commands)).await;
        let error = match answer {
            Ok(Ok(answer)) => {
                self.outage.answered(&self.address);
                return Some(answer);
            }
            Ok(Err(error)) => error,
            Err(_) => (ErrorKind::Io, "no answer in time").into(),
        };
        match Failure::of(error) {
            Failure::Refused(reason) => self.outage.refused(&self.address, &reason),
            Failure::Away(reason) => {
                self.outage.failed(&self.address, &reason);
                self.connection.lock().await.take();
            }
        }
        None
    }

    async fn ask<T: FromRedisValue>(&self, commands: &Pipeline) -> RedisResult<T> {
        let (number, mut connection) = self.connect(None).await?;
        match commands.query_async(&mut connection).await {
            // The server, or a proxy, closes idle connections. That is no outage. A replica was the primary before a
            // failover, and the address leads to the next one.
            Err(error) if error.is_io_error() && !error.is_timeout() || is_of_replica(&error) => {
                let (_, mut connection) = self.connect(Some(number)).await?;
                commands.query_async(&mut connection).await
            }
            answer => answer,
        }
    }

    /// The shared connection and its number; a new one if it is the one that broke.
    async fn connect(&self, broken: Option<u64>) -> RedisResult<(u64, MultiplexedConnection)> {
        let mut shared = self.connection.lock().await;
        if let Some((number, connection)) = &*shared
            && broken.is_none_or(|broken| broken < *number)
        {
            return Ok((*number, connection.clone()));
        }
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.patience))
            .set_response_timeout(Some(self.patience));
        let connection = self.client.get_multiplexed_async_connection_with_config(&config).await?;
        let number = broken.map_or(0, |broken| broken + 1);
        *shared = Some((number, connection.clone()));
        Ok((number, connection))
    }
}

/// Whether the server refuses to write because it is a replica.
fn is_of_replica(error: &RedisError) -> bool {
    let refused = error.clone().into_server_errors();
    refused.is_some_and(|errors| errors.first().is_some_and(|(_, error)| error.code() == "READONLY"))
}

/// Why a call failed, in words that contain no stored data.
enum Failure {
    /// The server answered with a refusal.
    Refused(String),
    /// No answer, or one that says the server is unavailable for now.
    Away(String),
}

impl Failure {
    fn of(error: RedisError) -> Self {
        let category = error.category().to_owned();
        match error.kind() {
            ErrorKind::Io => return Self::Away(error.to_string()),
            ErrorKind::UnexpectedReturnType | ErrorKind::Parse => return Self::Refused(category),
            _ => {}
        }
        let code = error.into_server_errors().and_then(|errors| Some(errors.first()?.1.code().to_owned()));
        match code.as_deref() {
            None | Some("LOADING" | "MASTERDOWN" | "NOAUTH" | "NOPERM") => {
                Self::Away(code.unwrap_or(category))
            }
            Some(code @ ("MOVED" | "ASK" | "CLUSTERDOWN")) => {
                Self::Refused(format!("{code}: {OF_A_CLUSTER}"))
            }
            Some(code) => Self::Refused(code.to_owned()),
        }
    }
}

/// The field names of a channel. The length keeps namespace and channel apart.
struct Fields {
    path: String,
    seed: String,
    /// The field that names the stored seed.
    seed_name: String,
}

impl Fields {
    fn of(key: &HistoryKey) -> Self {
        let (namespace, channel) = (key.namespace.as_str(), key.channel.as_str());
        let name = |kind| format!("{kind}:{}:{namespace}:{channel}", namespace.len());
        Self { path: name("path"), seed: name("seed"), seed_name: name("name") }
    }
}

#[async_trait]
impl HistoryCache for RedisCache {
    async fn get(&self, key: &HistoryKey) -> Option<CachedHistory> {
        let (hash, fields) = (self.hash(&key.thread), Fields::of(key));
        let mut commands = redis::pipe();
        commands.cmd("HMGET").arg(&hash).arg(&fields.path).arg(&fields.seed);
        let ((path, seed),): ((Option<Vec<u8>>, Option<Vec<u8>>),) = self.run(&commands).await?;
        let known = codec::open(key, &path?, seed.as_deref());
        if known.is_none() {
            // Delete both fields, or a damaged seed would stay while the new one has the same name.
            let mut commands = redis::pipe();
            commands.cmd("HDEL").arg(hash).arg(fields.path).arg(fields.seed).arg(fields.seed_name).ignore();
            let _: Option<()> = self.run(&commands).await;
        }
        known
    }

    async fn put(&self, key: &HistoryKey, path: &CachedHistory) {
        let Some(sealed) = codec::seal(key, path) else { return };
        let (hash, fields) = (self.hash(&key.thread), Fields::of(key));
        let mut commands = redis::pipe();
        commands.cmd("HGET").arg(&hash).arg(&fields.seed_name);
        let Some((there,)) = self.run::<(Option<Vec<u8>>,)>(&commands).await else { return };

        let mut commands = redis::pipe();
        commands.atomic();
        let set = commands.cmd("HSET").arg(&hash).arg(fields.path).arg(sealed.path);
        if let Some(seed) = sealed.seed.filter(|seed| there.as_ref() != Some(&seed.name)) {
            set.arg(fields.seed_name).arg(seed.name).arg(fields.seed).arg(seed.bytes);
        }
        set.ignore();
        match self.settings.ttl_seconds {
            Some(ttl) => commands.cmd("EXPIRE").arg(&hash).arg(ttl.get()).ignore(),
            // An entry from an earlier configuration may have an expiry.
            None => commands.cmd("PERSIST").arg(&hash).ignore(),
        };
        let _: Option<()> = self.run(&commands).await;
    }

    async fn purge(&self, thread: &ThreadId) {
        let mut commands = redis::pipe();
        commands.cmd("UNLINK").arg(self.hash(thread)).ignore();
        let _: Option<()> = self.run(&commands).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_of_a_cluster_is_refused_with_what_to_do() {
        let answer = redis::parse_redis_value(b"-MOVED 866 10.0.0.2:6379\r\n").unwrap();
        let Failure::Refused(reason) = Failure::of(answer.extract_error().unwrap_err()) else {
            panic!("it has answered")
        };
        assert!(reason.starts_with("MOVED: ") && reason.contains("without cluster mode"), "{reason}");
        assert!(!reason.contains("10.0.0.2"), "{reason}");
    }
}
