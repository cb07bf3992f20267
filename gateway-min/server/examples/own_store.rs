//! A gateway on a saver of its own: checkpoints in a redb file, the gateway's records in the configured `database.backend`.
//!
//! ```sh
//! cargo run --release -p threadkeep-gateway --example own_store -- serve
//! cargo run --release -p threadkeep-gateway --example own_store -- threads list
//! ```

use std::process::ExitCode;
use std::sync::Arc;

use async_trait::async_trait;
use threadkeep::Error;
use threadkeep::saver::Saver;
use threadkeep_gateway::program::{self, Config, OpenSaver, Stores};

struct OnRedb;

#[async_trait]
impl OpenSaver for OnRedb {
    async fn open(&self, config: &Config) -> threadkeep::Result<Arc<dyn Saver>> {
        let directory = &config.database.sqlite_dir;
        let unusable = |error: std::io::Error| Error::Unavailable {
            saver: "redb",
            reason: format!("cannot create the directory {}: {error}", directory.display()),
        };
        std::fs::create_dir_all(directory).map_err(unusable)?;
        Ok(Arc::new(threadkeep_redb::open(directory.join("checkpoints.redb"))?))
    }
}

fn main() -> ExitCode {
    program::main(Stores::with_saver(OnRedb))
}
