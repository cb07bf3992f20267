//! The configured history cache (`database.checkpoint_cache`).

use redis::aio::MultiplexedConnection;
use redis::{AsyncCommands as _, AsyncConnectionConfig};
use serde_json::{Value, json};
use threadkeep_testing::{Log, Redis};

use crate::support::{Gateway, Setup, texts};

/// In the log, once the server did not answer in half a second: for a moment, the cache does without it.
const AWAY: &str = "the history cache does not answer";

/// A gateway on SQLite with this cache.
fn setup(mode: &'static str, cache: Value) -> Setup {
    let database = json!({
        "backend": "sqlite",
        "sqlite_synchronous": "normal",
        "checkpoint_channel_mode": mode,
        "checkpoint_delta": {"snapshot_frequency": 1000},
        "checkpoint_cache": cache,
    });
    Setup { sections: json!({ "database": database }), ..Setup::on("sqlite", mode) }
}

/// Two turns, for a process that is started afterwards to read.
async fn two_turns(setup: Setup) -> Gateway {
    let mode = setup.mode;
    let gateway = setup.start().await;
    gateway.create("t").await;
    gateway.ask("t", "one").await;
    gateway.ask("t", "two").await;
    let gateway = gateway.reopen(mode).await;
    for _ in 0..2 {
        let state = gateway.state("t").await;
        assert_eq!(texts(&state), ["one", "You said: one", "two", "You said: two"]);
    }
    gateway
}

fn prefix() -> String {
    format!("gateway:{}:", uuid::Uuid::new_v4())
}

/// The gateway, once what a new process read is in the cache under this key.
async fn cached(mut gateway: Gateway, redis: &mut MultiplexedConnection, key: &str, log: &Log) -> Gateway {
    while !redis.exists::<_, bool>(key).await.unwrap() {
        assert!(log.count(AWAY) > 0, "what was read is not stored");
        gateway = gateway.reopen("delta").await;
        gateway.state("t").await;
    }
    gateway
}

#[tokio::test]
async fn in_delta_mode_the_redis_cache_has_what_was_read_and_nothing_of_a_deleted_thread() {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt().with_writer(log.clone()).finish();
    let _logged = tracing::subscriber::set_default(subscriber);
    let url = threadkeep_testing::redis().unwrap().url();
    // Without a limit of its own: by default, an answer may take half a second.
    let patient = AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
    let client = redis::Client::open(url).unwrap();
    let mut redis = client.get_multiplexed_async_connection_with_config(&patient).await.unwrap();
    let redis_cache =
        |prefix: &str| json!({"type": "redis", "redis_url": url, "key_prefix": prefix, "ttl_seconds": 600});
    let ours = prefix();
    let key = format!("{ours}t");
    let gateway = two_turns(setup("delta", redis_cache(&ours))).await;
    let gateway = cached(gateway, &mut redis, &key, &log).await;
    let life: i64 = redis.ttl(&key).await.unwrap();
    assert!((1..=600).contains(&life), "{life}");
    // A damaged entry is a miss: the process reads the thread from the store.
    let () = redis.hset(&key, "seed:0::messages", "damaged").await.unwrap();
    let mut gateway = gateway.reopen("delta").await;
    assert_eq!(texts(&gateway.state("t").await).len(), 4);
    loop {
        gateway.delete("/api/threads/t").await.ok();
        if !redis.exists::<_, bool>(&key).await.unwrap() {
            break;
        }
        assert!(log.count(AWAY) > 0, "the entry of a deleted thread is there");
        // The server was not asked: another deletion shows it.
        gateway.create("t").await;
        gateway.ask("t", "one").await;
        gateway = cached(gateway, &mut redis, &key, &log).await;
    }

    let full = prefix();
    two_turns(setup("full", redis_cache(&full))).await;
    let off = prefix();
    let mut cache = redis_cache(&off);
    cache["max_entries"] = json!(0);
    two_turns(setup("delta", cache)).await;
    for unused in [full, off] {
        assert!(!redis.exists::<_, bool>(format!("{unused}t")).await.unwrap());
    }
}

#[tokio::test]
async fn a_gateway_whose_redis_is_away_starts_and_answers() {
    let server = Redis::start().unwrap();
    server.crash().unwrap();
    two_turns(setup("delta", json!({"type": "redis", "redis_url": server.url()}))).await;
}

#[tokio::test]
async fn the_memory_cache_and_none_give_the_same_answers() {
    for entries in [128, 1, 0] {
        two_turns(setup("delta", json!({"type": "memory", "max_entries": entries}))).await;
    }
}
