//! The cache against real servers: what it returns, what expires, what an outage costs.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::AsyncCommands as _;
use serde_json::json;
use threadkeep::cache::{CachedHistory, CachedSaver, HistoryCache, HistoryKey};
use threadkeep::channel::Schema;
use threadkeep::checkpoint::{CheckpointKey, Write as ChannelWrite};
use threadkeep::id::{ChannelName, IdSource, Namespace, ThreadId};
use threadkeep::mode::ChannelMode;
use threadkeep::saver::{ChannelHistory, HistoryStep, Saver, Seed};
use threadkeep::state::{StateAccessor, Update};
use threadkeep::value::ChannelValue;
use threadkeep_memory::MemorySaver;
use threadkeep_redis::{RedisCache, Settings};
use threadkeep_testing::{Log, Redis};

/// How long what must happen may take: longer than on any busy machine.
const PATIENCE: Duration = Duration::from_mins(10);

fn settings(ttl: u64) -> Settings {
    Settings { key_prefix: format!("test:{}:", uuid::Uuid::new_v4()), ttl_seconds: ttl.try_into().ok() }
}

fn cache(settings: &Settings) -> RedisCache {
    patient(threadkeep_testing::redis().unwrap().url(), settings.clone())
}

/// A cache that waits for its server however busy the machine is.
fn patient(url: &str, settings: Settings) -> RedisCache {
    RedisCache::open(url, settings).unwrap().with_patience(PATIENCE)
}

async fn commands() -> redis::aio::MultiplexedConnection {
    let client = redis::Client::open(threadkeep_testing::redis().unwrap().url()).unwrap();
    client.get_multiplexed_async_connection().await.unwrap()
}

fn key(thread: &str) -> HistoryKey {
    HistoryKey { thread: thread.into(), namespace: Namespace::root(), channel: "messages".into() }
}

/// Paths that end at successive checkpoints after one seed.
fn paths(seed: &str, steps: usize) -> Vec<CachedHistory> {
    let ids = IdSource::default();
    let mut checkpoint = ids.checkpoint_after(None);
    let value = |text: &str| ChannelValue::from_json(&json!([{ "id": text, "content": text }])).unwrap();
    let mut version = ids.version_after(None);
    let seed = Seed { checkpoint, value: value(seed), version };
    let mut history = ChannelHistory { seed: Some(seed), steps: Vec::new() };
    let step = |n: usize| {
        checkpoint = ids.checkpoint_after(Some(checkpoint));
        version = ids.version_after(Some(version));
        let write =
            ChannelWrite { channel: "messages".into(), value: value(&n.to_string()), overwrite: false };
        history.steps.push(HistoryStep { checkpoint, tasks: 1, writes: vec![write] });
        CachedHistory { checkpoint, version, history: history.clone() }
    };
    (0..steps).map(step).collect()
}

#[tokio::test]
async fn what_one_process_puts_another_gets_until_it_is_purged() {
    let settings = settings(60);
    let (ours, theirs) = (cache(&settings), cache(&settings));
    let (known, other) = (paths("seed", 3), paths("another seed", 2));
    assert_eq!(theirs.get(&key("t")).await, None);
    for path in known.iter().chain(&other).chain(&known) {
        ours.put(&key("t"), path).await;
        assert_eq!(theirs.get(&key("t")).await.as_ref(), Some(path));
    }
    let nested = HistoryKey { namespace: "task".into(), ..key("t") };
    ours.put(&nested, &other[0]).await;
    ours.put(&key("u"), &other[1]).await;
    assert_eq!(theirs.get(&key("t")).await.as_ref(), known.last());

    theirs.purge(&"t".into()).await;
    assert_eq!((ours.get(&key("t")).await, ours.get(&nested).await), (None, None));
    assert_eq!(ours.get(&key("u")).await.as_ref(), Some(&other[1]));
    let elsewhere = cache(&Settings { key_prefix: "elsewhere:".into(), ..settings });
    assert_eq!(elsewhere.get(&key("u")).await, None);
}

