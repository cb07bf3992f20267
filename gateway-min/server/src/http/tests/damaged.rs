//! States with a value that does not decode.

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::http::Request;
use serde_json::{Map, json};
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
}

#[tokio::test]
async fn a_fork_leaves_a_head_whose_title_is_damaged() {
    for mode in MODES {
        let gateway = Gateway::start(mode).await;
        let good = gateway.checkpoints().await[0].key.id.to_string();
        gateway.app.records.threads().set_display_name("t", None, Some("First")).await.unwrap();
        gateway.damage_title().await;
        let read = Request::get("/api/threads/t/state").body(Body::empty()).unwrap();
        let response = router(Arc::clone(&gateway.app)).oneshot(read).await.unwrap();
        assert_eq!(response.status(), 500, "{mode}");

        let fork = json!({"checkpoint_id": good, "values": {"summary_text": "s"}});
        let fork = gateway.post("/state", fork).await;
        assert_eq!(fork["parent_checkpoint_id"], good, "{mode}");
        assert_eq!(gateway.get("/state").await, fork, "{mode}");
        let row = gateway.app.records.threads().get("t", None).await.unwrap().unwrap();
        assert_eq!(row.display_name.as_deref(), Some("First"), "nothing says that it was the title: {mode}");
    }
}
