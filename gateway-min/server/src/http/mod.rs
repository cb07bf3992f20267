//! The HTTP surface.

mod assistants;
mod auth;
mod branches;
mod compact;
mod delete;
pub mod error;
mod events;
mod exclusive;
pub mod extract;
pub mod fields;
mod goal;
mod health;
mod history;
mod metrics;
mod models;
mod origins;
mod replay;
pub mod run_body;
mod run_control;
pub(crate) mod runs;
mod schema;
mod search;
pub mod sse;
mod state;
#[cfg(test)]
mod tests;
mod threads;
mod token_usage;
mod turns;

use std::sync::Arc;

use axum::extract::Request;
use axum::http::uri::{PathAndQuery, Uri};
use axum::routing::{Router, get};
use axum::{Json, middleware};
use tower::ServiceExt as _;
use utoipa_axum::router::OpenApiRouter;

use self::origins::{Guard, Origins};
use crate::app::App;
use crate::auth::Reach;
use crate::telemetry;

/// Where the API is.
const API: &str = "/api/";
/// Where clients that are made for a reverse proxy look for it.
const PROXIED_API: &str = "/api/langgraph/";

/// Every route of the gateway, and at `/openapi.json` their description, for whom the configuration says.
///
/// Each route below `/api/` also answers below `/api/langgraph/`. Pages of other origins may use it if
/// `GATEWAY_CORS_ORIGINS` names them.
pub fn router(app: Arc<App>) -> Router {
    let reach = app.auth.reach();
    router_for(app, reach)
}

/// [`router`] for whom the operator says in another way than in the configuration.
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
        .merge(run_control::routes())
        .merge(replay::routes())
        .merge(goal::routes())
        .merge(compact::routes())
        .merge(token_usage::routes())
        .merge(events::routes())
        .merge(metrics::routes())
        .merge(models::routes())
        .merge(assistants::routes())
        .split_for_parts();
    let document = Arc::new(schema::rendered(&document));
    let routes = routes
        .route("/openapi.json", get(|| async move { Json(document.as_ref().clone()) }))
        .with_state(Arc::clone(&app));
    let origins = Origins::of(app.config.environment());
    let cors = origins.layer();
    let guard = Guard { origins, any_host: reach == Reach::Anywhere };
    let has_keys = app.auth.is_on();
    let mut routes =
        error::with_conventions(routes).layer(middleware::from_fn_with_state(app, auth::authenticate));
    // With keys, a page has to have one, and no browser adds it by itself.
    if !has_keys {
        routes = routes.layer(middleware::from_fn_with_state(guard, origins::guard));
    }
    if let Some(cors) = cors {
        routes = routes.layer(cors);
    }
    // A layer of the routes, so that it sees the template of the one that was chosen; around all others.
    let routes = routes.layer(middleware::from_fn(telemetry::traced));
    // A layer of the router itself would see requests only after their route was chosen.
    let service = routes.map_request(|request: Request| without_proxy_prefix(request));
    Router::new().fallback_service(service)
}

/// The request with its path as the reverse proxy of the service would rewrite it.
fn without_proxy_prefix(mut request: Request) -> Request {
    let Some(rest) = request.uri().path_and_query().and_then(|path| path.as_str().strip_prefix(PROXIED_API))
    else {
        return request;
    };
    let mut parts = request.uri().clone().into_parts();
    // A part of an address is an address.
    parts.path_and_query = PathAndQuery::try_from(format!("{API}{rest}")).ok();
    if let Ok(uri) = Uri::from_parts(parts) {
        *request.uri_mut() = uri;
    }
    request
}
