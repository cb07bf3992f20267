//! A thread of 10,000 checkpoints on the page: each place shows a part of it.

use serde_json::{Value, json};

use crate::page::html;
use crate::support::{MODES, Setup};

/// The supersteps of a thread with this many messages.
fn supersteps(number: usize) -> Value {
    let step = |at: usize| {
        let kind = if at.is_multiple_of(2) { "human" } else { "ai" };
        let message = json!({"type": kind, "id": format!("m{at}"), "content": format!("message {at}")});
        json!({"updates": [{"as_node": "model", "values": {"messages": [message]}}]})
    };
    (0..number).map(step).collect()
}

#[tokio::test]
async fn a_thread_of_ten_thousand_checkpoints_is_shown_in_parts() {
    // The first checkpoint is that of the empty thread. In full mode one of 2,000 is enough: each has all of its messages.
    for (mode, number) in MODES.into_iter().zip([2_000, 10_000]) {
        let gateway = Setup { frequency: 10, ..Setup::on("sqlite", mode) }.start().await;
        let body = json!({"thread_id": "t", "supersteps": supersteps(number - 1)});
        gateway.post("/api/threads", body).await.ok();
        let first = gateway.get("/threads/t/checkpoints").await;
        let page = html(&first);
        assert_eq!(page.matches("class=\"lanes\"").count(), 250 + 3, "{mode}: a part, and the legend");
        let all = if number == 10_000 { "10,000" } else { "2,000" };
        assert!(page.contains(&format!("1–250 of {all}")) && page.contains("?offset=250\""), "{mode}");
        assert!(page.len() < 500_000, "{mode}: {} bytes", page.len());
        let last = gateway.get(&format!("/threads/t/checkpoints?offset={}", number - 10)).await;
        assert_eq!(html(&last).matches("class=\"lanes\"").count(), 10 + 3, "{mode}");
        assert!(html(&last).contains("child of nothing"), "{mode}: its first checkpoint");
        let talk = gateway.get("/threads/t").await;
        assert_eq!(html(&talk).matches("<article").count(), 200, "{mode}");
        assert!(html(&talk).contains(&format!("message {}", number - 2)), "{mode}");
        let earlier = gateway.get("/threads/t?end=200").await;
        assert!(html(&earlier).contains(">message 0<") && !html(&earlier).contains("message 200"), "{mode}");
        let storage = gateway.get("/threads/t/storage").await;
        assert!(html(&storage).contains(&format!("<b>{all}</b>")), "{mode}");
    }
}
