//! What SDK clients can call and this gateway does not do. Each answers 501 with a sentence that says what instead.

use std::sync::Arc;

use axum::extract::Request;
use axum::http::StatusCode;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::error::ApiError;
use super::extract::drained;
use super::schema::ErrorBody;
use crate::app::App;

const CRONS: &str = "Cron jobs are not supported: start runs on a schedule from outside, for example with a timer of the system";
const STORE: &str = "The store is not supported: keep values in the state or the metadata of threads";
const ASSISTANTS: &str = "Assistants cannot be created, changed or deleted: the lead agent is built in; see config.yaml for its models and tools";
const UI: &str =
    "Components are not supported: this gateway serves no graph with a user interface of its own";

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(create_thread_cron))
        .routes(routes!(create_cron))
        .routes(routes!(update_cron, delete_cron))
        .routes(routes!(search_crons))
        .routes(routes!(count_crons))
        .routes(routes!(put_item, get_item, delete_item))
        .routes(routes!(search_items))
        .routes(routes!(list_namespaces))
        .routes(routes!(create_assistant))
        .routes(routes!(get_component))
}

/// A route that answers 501 with a sentence.
macro_rules! unsupported {
    ($($name:ident: $method:ident $path:literal ($($param:literal),*) $tag:literal $what:literal $sentence:ident;)*) => {$(
        #[doc = $what]
        ///
        /// Not supported.
        #[utoipa::path($method, path = $path, tag = $tag, params($(($param = String, Path)),*),
            responses((status = 501, description = "Not supported", body = ErrorBody)))]
        async fn $name(request: Request) -> ApiError {
            drained(request.into_body()).await;
            not_implemented($sentence)
        }
    )*};
}

unsupported! {
    create_thread_cron: post "/api/threads/{thread_id}/runs/crons" ("thread_id") "crons" "Create a cron job on a thread." CRONS;
    create_cron: post "/api/runs/crons" () "crons" "Create a cron job." CRONS;
    update_cron: patch "/api/runs/crons/{cron_id}" ("cron_id") "crons" "Change a cron job." CRONS;
    delete_cron: delete "/api/runs/crons/{cron_id}" ("cron_id") "crons" "Delete a cron job." CRONS;
    search_crons: post "/api/runs/crons/search" () "crons" "Find cron jobs." CRONS;
    count_crons: post "/api/runs/crons/count" () "crons" "Count cron jobs." CRONS;
    put_item: put "/api/store/items" () "store" "Store an item." STORE;
    get_item: get "/api/store/items" () "store" "Read an item." STORE;
    delete_item: delete "/api/store/items" () "store" "Delete an item." STORE;
    search_items: post "/api/store/items/search" () "store" "Find items." STORE;
    list_namespaces: post "/api/store/namespaces" () "store" "List namespaces of items." STORE;
    create_assistant: post "/api/assistants" () "assistants" "Create an assistant." ASSISTANTS;
    get_component: post "/api/ui/{assistant_id}" ("assistant_id") "assistants" "Read a component of an assistant's user interface." UI;
}

/// The 501 of changes to assistants.
pub(super) async fn fixed_assistants(request: Request) -> ApiError {
    drained(request.into_body()).await;
    not_implemented(ASSISTANTS)
}

fn not_implemented(sentence: &str) -> ApiError {
    ApiError::new(StatusCode::NOT_IMPLEMENTED, sentence)
}
