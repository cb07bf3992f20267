//! What happens to gateways and servers.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rand::RngExt as _;
use rand::rngs::StdRng;

use super::Scene;

/// The kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    KilledGateway,
    StoppedInOrder,
    StandsStill,
    CrashedPostgres,
    RestartedPostgres,
    RestartedBouncer,
    EndedBackends,
    CrashedRedis,
    EmptiedRedis,
    GarbageInRedis,
}

const ALL: [Fault; 10] = [
    Fault::KilledGateway,
    Fault::StoppedInOrder,
    Fault::StandsStill,
    Fault::CrashedPostgres,
    Fault::RestartedPostgres,
    Fault::RestartedBouncer,
    Fault::EndedBackends,
    Fault::CrashedRedis,
    Fault::EmptiedRedis,
    Fault::GarbageInRedis,
];

/// How often each fault happened, and which gateways stand still until when.
#[derive(Default)]
pub(super) struct Happened {
    counts: BTreeMap<Fault, usize>,
    still: Vec<(usize, Instant)>,
}

impl Happened {
    /// Whether each fault happened.
    pub(super) fn everything(&self) -> bool {
        self.counts.len() == ALL.len()
    }
}

impl fmt::Display for Happened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (fault, count) in &self.counts {
            writeln!(f, "{:<20} {count:>5}", format!("{fault:?}"))?;
        }
        write!(f, "{:<20} {:>5}", "faults", self.counts.values().sum::<usize>())
    }
}

/// Lets one thing happen: each kind once in the beginning, then any.
pub(super) async fn one(scene: &Arc<Scene>, choices: &mut StdRng, happened: &mut Happened) {
    wake(scene, happened, Instant::now());
    let missing: Vec<Fault> = ALL.into_iter().filter(|fault| !happened.counts.contains_key(fault)).collect();
    let among = if missing.is_empty() { &ALL[..] } else { &missing };
    let fault = among[choices.random_range(0..among.len())];
    let at = choices.random_range(0..scene.dirs.len());
    // One that stands still cannot end in order, and is not stopped twice.
    if happened.still.iter().any(|(still, _)| *still == at)
        && matches!(fault, Fault::KilledGateway | Fault::StoppedInOrder | Fault::StandsStill)
    {
        return;
    }
    let is_of_database =
        matches!(fault, Fault::CrashedPostgres | Fault::RestartedPostgres | Fault::EndedBackends);
    if is_of_database {
        scene.disturbances.fetch_add(1, Ordering::SeqCst);
    }
    match fault {
        Fault::KilledGateway => {
            drop(scene.take_gateway(at));
            scene.start_gateway(at).await;
        }
        Fault::StoppedInOrder => {
            let mut gateway = scene.take_gateway(at);
            gateway.signal("-TERM");
            let ended = tokio::task::spawn_blocking(move || gateway.child.wait().unwrap());
            assert!(ended.await.unwrap().success(), "a gateway that is asked to end does so in order");
            scene.start_gateway(at).await;
        }
        Fault::StandsStill => {
            let longest = if super::number("CHAOS_SECONDS", 20) > 60 { 60 } else { 14 };
            let until = Instant::now() + Duration::from_secs(choices.random_range(1..longest));
            signal(scene, at, "-STOP");
            happened.still.push((at, until));
        }
        Fault::CrashedPostgres | Fault::RestartedPostgres => {
            let pause = Duration::from_millis(choices.random_range(0..2000));
            let scene = Arc::clone(scene);
            let done = tokio::task::spawn_blocking(move || {
                let end = match fault {
                    Fault::CrashedPostgres => scene.postgres.crash(),
                    _ => scene.postgres.shut_down(),
                };
                end.unwrap();
                std::thread::sleep(pause);
                scene.postgres.resume().unwrap();
            });
            done.await.unwrap();
        }
        Fault::RestartedBouncer => {
            let scene = Arc::clone(scene);
            let done = tokio::task::spawn_blocking(move || {
                scene.bouncer.crash().unwrap();
                scene.bouncer.resume().unwrap();
            });
            done.await.unwrap();
        }
        Fault::EndedBackends => end_backends(scene).await,
        Fault::CrashedRedis => {
            let pause = Duration::from_millis(choices.random_range(0..1500));
            let scene = Arc::clone(scene);
            let done = tokio::task::spawn_blocking(move || {
                scene.redis.crash().unwrap();
                std::thread::sleep(pause);
                scene.redis.resume().unwrap();
            });
            done.await.unwrap();
        }
        Fault::EmptiedRedis => {
            redis(scene, |connection| redis::cmd("FLUSHALL").exec(connection).unwrap()).await;
        }
        Fault::GarbageInRedis => redis(scene, garbage).await,
    }
    if is_of_database {
        scene.disturbances.fetch_add(1, Ordering::SeqCst);
    }
    *happened.counts.entry(fault).or_default() += 1;
}

/// Everything serves again.
pub(super) async fn heal(scene: &Arc<Scene>, happened: &mut Happened) {
    if let Some(last) = happened.still.iter().map(|(_, until)| *until).max() {
        tokio::time::sleep_until(last.into()).await;
        wake(scene, happened, last);
    }
}

/// Wakes those whose time has come.
fn wake(scene: &Scene, happened: &mut Happened, now: Instant) {
    happened.still.retain(|(at, until)| {
        if *until > now {
            return true;
        }
        signal(scene, *at, "-CONT");
        false
    });
}

fn signal(scene: &Scene, at: usize, name: &str) {
    scene.gateways.lock().unwrap()[at].as_ref().unwrap().signal(name);
}

async fn end_backends(scene: &Scene) {
    let (client, connection) =
        tokio_postgres::connect(scene.database.url(), tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
               WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'";
    client.batch_execute(sql).await.unwrap();
}

/// Writes something else over every entry.
fn garbage(connection: &mut redis::Connection) {
    let keys: Vec<Vec<u8>> = redis::cmd("KEYS").arg("*").query(connection).unwrap();
    for key in keys {
        redis::cmd("SET").arg(key).arg("\u{1}garbage").exec(connection).unwrap();
    }
}

async fn redis(scene: &Scene, work: impl FnOnce(&mut redis::Connection) + Send + 'static) {
    let client = redis::Client::open(scene.redis.url()).unwrap();
    let done = tokio::task::spawn_blocking(move || work(&mut client.get_connection().unwrap()));
    done.await.unwrap();
}