#[tokio::test]
async fn the_seed_is_sent_once_and_sent_again_when_it_was_lost() {
    let settings = settings(60);
    let cache = cache(&settings);
    let mut redis = commands().await;
    let hash = format!("{}t", settings.key_prefix);
    let known = paths("seed", 3);
    cache.put(&key("t"), &known[0]).await;
    // A marker in the seed shows whether it is written again.
    let seed: Vec<u8> = redis.hget(&hash, "seed:0::messages").await.unwrap();
    let () = redis.hset(&hash, "seed:0::messages", "marked").await.unwrap();
    cache.put(&key("t"), &known[1]).await;
    let there: Vec<u8> = redis.hget(&hash, "seed:0::messages").await.unwrap();
    assert_eq!(there, b"marked");
    let () = redis.hset(&hash, "seed:0::messages", seed).await.unwrap();
    assert_eq!(cache.get(&key("t")).await.as_ref(), Some(&known[1]));
    let () = redis.del(&hash).await.unwrap();
    cache.put(&key("t"), &known[2]).await;
    assert_eq!(cache.get(&key("t")).await.as_ref(), Some(&known[2]));
}

#[tokio::test]
async fn entries_live_as_long_as_the_setting_says() {
    let mut redis = commands().await;
    let lasting = settings(0);
    let passing = Settings { ttl_seconds: 3600.try_into().ok(), ..lasting.clone() };
    let hash = format!("{}t", lasting.key_prefix);
    for (settings, ttl) in [(&lasting, -1..=-1), (&passing, 1..=3600), (&lasting, -1..=-1)] {
        cache(settings).put(&key("t"), &paths("seed", 1)[0]).await;
        let left: i64 = redis.ttl(&hash).await.unwrap();
        assert!(ttl.contains(&left), "{settings:?}: {left}");
    }
    cache(&passing).put(&key("t"), &paths("seed", 1)[0]).await;
    assert!(redis.pexpire::<_, bool>(&hash, 1).await.unwrap());
    until("the entry expires", async || cache(&passing).get(&key("t")).await.is_none()).await;
}

#[tokio::test]
async fn a_damaged_or_foreign_entry_is_a_miss_and_the_next_put_heals_it() {
    let settings = settings(60);
    let cache = cache(&settings);
    let mut redis = commands().await;
    let (t, u) = (format!("{}t", settings.key_prefix), format!("{}u", settings.key_prefix));
    let known = &paths("seed", 2)[1];
    cache.put(&key("t"), known).await;
    for field in ["path:0::messages", "seed:0::messages"] {
        let whole: Vec<u8> = redis.hget(&t, field).await.unwrap();
        let mut flipped = whole.clone();
        *flipped.last_mut().unwrap() ^= 1;
        for damaged in [flipped, whole[..whole.len() - 1].to_vec(), b"hello".to_vec(), Vec::new()] {
            let () = redis.hset(&t, field, damaged).await.unwrap();
            assert_eq!(cache.get(&key("t")).await, None);
            cache.put(&key("t"), known).await;
            assert_eq!(cache.get(&key("t")).await.as_ref(), Some(known));
        }
    }
    let () = redis::cmd("COPY").arg(&t).arg(&u).query_async(&mut redis).await.unwrap();
    assert_eq!(cache.get(&key("u")).await, None, "the entry of another thread");
    cache.put(&key("u"), known).await;
    assert_eq!(cache.get(&key("u")).await.as_ref(), Some(known));
}

