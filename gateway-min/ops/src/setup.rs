//! `threadkeep setup`: creates or migrates the configured stores.

use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use threadkeep_config::{Config, LoadOptions};
use threadkeep_storage::Stores;

use super::error::Result;
use super::output::{Out, one_line};

/// Create the configured stores, or migrate them to this version.
///
/// The gateway does the same when it starts, if its role may. Run it by itself before the first import, or, on Postgres, as
/// the role that owns the tables. Stores that are up to date are left alone.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  threadkeep setup
  threadkeep setup --config prod.yaml")]
pub(crate) struct SetupCommand {
    /// The gateway's configuration, which names the stores [default: SVC_CONFIG_PATH, then config.yaml in the project
    /// root].
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

impl SetupCommand {
    pub(crate) async fn run(&self, stores: &Stores, out: &mut Out) -> Result<()> {
        let options = LoadOptions::from_process(self.config.clone())?;
        let loading = tokio::task::spawn_blocking(move || Config::load(&options)).await;
        let config = loading.map_err(std::io::Error::from)??.config;
        let names = Box::pin(stores.set_up(&config)).await?;
        if self.json {
            return Ok(out.json(&json!({"stores": names}))?);
        }
        for name in names {
            out.line(format!("{}: ready.", one_line(&name)))?;
        }
        Ok(())
    }
}
