//! `threadkeep chat`: the agent at a terminal, on the embedded client. Headless for scripts (`--print`, `--json`), or a
//! terminal UI.
//!
//! | Exit code | Means |
//! |---|---|
//! | 0 | the turn finished, or the user left the terminal UI |
//! | 1 | an error, printed on stderr; or the reader of stdout is gone |
//! | 2 | an invalid command line, or no message |
//! | 130, 143 | without the terminal UI: Ctrl-C, or a signal to end, stopped the turn; what it had committed stays |

mod headless;
mod signals;
mod terminal;
mod threads;
mod tui;

use std::fmt::Display;
use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use crate::client::{Checkpointer, Client, ClientError, ClientOptions, Configuration, TurnOptions};
use headless::Form;
use threadkeep_config::{ConfigHandle, LoadOptions};
use threadkeep_storage::Stores;

/// The error for a headless call without a message.
const NO_MESSAGE: &str = "No message provided.";
/// The error for `--recursion-limit` with the terminal UI.
const LIMIT_IS_HEADLESS: &str = "--recursion-limit needs --print or --json";
/// The error for a forced terminal UI without a terminal.
const NO_TERMINAL: &str = "the terminal UI needs a terminal; --print and --json do not";
/// The exit code for an invalid command line.
const USAGE: u8 = 2;

/// Talk to the configured agent, without a gateway.
///
/// At a terminal this opens the terminal UI, where /help lists the commands. With --print or --json, or without a
/// terminal, it runs one turn and exits.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  threadkeep chat                               the terminal UI
  threadkeep chat --continue                    ... on the thread written last
  threadkeep chat --print 'What is in here?'    the answer on stdout, errors on stderr
  git diff | threadkeep chat --print            the message from standard input
  threadkeep chat --json 'Hi' | jq .type        every event as a line of JSON
  threadkeep chat --resume 'Plan a trip' --print 'And then?'
  threadkeep chat --subagents 'Research three things'
  threadkeep chat --subagents --continue --print   go on with what was killed, without a message

The configuration, .env and threads (.svc) of the working directory are used only after `threadkeep config trust`, as
they decide which programs run and where keys are sent. Otherwise your own are: ~/.config/threadkeep/config.yaml,
~/.config/threadkeep/.env, ~/.local/state/threadkeep. What --config and the variables SVC_CONFIG_PATH, SVC_PROJECT_ROOT
and SVC_HOME name is always used.

Threads are in the configured store, which a gateway may serve at the same time. If both write to one thread at the
same time, one of them fails with a conflict, and nothing is lost.

With --subagents the agent hands work to subagents. --json prints their task_started, task_running, task_completed,
task_failed, task_cancelled and task_timed_out events as records of type 'custom'. Ctrl-C cancels them with the turn; after
a crash, --continue or --resume without a message goes on with them.

Exit codes:
  0    success
  1    an error, printed on stderr; or the reader of stdout is gone
  2    an invalid command line, or no message
  130  Ctrl-C stopped the turn; what it had committed stays (143: SIGTERM did)")]
pub struct ChatArgs {
    /// The message; in the terminal UI the first one. If omitted, standard input is read unless it is a terminal.
    message: Option<String>,
    /// Run one turn and print the answer.
    #[arg(long, value_name = "MESSAGE", num_args = 0..=1, conflicts_with = "json")]
    #[allow(clippy::option_option)] // How clap models an optional value.
    print: Option<Option<String>>,
    /// Run one turn and print its events as lines of JSON: {"type": ..., "data": ...}.
    #[arg(long, value_name = "MESSAGE", num_args = 0..=1)]
    #[allow(clippy::option_option)]
    json: Option<Option<String>>,
    /// Open the terminal UI.
    #[arg(long, conflicts_with_all = ["cli", "print", "json"])]
    tui: bool,
    /// Do not open the terminal UI, as with --print. SVC_TUI=1 or SVC_TUI=0 sets the default.
    #[arg(long)]
    cli: bool,
    /// Keep the terminal's background.
    #[arg(long, env = "SVC_TUI_TRANSPARENT", value_parser = clap::builder::FalseyValueParser::new())]
    tui_transparent: bool,
    /// Continue the thread that was written last.
    #[arg(long = "continue", conflicts_with = "resume")]
    go_on: bool,
    /// Continue this thread, by id or title.
    #[arg(long, value_name = "THREAD")]
    resume: Option<String>,
    /// Maximum supersteps of the turn.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    recursion_limit: Option<u64>,
    /// Let the agent delegate to subagents, with the tool `task`.
    #[arg(long)]
    subagents: bool,
    /// Maximum delegations in one answer of the model [default: 3, at most subagent_runtime.max_running].
    #[arg(long, value_name = "N", requires = "subagents", value_parser = clap::value_parser!(i64).range(1..=64))]
    max_concurrent_subagents: Option<i64>,
    /// Maximum delegations of a turn [default: subagents.max_total_per_run].
    #[arg(long, value_name = "N", requires = "subagents", value_parser = clap::value_parser!(i64).range(1..=50))]
    max_total_subagents: Option<i64>,
    /// The model [default: the first configured one].
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// The configuration file [default: SVC_CONFIG_PATH, then config.yaml of a trusted directory, then your own].
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Set by [`run`].
    #[arg(skip)]
    stores: Stores,
}

