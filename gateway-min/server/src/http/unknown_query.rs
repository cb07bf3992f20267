//! Refuses query parameters that a route does not have.
//!
//! The description of the API is what decides: a parameter is either described, and read by its route, or refused by name.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use axum::extract::{MatchedPath, Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use serde_json::Value;

use super::error::ApiError;
use super::extract::{drained, query_of};
use super::fields::{Flaw, Problems};

/// The query parameters of each described operation, by path and method.
pub(super) struct KnownParameters(BTreeMap<(String, String), BTreeSet<String>>);

impl KnownParameters {
    /// Those of this description.
    pub(super) fn of(document: &Value) -> Self {
        let mut known = BTreeMap::new();
        for (path, operations) in document["paths"].as_object().into_iter().flatten() {
            for (method, operation) in operations.as_object().into_iter().flatten() {
                let parameters = operation["parameters"].as_array().into_iter().flatten();
                let names = parameters.filter(|parameter| parameter["in"] == "query");
                let names = names.filter_map(|parameter| parameter["name"].as_str()).map(str::to_owned);
                known.insert((path.clone(), method.to_uppercase()), names.collect());
            }
        }
        Self(known)
    }
}

/// The layer around the routes: 422 for a query parameter that the matched operation does not have.
pub(super) async fn refuse(
    State(known): State<Arc<KnownParameters>>,
    request: Request,
    next: Next,
) -> Response {
    if request.uri().query().is_some_and(|query| !query.is_empty())
        && let Some(path) = request.extensions().get::<MatchedPath>()
    {
        let method = if request.method() == Method::HEAD { &Method::GET } else { request.method() };
        if let Some(known) = known.0.get(&(path.as_str().to_owned(), method.to_string())) {
            let sent = match query_of(request.uri()) {
                Ok(sent) => sent,
                Err(error) => return error.into_response(),
            };
            let mut problems = Problems::default();
            for (name, value) in sent.into_iter().filter(|(name, _)| !known.contains(name)) {
                problems.add(vec!["query".into(), name.as_str().into()], Flaw::extra_forbidden(), value);
            }
            if !problems.is_empty() {
                drained(request.into_body()).await;
                return ApiError::from(problems).into_response();
            }
        }
    }
    next.run(request).await
}
