//! A client for the OpenAI chat-completions protocol, which many providers and local servers support.

mod answer;
mod defaults;
mod failure;
#[cfg(any(test, feature = "fuzzing"))]
mod fuzzing;
mod lines;
mod mistral;
mod parameters;
mod request;
mod returned;
mod schema;
#[cfg(test)]
// JSON literals are passed by value.
#[allow(clippy::needless_pass_by_value)]
mod tests;

use std::net::IpAddr;
use std::time::Duration;

use async_trait::async_trait;
use eventsource_stream::{Event, EventStreamError, Eventsource};
use futures::{Stream, StreamExt, stream};
use reqwest::header::CONTENT_TYPE;
use reqwest::{Client, Response, Url, redirect};
use threadkeep_config::Hidden;
use tokio::time::timeout;

use super::{ChatModel, ChunkStream, ModelChunk, ModelError, ModelErrorKind, ModelRequest, ModelSettings};
use answer::AnswerParser;
use defaults::Defaults;
use failure::Failure;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use fuzzing::fuzz;
use lines::{Broken, Limits, lines};

const DEFAULT_BASE_URL: &str = "https://api.openai.com/v1";
const DEFAULT_REQUEST_TIMEOUT: Duration = Duration::from_mins(10);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// A model behind a chat-completions endpoint.
pub(super) struct OpenAiModel {
    settings: ModelSettings,
    endpoint: Url,
    /// What errors must not contain besides the key.
    hidden: Hidden,
    request_timeout: Duration,
    client: Client,
}

impl OpenAiModel {
    /// Validates `settings` and prepares the connection pool; does not connect yet.
    pub(super) fn new(settings: ModelSettings) -> Result<Self, ModelError> {
        let unusable =
            |detail: String| ModelError::new(&settings.name, ModelErrorKind::Configuration, detail);
        let endpoint =
            endpoint(settings.base_url.as_deref().unwrap_or(DEFAULT_BASE_URL)).map_err(unusable)?;
        let defaults = Defaults::of(&settings).map_err(unusable)?;
        let headers = defaults.headers(settings.api_key.as_ref()).map_err(unusable)?;
        let request_timeout = request_timeout(&settings).map_err(unusable)?;

        // Fails if a provider is already installed, which is just as good: only ring is linked.
        let _ = rustls::crypto::ring::default_provider().install_default();
        // Send conversations only to the configured host: do not follow redirects.
        let mut client = Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .redirect(redirect::Policy::none())
            .default_headers(headers);
        if is_loopback(&endpoint) {
            // A proxy from the environment cannot reach a server on this machine.
            client = client.no_proxy();
        }
        let client = client.build().map_err(|error| unusable(failure::describe(error)))?;
        let endpoint = defaults.at(endpoint);
        let hidden = defaults.hidden(&endpoint);
        Ok(Self { settings, endpoint, hidden, request_timeout, client })
    }

    async fn send(&self, request: &ModelRequest) -> Result<Response, Failure> {
        let body = request::body(&self.settings, request)?;
        let post = self.client.post(self.endpoint.clone()).json(&body);
        let begun = async {
            let response = post.send().await.map_err(Failure::from_transport)?;
            if !response.status().is_success() {
                return Err(Failure::from_response(response, request.tools.len()).await);
            }
            let found = response.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
            match found.map(str::to_ascii_lowercase) {
                Some(found) if !found.starts_with("text/event-stream") => {
                    Err(Failure::from_body(&found, response).await)
                }
                _ => Ok(response),
            }
        };
        timeout(self.request_timeout, begun).await.unwrap_or_else(|_| {
            let waited =
                format!("the answer did not begin within {:?} (request_timeout)", self.request_timeout);
            Err(Failure::new(ModelErrorKind::Timeout, waited))
        })
    }
}

#[async_trait]
impl ChatModel for OpenAiModel {
    fn name(&self) -> &str {
        &self.settings.name
    }

    fn provider(&self) -> &'static str {
        "openai"
    }

    async fn stream(&self, request: &ModelRequest) -> Result<ChunkStream, ModelError> {
        let model = self.settings.name.clone();
        let host = self.endpoint.host_str().unwrap_or_default().to_owned();
        let (key, hidden) = (self.settings.api_key.clone(), self.hidden.clone());
        let named = move |failure: Failure| failure.without(&hidden).into_error(&model, &host, key.as_ref());
        let response = self.send(request).await.map_err(&named)?;
        let events = lines(response.bytes_stream().boxed(), Limits::default()).eventsource();
        Ok(chunks(events, self.settings.stream_chunk_timeout).map(move |item| item.map_err(&named)).boxed())
    }
}

/// The chunks in a stream of server-sent events; nothing follows the last chunk or a failure.
fn chunks<S>(events: S, pause: Duration) -> impl Stream<Item = Result<ModelChunk, Failure>> + Send
where
    S: Stream<Item = Result<Event, EventStreamError<Broken<reqwest::Error>>>> + Send,
{
    let state = Some((Box::pin(events), AnswerParser::default()));
    stream::unfold(state, move |state| async move {
        let (mut events, mut parser) = state?;
        loop {
            let failure = match timeout(pause, events.next()).await {
                Ok(Some(Ok(event))) => match parser.read(&event.data) {
                    Ok(None) => continue,
                    Ok(Some(chunk)) if chunk.is_last() => return Some((Ok(chunk), None)),
                    Ok(Some(chunk)) => return Some((Ok(chunk), Some((events, parser)))),
                    Err(failure) => return Some((Err(failure), None)),
                },
                Ok(Some(Err(error))) => Failure::from_events(error),
                Ok(None) => {
                    Failure::new(ModelErrorKind::Connection, "the answer ended before it was complete")
                }
                Err(_) => Failure::new(
                    ModelErrorKind::Timeout,
                    format!("no further part of the answer within {pause:?} (stream_chunk_timeout)"),
                ),
            };
            // A provider that sent a finish reason has sent the whole answer, however the connection ends.
            return Some((parser.end().ok_or(failure), None));
        }
    })
}

fn endpoint(base_url: &str) -> Result<Url, String> {
    let invalid = |why: &dyn std::fmt::Display| format!("`base_url` is invalid: {why}");
    let mut url = Url::parse(base_url).map_err(|error| invalid(&error))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(invalid(&"it must start with http:// or https://"));
    }
    if url.path().trim_end_matches('/').ends_with("/chat/completions") {
        return Err(invalid(&"leave out /chat/completions, which is added to it"));
    }
    url.path_segments_mut()
        .map_err(|()| invalid(&"it cannot be extended"))?
        .pop_if_empty()
        .extend(["chat", "completions"]);
    Ok(url)
}

/// Whether the address is on this machine.
pub fn is_loopback(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']);
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn request_timeout(settings: &ModelSettings) -> Result<Duration, String> {
    match settings.extra.get(parameters::REQUEST_TIMEOUT) {
        None | Some(serde_json::Value::Null) => Ok(DEFAULT_REQUEST_TIMEOUT),
        Some(value) => value
            .as_f64()
            .filter(|seconds| *seconds > 0.0)
            .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
            .ok_or_else(|| "`request_timeout` must be a number of seconds above 0".to_owned()),
    }
}
