//! `threadkeep keys`: manages the API keys of a gateway with authentication.

use std::io::{self, Write as _};
use std::path::PathBuf;

use clap::{Args, Subcommand};
use serde_json::json;

use super::advice::SameStore;
use super::error::Result;
use super::output::{Columns, Out, time};
use threadkeep_config::{Config, KeyFile, LoadOptions, Role};

/// Which key file.
#[derive(Debug, Args)]
pub(crate) struct KeysArgs {
    /// The gateway's configuration, which names the key file (auth.keys_file) [default: SVC_CONFIG_PATH, then
    /// config.yaml in the project root].
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// Create, list and revoke API keys.
#[derive(Debug, Subcommand)]
pub(crate) enum KeysCommand {
    /// Create a key and print it once: only its hash is stored.
    #[command(after_help = "\
Examples:
  threadkeep keys create --user ann
  threadkeep keys create --user ops --role admin
  threadkeep keys create --user default          for threads created while authentication was off

The key goes to stdout, its description to stderr. A running gateway accepts it at once. Clients send it in the
header `x-api-key`, or as `Authorization: Bearer`.")]
    Create {
        /// The user of the key, who owns the threads created with it.
        #[arg(long, value_name = "NAME")]
        user: String,
        /// user, or admin to also allow administrator routes.
        #[arg(long, value_name = "ROLE", default_value = "user")]
        role: Role,
        #[command(flatten)]
        file: KeysArgs,
    },
    /// List the keys, oldest first, without their secrets.
    #[command(after_help = "--json prints one document per line, one for each key.")]
    List {
        #[command(flatten)]
        file: KeysArgs,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Revoke a key: the next request with it is refused.
    #[command(after_help = "Example:\n  threadkeep keys revoke 1f0c2a9b77de")]
    Revoke {
        /// The id, as in `keys list` and after `tk_` in the key.
        #[arg(value_name = "ID")]
        id: String,
        #[command(flatten)]
        file: KeysArgs,
    },
}

impl KeysArgs {
    fn open(&self) -> Result<KeyFile> {
        let options = LoadOptions::from_process(self.config.clone())?;
        Ok(KeyFile::new(&Config::load(&options)?.config.auth.keys_file))
    }
}

impl KeysCommand {
    /// Runs the command. Blocks.
    pub(crate) fn run(&self, out: &mut Out) -> Result<()> {
        match self {
            Self::Create { user, role, file } => {
                let (record, key) = file.open()?.create(user, *role)?;
                let role = role.as_str();
                // stderr may be closed when only stdout is captured.
                let _ = writeln!(
                    io::stderr(),
                    "key {} of {user} with role {role}; it is not shown again:",
                    record.id
                );
                out.line(key.expose())?;
                out.show_all()?;
            }
            Self::List { file, json } => {
                let mut table = Columns::new(&["ID", "USER", "ROLE", "CREATED"]);
                for record in file.open()?.list()? {
                    let role = record.role.as_str();
                    if *json {
                        let document = json!({"id": record.id, "user": record.user, "role": role, "created_at": record.created_at});
                        out.json(&document)?;
                    } else {
                        table.row([record.id, record.user, role.to_owned(), time(record.created_at)]);
                    }
                }
                if !json {
                    let create = SameStore::of(file.config.as_deref(), None, None).command("keys create");
                    out.table_or(&table, &format!("No keys; {create} makes one."))?;
                }
            }
            Self::Revoke { id, file } => {
                let record = file.open()?.revoke(id)?;
                out.line(format!("revoked key {} of {}", record.id, record.user))?;
            }
        }
        Ok(())
    }
}
