//! The list of threads on the page: their sizes, and the search of titles beside what changes.

use std::collections::BTreeSet;

use serde_json::json;

use crate::page::html;
use crate::support::Setup;

/// The ids of the threads that a list shows.
fn shown(page: &str) -> Vec<&str> {
    let links = page.split("href=\"/threads/").skip(1).filter_map(|rest| rest.split('"').next());
    links.filter_map(|link| link.strip_suffix("/delete")).collect()
}

/// What each thread's rows take, on either store.
#[tokio::test]
async fn the_list_and_the_storage_of_a_thread_show_the_bytes_of_its_rows() {
    for database in ["sqlite", "postgres"] {
        let gateway = Setup::on(database, "delta").start().await;
        gateway.create("asked").await;
        gateway.create("empty").await;
        gateway.ask("asked", "How far is it?").await;
        let answer = gateway.get("/").await;
        let list = html(&answer);
        let size = |id: &str| {
            let row = list.split("<tr>").find(|row| row.contains(&format!("/threads/{id}/delete"))).unwrap();
            row.split("<td class=\"number\">").nth(1).unwrap().split('<').next().unwrap()
        };
        // Creating a thread stores a checkpoint.
        assert!(size("empty").ends_with(" B") && size("empty") != "0 B", "{database}: {}", size("empty"));
        let asked = size("asked");
        assert!(asked.ends_with(" kB"), "{database}: {asked}");
        let answer = gateway.get("/threads/asked/storage").await;
        let storage = html(&answer);
        let stored = storage.split("Stored").nth(1).unwrap();
        assert!(
            stored[..stored.find("bytes of its rows").unwrap()].contains(asked),
            "{database}: {asked}, {stored}"
        );
    }
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
