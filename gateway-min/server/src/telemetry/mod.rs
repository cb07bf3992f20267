//! The log on stderr and, if enabled, traces for an OpenTelemetry collector.
//!
//! `spans.rs` alone defines what a trace can contain: only the spans created there are sent, with the attributes set
//! there. Log events and spans of libraries are not sent, so no text from an error leaves the process this way.
//!
//! A trace is a request, the run that it started, the run's supersteps, and in these the commits, model calls and tool
//! calls. A request with a W3C `traceparent` continues that trace.

mod export;
mod lines;
pub(crate) mod recent;
mod request;
pub(crate) mod spans;

use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider};
use threadkeep_agent::TRACE_TARGET;
use tokio::runtime::Handle;
use tracing::level_filters::LevelFilter;
use tracing::{Metadata, Subscriber};
use tracing_opentelemetry::OpenTelemetryLayer;
use tracing_subscriber::filter::{EnvFilter, FilterExt as _, filter_fn};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::{Layer as _, SubscriberExt as _};
use tracing_subscriber::registry::{LookupSpan, Registry};
use tracing_subscriber::util::SubscriberInitExt as _;

use export::Collector;
use lines::OneLine;
use recent::{ERRORS, Recent};
pub(crate) use request::traced;
use threadkeep_config::{Environment, Secret, Traces as Settings};

/// The default name of a gateway.
const SERVICE_NAME: &str = "threadkeep";
/// The scope of our spans.
const SCOPE: &str = "threadkeep-gateway";
/// How long a stopping gateway tries to send its remaining traces.
const LAST_WORDS: Duration = Duration::from_secs(3);
/// The path to which traces are sent.
const PATH: &str = "/v1/traces";
/// The default address of the collector.
const DEFAULT_ENDPOINT: &str = "http://localhost:4318";

/// Why traces cannot be sent.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The collector's address, from the configuration or the environment, is invalid.
    #[error("telemetry.traces.endpoint: {0}")]
    Endpoint(String),
    /// The HTTP client cannot be created.
    #[error("telemetry.traces: {0}")]
    Client(#[from] reqwest::Error),
}

/// Sends traces to a collector, in batches and in the background; an unreachable collector costs one warning and the
/// traces of that time.
#[derive(Debug)]
pub struct Traces {
    provider: SdkTracerProvider,
}

impl Traces {
    /// Starts what the configuration asks for; `None` if traces are disabled.
    ///
    /// # Errors
    /// [`TelemetryError`]. Does not check whether the collector answers.
    pub fn start(
        settings: &Settings,
        environment: &Environment,
        runtime: &Handle,
    ) -> Result<Option<Self>, TelemetryError> {
        if !settings.enabled {
            return Ok(None);
        }
        let endpoint = endpoint(settings, environment);
        let collector = Collector::new(&endpoint, headers(settings, environment), runtime.clone())?;
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(collector)
            .with_endpoint(endpoint)
            .build()
            .map_err(|error| TelemetryError::Endpoint(error.to_string()))?;
        let share = Sampler::TraceIdRatioBased(settings.sample_ratio);
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_resource(resource(settings, environment))
            .with_sampler(Sampler::ParentBased(Box::new(share)))
            .build();
        Ok(Some(Self { provider }))
    }

    /// Sends the remaining traces, for a few seconds at most. Blocks, and needs the runtime of [`Self::start`] to be
    /// running.
    pub fn stop(self) {
        // The failure was already logged; there is nothing more to try.
        let _ = self.provider.shutdown_with_timeout(LAST_WORDS);
    }
}

/// The complete URL to send to.
fn endpoint(settings: &Settings, environment: &Environment) -> String {
    let of_base = |base: &str| format!("{}{PATH}", base.trim_end_matches('/'));
    if let Some(base) = &settings.endpoint {
        return of_base(base);
    }
    if let Some(whole) = environment.non_empty("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") {
        return whole.to_owned();
    }
    of_base(environment.non_empty("OTEL_EXPORTER_OTLP_ENDPOINT").unwrap_or(DEFAULT_ENDPOINT))
}

/// The gateway as the collector knows it: with the attributes of the environment, and the first name that there is.
fn resource(settings: &Settings, environment: &Environment) -> Resource {
    let attributes = listed(environment.non_empty("OTEL_RESOURCE_ATTRIBUTES").unwrap_or_default());
    let attributes = attributes.map(|(name, value)| KeyValue::new(name, value));
    let named = Resource::builder().with_service_name(SERVICE_NAME).with_attributes(attributes);
    match settings.service_name.as_deref().or(environment.non_empty("OTEL_SERVICE_NAME")) {
        Some(name) => named.with_service_name(name.to_owned()).build(),
        None => named.build(),
    }
}

