//! The life of one server: connected in the background, again after it has ended.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use rmcp::model::{CallToolResult, JsonObject};
use rmcp::service::ServiceError;
use threadkeep_config::{Hidden, McpServer};
use threadkeep_processes::Guard;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::connection::{ConnectError, Connection, root_cause};
use crate::listed::{Listed, listed};

/// How long runs wait for a server that is connected to for the first time, all of them together.
pub(crate) const FIRST_WAIT: Duration = Duration::from_secs(5);
/// How long a server has to connect and to list its tools.
const CONNECT_WITHIN: Duration = Duration::from_secs(30);
/// How long after a failure a run tries again.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(15);

/// How long after a listing the tools are listed again. A server may say after each listing that they have changed.
const LIST_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// A server and how it is at the moment.
pub(crate) struct Server {
    pub(crate) name: String,
    pub(crate) config: McpServer,
    /// What no error of it may contain.
    pub(crate) hidden: Hidden,
    guard: Guard,
    status: watch::Sender<Status>,
    /// When the first connection began.
    begun: Mutex<Option<Instant>>,
}

/// How a server is.
#[derive(Clone)]
enum Status {
    /// Nobody has asked for it.
    Unused,
    Connecting,
    Connected(Arc<Connected>),
    Failed(Arc<str>, Instant),
}

/// A server that answers.
pub(crate) struct Connected {
    connection: Connection,
    tools: watch::Receiver<Vec<Listed>>,
}

/// Why a call has no result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    /// The server cannot be reached.
    #[error("the server '{server}' is not available: {reason}. Try again later, or go on without it")]
    Unavailable { server: String, reason: Arc<str> },
    /// It took too long.
    #[error(
        "the server '{server}' did not answer within {seconds} seconds. It may have done something nevertheless"
    )]
    TimedOut { server: String, seconds: u64 },
    /// It ended, or broke the protocol.
    #[error("the call of the server '{server}' failed: {reason}. It may have done something nevertheless")]
    Failed { server: String, reason: String },
}

impl Server {
    pub(crate) fn new(name: &str, config: McpServer, guard: Guard) -> Arc<Self> {
        let status = watch::Sender::new(Status::Unused);
        let hidden = Hidden::of_server(&config);
        Arc::new(Self { name: name.to_owned(), config, hidden, guard, status, begun: Mutex::default() })
    }

    /// Connects in the background, unless it is connected or a connection has failed a moment ago.
    pub(crate) fn connect(self: &Arc<Self>) {
        self.connect_unless(TRY_AGAIN_AFTER);
    }

    fn connect_unless(self: &Arc<Self>, failed_within: Duration) {
        let begins = self.status.send_if_modified(|status| {
            let begins = match status {
                Status::Unused => true,
                Status::Connecting => false,
                Status::Connected(connected) => connected.connection.is_closed(),
                Status::Failed(_, at) => at.elapsed() >= failed_within,
            };
            if begins {
                *status = Status::Connecting;
            }
            begins
        });
        if begins {
            self.begun.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(Instant::now);
            // It must not keep a server that is no longer configured.
            let (this, guard, config) = (Arc::downgrade(self), self.guard.clone(), self.config.clone());
            let (name, hidden) = (self.name.clone(), self.hidden.clone());
            tokio::spawn(async move {
                let opened = open(&guard, &config, &name, &hidden).await;
                let opened = opened.map_err(|error| hidden.from(&error.to_string()));
                settle(&this, &name, opened);
            });
        }
    }

    /// The tools, if the server is connected. Waits for the first connection, but all who wait together no longer than
    /// [`FIRST_WAIT`].
    pub(crate) async fn tools(self: &Arc<Self>) -> Vec<Listed> {
        self.connect();
        let begun = *self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        let deadline = begun.unwrap_or_else(Instant::now) + FIRST_WAIT;
        match self.settled(deadline).await {
            Status::Connected(connected) => connected.tools.borrow().clone(),
            Status::Unused | Status::Connecting | Status::Failed(..) => Vec::new(),
        }
    }

