//! `threadkeep config`: the configuration file.

use std::path::PathBuf;

use clap::Subcommand;

use super::error::Result;
use super::output::{Out, one_line};
use threadkeep_config::{Cadence, Config, LoadOptions, Upgrade, UserDirs, upgrade};

/// Maintain the configuration file: upgrade, trust.
#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Add the settings that are new in this version to the file.
    ///
    /// Missing keys are added with their defaults and comments. Everything else stays unchanged, including comments and
    /// layout, except that the deprecated key database.checkpoint_delta_snapshot_frequency moves to its new place with
    /// its value. The old file is kept next to it with the suffix .bak. An up-to-date file is left alone; a missing one
    /// is created. Keys without an effect, such as misspelt ones, are named.
    #[command(
        after_help = "Examples:\n  threadkeep config upgrade\n  threadkeep config upgrade --config prod.yaml"
    )]
    Upgrade {
        /// The file [default: SVC_CONFIG_PATH, then config.yaml in the project root].
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// Trust the working directory, so that `threadkeep chat` uses its configuration.
    ///
    /// A configuration decides which programs run and where keys are sent, so look at the files before you trust them:
    /// config.yaml, .env, and the file that SVC_CONFIG_PATH in this .env names. The directory's path and the content of
    /// these files are remembered for your user; after an edit they have to be trusted again.
    #[command(after_help = "Examples:\n  threadkeep config trust\n  threadkeep config trust --forget")]
    Trust {
        /// Trust it no longer.
        #[arg(long)]
        forget: bool,
    },
}

impl ConfigCommand {
    /// Runs the command. Blocks.
    pub(crate) fn run(&self, out: &mut Out) -> Result<()> {
        let config = match self {
            Self::Upgrade { config } => config,
            Self::Trust { forget } => return trust(*forget, out),
        };
        match upgrade(&LoadOptions::from_process(config.clone())?)? {
            Upgrade::Created { path, version } => {
                out.line(format!("created {} from the example (version {version})", path.display()))?;
            }
            Upgrade::UpToDate { path, version } => {
                let name = path.file_name().unwrap_or_default().display();
                out.line(format!("OK {name} is already up to date (version {version})."))?;
            }
            Upgrade::Upgraded { path, backup, versions: (before, now), added, cadence } => {
                let older = if before == now { String::new() } else { format!("{before} -> ") };
                out.line(format!("{}: version {older}{now}", path.display()))?;
                for key in added {
                    out.line(format!("  added {key}"))?;
                }
                if let Some(cadence) = cadence {
                    let done = match cadence {
                        Cadence::Moved => "moved its value to",
                        Cadence::Dropped => "dropped it in favour of",
                    };
                    out.line(format!(
                        "  database.checkpoint_delta_snapshot_frequency: {done} \
                         database.checkpoint_delta.snapshot_frequency"
                    ))?;
                }
                out.line(format!("backup of the old file: {}", backup.display()))?;
            }
        }
        // Loading logs what has no effect: unknown keys, with the nearest known ones.
        Config::load(&LoadOptions::from_process(config.clone())?)?;
        Ok(())
    }
}

fn trust(forget: bool, out: &mut Out) -> Result<()> {
    let options = LoadOptions::from_process(None)?;
    let user = UserDirs::of(&options.environment)?;
    let directory = &options.working_dir;
    let shown = one_line(&directory.display().to_string());
    if forget {
        let text = if user.distrust(directory)? { "is trusted no longer" } else { "was not trusted" };
        return Ok(out.line(format!("{shown} {text}."))?);
    }
    let names = user.trust(directory)?;
    let files =
        if names.is_empty() { "it has no config.yaml and no .env".to_owned() } else { names.join(", ") };
    Ok(out.line(format!("{shown} is trusted, as it is now: {files}."))?)
}
