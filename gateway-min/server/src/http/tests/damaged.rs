//! States with a value that does not decode.

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::http::{Request, StatusCode};
use serde_json::{Map, Value, json};
use threadkeep::checkpoint::Write;
use threadkeep::state::Update;
use threadkeep::value::{ChannelValue, Codec, Encoded};
use tower::ServiceExt as _;

use super::super::router;
use super::{Gateway, MODES};

/// A text of five bytes that ends after the first.
const DAMAGE: &[u8] = b"\xa5t";

impl Gateway {
    /// Writes a head whose title is damaged.
    async fn damage_title(&self) {
        let bytes = Bytes::from_static(DAMAGE);
        let value = ChannelValue::Plain(Encoded { codec: Codec::MessagePack, bytes });
        let writes = vec![Write { channel: "title".into(), value, overwrite: false }];
        let update = Update { at: None, node: "test".into(), writes, extra: Map::new() };
        self.app.threads.accessor().update(&self.thread, update).await.unwrap();
    }

    /// How a read of the state is answered.
    async fn status_of_state(&self, query: &str) -> StatusCode {
        let request = Request::get(format!("/api/threads/t/state{query}")).body(Body::empty()).unwrap();
        router(Arc::clone(&self.app)).oneshot(request).await.unwrap().status()
    }
}

#[tokio::test]
async fn a_fork_leaves_a_head_whose_title_is_damaged() {
    for mode in MODES {
        let gateway = Gateway::start(mode).await;
        let good = gateway.checkpoints().await[0].key.id.to_string();
        gateway.app.records.threads().set_display_name("t", None, Some("First")).await.unwrap();
        gateway.damage_title().await;
        assert_eq!(gateway.status_of_state("").await, 500, "{mode}");

        let fork = json!({"checkpoint_id": good, "values": {"summary_text": "s"}});
        let fork = gateway.post("/state", fork).await;
        assert_eq!(fork["parent_checkpoint_id"], good, "{mode}");
        assert_eq!(gateway.get("/state").await, fork, "{mode}");
        let row = gateway.app.records.threads().get("t", None).await.unwrap().unwrap();
        assert_eq!(row.display_name.as_deref(), Some("First"), "nothing says that it was the title: {mode}");
    }
}

/// So a thread of which only a small value is asked for costs no more than that.
#[tokio::test]
async fn a_selection_reads_its_own_values_only() {
    for mode in MODES {
        let gateway = Gateway::start(mode).await;
        gateway.turn("r").await;
        gateway.damage_title().await;
        for query in ["", "?select=values", "?select=values.title", "?select=values.messages&select=values"] {
            assert_eq!(gateway.status_of_state(query).await, 500, "{mode} {query}");
        }
        let state = gateway.get("/state?select=next&select=values.none").await;
        assert_eq!(state, json!({"next": [], "values": {}}), "{mode}");
        let state = gateway.get("/state?select=values.messages").await;
        let ids = |state: &Value| [0, 1].map(|index| state["values"]["messages"][index]["id"].clone());
        assert_eq!(ids(&state), ["h-r", "a-r"], "{mode}");
        let selection = |select: &str| json!({"select": [select], "limit": 1});
        assert_eq!(gateway.post("/history", selection("next")).await, json!([{"next": []}]), "{mode}");
        let history = gateway.post("/history", selection("values.messages")).await;
        assert_eq!(ids(&history[0]), ["h-r", "a-r"], "{mode}");
        let params = json!({"namespace": [], "keys": ["messages"]});
        let command = json!({"id": 1, "method": "state.get", "params": params});
        let state = gateway.post("/commands", command).await;
        assert_eq!(ids(&state["result"]), ["h-r", "a-r"], "{mode}");
    }
}
