//! The search of titles on the page, beside what changes.

use std::collections::BTreeSet;

use serde_json::json;

use crate::page::html;
use crate::support::Setup;

/// The ids of the threads that a list shows.
fn shown(page: &str) -> Vec<&str> {
    let links = page.split("href=\"/threads/").skip(1).filter_map(|rest| rest.split('"').next());
    links.filter_map(|link| link.strip_suffix("/delete")).collect()
}

/// A thread that changes becomes the first of the list, and moves the others.
#[tokio::test]
async fn a_search_shows_every_thread_once_while_threads_change() {
    let gateway = Setup::default().start().await;
    let ids: Vec<String> = (0..510).map(|number| format!("thread-{number}")).collect();
    for id in &ids {
        gateway.create(id).await;
    }
    let changes = async {
        for id in ids.iter().cycle() {
            gateway.patch(&format!("/api/threads/{id}"), json!({"metadata": {"seen": true}})).await.ok();
        }
    };
    let searches = async {
        for _ in 0..20 {
            let answer = gateway.get("/?q=THREAD&offset=480").await;
            let page = html(&answer);
            let found = shown(page);
            let different: BTreeSet<&str> = found.iter().copied().collect();
            assert_eq!((found.len(), different.len()), (30, 30), "{found:?}");
            assert!(page.contains(">510<"), "{page}");
        }
    };
    tokio::select! {
        () = searches => {}
        () = changes => {}
    }
}
