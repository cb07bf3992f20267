//! Helpers of the driver's tests.
#![allow(dead_code, unreachable_pub, unused_imports, reason = "each test uses its part")]

pub mod damage;
pub mod talk;

use std::time::Duration;

use threadkeep_postgres::{Options, PostgresSaver, setup};
pub use threadkeep_testing::proxy;
use threadkeep_testing::{Database, postgres};

/// A database with the tables in it.
pub async fn database() -> Database {
    let database = postgres().unwrap().database().await.unwrap();
    setup(database.url(), &patient()).await.unwrap();
    database
}

/// Options that wait as long as tests on a busy machine need.
pub fn patient() -> Options {
    Options { patience: Duration::from_mins(10), ..Options::default() }
}

/// A saver that waits as long as tests on a busy machine need.
pub async fn open(url: &str) -> PostgresSaver {
    PostgresSaver::connect(url, patient()).await.unwrap()
}

/// A saver that tries everything once.
pub async fn open_impatient(url: &str) -> PostgresSaver {
    let options = Options { patience: Duration::ZERO, ..Options::default() };
    PostgresSaver::connect(url, options).await.unwrap()
}