/// How the conversation is displayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Surface {
    Headless(Form),
    Tui,
}

impl ChatArgs {
    /// Whether the terminal UI will run, so that nothing else may write to the terminal.
    pub fn is_tui(&self) -> bool {
        self.surface() == Surface::Tui
    }

    fn surface(&self) -> Surface {
        let terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
        self.surface_on(terminal, std::env::var("SVC_TUI").ok().as_deref())
    }

    /// Flags take precedence over the variable, and that over whether standard input and output are a terminal.
    fn surface_on(&self, terminal: bool, variable: Option<&str>) -> Surface {
        let plain = Surface::Headless(Form::Text);
        if self.json.is_some() {
            return Surface::Headless(Form::Json);
        }
        if self.print.is_some() || self.cli {
            return plain;
        }
        if self.tui {
            return Surface::Tui;
        }
        match variable.map(str::trim) {
            Some("1" | "true" | "yes" | "on") => Surface::Tui,
            Some("0" | "false" | "no" | "off") => plain,
            _ if terminal => Surface::Tui,
            _ => plain,
        }
    }

    /// The message on the command line; an error if there are two.
    fn message(&self) -> Result<Option<&str>, &'static str> {
        let of_flag = self.print.as_ref().or(self.json.as_ref()).and_then(Option::as_deref);
        match (self.message.as_deref(), of_flag) {
            (Some(_), Some(_)) => Err("the message is given twice"),
            (message, of_flag) => Ok(message.or(of_flag).filter(|message| !message.trim().is_empty())),
        }
    }

    /// The configuration: the named file, else that of the working directory if its user trusts it, else the user's own.
    async fn config(&self) -> Result<ConfigHandle, ClientError> {
        let options = LoadOptions::from_process(self.config.clone())?;
        let opened = tokio::task::spawn_blocking(move || ConfigHandle::open_trusted(&options));
        Ok(opened.await.map_err(|_| ClientError::Died)??)
    }

    fn client_options(&self, config: ConfigHandle) -> ClientOptions {
        ClientOptions {
            config: Configuration::Given(config),
            turn: TurnOptions {
                model_name: self.model.clone(),
                recursion_limit: self.recursion_limit,
                subagent_enabled: self.subagents.then_some(true),
                max_concurrent_subagents: self.max_concurrent_subagents,
                max_total_subagents: self.max_total_subagents,
                ..TurnOptions::default()
            },
            checkpointer: Checkpointer::ProcessWide(self.stores.clone()),
            ..ClientOptions::default()
        }
    }

    /// Whether it continues a thread, which needs no message if the thread stopped in the middle of a turn.
    fn continues(&self) -> bool {
        self.go_on || self.resume.is_some()
    }

    /// The thread to continue; `None` for a new one.
    async fn thread(&self, client: &Client) -> Result<Option<String>, ClientError> {
        match &self.resume {
            Some(named) => threads::named(client, named).await.map(Some),
            None if self.go_on => threads::newest(client).await.map(Some),
            None => Ok(None),
        }
    }
}

