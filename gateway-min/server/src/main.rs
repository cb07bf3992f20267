//! The `threadkeep` binary.

use std::future::IntoFuture as _;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use threadkeep::mode::ModeRegister;
use threadkeep_gateway::app::App;
use threadkeep_gateway::auth;
use threadkeep_gateway::config::{Auth, ConfigHandle, KeyFile, LoadOptions};
use threadkeep_gateway::console::{self, ChatArgs};
use threadkeep_gateway::http;
use threadkeep_gateway::ops::{self, OpsCommand};
use threadkeep_gateway::telemetry::{self, Traces};
use tokio::runtime::Runtime;
use tokio::sync::Notify;
use tracing::level_filters::LevelFilter;

/// How long clients have to take what was sent to them before the gateway stopped.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// Keeps the state of agent conversations as checkpoints, and serves agents that run on them.
///
/// Without a configuration file everything has a default: an embedded SQLite below `.svc`, and a demo model that needs
/// no API key. `config.example.yaml` shows every setting.
#[derive(Debug, Parser)]
#[command(
    name = "threadkeep",
    version,
    after_help = "\
Examples:
  threadkeep serve                              serve on http://127.0.0.1:8001
  threadkeep serve --config prod.yaml --port 80 with a configuration of your own
  RUST_LOG=debug threadkeep serve               say more on stderr
  threadkeep chat                               talk with the agent at this terminal
  git diff | threadkeep chat --print            one turn, the answer on stdout
  threadkeep keys create --user ann             a key for a gateway with auth.enabled: true
  threadkeep config upgrade                     add what is new in this version to config.yaml
  threadkeep threads list                       the threads in the gateway's store
  threadkeep prune plan --all --keep since:30d  what would go, and why

The commands on threads work on the store of the configuration (--config) or on one that is named (--sqlite), whether a
gateway runs or not. Each has a --help of its own, with examples.

Exit codes:
  0  done; what was looked at is clean
  1  an error; each thread was changed whole or not at all
  2  a wrong command line
  3  verify found violations
  4  nothing was changed, because nobody confirmed it"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve the HTTP gateway until interrupted.
    Serve {
        /// The configuration file; else SVC_CONFIG_PATH, else config.yaml in the project root.
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// The address to listen on.
        #[arg(long, env = "GATEWAY_HOST", default_value = "127.0.0.1")]
        host: IpAddr,
        /// The port to listen on; 0 takes a free one and says which.
        #[arg(long, env = "GATEWAY_PORT", default_value_t = 8001)]
        port: u16,
        /// Serve other machines, and under any host name, although there is no authentication.
        #[arg(long, env = "GATEWAY_ALLOW_UNAUTHENTICATED")]
        allow_unauthenticated: bool,
    },
    Chat(ChatArgs),
    #[command(flatten)]
    Ops(OpsCommand),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    // The results of a command are its output; a server's log is what it has to say; a conversation says what went wrong
    // itself.
    let level = match &cli.command {
        Command::Serve { .. } => LevelFilter::INFO,
        Command::Ops(_) => LevelFilter::WARN,
        Command::Chat(_) => LevelFilter::OFF,
    };
    match run(cli, level) {
        Ok(code) => code,
        Err(error) => {
            // It may be one from before there was a log.
            tracing::subscriber::with_default(telemetry::log(level), || tracing::error!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Lets the process have as many open files as it may: a client that follows a run is one, and the usual limit of 1,024 is
/// there for programs that could not use more.
fn raise_open_files() {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let limit = getrlimit(Resource::Nofile);
        // Without it, fewer clients are served at once.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    }
}

fn run(cli: Cli, level: LevelFilter) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    match cli.command {
        Command::Serve { config, host, port, allow_unauthenticated } => {
            let config = configured(config, level)?;
            let traces = start_telemetry(&config, level, &runtime)?;
            let address = SocketAddr::new(host, port);
            let served = runtime.block_on(serve(config, address, allow_unauthenticated));
            if let Some(traces) = traces {
                traces.stop();
            }
            served.map(|()| ExitCode::SUCCESS)
        }
        Command::Ops(command) => {
            telemetry::install(level, None);
            Ok(runtime.block_on(ops::run(&command)).into())
        }
        Command::Chat(args) => {
            // In the terminal UI nothing else may write.
            if !args.is_tui() {
                telemetry::install(level, None);
            }
            Ok(runtime.block_on(console::run(args)))
        }
    }
}

/// Reads the configuration. It says where traces go, so what it has to say itself is logged before there are any.
fn configured(path: Option<PathBuf>, level: LevelFilter) -> anyhow::Result<ConfigHandle> {
    let options = LoadOptions::from_process(path)?;
    Ok(tracing::subscriber::with_default(telemetry::log(level), || ConfigHandle::open(&options))?)
}

/// Starts the log, and the traces if there are to be any.
fn start_telemetry(
    config: &ConfigHandle,
    level: LevelFilter,
    runtime: &Runtime,
) -> anyhow::Result<Option<Traces>> {
    let settings = &config.last_known().telemetry.traces;
    let traces = Traces::start(settings, config.environment(), runtime.handle())?;
    telemetry::install(level, traces.as_ref());
    Ok(traces)
}

async fn serve(config: ConfigHandle, address: SocketAddr, allow_unauthenticated: bool) -> anyhow::Result<()> {
    raise_open_files();
    let settings = config.current_async().await.auth.clone();
    let reach = auth::reach(address, &settings, allow_unauthenticated)?;
    let app = App::start(config, Arc::new(ModeRegister::new())).await?;
    let listener = tokio::net::TcpListener::bind(address).await.with_context(|| {
        format!("cannot listen on {address}; is another gateway running? --port chooses another port")
    })?;
    let address = listener.local_addr()?;
    if settings.enabled {
        warn_without_keys(&settings).await?;
    } else if !address.ip().is_loopback() {
        tracing::warn!(%address, "listening beyond this machine without authentication: whoever reaches the port is the administrator");
    }
    tracing::info!(
        "serving on http://{address}, API at http://{address}/api, description at http://{address}/openapi.json"
    );
    let router = http::router_for(Arc::clone(&app), reach);
    let drained = Arc::new(Notify::new());
    let stopping = {
        let (app, drained) = (Arc::clone(&app), Arc::clone(&drained));
        async move {
            interrupted().await;
            tracing::info!("stopping: runs are interrupted, their last writes awaited");
            app.stop_runs().await;
            drained.notify_one();
        }
    };
    let served = axum::serve(listener, router).with_graceful_shutdown(stopping);
    tokio::select! {
        served = served.into_future() => served?,
        // Clients had the end of their streams; one that does not read it must not hold up the stop.
        () = async { drained.notified().await; tokio::time::sleep(LAST_WORDS).await } => {}
    }
    app.close().await;
    tracing::info!("stopped");
    Ok(())
}

/// Points out that nobody can get in yet; a file of keys that cannot be read stops the start.
async fn warn_without_keys(settings: &Auth) -> anyhow::Result<()> {
    let file = KeyFile::new(&settings.keys_file);
    if tokio::task::spawn_blocking(move || file.list()).await??.is_empty() {
        tracing::warn!(
            "there is no API key yet, so every request is refused; `threadkeep keys create` makes one"
        );
    }
    Ok(())
}

/// Waits for Ctrl-C or, on Unix, SIGTERM.
async fn interrupted() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminate) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = tokio::signal::ctrl_c() => {}
                _ = terminate.recv() => {}
            }
            return;
        }
    }
    // Without a handler the process ends as the system decides.
    let _ = tokio::signal::ctrl_c().await;
}
