#![doc = include_str!("../README.md")]
//!
//! Commands on threads work on the configured store or on a named one, whether a gateway runs or not: every change of a
//! thread is atomic, and is refused and planned again if another process wrote meanwhile. Nothing is deleted without
//! `--yes` or a confirmed question. With `--json`, commands print one JSON document per line.

mod advice;
pub mod archive;
mod backup;
mod batches;
mod checkpoints;
mod config;
mod convert;
mod delegations;
mod diff;
mod error;
mod flushing;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod import;
mod interrupt;
mod keys;
mod lineage;
mod output;
mod pace;
mod pages;
mod pass;
mod plan;
mod progress;
mod prune;
mod question;
mod retention;
mod setup;
mod state;
mod target;
#[cfg(test)]
mod tests;
mod threads;
mod transfer;
mod vacuum;
mod verify;

use std::io::Write as _;

use clap::{ArgMatches, FromArgMatches, Subcommand};
use threadkeep_storage::Stores;

pub use advice::option;
pub use error::Exit;
pub use interrupt::Signals;

use self::backup::BackupCommand;
use self::batches::BatchesCommand;
use self::checkpoints::CheckpointsCommand;
use self::config::ConfigCommand;
use self::convert::ConvertCommand;
use self::delegations::DelegationsCommand;
use self::error::Result;
use self::import::ImportCommand;
use self::keys::KeysCommand;
use self::output::{Out, one_line};
use self::prune::PruneCommand;
use self::retention::RetentionCommand;
use self::setup::SetupCommand;
use self::state::StateCommand;
use self::target::{StoreArgs, Target};
use self::threads::ThreadsCommand;
use self::transfer::ExportCommand;
use self::vacuum::VacuumCommand;
use self::verify::VerifyCommand;

/// The operator commands with their arguments, to be flattened into a program's own commands.
#[derive(Debug)]
pub struct OpsCommand(Command);

impl OpsCommand {
    /// Whether it may go over a whole store or a long thread, so that it should leave the processors to gateways.
    pub fn is_long(&self) -> bool {
        match &self.0 {
            Command::Store(command) => command.is_long(),
            Command::Setup(_) | Command::Keys(_) | Command::Config(_) => false,
        }
    }
}

impl FromArgMatches for OpsCommand {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Command::from_arg_matches(matches).map(Self)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.0.update_from_arg_matches(matches)
    }
}

impl Subcommand for OpsCommand {
    fn augment_subcommands(command: clap::Command) -> clap::Command {
        Command::augment_subcommands(command)
    }

    fn augment_subcommands_for_update(command: clap::Command) -> clap::Command {
        Command::augment_subcommands_for_update(command)
    }

    fn has_subcommand(name: &str) -> bool {
        Command::has_subcommand(name)
    }
}

#[derive(Debug, Subcommand)]
enum Command {
    #[command(flatten)]
    Store(StoreCommand),
    Setup(SetupCommand),
    /// Create, list and revoke API keys.
    #[command(subcommand)]
    Keys(KeysCommand),
    /// Maintain the configuration file: upgrade, trust.
    #[command(subcommand)]
    Config(ConfigCommand),
}

impl Command {
    async fn carry_out(&self, stores: &Stores, out: &mut Out) -> Result<Exit> {
        match self {
            Self::Store(command) => {
                let target = Target::open(command.store(), stores).await?;
                let result = command.carry_out(&target, out).await;
                // Closing checkpoints the database, also after an error.
                target.close().await;
                return result;
            }
            Self::Setup(command) => command.run(stores, out).await?,
            Self::Keys(command) => command.run(out)?,
            Self::Config(command) => command.run(out)?,
        }
        Ok(Exit::Done)
    }
}

