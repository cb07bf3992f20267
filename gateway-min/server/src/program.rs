//! The `threadkeep` program: the gateway, the chat at a terminal, the operator's commands. A program with a saver of its own passes it
//! here, and has all of them on its store.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use axum::serve::Listener;
use clap::{Parser, Subcommand};
use threadkeep::mode::ModeRegister;
use threadkeep_chat::console::{self, ChatArgs};
use threadkeep_config::{Auth, ConfigHandle, Environment, KeyFile, LoadOptions};
use threadkeep_ops::{OpsCommand, Signals};
use threadkeep_processes::run_guard_if_asked;
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use tracing::level_filters::LevelFilter;

use crate::app::App;
use crate::auth;
use crate::directory::DirectoryLock;
use crate::http;
use crate::process;
use crate::telemetry::{self, Traces};

pub use threadkeep_config::Config;
pub use threadkeep_storage::{OpenSaver, Stores};

/// The variable with the address to listen on, if the command line has none.
const HOST: &str = "GATEWAY_HOST";
/// The variable with the port.
const PORT: &str = "GATEWAY_PORT";
/// The variable that accepts every client without authentication.
const ALLOW_UNAUTHENTICATED: &str = "GATEWAY_ALLOW_UNAUTHENTICATED";
/// Where to listen by default.
const DEFAULT_HOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const DEFAULT_PORT: u16 = 8001;
/// How long clients have to read what was sent to them before the gateway exits.
const LAST_WORDS: Duration = Duration::from_secs(3);
/// How long the stores may take to close: what was acknowledged is durable without it.
const CLOSING: Duration = Duration::from_secs(10);
/// How long work on the runtime's threads may take to end after everything else.
const LEFTOVERS: Duration = Duration::from_secs(1);
/// How much longer others are served than a long command, as `nice` counts: a quarter of the time falls to it beside one other
/// thread. With ten it would be a tenth, and on a machine with too much to do a command would hardly get on.
const NICE: i32 = 5;

/// Stores the state of agent conversations as checkpoints, and serves the agents that run on them.
///
/// Works without a configuration file: with SQLite files in `.svc`, and a demo model that needs no API key.
/// `config.example.yaml` shows every setting.
#[derive(Debug, Parser)]
#[command(
    name = "threadkeep",
    version,
    after_help = "\
Examples:
  threadkeep serve                              serve on http://127.0.0.1:8001
  threadkeep serve --config prod.yaml --port 80 with your own configuration
  RUST_LOG=debug threadkeep serve               log more on stderr
  threadkeep chat                               talk with the agent at this terminal
  git diff | threadkeep chat --print            one turn, the answer on stdout
  threadkeep keys create --user ann             a key for a gateway with auth.enabled: true
  threadkeep config upgrade                     add the settings new in this version to config.yaml
  threadkeep threads list                       the threads in the gateway's store
  threadkeep prune plan --all --keep since:30d  what would be removed, and why

The commands on threads work on the configured store (--config) or on a named one (--sqlite, --postgres), whether a
gateway runs or not. Each has its own --help, with examples.

Exit codes:
  0  success; what was checked is clean
  1  an error; each change happened completely or not at all
  2  an invalid command line
  3  verify found violations, delegations verify records that differ; a watched batch did not complete
  4  nothing was changed, because the change was not confirmed
  130  Ctrl-C, SIGTERM or SIGHUP ended it early; what was done stays done"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve the HTTP gateway until interrupted.
    #[command(after_help = "\
Examples:
  threadkeep serve
  threadkeep serve --config prod.yaml --host 0.0.0.0     with auth.enabled: true in prod.yaml

