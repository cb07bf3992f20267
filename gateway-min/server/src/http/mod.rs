//! The HTTP surface.

mod assistants;
mod auth;
mod awaited;
mod batch;
mod branches;
mod compact;
mod delete;
mod described;
pub mod error;
mod events;
mod exclusive;
mod executions;
pub mod extract;
mod features;
pub mod fields;
mod goal;
mod health;
mod history;
mod listen;
mod metrics;
mod models;
mod origins;
mod overview;
mod page;
mod protocol;
mod prune;
mod replay;
pub mod run_body;
mod run_control;
mod run_follow;
pub(crate) mod runs;
mod schema;
mod search;
mod select;
mod serve;
pub mod sse;
mod stamps;
mod state;
mod subagent_batches;
mod subagents;
mod supersteps;
#[cfg(test)]
mod tests;
mod thread_runs;
mod thread_stream;
mod threads;
mod token_usage;
mod turns;
mod unknown_query;
mod unsupported;

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::Request;
use axum::http::header;
use axum::http::uri::{PathAndQuery, Uri};
use axum::middleware;
use axum::routing::{Router, get};
use tower::ServiceExt as _;
use utoipa_axum::router::OpenApiRouter;

pub use self::listen::listen;
use self::origins::{Guard, Origins};
pub use self::serve::serve;
use self::unknown_query::KnownParameters;
use crate::app::App;
use crate::auth::Reach;
use crate::telemetry;

/// The prefix of the API.
const API: &str = "/api/";
/// Where clients configured for a reverse proxy look for it.
const PROXIED_API: &str = "/api/langgraph/";

/// All routes of the gateway, and their description at `/openapi.json`, reachable as configured.
///
/// Each route below `/api/` also answers below `/api/langgraph/`. Pages of other origins may use it if
/// `GATEWAY_CORS_ORIGINS` lists them.
pub fn router(app: Arc<App>) -> Router {
    let reach = app.auth.reach();
    router_for(app, reach)
}

/// [`router`] with a reach other than the configured one.
pub fn router_for(app: Arc<App>, reach: Reach) -> Router {
    let (routes, document) = OpenApiRouter::with_openapi(schema::document())
        .merge(health::routes())
        .merge(threads::routes())
        .merge(search::routes())
        .merge(delete::routes())
        .merge(branches::routes())
        .merge(state::routes())
        .merge(history::routes())
        .merge(runs::routes())
        .merge(run_follow::routes())
        .merge(run_control::routes())
        .merge(overview::routes())
        .merge(replay::routes())
        .merge(goal::routes())
        .merge(compact::routes())
        .merge(token_usage::routes())
        .merge(events::routes())
        .merge(executions::routes())
        .merge(metrics::routes())
        .merge(models::routes())
        .merge(assistants::routes())
        .merge(subagents::routes())
        .merge(subagent_batches::routes())
        .merge(features::routes())
        .merge(thread_stream::routes())
        .merge(protocol::routes())
        .merge(batch::routes())
        .merge(prune::routes())
        .merge(unsupported::routes())
        .split_for_parts();
    let document = schema::rendered(&document, app.threads.accessor().table());
    let known = Arc::new(KnownParameters::of(&document));
    let document = Bytes::from(document.to_string());
    let json = [(header::CONTENT_TYPE, "application/json")];
    let routes = if app.has_page { routes.merge(page::routes(&app)) } else { routes };
    let routes = routes
        .route("/openapi.json", get(|| async move { (json, document) }))
        .with_state(Arc::clone(&app))
        .layer(middleware::from_fn_with_state(known, unknown_query::refuse));
    let origins = Origins::of(app.config.environment());
    let cors = origins.layer();
    let guard = Guard { origins, any_host: reach == Reach::Anywhere };
    let has_keys = app.auth.is_on();
    let mut routes = error::with_conventions(routes);
    if app.has_page {
        // After the conventions, so that it also sees methods that pages do not have.
        routes = routes.layer(middleware::from_fn(page::only_for_pages));
    }
    let mut routes = routes.layer(middleware::from_fn_with_state(Arc::clone(&app), auth::authenticate));
    // With keys, a page needs a key, which no browser adds by itself.
    if !has_keys {
        routes = routes.layer(middleware::from_fn_with_state(guard, origins::guard));
    }
    // Around what refuses, so that people can read why.
    let mut routes = routes.layer(middleware::from_fn_with_state(app, page::present));
    if let Some(cors) = cors {
        routes = routes.layer(cors);
    }
    // A layer of the routes, so that it sees the matched route's template; around all others.
    let routes = routes.layer(middleware::from_fn(telemetry::traced));
    // A layer of the router itself would only see requests after routing.
    let service = routes.map_request(|request: Request| without_proxy_prefix(request));
    Router::new().fallback_service(service)
}

/// The request with the path that the service's reverse proxy would forward.
fn without_proxy_prefix(mut request: Request) -> Request {
    let Some(rest) = request.uri().path_and_query().and_then(|path| path.as_str().strip_prefix(PROXIED_API))
    else {
        return request;
    };
    let mut parts = request.uri().clone().into_parts();
    // A suffix of a valid path is a valid path.
    parts.path_and_query = PathAndQuery::try_from(format!("{API}{rest}")).ok();
    if let Ok(uri) = Uri::from_parts(parts) {
        *request.uri_mut() = uri;
    }
    request
}
