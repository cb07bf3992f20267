//! The conformance suite on the Postgres saver, directly and through PgBouncer.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use common::damage;
use common::proxy::{Cut, Proxy};
use threadkeep::saver::Saver;
use threadkeep_conformance::savers::Postgres;
use threadkeep_conformance::{BoxError, Claim, Damage, Factory, Failing, child};
use threadkeep_postgres::{Options, PostgresSaver};
use threadkeep_testing::Database;

/// The saver with everything that can happen to it.
struct Maltreated(Postgres);

#[async_trait]
impl Factory for Maltreated {
    type Storage = Database;

    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn claims(&self) -> &'static [Claim] {
        &[
            Claim::Durable,
            Claim::LoseCheckpoint,
            Claim::LoseWrites,
            Claim::LoseParentLink,
            Claim::ChangeByte,
            Claim::SharedElements,
            Claim::StoredBytes,
            Claim::Killable,
            Claim::FailOperations,
            Claim::WritesAsItComes,
        ]
    }

    async fn create(&self) -> Result<Database, BoxError> {
        self.0.create().await
    }

    async fn open(&self, place: &Database) -> Result<Arc<dyn Saver>, BoxError> {
        self.0.open(place).await
    }

    fn address(&self, place: &Database) -> Result<String, BoxError> {
        self.0.address(place)
    }

    async fn open_at(&self, address: &str) -> Result<Arc<dyn Saver>, BoxError> {
        self.0.open_at(address).await
    }

    async fn open_failing(&self, place: &Database, nth: u32) -> Result<Failing, BoxError> {
        let proxy = Proxy::before(&self.address(place)?).await;
        let options = Options { connections: 4, patience: Duration::ZERO, ..Options::default() };
        let saver = Arc::new(PostgresSaver::connect(proxy.url(), options).await?);
        // Each request is cut off twice: before the server sees it, and before its answer comes back.
        proxy.cut((nth / 2) as usize, if nth.is_multiple_of(2) { Cut::Before } else { Cut::After });
        Ok(Failing { saver, failed: proxy.was_cut() })
    }

    async fn stored_bytes(&self, place: &Database) -> Result<u64, BoxError> {
        damage::stored_bytes(place.url()).await
    }

    async fn damage(&self, place: &Database, damage: &Damage) -> Result<(), BoxError> {
        damage::inflict(place.url(), damage).await
    }
}

/// The number of random programs, unless the environment sets it: each makes thousands of requests.
const PROGRAMS: (&str, &str) = ("PROPTEST_CASES", "16");

fn main() -> ExitCode {
    if std::env::var_os(PROGRAMS.0).is_none() {
        // The suite reads it from the environment, which a process can only set for another one. That takes this one's place: a
        // child would outlive it if it is ended.
        let mut this = Command::new(std::env::current_exe().expect("this program has a path"));
        let error = this.args(std::env::args_os().skip(1)).env(PROGRAMS.0, PROGRAMS.1).exec();
        panic!("this program cannot begin again: {error}");
    }
    let [direct, pooled] = [false, true].map(|pooled| Maltreated(Postgres { pooled }));
    // A child of the second suite must not run on the first.
    if let Some(code) = child(&pooled) {
        return code;
    }
    let direct = threadkeep_conformance::main(direct);
    let pooled = threadkeep_conformance::main(pooled);
    if direct == ExitCode::SUCCESS { pooled } else { direct }
}