GATEWAY_CORS_ORIGINS=https://app.example,http://localhost:3000 lists the origins whose web pages may use the API;
* is any. These variables may also be in the project's .env.")]
    Serve {
        /// The configuration file [default: SVC_CONFIG_PATH, then config.yaml in the project root].
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// The address to listen on [default: 127.0.0.1].
        #[arg(long, env = HOST)]
        host: Option<IpAddr>,
        /// The port to listen on; 0 picks a free port, which is logged [default: GATEWAY_PORT, then 8001].
        #[arg(long)]
        port: Option<u16>,
        /// Listen beyond this machine and accept any host name without authentication.
        #[arg(long, env = ALLOW_UNAUTHENTICATED)]
        allow_unauthenticated: bool,
    },
    Chat(ChatArgs),
    #[command(flatten)]
    Ops(OpsCommand),
}

/// Runs the command of this process's arguments on these stores. It takes over the process: its signals, its log, its open files. Call
/// it first in `main`: guards of other programs are the same binary.
pub fn main(stores: Stores) -> ExitCode {
    if let Some(code) = run_guard_if_asked() {
        return code;
    }
    let cli = Cli::parse();
    // Operator commands print their results, so log only warnings. The server's log is its output. The chat shows
    // errors itself.
    let level = match &cli.command {
        Command::Serve { .. } => LevelFilter::INFO,
        Command::Ops(_) => LevelFilter::WARN,
        Command::Chat(_) => LevelFilter::OFF,
    };
    match run(cli, level, stores) {
        Ok(code) => code,
        Err(error) => {
            // The error may have occurred before the log was set up.
            tracing::subscriber::with_default(telemetry::log(level), || tracing::error!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Raises the soft limit of open files to the hard limit: each client that follows a run needs one, and the usual soft
/// limit of 1,024 only protects programs that use select(2).
fn raise_open_files() {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let limit = getrlimit(Resource::Nofile);
        // If this fails, the gateway serves fewer clients at once.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    }
}

/// Leaves the processors to gateways on this machine, for the threads that this one starts: a command that goes over a
/// whole store takes as much of them as it gets.
fn give_way() {
    #[cfg(unix)]
    {
        // If this fails, the command runs as others do.
        let _ = rustix::process::nice(NICE);
    }
}

fn run(cli: Cli, level: LevelFilter, stores: Stores) -> anyhow::Result<ExitCode> {
    process::keep_files_private();
    if !matches!(cli.command, Command::Ops(_)) {
        tracing::subscriber::with_default(telemetry::log(level), process::close_to_commands);
    }
    if let Command::Ops(command) = &cli.command
        && command.is_long()
    {
        give_way();
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    match cli.command {
        Command::Serve { config, host, port, allow_unauthenticated } => {
            let config = configured(config, level)?;
            let environment = config.environment();
            let address = address(host, port, environment)?;
            let accepted =
                allow_unauthenticated || variable::<bool>(environment, ALLOW_UNAUTHENTICATED)? == Some(true);
            let traces = start_telemetry(&config, level, &runtime)?;
            let served = runtime.block_on(serve(config, stores, address, accepted));
            if let Some(traces) = traces {
                traces.stop();
            }
            // Dropping it would wait for work that blocks, however long that takes.
            runtime.shutdown_timeout(LEFTOVERS);
            served.map(|()| ExitCode::SUCCESS)
        }
        Command::Ops(command) => {
            telemetry::install(level, None);
            let exit = runtime.block_on(threadkeep_ops::run(&command, &stores));
            // As above: an interrupted command may have left a question, or a copy that nobody wants any more.
            runtime.shutdown_timeout(LEFTOVERS);
            Ok(exit.into())
        }
        Command::Chat(args) => {
            // The terminal UI owns the screen, so nothing else may write.
            if !args.is_tui() {
                telemetry::install(level, None);
            }
            let code = runtime.block_on(console::run(args, stores));
            // As above: a second signal ends the chat, whatever a tool reads or a name server does not answer.
            runtime.shutdown_timeout(LEFTOVERS);
            Ok(code)
        }
    }
}

/// Loads the configuration. It decides where traces go, so its own messages are logged before tracing starts.
fn configured(path: Option<PathBuf>, level: LevelFilter) -> anyhow::Result<ConfigHandle> {
    let options = LoadOptions::from_process(path)?;
    Ok(tracing::subscriber::with_default(telemetry::log(level), || ConfigHandle::open(&options))?)
}

/// Where to listen: what the command line or the process's environment says, else what the project's `.env` says.
fn address(host: Option<IpAddr>, port: Option<u16>, environment: &Environment) -> anyhow::Result<SocketAddr> {
    let host = match host {
        Some(host) => Some(host),
        None => variable(environment, HOST)?,
    };
    let port = match port {
        Some(port) => Some(port),
        // Kubernetes sets it in each container beside a service of the name `gateway`: to that service's address.
        None if environment.non_empty(PORT).is_some_and(|text| text.contains("://")) => None,
        None => variable(environment, PORT)?,
    };
    Ok(SocketAddr::new(host.unwrap_or(DEFAULT_HOST), port.unwrap_or(DEFAULT_PORT)))
}

/// The value of a variable, if it is set.
fn variable<T: FromStr>(environment: &Environment, name: &str) -> anyhow::Result<Option<T>>
where
    T::Err: std::error::Error + Send + Sync + 'static,
{
    let Some(text) = environment.non_empty(name) else { return Ok(None) };
    let value = text
        .parse::<T>()
        .with_context(|| format!("{name} is '{text}', which is not valid; see `serve --help`"))?;
    Ok(Some(value))
}

/// Starts the log, and the traces if they are enabled.
fn start_telemetry(
    config: &ConfigHandle,
    level: LevelFilter,
    runtime: &Runtime,
) -> anyhow::Result<Option<Traces>> {
    let settings = &config.at_start().telemetry.traces;
    let traces = Traces::start(settings, config.environment(), runtime.handle())?;
    telemetry::install(level, traces.as_ref());
    Ok(traces)
}

async fn serve(
    config: ConfigHandle,
    stores: Stores,
    address: SocketAddr,
    allow_unauthenticated: bool,
) -> anyhow::Result<()> {
    raise_open_files();
    // From here on: the first process of a container ignores a signal that it does not catch.
    let mut signals = Signals::new().context("signals cannot be caught")?;
    let current = config.at_start();
    let (settings, has_page) = (current.auth.clone(), current.page.enabled);
    let reach = auth::reach(address, &settings, allow_unauthenticated)?;
    let mut directory = tokio::task::spawn_blocking(move || DirectoryLock::take(&current)).await??;
    // Before the start, which ends the runs that no process seems to work on: a gateway that cannot serve changes nothing.
    // Clients that connect from now on are served once it has started.
    let listener = http::listen(address).await.with_context(|| cannot_listen(address))?;
    let address = listener.local_addr()?;
    if let Some(directory) = &mut directory {
        directory.serves_at(address);
    }
    if settings.enabled {
        warn_without_keys(&settings).await?;
    } else if !address.ip().is_loopback() {
        tracing::warn!(%address, "listening beyond this machine without authentication: every client that reaches the port is an administrator");
    }
    let in_use = in_use(&config);
    let app = tokio::select! {
        app = App::start_on(stores, config, Arc::clone(ModeRegister::process())) => app?,
        // Whatever it waits for, such as a database that does not answer. The next start goes on as after a kill.
        _ = signals.next() => {
            tracing::info!("stopped before it served");
            return Ok(());
        }
    };
    let page = if has_page { format!("page at http://{address}/, ") } else { String::new() };
    tracing::info!("{in_use}");
    tracing::info!(
        "serving on http://{address}, {page}API at http://{address}/api, OpenAPI document at http://{address}/openapi.json"
    );
    let router = http::router_for(Arc::clone(&app), reach);
    let asked = async {
        signals.next().await;
    };
    serve_until(&app, listener, router, asked).await;
    if tokio::time::timeout(CLOSING, app.close()).await.is_err() {
        tracing::warn!(seconds = CLOSING.as_secs(), "the stores did not close in time");
    }
    tracing::info!("stopped");
    Ok(())
}

/// Serves until `asked` ends. From then on the port is closed, while runs are interrupted and their followers are
/// served to the end.
pub(crate) async fn serve_until<L>(
    app: &Arc<App>,
    listener: L,
    router: Router,
    asked: impl Future<Output = ()>,
) where
    L: Listener<Io = TcpStream>,
{
    let (stopping, drained) = (CancellationToken::new(), CancellationToken::new());
    let last_words = async {
        drained.cancelled().await;
        tokio::time::sleep(LAST_WORDS).await;
    };
    let serving = async {
        tokio::select! {
            () = http::serve(listener, router, app.connections(), stopping.cancelled()) => {}
            // Every stream has ended; a client that does not read its end must not delay the exit.
            () = last_words => {}
        }
    };
    let draining = async {
        asked.await;
        tracing::info!("stopping: interrupting runs and waiting for their last writes");
        stopping.cancel();
        app.stop_runs().await;
        drained.cancel();
    };
    tokio::join!(serving, draining);
}

/// The configuration and the state directory, so that a file in another directory or of another name is noticed.
fn in_use(config: &ConfigHandle) -> String {
    let (source, current) = (config.source(), config.last_known());
    let state = current.state_dir.display();
    match source {
        Some(path) => format!("configuration {}, state in {state}", path.display()),
        None => format!(
            "no config.yaml in {}: using the defaults and the demo model, state in {state}",
            current.root.display()
        ),
    }
}

/// A gateway that `make run` starts takes no options, so the variable is named, too.
fn cannot_listen(address: SocketAddr) -> String {
    format!(
        "cannot listen on {address}; is another gateway running? choose another port with --port, or with {PORT}"
    )
}

/// Warns that no client can log in yet. An unreadable key file stops the start.
async fn warn_without_keys(settings: &Auth) -> anyhow::Result<()> {
    let file = KeyFile::new(&settings.keys_file);
    if tokio::task::spawn_blocking(move || file.list()).await??.is_empty() {
        tracing::warn!(
            "there is no API key yet, so every request is refused; create one with `threadkeep keys create`"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_names_the_configuration_in_use() {
        let dir = tempfile::tempdir().unwrap();
        let options = LoadOptions {
            config_path: None,
            environment: Environment::default(),
            working_dir: dir.path().to_owned(),
        };
        let said = || in_use(&ConfigHandle::open(&options).unwrap());
        std::fs::write(dir.path().join("config.yml"), "").unwrap();
        let without = said();
        let here = dir.path().display().to_string();
        assert!(without.contains(&format!("no config.yaml in {here}:")), "{without}");
        assert!(without.contains("demo model"), "{without}");
        let file = dir.path().join("config.yaml");
        std::fs::write(&file, "").unwrap();
        let with = said();
        assert!(with.starts_with(&format!("configuration {}, ", file.display())), "{with}");
    }

    #[test]
    fn a_port_that_is_taken_is_named_with_both_ways_to_choose_another() {
        let said = cannot_listen("127.0.0.1:8001".parse().unwrap());
        for part in ["127.0.0.1:8001", "--port", "GATEWAY_PORT"] {
            assert!(said.contains(part), "{said}");
        }
    }

    #[test]
    fn the_command_line_says_where_to_listen_then_the_variables_of_the_process_and_of_the_env_file() {
        let environment = Environment::from_iter([(HOST, "127.0.0.2"), (PORT, "9000")]);
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        assert_eq!(address(None, None, &Environment::default()).unwrap(), at("127.0.0.1:8001"));
        assert_eq!(address(None, None, &environment).unwrap(), at("127.0.0.2:9000"));
        assert_eq!(address(Some(at("[::1]:1").ip()), Some(0), &environment).unwrap(), at("[::1]:0"));
        let of_a_service = Environment::from_iter([(PORT, "tcp://10.96.0.7:8001")]);
        assert_eq!(address(None, None, &of_a_service).unwrap(), at("127.0.0.1:8001"));
        for (name, value) in [(HOST, "localhost"), (PORT, "65536")] {
            let error =
                address(None, None, &Environment::from_iter([(name, value)])).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(value), "{error}");
        }
    }
}