/// A command that needs the store.
#[derive(Debug, Subcommand)]
enum StoreCommand {
    /// Inspect threads: list, show, du.
    #[command(subcommand)]
    Threads(ThreadsCommand),
    /// Inspect the checkpoints of a thread: list, show, diff.
    #[command(subcommand)]
    Checkpoints(CheckpointsCommand),
    /// Inspect the state of a thread.
    #[command(subcommand)]
    State(StateCommand),
    /// Follow what a thread delegated to subagents: tree, show, verify.
    #[command(subcommand)]
    Delegations(DelegationsCommand),
    /// Follow the durable batches of a thread: list, show, watch, export.
    #[command(subcommand)]
    Batches(BatchesCommand),
    /// Remove leaf checkpoints that no run needs: plan, apply.
    #[command(subcommand)]
    Retention(RetentionCommand),
    /// Remove old checkpoints: plan, apply.
    #[command(subcommand)]
    Prune(PruneCommand),
    /// Convert threads to the other mode.
    Convert(ConvertCommand),
    /// Check every invariant, and repair what can be repaired safely.
    Verify(VerifyCommand),
    /// Write a thread to a file that any store can import.
    Export(ExportCommand),
    /// Read a thread from a file.
    Import(ImportCommand),
    /// Copy the store into new files, while gateways read and write.
    Backup(BackupCommand),
    /// Return the space freed by deletions to the file system.
    Vacuum(VacuumCommand),
}

impl StoreCommand {
    fn store(&self) -> &StoreArgs {
        match self {
            Self::Threads(command) => command.store(),
            Self::Checkpoints(command) => command.store(),
            Self::State(command) => command.store(),
            Self::Delegations(command) => command.store(),
            Self::Batches(command) => command.store(),
            Self::Retention(command) => command.store(),
            Self::Prune(command) => command.store(),
            Self::Convert(command) => &command.store,
            Self::Verify(command) => &command.store,
            Self::Export(command) => &command.store,
            Self::Import(command) => &command.store,
            Self::Backup(command) => &command.store,
            Self::Vacuum(command) => &command.store,
        }
    }

    fn is_long(&self) -> bool {
        match self {
            Self::Threads(_)
            | Self::Checkpoints(_)
            | Self::State(_)
            | Self::Delegations(_)
            | Self::Batches(_) => false,
            Self::Retention(_)
            | Self::Prune(_)
            | Self::Convert(_)
            | Self::Verify(_)
            | Self::Export(_)
            | Self::Import(_)
            | Self::Backup(_)
            | Self::Vacuum(_) => true,
        }
    }

    async fn carry_out(&self, target: &Target, out: &mut Out) -> Result<Exit> {
        match self {
            Self::Threads(command) => command.run(target, out).await?,
            Self::Checkpoints(command) => command.run(target, out).await?,
            Self::State(command) => command.run(target, out).await?,
            Self::Delegations(command) => return command.run(target, out).await,
            Self::Batches(command) => return command.run(target, out).await,
            Self::Retention(command) => command.run(target, out).await?,
            Self::Prune(command) => command.run(target, out).await?,
            Self::Convert(command) => command.run(target, out).await?,
            Self::Verify(command) => return command.run(target, out).await,
            Self::Export(command) => command.run(target, out).await?,
            Self::Import(command) => command.run(target, out).await?,
            Self::Backup(command) => command.run(target, out).await?,
            Self::Vacuum(command) => command.run(target, out).await?,
        }
        Ok(Exit::Done)
    }
}

/// Runs a command on these stores, or on that which its arguments name: results go to stdout, errors and progress to
/// stderr. Ctrl-C, SIGTERM and SIGHUP end the command, and the process if the command does not end soon: call it where
/// nothing else goes on.
pub async fn run(command: &OpsCommand, stores: &Stores) -> Exit {
    let mut out = Out::stdout();
    interrupt::listen();
    let result = tokio::select! {
        result = command.0.carry_out(stores, &mut out) => result,
        () = interrupt::at_once() => {
            // Nobody may be reading stderr.
            let _ = writeln!(std::io::stderr(), "\ninterrupted; each change happened completely or not at all");
            Ok(Exit::Interrupted)
        }
    };
    let shown = out.show().map_err(error::OpsError::from);
    match result.and_then(|exit| shown.map(|()| exit)) {
        Ok(exit) => exit,
        Err(error) => {
            // Nobody may be reading stderr.
            let text = error.to_string();
            let lines: Vec<String> = text.lines().map(one_line).collect();
            let _ = writeln!(std::io::stderr(), "error: {}", lines.join("\n"));
            error.exit()
        }
    }
}
