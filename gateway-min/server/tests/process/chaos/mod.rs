//! Gateways on one Postgres, one of them through PgBouncer, while processes are killed and stand still, servers
//! restart, operators work on the threads and the cache fills with garbage. Clients leave, return and cancel, and
//! remember what was acknowledged to them; in the end every thread is judged by that.
//!
//! `CHAOS_SECONDS` and `CHAOS_SEED` ask for more than the short form; `make chaos` does.

mod clients;
mod faults;
mod operators;
mod verdict;

use std::path::PathBuf;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value as Json, json};
use tempfile::TempDir;
use threadkeep_testing::{Database, PgBouncer, Postgres, Redis};
use tokio_util::sync::CancellationToken;

use super::{Gateway, command, on_postgres};

const CLIENTS: usize = 6;

/// Where gateways keep what is not in the database.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Homes {
    /// Each in a directory of its own.
    Separate,
    /// All in one.
    Shared,
}

/// The servers and gateways that things happen to.
struct Scene {
    postgres: Postgres,
    database: Database,
    bouncer: PgBouncer,
    redis: Redis,
    /// The directories that gateways are started in.
    dirs: Vec<TempDir>,
    homes: Homes,
    /// `database.checkpoint_channel_mode`
    mode: &'static str,
    /// Beginnings and ends of faults of the database: odd during one.
    disturbances: AtomicUsize,
    /// The gateways; `None` while one is being started.
    gateways: Mutex<Vec<Option<Gateway>>>,
}

impl Scene {
    /// With this many gateways, in this mode.
    async fn start(gateways: usize, homes: Homes, mode: &'static str) -> Arc<Self> {
        let servers = tokio::task::spawn_blocking(|| {
            let postgres = Postgres::start().unwrap();
            let bouncer = PgBouncer::start(&postgres).unwrap();
            (postgres, bouncer, Redis::start().unwrap())
        });
        let (postgres, bouncer, redis) = servers.await.unwrap();
        let database = postgres.database().await.unwrap();
        let url = |at| if at == 1 { bouncer.url(&database) } else { database.url().to_owned() };
        let dirs: Vec<TempDir> = (0..gateways).map(|at| on_postgres(&url(at), mode)).collect();
        for dir in &dirs {
            configure(dir, &redis);
        }
        let scene = Self {
            postgres,
            database,
            bouncer,
            redis,
            dirs,
            homes,
            mode,
            disturbances: AtomicUsize::new(0),
            gateways: Mutex::new((0..gateways).map(|_| None).collect()),
        };
        let scene = Arc::new(scene);
        for at in 0..gateways {
            scene.start_gateway(at).await;
        }
        scene
    }

    /// Starts it as a service manager does: again, if the database is away, which PgBouncer says for up to 15 seconds
    /// after it is back.
    async fn start_gateway(self: &Arc<Self>, at: usize) {
        let path: PathBuf = self.dirs[at].path().to_owned();
        let home = self.dirs[if self.homes == Homes::Shared { 0 } else { at }].path().join("state");
        let started = tokio::task::spawn_blocking(move || {
            loop {
                match Gateway::try_start(command(&path).env("SVC_HOME", &home)) {
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
async fn three_gateways_keep_what_they_acknowledged_once_and_in_order_whatever_happens() {
    chaos(3, Homes::Separate).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_gateways_with_one_state_directory_keep_what_they_acknowledged_whatever_happens() {
    chaos(2, Homes::Shared).await;
}

#[expect(clippy::print_stdout, reason = "make chaos shows it")]
async fn chaos(gateways: usize, homes: Homes) {
    let seconds = number("CHAOS_SECONDS", 20);
    let seed = number("CHAOS_SEED", 1);
    // Of the two tests one is in each mode; the seed says which.
    let mode = if (seed + gateways as u64) % 2 == 1 { "delta" } else { "full" };
    let started = Instant::now();
    let scene = Scene::start(gateways, homes, mode).await;
    let over = CancellationToken::new();
    let mut clients = Vec::new();
    for number in 0..CLIENTS {
        let threads = clients::threads(&scene, number).await;
        let choices = StdRng::seed_from_u64(seed ^ (number as u64 + 1) << 32);
        clients.push(tokio::spawn(clients::work(Arc::clone(&scene), over.clone(), threads, choices)));
    }
    let operators = tokio::spawn(operators::work(Arc::clone(&scene), over.clone(), seed));
    let mut choices = StdRng::seed_from_u64(seed);
    let mut happened = faults::Happened::default();
    // Operators end early only because a command did what no fault explains.
    while !operators.is_finished()
        && (started.elapsed() < Duration::from_secs(seconds) || !happened.everything())
    {
        faults::one(&scene, &mut choices, &mut happened).await;
        tokio::time::sleep(Duration::from_millis(choices.random_range(100..1500))).await;
    }
    faults::heal(&scene, &mut happened).await;
    over.cancel();
    let mut threads = Vec::new();
    for client in clients {
        threads.extend(client.await.unwrap());
    }
    let mut done = operators.await.unwrap();
    for thread in &mut threads {
        clients::ask_last(&scene, thread).await;
    }
    done.rest(&scene).await;
    let judged = verdict::judge(&scene, &threads).await;
    println!("{gateways} gateways in {mode} mode, {seconds} s with the seed {seed}");
    println!("{happened}\n{done}\n{judged}");
    assert!(judged.acknowledged > 0, "{judged}");
    assert!(judged.wrong.is_empty(), "{judged}");
}
