//! One connection to a server.

use std::collections::BTreeSet;
use std::time::Duration;

use reqwest::{StatusCode, redirect};
use rmcp::model::{
    CallToolRequestParams, CallToolResult, ClientRequest, ElicitRequestParams, ElicitResult,
    ElicitationCreateRequestMethod, ErrorData, JsonObject, ListRootsRequestMethod, ListToolsRequest,
    PaginatedRequestParams, ServerResult, Tool,
};
use rmcp::service::{
    ClientInitializeError, NotificationContext, RequestContext, RunningService, ServiceError,
};
use rmcp::transport::StreamableHttpClientTransport;
use rmcp::transport::streamable_http_client::StreamableHttpClientTransportConfig;
use rmcp::{ClientHandler, RoleClient, ServiceExt as _};
use std::sync::Arc;
use threadkeep_agent::model::is_loopback;
use threadkeep_config::{Hidden, McpServer};
use threadkeep_processes::{Guard, Guarded, Program, SpawnError};
use tokio::sync::Notify;

use crate::http::Client;
use crate::listed::well_formed;
use crate::pipes::Pipes;

/// How long a server over HTTP has to accept a connection.
const HTTP_CONNECT: Duration = Duration::from_secs(10);
/// The most redirects of one request.
const REDIRECTS_MAX: usize = 3;
/// The most tools of one server.
const TOOLS_MAX: usize = 512;
/// How much of a program's standard error is shown.
const SAID_MAX: usize = 300;