/// Runs the command on these stores.
pub async fn run(mut args: ChatArgs, stores: Stores) -> ExitCode {
    args.stores = stores;
    let message = match args.message() {
        Ok(message) => message,
        Err(problem) => return refuse(problem),
    };
    match args.surface() {
        Surface::Tui if args.recursion_limit.is_some() => refuse(LIMIT_IS_HEADLESS),
        Surface::Tui if !(std::io::stdin().is_terminal() && std::io::stdout().is_terminal()) => {
            complain(NO_TERMINAL);
            ExitCode::FAILURE
        }
        Surface::Tui => match tui::run(&args, message.map(str::to_owned)).await {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                complain(error);
                ExitCode::FAILURE
            }
        },
        Surface::Headless(form) => headless::run(&args, form, message.map(str::to_owned)).await,
    }
}

/// What the user should know if files of the working directory are not used.
fn withheld(config: &ConfigHandle) -> Option<String> {
    let names: Vec<_> = config.withheld().iter().filter_map(|path| path.file_name()?.to_str()).collect();
    let listed = names.join(", ");
    (!names.is_empty()).then(|| {
        format!(
            "{listed} of this directory {} not used, because you have not trusted the directory; if you do, run \
             `threadkeep config trust`, or name a file with --config",
            if names.len() == 1 { "is" } else { "are" }
        )
    })
}

/// Prints an error on stderr. If that fails, there is nobody to report it to.
fn complain(error: impl Display) {
    say("Error", &error.to_string());
}

/// Prints something that is no error on stderr.
fn note(text: &str) {
    say("Note", text);
}

fn say(what: &str, text: &str) {
    let mut err = std::io::stderr().lock();
    let text = if err.is_terminal() { terminal::harmless(text) } else { text.into() };
    let _ = writeln!(err, "{what}: {text}");
}

/// Exits because of an invalid command line.
fn refuse(problem: &str) -> ExitCode {
    let _ = writeln!(std::io::stderr(), "{problem}");
    ExitCode::from(USAGE)
}

/// The error's message, or at least its class.
fn text_of(error: &ClientError) -> String {
    Some(error.to_string())
        .filter(|text| !text.trim().is_empty())
        .unwrap_or_else(|| error.class_name().to_owned())
}

#[cfg(test)]
mod tests {
    use clap::{Command, FromArgMatches as _};

    use super::*;

    fn parsed(arguments: &[&str]) -> Result<ChatArgs, clap::Error> {
        let command = ChatArgs::augment_args(Command::new("chat"));
        let matches = command.try_get_matches_from([&["chat"], arguments].concat())?;
        ChatArgs::from_arg_matches(&matches)
    }

    #[test]
    fn flags_count_before_the_variable_and_that_before_the_terminal() {
        let (text, json) = (Surface::Headless(Form::Text), Surface::Headless(Form::Json));
        for (arguments, terminal, variable, surface) in [
            (&[][..], true, None, Surface::Tui),
            (&[], false, None, text),
            (&[], true, Some("0"), text),
            (&[], false, Some("1"), Surface::Tui),
            (&[], true, Some(""), Surface::Tui),
            (&["--cli"], true, Some("1"), text),
            (&["--tui"], false, Some("0"), Surface::Tui),
            (&["--print"], true, Some("1"), text),
            (&["--json"], true, Some("1"), json),
        ] {
            assert_eq!(parsed(arguments).unwrap().surface_on(terminal, variable), surface, "{arguments:?}");
        }
    }

    #[test]
    fn a_message_is_given_once_and_blank_ones_are_none() {
        for (arguments, message) in [
            (&["hi"][..], Ok(Some("hi"))),
            (&["--print", "hi"], Ok(Some("hi"))),
            (&["--json", "hi"], Ok(Some("hi"))),
            (&["hi", "--print"], Ok(Some("hi"))),
            (&["--print"], Ok(None)),
            (&["  "], Ok(None)),
            (&["one", "--print", "two"], Err("the message is given twice")),
        ] {
            assert_eq!(parsed(arguments).unwrap().message(), message, "{arguments:?}");
        }
        for wrong in [
            &["--print", "--json"][..],
            &["--tui", "--cli"],
            &["--tui", "--print", "x"],
            &["--continue", "--resume", "x"],
            &["--recursion-limit", "0"],
            &["--recursion-limit", "x"],
            &["--max-total-subagents", "3"],
            &["--subagents", "--max-total-subagents", "51"],
            &["--subagents", "--max-concurrent-subagents", "0"],
        ] {
            assert_eq!(parsed(wrong).unwrap_err().exit_code(), 2, "{wrong:?}");
        }
    }
}