/// The headers from the environment and from the configuration, which takes precedence.
fn headers(settings: &Settings, environment: &Environment) -> HeaderMap {
    let variables = ["OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS"];
    let text = variables.iter().find_map(|name| environment.non_empty(name)).unwrap_or_default();
    let listed = listed(text).map(|(name, value)| (name, Secret::new(value)));
    let configured = settings.headers.iter().map(|(name, value)| (name.clone(), value.clone()));
    let mut headers = HeaderMap::new();
    for (name, value) in listed.chain(configured) {
        if let (Ok(name), Ok(mut value)) = (HeaderName::try_from(name), HeaderValue::try_from(value.expose()))
        {
            value.set_sensitive(true);
            headers.insert(name, value);
        }
    }
    headers
}

/// The names and values of a variable such as `a=1,b=two%20words`.
fn listed(text: &str) -> impl Iterator<Item = (String, String)> {
    text.split(',').filter_map(|entry| {
        let (name, value) = entry.split_once('=')?;
        Some((name.trim().to_owned(), decoded(value.trim())))
    })
}

/// A text with its percent-encoded bytes decoded; as it is, if that gives no text.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let digits = after.get(..2).filter(|two| first == b'%' && two.iter().all(u8::is_ascii_hexdigit));
        let byte = digits.and_then(|two| u8::from_str_radix(std::str::from_utf8(two).ok()?, 16).ok());
        bytes.push(byte.unwrap_or(first));
        rest = if byte.is_some() { &after[2..] } else { after };
    }
    String::from_utf8(bytes).unwrap_or_else(|_| text.to_owned())
}

/// The process's log on stderr: as `RUST_LOG` says, else from `level` on.
pub fn log(level: LevelFilter) -> impl Subscriber + Send + Sync {
    Registry::default().with(log_layer(level, std::io::stderr))
}

/// Installs the log and, if enabled, the traces for this process.
pub fn install(level: LevelFilter, traces: Option<&Traces>) {
    let traces = traces.map(|traces| {
        OpenTelemetryLayer::new(traces.provider.tracer(SCOPE))
            .with_location(false)
            .with_threads(false)
            .with_target(false)
            .with_tracked_inactivity(false)
            .with_filter(filter_fn(is_traced))
    });
    Registry::default()
        .with(log_layer(level, std::io::stderr))
        .with(traces)
        .with(Recent(&ERRORS).with_filter(LevelFilter::ERROR.and(filter_fn(is_logged))))
        .init();
}

fn log_layer<S, W>(level: LevelFilter, writer: W) -> impl tracing_subscriber::Layer<S>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    W: for<'a> MakeWriter<'a> + 'static,
{
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level.to_string()));
    let log = tracing_subscriber::fmt::layer().with_writer(OneLine(writer)).with_ansi(in_colour());
    log.with_filter(filter.and(filter_fn(is_logged)))
}

/// Whether the log may have colours: only on a terminal, and not if its user asked for none (<https://no-color.org>).
fn in_colour() -> bool {
    let asked_for_none = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    std::io::IsTerminal::is_terminal(&std::io::stderr()) && !asked_for_none
}

/// Whether the log may have it, whatever level was asked for. The client of MCP servers logs their addresses, which may
/// hold keys, and what tools are called with.
fn is_logged(metadata: &Metadata<'_>) -> bool {
    !is_traced(metadata) && !threadkeep_mcp::is_of_client(metadata.target())
}