/// Waits for a condition, however busy the machine is.
async fn until(what: &str, mut happened: impl AsyncFnMut() -> bool) {
    let started = Instant::now();
    while !happened().await {
        assert!(started.elapsed() < PATIENCE, "{what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

const AWAY: &str = "does not answer";
const BACK: &str = "answers again";

#[tokio::test]
async fn an_outage_costs_hits_and_one_warning_and_hits_come_back_with_the_server() {
    let log = Log::default();
    let subscriber =
        tracing_subscriber::fmt().with_writer(log.clone()).with_max_level(tracing::Level::INFO).finish();
    let _logging = tracing::subscriber::set_default(subscriber);
    let server = Redis::start().unwrap();
    let cache = Arc::new(patient(server.url(), settings(60)));
    let inner = MemorySaver::new();
    let saver = Arc::new(CachedSaver::new(Arc::new(inner.clone()), cache.clone()));
    let table = Schema::thread_state().compile(ChannelMode::Delta, 1000).unwrap();
    let accessor = StateAccessor::new(saver.clone(), Arc::new(table), Arc::new(IdSource::default()));
    let thread = ThreadId::from("t");
    let channels: BTreeSet<ChannelName> = ["messages".into()].into();
    accessor.create(&thread, serde_json::Map::new()).await.unwrap();
    let say = async || {
        let writes = vec![accessor.write("messages", json!(["hello"]), false).unwrap()];
        let update = Update { at: None, node: "n".into(), writes, extra: serde_json::Map::new() };
        accessor.update(&thread, update).await.unwrap().key
    };
    let agrees = async |at: &CheckpointKey| {
        let path = saver.delta_history(at, &channels, None).await;
        assert_eq!(path, inner.delta_history(at, &channels, None).await);
    };
    let hit =
        async |at: &CheckpointKey| cache.get(&key("t")).await.is_some_and(|path| path.checkpoint == at.id);

    for outage in 1..=2 {
        let first = say().await;
        agrees(&first).await;
        assert!(hit(&first).await, "the server is up");
        server.crash().unwrap();
        for _ in 0..20 {
            let at = say().await;
            agrees(&at).await;
            assert!(!hit(&at).await);
        }
        saver.delete_thread(&"another".into()).await.unwrap();
        assert_eq!((log.count(AWAY), log.count(BACK)), (outage, outage - 1));

        server.resume().unwrap();
        let at = say().await;
        until("hits come back", async || {
            agrees(&at).await;
            hit(&at).await
        })
        .await;
        assert_eq!((log.count(AWAY), log.count(BACK)), (outage, outage));
    }
    let (_, secret) = server.url().split_once(":@").or(server.url().split_once("://:")).unwrap();
    let (password, _) = secret.split_once('@').unwrap();
    assert_eq!(log.count(password), 0);
    assert!(!format!("{cache:?}").contains(password));
}

#[tokio::test]
async fn calls_share_one_connection_and_make_one_again_when_the_server_ended_it() {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt().with_writer(log.clone()).finish();
    let _logging = tracing::subscriber::set_default(subscriber);
    let server = Redis::start().unwrap();
    let cache = Arc::new(patient(server.url(), settings(60)));
    let client = redis::Client::open(server.url()).unwrap();
    let redis = client.get_multiplexed_async_connection().await.unwrap();
    let connections = async || {
        let mut redis = redis.clone();
        let clients: String = redis::cmd("CLIENT").arg("LIST").query_async(&mut redis).await.unwrap();
        clients.lines().count() - 1
    };
    for _ in 0..2 {
        let call = |n: u8| {
            let cache = Arc::clone(&cache);
            tokio::spawn(async move { cache.put(&key(&format!("t{n}")), &paths("seed", 1)[0]).await })
        };
        for call in (0..8).map(call).collect::<Vec<_>>() {
            call.await.unwrap();
        }
        assert_eq!(connections().await, 1);
        let mut kill = redis::cmd("CLIENT");
        let _: i64 = kill.arg("KILL").arg("SKIPME").arg("yes").query_async(&mut redis.clone()).await.unwrap();
        assert_eq!(connections().await, 0);
    }
    assert!(cache.get(&key("t7")).await.is_some());
    assert_eq!(log.count(AWAY), 0);
}

/// As after a failover that leaves connections open: the address leads to the new primary.
#[tokio::test]
async fn a_primary_that_has_become_a_replica_is_left_for_where_the_address_leads() {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt().with_writer(log.clone()).finish();
    let _logging = tracing::subscriber::set_default(subscriber);
    let server = Redis::start().unwrap();
    let cache = patient(server.url(), settings(60));
    let known = paths("seed", 2);
    cache.put(&key("t"), &known[0]).await;
    let client = redis::Client::open(server.url()).unwrap();
    let mut redis = client.get_multiplexed_async_connection().await.unwrap();
    let mut replica_of = async |host: &str, port: &str| {
        let _: String = redis::cmd("REPLICAOF").arg(host).arg(port).query_async(&mut redis).await.unwrap();
        let stats: String = redis::cmd("INFO").arg("stats").query_async(&mut redis).await.unwrap();
        let accepted = stats.lines().find_map(|line| line.strip_prefix("total_connections_received:"));
        accepted.unwrap().trim().parse::<u64>().unwrap()
    };
    let before = replica_of("127.0.0.1", "1").await;
    cache.purge(&"u".into()).await;
    cache.put(&key("t"), &known[1]).await;
    assert_eq!(cache.get(&key("t")).await.as_ref(), Some(&known[0]));
    assert_eq!(replica_of("NO", "ONE").await, before + 2);
    cache.put(&key("t"), &known[1]).await;
    assert_eq!(cache.get(&key("t")).await.as_ref(), Some(&known[1]));
    assert_eq!((log.count("refuses"), log.count(AWAY)), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_server_that_takes_connections_and_says_nothing_is_asked_once() {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt().with_writer(log.clone()).finish();
    let _logging = tracing::subscriber::set_default(subscriber);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    let cache = RedisCache::open(&url, settings(60)).unwrap();
    // While this waits, the clock does not move: the patience would be over before the system has made the connection.
    let accepting = tokio::task::spawn_blocking(move || (listener.accept(), listener));
    assert_eq!(cache.get(&key("t")).await, None);
    let (first, listener) = accepting.await.unwrap();
    assert!(first.is_ok(), "{first:?}");
    // While no call may try the server, none connects.
    for _ in 0..100 {
        assert_eq!(cache.get(&key("t")).await, None);
    }
    listener.set_nonblocking(true).unwrap();
    let more = std::iter::from_fn(|| listener.accept().ok()).count();
    assert_eq!((more, log.count(AWAY)), (0, 1));
}

#[tokio::test]
async fn a_server_that_has_something_else_under_the_key_or_needs_a_password_is_no_error() {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt().with_writer(log.clone()).finish();
    let _logging = tracing::subscriber::set_default(subscriber);
    let settings = settings(60);
    let ours = cache(&settings);
    let mut redis = commands().await;
    let () = redis.set(format!("{}t", settings.key_prefix), "a text").await.unwrap();
    for _ in 0..3 {
        assert_eq!(ours.get(&key("t")).await, None);
        ours.put(&key("t"), &paths("seed", 1)[0]).await;
    }
    ours.put(&key("u"), &paths("seed", 1)[0]).await;
    assert!(ours.get(&key("u")).await.is_some(), "other threads are still cached");
    assert_eq!((log.count("refuses"), log.count(AWAY)), (1, 0));

    let server = Redis::start().unwrap();
    let (_, address) = server.url().split_once('@').unwrap();
    let locked_out = RedisCache::open(&format!("redis://{address}"), settings.clone()).unwrap();
    let in_clear = RedisCache::open(&format!("rediss://{address}"), settings).unwrap();
    for cache in [locked_out, in_clear] {
        let before = log.count(AWAY);
        for _ in 0..3 {
            cache.put(&key("t"), &paths("seed", 1)[0]).await;
            assert_eq!(cache.get(&key("t")).await, None);
        }
        assert_eq!(log.count(AWAY), before + 1);
    }
}

#[test]
fn a_url_that_is_none_is_refused_without_being_told() {
    for url in ["postgres://u:secret@h/d", "redis://u:secret@h:99999", "secret"] {
        let error = RedisCache::open(url, settings(0)).unwrap_err().to_string();
        assert!(error.contains("redis://[user:password@]host"), "{error}");
        assert!(!error.contains("secret"), "{error}");
    }
}

/// Runs in a second process, because a process reads its trusted certificates at start.
#[tokio::test]
async fn rediss_urls_are_encrypted_and_the_certificate_is_checked() {
    const URL: &str = "THREADKEEP_TEST_REDISS_URL";
    let known = paths("seed", 1);
    if let Ok(url) = std::env::var(URL) {
        let cache = patient(&url, settings(60));
        cache.put(&key("t"), &known[0]).await;
        assert_eq!(cache.get(&key("t")).await.as_ref(), Some(&known[0]));
        return;
    }
    let server = Redis::start().unwrap();
    let url = server.tls_url().unwrap();
    let itself = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "rediss_urls_are_encrypted_and_the_certificate_is_checked"])
        .env(URL, url)
        .env("SSL_CERT_FILE", server.certificate().unwrap())
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&itself.stdout);
    assert!(itself.status.success() && printed.contains("1 passed"), "{printed}");
    // Without the certificate the server is untrusted, and receives nothing.
    let cache = RedisCache::open(url, settings(60)).unwrap();
    cache.put(&key("t"), &known[0]).await;
    assert_eq!(cache.get(&key("t")).await, None);
}
