//! The HTTP surface.

mod assistants;
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
mod models;
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

use axum::Json;
use axum::extract::Request;
use axum::http::uri::{PathAndQuery, Uri};
use axum::http::{HeaderValue, header};
use axum::routing::{Router, get};
use tower::ServiceExt as _;
use tower_http::cors::{AllowHeaders, AllowMethods, AllowOrigin, CorsLayer};
use utoipa_axum::router::OpenApiRouter;

use crate::app::App;

/// The variable with the origins whose pages may use the API, with commas between them; `*` for all.
const CORS_VARIABLE: &str = "GATEWAY_CORS_ORIGINS";
/// Where the API is.
const API: &str = "/api/";
/// Where clients that are made for a reverse proxy look for it.
const PROXIED_API: &str = "/api/langgraph/";

/// Every route of the gateway, and at `/openapi.json` their description.
///
/// Each route below `/api/` also answers below `/api/langgraph/`. Pages of other origins may use it if
/// `GATEWAY_CORS_ORIGINS` names them.
pub fn router(app: Arc<App>) -> Router {
    let origins = app.config.environment().non_empty(CORS_VARIABLE).and_then(cors);
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
        .merge(models::routes())
        .merge(assistants::routes())
        .split_for_parts();
    let document = Arc::new(schema::rendered(&document));
    let routes =
        routes.route("/openapi.json", get(|| async move { Json(document.as_ref().clone()) })).with_state(app);
    let mut routes = error::with_conventions(routes);
    if let Some(layer) = origins {
        routes = routes.layer(layer);
    }
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

/// What lets pages of these origins use the API, the headers with the places of runs included.
fn cors(origins: &str) -> Option<CorsLayer> {
    let origins = origins.split(',').map(str::trim).filter(|origin| !origin.is_empty());
    let mut allowed: Vec<HeaderValue> = Vec::new();
    let mut any = false;
    for origin in origins {
        match origin.parse() {
            Ok(_) if origin == "*" => any = true,
            Ok(origin) => allowed.push(origin),
            Err(_) => tracing::warn!("{CORS_VARIABLE}: an entry is not an origin and is left out"),
        }
    }
    let allowed = match (any, allowed.is_empty()) {
        (true, _) => AllowOrigin::any(),
        (false, true) => return None,
        (false, false) => AllowOrigin::list(allowed),
    };
    Some(
        CorsLayer::new()
            .allow_origin(allowed)
            .allow_methods(AllowMethods::mirror_request())
            .allow_headers(AllowHeaders::mirror_request())
            .expose_headers([header::CONTENT_LOCATION, header::LOCATION]),
    )
}
