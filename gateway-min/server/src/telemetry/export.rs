//! Sends traces to a collector.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use axum::http::HeaderMap;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use threadkeep_agent::model::is_loopback;
use tokio::runtime::Handle;

use super::TelemetryError;

/// How long a collector may take to answer, as OTLP has it. Nothing is sent meanwhile.
const PATIENCE: Duration = Duration::from_secs(10);
/// The port on which collectors take gRPC.
const GRPC_PORT: u16 = 4317;

/// The longest body of an answer; those of collectors have some hundred bytes at most.
const ANSWER_BYTES: usize = 64 * 1024;

/// A collector, over HTTP. Logs once when it stops answering, and once when it answers again.
#[derive(Debug)]
pub(super) struct Collector {
    client: reqwest::Client,
    /// Added to each request.
    headers: HeaderMap,
    /// Exports run on a thread without a runtime.
    runtime: Handle,
    /// Its address for the log.
    shown: String,
    port: Option<u16>,
    away: AtomicBool,
}

impl Collector {
    pub(super) fn new(endpoint: &str, headers: HeaderMap, runtime: Handle) -> Result<Self, TelemetryError> {
        let url = reqwest::Url::parse(endpoint)
            .map_err(|error| TelemetryError::Endpoint(format!("not a valid URL: {error}")))?;
        let port = url.port_or_known_default();
        let shown_port = port.map(|port| format!(":{port}")).unwrap_or_default();
        let shown = format!("{}{shown_port}", url.host_str().unwrap_or_default());
        // Other code in this process may have installed one already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = reqwest::Client::builder();
        let mut client = client.redirect(reqwest::redirect::Policy::none()).timeout(PATIENCE);
        if is_loopback(&url) {
            // A proxy of the environment cannot reach a collector on this machine, and would read the headers.
            client = client.no_proxy();
        }
        let client = client.build()?;
        Ok(Self { client, headers, runtime, shown, port, away: AtomicBool::new(false) })
    }

    fn answered(&self) {
        if self.away.swap(false, Ordering::Relaxed) {
            tracing::info!(collector = self.shown, "the collector accepts traces again");
        }
    }

    fn failed(&self, reason: &str) {
        if !self.away.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                collector = self.shown,
                reason,
                "the collector does not accept traces; they are lost until it does"
            );
        }
    }
}

/// One request, from beginning to end.
async fn send(client: reqwest::Client, request: reqwest::Request) -> reqwest::Result<Response<Bytes>> {
    let answer = client.execute(request).await?;
    let (status, headers) = (answer.status(), answer.headers().clone());
    let mut response = Response::new(body(answer).await?);
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    Ok(response)
}

/// The body of an answer; empty for one that is too long to be a collector's.
async fn body(mut answer: reqwest::Response) -> reqwest::Result<Bytes> {
    let mut body = Vec::new();
    while let Some(part) = answer.chunk().await? {
        if body.len() + part.len() > ANSWER_BYTES {
            return Ok(Bytes::new());
        }
        body.extend_from_slice(&part);
    }
    Ok(body.into())
}

#[async_trait]
impl HttpClient for Collector {
    async fn send_bytes(&self, mut request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        // Here, because the exporter decodes its headers, and those of the environment replace them.
        for (name, value) in &self.headers {
            request.headers_mut().insert(name.clone(), value.clone());
        }
        // Without its address, which may come from the environment.
        let sent = match reqwest::Request::try_from(request) {
            Ok(request) => self.runtime.spawn(send(self.client.clone(), request)).await?,
            Err(error) => Err(error),
        };
        match sent {
            Ok(response) if response.status().is_success() => {
                self.answered();
                Ok(response)
            }
            Ok(response) => {
                self.failed(&response.status().to_string());
                Ok(response)
            }
            Err(error) => {
                self.failed(reason(&error, self.port));
                Err(error.without_url().into())
            }
        }
    }
}

/// Why nothing was sent, without the address.
fn reason(error: &reqwest::Error, port: Option<u16>) -> &'static str {
    if error.is_connect() {
        "no connection"
    } else if error.is_timeout() {
        "no answer in time"
    } else {
        broken_off(port)
    }
}

/// A server of gRPC closes a connection on which it is sent HTTP/1.1.
fn broken_off(port: Option<u16>) -> &'static str {
    if port == Some(GRPC_PORT) {
        "the connection broke off; traces are sent over HTTP, usually to port 4318, and 4317 is usually the port for gRPC"
    } else {
        "the connection broke off"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_answer_that_is_too_long_to_be_a_collectors_is_not_kept() {
        for (sent, kept) in [(0, 0), (ANSWER_BYTES, ANSWER_BYTES), (ANSWER_BYTES + 1, 0)] {
            let answer = reqwest::Response::from(Response::new(vec![0_u8; sent]));
            assert_eq!(body(answer).await.unwrap().len(), kept);
        }
    }

    #[test]
    fn the_port_for_grpc_is_named_with_the_one_for_http() {
        assert!(broken_off(Some(4317)).contains("4318"));
        for port in [Some(4318), Some(443), None] {
            assert_eq!(broken_off(port), "the connection broke off");
        }
    }
}
