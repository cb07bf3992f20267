//! Three gateways on one Postgres, one of them through PgBouncer, while processes are killed and stand still, servers
//! restart, operators work on the threads and the cache fills with garbage. Clients remember what was acknowledged to
//! them, and in the end every thread is judged by that.
//!
//! `CHAOS_SECONDS` and `CHAOS_SEED` ask for more than the short form; `make chaos` does.

mod clients;
mod faults;
mod verdict;

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value as Json, json};
use tempfile::TempDir;
use threadkeep_testing::{Database, PgBouncer, Postgres, Redis};
use tokio_util::sync::CancellationToken;

use super::{Gateway, command, on_postgres};

const GATEWAYS: usize = 3;
const CLIENTS: usize = 6;

/// The servers and gateways that things happen to.
struct Scene {
    postgres: Postgres,
    database: Database,
    bouncer: PgBouncer,
    redis: Redis,
    dirs: Vec<TempDir>,
    /// The gateways; `None` while one is being started.
    gateways: Mutex<Vec<Option<Gateway>>>,
}

impl Scene {
    async fn start() -> Arc<Self> {
        let servers = tokio::task::spawn_blocking(|| {
            let postgres = Postgres::start().unwrap();
            let bouncer = PgBouncer::start(&postgres).unwrap();
            (postgres, bouncer, Redis::start().unwrap())
        });
        let (postgres, bouncer, redis) = servers.await.unwrap();
        let database = postgres.database().await.unwrap();
        let urls = [database.url().to_owned(), bouncer.url(&database), database.url().to_owned()];
        let dirs: Vec<TempDir> = urls.iter().map(|url| on_postgres(url, "delta")).collect();
        for dir in &dirs {
            configure(dir, &redis);
        }
        let scene = Self {
            postgres,
            database,
            bouncer,
            redis,
            dirs,
            gateways: Mutex::new((0..GATEWAYS).map(|_| None).collect()),
        };
        let scene = Arc::new(scene);
        for at in 0..GATEWAYS {
            scene.start_gateway(at).await;
        }
        scene
    }

    /// Starts it as a service manager does: again, if the database is away, which PgBouncer says for up to 15 seconds
    /// after it is back.
    async fn start_gateway(self: &Arc<Self>, at: usize) {
        let path: PathBuf = self.dirs[at].path().to_owned();
        let started = tokio::task::spawn_blocking(move || {
            loop {
                match Gateway::try_start(&mut command(&path)) {
                    Ok(gateway) => break gateway,
                    Err(said) => assert!(said.contains("the postgres store is unavailable"), "{said}"),
                }
            }
        });
        let gateway = started.await.unwrap();
        self.gateways.lock().unwrap()[at] = Some(gateway);
    }

    fn take_gateway(&self, at: usize) -> Gateway {
        self.gateways.lock().unwrap()[at].take().unwrap()
    }

    /// The addresses of the gateways that serve, or stand still.
    fn bases(&self) -> Vec<String> {
        self.gateways.lock().unwrap().iter().flatten().map(|gateway| gateway.base.clone()).collect()
    }
}

/// Answers that take a moment, a shared cache.
fn configure(dir: &TempDir, redis: &Redis) {
    let script =
        json!({"chunk_chars": 8, "rules": [{"answers": [{"text": "You said: {{input}}", "delay_ms": 5}]}]});
    std::fs::write(dir.path().join("script.json"), script.to_string()).unwrap();
    let file = dir.path().join("config.yaml");
    let mut config: Json = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    config["database"]["checkpoint_cache"] = json!({"type": "redis", "redis_url": redis.url()});
    config["title"] = json!({"enabled": false});
    std::fs::write(file, config.to_string()).unwrap();
}

fn number(name: &str, usual: u64) -> u64 {
    std::env::var(name).map_or(usual, |text| text.parse().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_acknowledged_is_there_once_and_in_order_whatever_happened_meanwhile() {
    let seconds = number("CHAOS_SECONDS", 20);
    let seed = number("CHAOS_SEED", 1);
    let started = Instant::now();
    let scene = Scene::start().await;
    let over = CancellationToken::new();
    let clients: Vec<_> = (0..CLIENTS)
        .map(|number| {
            let (scene, over) = (Arc::clone(&scene), over.clone());
            tokio::spawn(clients::work(scene, over, number, seed))
        })
        .collect();
    let mut choices = StdRng::seed_from_u64(seed);
    let mut happened = faults::Happened::default();
    while started.elapsed() < Duration::from_secs(seconds) || !happened.everything() {
        faults::one(&scene, &mut choices, &mut happened).await;
        tokio::time::sleep(Duration::from_millis(choices.random_range(100..1500))).await;
    }
    faults::heal(&scene, &mut happened).await;
    over.cancel();
    let mut threads = Vec::new();
    for client in clients {
        threads.extend(client.await.unwrap());
    }
    let judged = verdict::judge(&scene, &threads).await;
    println!("{seconds} s with the seed {seed}\n{happened}\n{judged}");
    assert!(judged.acknowledged > 0, "{judged}");
    assert!(judged.wrong.is_empty(), "{judged}");
}
