//! The gateway itself: how it is configured, and its figures.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Html;
use threadkeep_agent::serialize::time;
use threadkeep_page::{ErrorLine, Health, figures};

use super::super::auth::Caller;
use super::Page;
use super::session::Viewer;
use crate::app::App;
use crate::telemetry::recent::ERRORS;

/// `GET /status`
pub(super) async fn show(
    State(app): State<Arc<App>>,
    Viewer(session): Viewer,
    Caller(caller): Caller,
) -> Page {
    let config = app.config.current_async().await;
    let inside = if caller.is_admin() { Some((figures(&app.metrics().await), errors())) } else { None };
    let view = Health {
        // Without mode and cadence, as the service reference requires ("Thread, checkpoint and run records").
        facts: vec![
            ("Version", env!("CARGO_PKG_VERSION").to_owned()),
            ("Store", app.backend.as_str().to_owned()),
            ("Default model", config.models.first().map(|model| model.name.clone()).unwrap_or_default()),
        ],
        inside,
    };
    Ok(Html(view.page(&session)))
}

fn errors() -> Vec<ErrorLine> {
    let logged = ERRORS.of_last_hour().into_iter();
    let line = logged.map(|logged| ErrorLine {
        at: time(logged.at),
        target: logged.target.to_owned(),
        text: logged.text,
    });
    line.collect()
}