    /// Calls a tool; a server that has ended is started again for that.
    pub(crate) async fn call(
        self: &Arc<Self>,
        tool: &str,
        args: JsonObject,
    ) -> Result<CallToolResult, CallError> {
        let (server, seconds) = (self.name.clone(), self.config.timeout_seconds);
        let deadline = Instant::now() + Duration::from_secs(seconds);
        self.connect_unless(Duration::ZERO);
        let connected = match self.settled(deadline).await {
            Status::Connected(connected) => connected,
            Status::Failed(reason, _) => return Err(CallError::Unavailable { server, reason }),
            Status::Unused | Status::Connecting => return Err(CallError::TimedOut { server, seconds }),
        };
        match timeout_at(deadline, connected.connection.call(tool, args)).await {
            Ok(Ok(result)) => Ok(result),
            Ok(Err(error)) => Err(CallError::Failed { server, reason: self.hidden.from(&reason(&error)) }),
            Err(_) => Err(CallError::TimedOut { server, seconds }),
        }
    }

    /// The status when no connection is being opened, or at the deadline.
    async fn settled(&self, deadline: Instant) -> Status {
        let mut status = self.status.subscribe();
        let settled = status.wait_for(|status| !matches!(status, Status::Unused | Status::Connecting));
        let settled = timeout_at(deadline, settled)
            .await
            .ok()
            .and_then(|found| found.ok().map(|status| status.clone()));
        settled.unwrap_or(Status::Connecting)
    }
}

fn reason(error: &ServiceError) -> String {
    match error {
        ServiceError::McpError(error) => error.message.to_string(),
        ServiceError::TransportClosed => "the connection ended".to_owned(),
        // What the transport says of itself around its reason is of no use to a model.
        ServiceError::TransportSend(error) => root_cause(&*error.error),
        other => other.to_string(),
    }
}

async fn open(
    guard: &Guard,
    config: &McpServer,
    name: &str,
    hidden: &Hidden,
) -> Result<(Connection, Vec<Listed>), ConnectError> {
    let opening = async {
        let connection = Connection::open(guard, config, hidden).await?;
        let tools = connection.tools(name).await;
        let tools = tools.map_err(|error| ConnectError::Protocol(reason(&error)))?;
        Ok((connection, listed(name, tools)))
    };
    let late =
        || ConnectError::Protocol(format!("it was not ready within {} seconds", CONNECT_WITHIN.as_secs()));
    timeout(CONNECT_WITHIN, opening).await.unwrap_or_else(|_| Err(late()))
}

/// Publishes what came of a connection. A server that is no longer configured is let go of.
fn settle(server: &Weak<Server>, name: &str, opened: Result<(Connection, Vec<Listed>), String>) {
    let Some(server) = server.upgrade() else { return };
    let status = match opened {
        Ok((connection, tools)) => {
            tracing::info!(server = name, tools = tools.len(), "connected to an MCP server");
            let (sender, receiver) = watch::channel(tools);
            let connected = Arc::new(Connected { connection, tools: receiver });
            tokio::spawn(follow(Arc::downgrade(&connected), name.to_owned(), server.hidden.clone(), sender));
            Status::Connected(connected)
        }
        Err(error) => {
            tracing::warn!(
                server = name,
                error,
                "an MCP server is not available; runs go on without its tools"
            );
            Status::Failed(error.into(), Instant::now())
        }
    };
    server.status.send_replace(status);
}

/// Lists the tools again whenever the server says that they have changed. It says so once, so a list that
/// failed is tried again, with growing pauses, as long as the connection lasts.
async fn follow(connected: Weak<Connected>, name: String, hidden: Hidden, tools: watch::Sender<Vec<Listed>>) {
    let mut pause = LIST_AGAIN_AFTER;
    loop {
        let Some(changed) = connected.upgrade().map(|connected| Arc::clone(&connected.connection.changed))
        else {
            return;
        };
        tokio::select! {
            () = changed.notified() => {}
            // The connection is gone.
            () = tools.closed() => return,
        }
        let Some(connected) = connected.upgrade() else { return };
        let error = match timeout(CONNECT_WITHIN, connected.connection.tools(&name)).await {
            Ok(Ok(found)) => {
                tools.send_replace(listed(&name, found));
                None
            }
            Ok(Err(error)) => Some(hidden.from(&reason(&error))),
            Err(_) => Some(format!("no answer within {} seconds", CONNECT_WITHIN.as_secs())),
        };
        if let Some(error) = error {
            tracing::warn!(server = name, error, "the changed tools of an MCP server could not be listed");
            if connected.connection.is_closed() {
                return;
            }
            changed.notify_one();
            pause = TRY_AGAIN_AFTER.min(2 * pause);
        } else {
            pause = LIST_AGAIN_AFTER;
        }
        // What nobody uses any more ends now, not after the pause.
        drop(connected);
        tokio::select! {
            () = sleep(pause) => {}
            () = tools.closed() => return,
        }
    }
}