/// Why a server cannot be used. A text may contain an address, a header or a variable, which may be secrets: show it
/// without what is [`Hidden`].
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectError {
    #[error(transparent)]
    Spawn(#[from] SpawnError),
    #[error("cannot use the url: {0}")]
    Http(String),
    #[error("the header '{0}' is not valid")]
    Header(String),
    #[error("the server did not answer as the protocol demands: {0}")]
    Protocol(String),
}

/// Notices that the server's tools have changed. Requests of the server are refused, as those for the gateway's models
/// are by default: what it may ask a client for, the gateway does not offer when it connects.
#[derive(Clone)]
pub(crate) struct Listener {
    changed: Arc<Notify>,
}

impl ClientHandler for Listener {
    #[expect(deprecated, reason = "servers of earlier versions ask for them")]
    async fn list_roots(
        &self,
        _: RequestContext<RoleClient>,
    ) -> Result<rmcp::model::ListRootsResult, ErrorData> {
        Err(ErrorData::method_not_found::<ListRootsRequestMethod>())
    }

    async fn create_elicitation(
        &self,
        _: ElicitRequestParams,
        _: RequestContext<RoleClient>,
    ) -> Result<ElicitResult, ErrorData> {
        Err(ErrorData::method_not_found::<ElicitationCreateRequestMethod>())
    }

    async fn on_tool_list_changed(&self, _: NotificationContext<RoleClient>) {
        self.changed.notify_one();
    }
}

/// A connection. Dropping it ends it, and the program of a server that is one.
pub(crate) struct Connection {
    service: RunningService<RoleClient, Listener>,
    /// Notified when the server's tools have changed.
    pub(crate) changed: Arc<Notify>,
    /// The program; it ends when the service closes its input.
    _program: Option<Guarded>,
}

impl Connection {
    /// Connects. The caller bounds the time.
    pub(crate) async fn open(
        guard: &Guard,
        server: &McpServer,
        hidden: &Hidden,
    ) -> Result<Self, ConnectError> {
        let changed = Arc::<Notify>::default();
        let listener = Listener { changed: Arc::clone(&changed) };
        if let Some(command) = &server.command {
            let program = Program {
                command: command.clone(),
                args: server.args.clone(),
                env: server.env.clone(),
                directory: ".".into(),
            };
            let (mut program, stdin, stdout) = guard.spawn(&program)?;
            return match listener.serve(Pipes::new(stdout, stdin)).await {
                Ok(service) => Ok(Self { service, changed, _program: Some(program) }),
                Err(error) => {
                    program.ended().await;
                    // Before it is cut, which would leave a part of what is hidden.
                    let said: String = hidden.from_cut(&program.said()).chars().take(SAID_MAX).collect();
                    let said = if said.is_empty() { said } else { format!("; its standard error: {said}") };
                    Err(ConnectError::Protocol(format!("{error}{said}")))
                }
            };
        }
        let service = listener.serve(http_transport(server)?).await;
        let service = service.map_err(|error| {
            ConnectError::Http(match &error {
                ClientInitializeError::TransportError { error, .. } => root_cause(&*error.error),
                error => root_cause(error),
            })
        })?;
        Ok(Self { service, changed, _program: None })
    }

    /// Whether the other side is gone.
    pub(crate) fn is_closed(&self) -> bool {
        self.service.is_closed() || self.service.peer().is_transport_closed()
    }

    /// All tools of the server with this name, the first [`TOOLS_MAX`].
    pub(crate) async fn tools(&self, server: &str) -> Result<Vec<Tool>, ServiceError> {
        let mut tools: Vec<Tool> = Vec::new();
        let mut cursor: Option<String> = None;
        let mut seen = BTreeSet::new();
        loop {
            let params =
                cursor.take().map(|cursor| PaginatedRequestParams::default().with_cursor(Some(cursor)));
            let request = ListToolsRequest { params, ..ListToolsRequest::default() };
            let request = ClientRequest::ListToolsRequest(request);
            let result = match self.service.peer().send_request(request).await? {
                ServerResult::ListToolsResult(result) => Some(result),
                // What the client cannot read as a list has malformed tools.
                ServerResult::CustomResult(answer) => well_formed(server, answer.0),
                _ => None,
            };
            let result = result.ok_or(ServiceError::UnexpectedResponse)?;
            tools.extend(result.tools);
            // Some servers repeat their cursors, or give new ones without end.
            let next = result.next_cursor.filter(|next| seen.insert(next.clone()));
            if next.is_none() || tools.len().max(seen.len()) >= TOOLS_MAX {
                if next.is_some() || tools.len() > TOOLS_MAX {
                    tracing::warn!(
                        server,
                        most = TOOLS_MAX,
                        "an MCP server has more tools than are used; the others are left out"
                    );
                }
                break;
            }
            cursor = next;
        }
        tools.truncate(TOOLS_MAX);
        Ok(tools)
    }

    /// Calls a tool. Dropping the future tells the server to stop.
    pub(crate) async fn call(
        &self,
        tool: &str,
        arguments: JsonObject,
    ) -> Result<CallToolResult, ServiceError> {
        let params = CallToolRequestParams::new(tool.to_owned()).with_arguments(arguments);
        self.service.peer().call_tool(params).await
    }
}

fn http_transport(server: &McpServer) -> Result<StreamableHttpClientTransport<Client>, ConnectError> {
    let url = server.url.as_ref().map(threadkeep_config::Secret::expose).unwrap_or_default();
    // The process has one provider for TLS; the first one to come installs it.
    drop(rustls::crypto::ring::default_provider().install_default());
    let mut client = reqwest::Client::builder().connect_timeout(HTTP_CONNECT).redirect(
        redirect::Policy::custom(|attempt| if stays(&attempt) { attempt.follow() } else { attempt.stop() }),
    );
    if reqwest::Url::parse(url).is_ok_and(|url| is_loopback(&url)) {
        // A proxy of the environment cannot reach a server on this machine, and would read the headers.
        client = client.no_proxy();
    }
    let client = client.build().map_err(|error| ConnectError::Http(error.without_url().to_string()))?;
    let mut config = StreamableHttpClientTransportConfig::with_uri(url);
    for (name, value) in &server.headers {
        let invalid = || ConnectError::Header(name.clone());
        let header = name.parse().map_err(|_| invalid())?;
        let mut value: reqwest::header::HeaderValue = value.expose().parse().map_err(|_| invalid())?;
        value.set_sensitive(true);
        config.custom_headers.insert(header, value);
    }
    Ok(StreamableHttpClientTransport::with_client(Client(client), config))
}

/// Whether a redirect leads to the same server, and the request stays as it is. Many servers redirect from `/mcp` to
/// `/mcp/` or back. Another redirect would take the headers elsewhere.
fn stays(attempt: &redirect::Attempt<'_>) -> bool {
    let keeps_request =
        matches!(attempt.status(), StatusCode::TEMPORARY_REDIRECT | StatusCode::PERMANENT_REDIRECT);
    let before = attempt.previous();
    let is_same = before.last().is_some_and(|before| before.origin() == attempt.url().origin());
    keeps_request && is_same && before.len() <= REDIRECTS_MAX
}

/// The innermost reason.
pub(crate) fn root_cause(error: &(dyn std::error::Error + 'static)) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}