fn is_traced(metadata: &Metadata<'_>) -> bool {
    metadata.target() == TRACE_TARGET
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use opentelemetry::Key;

    use super::*;

    fn settings(endpoint: Option<&str>) -> Settings {
        Settings { endpoint: endpoint.map(str::to_owned), ..Settings::default() }
    }

    #[test]
    fn the_endpoint_is_the_configured_one_then_that_of_the_environment() {
        let general = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://general:1/");
        let of_traces = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://traces:2/take/them");
        let both = Environment::from_iter([general, of_traces]);
        assert_eq!(endpoint(&settings(Some("https://c:3/")), &both), "https://c:3/v1/traces");
        assert_eq!(endpoint(&settings(None), &both), "http://traces:2/take/them");
        assert_eq!(
            endpoint(&settings(None), &Environment::from_iter([general])),
            "http://general:1/v1/traces"
        );
        let unset = Environment::from_iter([("OTEL_EXPORTER_OTLP_ENDPOINT", "")]);
        assert_eq!(endpoint(&settings(None), &unset), "http://localhost:4318/v1/traces");
    }

    #[test]
    fn headers_of_the_environment_are_added() {
        let configured = Settings { headers: [("a".to_owned(), Secret::new("1"))].into(), ..settings(None) };
        let environment = Environment::from_iter([("OTEL_EXPORTER_OTLP_HEADERS", "A=3,b=2, c=x=y,broken")]);
        let found = headers(&configured, &environment);
        let mut shown: Vec<(&str, &str)> =
            found.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        shown.sort_unstable();
        assert_eq!(shown, [("a", "1"), ("b", "2"), ("c", "x=y")], "the configured one counts");
        assert!(found.values().all(HeaderValue::is_sensitive));
    }

    #[test]
    fn values_of_the_environment_are_percent_decoded() {
        for (text, expected) in [
            ("Basic%20MTIz%3D", "Basic MTIz="),
            ("a+b/c==", "a+b/c=="),
            ("100%", "100%"),
            ("%zz%+1%2", "%zz%+1%2"),
            ("%e2%82%ac", "\u{20ac}"),
            ("%ff", "%ff"),
        ] {
            assert_eq!(decoded(text), expected);
        }
        let environment = Environment::from_iter([("OTEL_EXPORTER_OTLP_HEADERS", "a=Basic%20MTIz")]);
        assert_eq!(headers(&settings(None), &environment)["a"], "Basic MTIz");
    }

    #[test]
    fn the_name_is_the_configured_one_then_that_of_the_environment() {
        let attributes = ("OTEL_RESOURCE_ATTRIBUTES", "service.name=listed,host.name=h%201");
        let environment = Environment::from_iter([attributes, ("OTEL_SERVICE_NAME", "named")]);
        let configured = Settings { service_name: Some("configured".to_owned()), ..settings(None) };
        let shown = |settings: &Settings, environment: &Environment, name: &'static str| {
            resource(settings, environment)
                .get(&Key::from_static_str(name))
                .map(|value| value.as_str().into_owned())
        };
        for (settings, environment, expected) in [
            (&configured, &environment, "configured"),
            (&settings(None), &environment, "named"),
            (&settings(None), &Environment::from_iter([attributes]), "listed"),
            (&settings(None), &Environment::default(), SERVICE_NAME),
        ] {
            assert_eq!(shown(settings, environment, "service.name").as_deref(), Some(expected));
        }
        assert_eq!(shown(&configured, &environment, "host.name").as_deref(), Some("h 1"));
    }

    #[tokio::test]
    async fn there_are_none_unless_asked_for_and_an_address_that_is_none_is_an_error() {
        let (none, runtime) = (Environment::default(), Handle::current());
        assert!(Traces::start(&settings(None), &none, &runtime).unwrap().is_none());
        let bad = Environment::from_iter([("OTEL_EXPORTER_OTLP_ENDPOINT", "not an address")]);
        let error = Traces::start(&Settings { enabled: true, ..settings(None) }, &bad, &runtime).unwrap_err();
        assert!(error.to_string().starts_with("telemetry.traces.endpoint: "), "{error}");
    }

    /// What a log has written.
    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn what_the_mcp_client_says_is_not_logged() {
        let written = Written::default();
        let writer = written.clone();
        let log = Registry::default().with(log_layer(LevelFilter::TRACE, move || writer.clone()));
        tracing::subscriber::with_default(log, || {
            tracing::error!(target: "rmcp::transport::worker", "worker quit for url (http://h/?key=1)");
            tracing::debug!(target: "reqwest::connect", "starting new connection '1'");
            tracing::trace!(target: "hyper_util::client::legacy::pool", "put 1");
            tracing::warn!(target: "threadkeep_mcp::server", "the gateway's own words");
        });
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        assert!(text.contains("the gateway's own words") && text.lines().count() == 1, "{text}");
    }

    #[test]
    fn a_text_with_line_breaks_forges_no_line() {
        let written = Written::default();
        let writer = written.clone();
        let log = Registry::default().with(log_layer(LevelFilter::INFO, move || writer.clone()));
        tracing::subscriber::with_default(log, || {
            let error = "refused\r\n2026-01-01T00:00:00Z ERROR threadkeep: forged\n";
            tracing::warn!(%error, "model call failed");
            tracing::info!("the next event");
        });
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        let lines: Vec<&str> = text.split_inclusive(['\n', '\r']).collect();
        let [first, second] = lines[..] else { panic!("{text}") };
        assert!(first.contains("refused\\r\\n2026") && first.contains("forged\\n"), "{text}");
        assert!(second.contains("the next event") && second.ends_with('\n'), "{text}");
    }
}
