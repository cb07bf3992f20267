//! A batch that is watched, paused, resumed and cancelled, and a failed item of it tried again.

use serde_json::Value;

use crate::driver::Window;
use crate::gateway::Gateway;
use crate::{KEEP, complaints, script};

/// Whether the item with this key has this status.
fn item(key: &str, status: &str) -> String {
    format!(
        "[...document.querySelectorAll('tr[data-status={status}]')].some((row) => row.innerText.startsWith('{key}'))"
    )
}

#[tokio::test]
async fn a_batch_is_watched_paused_tried_again_and_cancelled() {
    let gateway = Gateway::start(&script(), "delta", false);
    let window = Window::open(&gateway.base).await;
    let thread = gateway.thread().await;
    gateway.delegate(&thread, "please submit").await;
    window.go(&format!("/threads/{thread}/runs")).await;
    // Nobody loads the page again: it follows what is at work.
    window.until("document.querySelector('.card').innerText.includes('1 succeeded')").await;
    window.until("document.querySelector('.card').innerText.includes('1 failed')").await;
    window.until("document.querySelector('.card').innerText.includes('1 running')").await;
    window.click(".card a").await;
    window.until(&item("plain", "succeeded")).await;
    window.until(&item("hang", "running")).await;
    window.sees("refused the request").await;
    // The window that is not loaded again keeps this.
    window.value("window.stays = true").await;

    window.click("button[data-post$='/pause']").await;
    window.until("document.querySelector('.card[data-status=paused]')").await;
    std::fs::create_dir_all(gateway.thread_dir(&thread)).unwrap();
    std::fs::write(gateway.thread_dir(&thread).join("flag.txt"), "the flag is up").unwrap();
    window.click("button[data-post$='/retry']").await;
    window.until(&item("flag", "pending")).await;
    window.click("button[data-post$='/resume']").await;
    window.until(&item("flag", "succeeded")).await;
    window.sees("It is up.").await;

    window.click("button[data-post$='/cancel']").await;
    window.until(&item("hang", "cancelled")).await;
    window.until("document.querySelector('.card[data-status=cancelled]')").await;
    assert_eq!(window.value("document.querySelectorAll('#watched button').length").await, 0);
    assert_eq!(window.value("window.stays").await, Value::Bool(true));
    assert_eq!(complaints(&window).await, Vec::<String>::new());
}

/// Hands on what was kept, and returns whether another status than `paused` was shown from then on. What a page does
/// with an answer that it has is done before a timer fires.
const HAND_ON: &str = "(() => { window.others = false; \
     const look = () => { window.others ||= document.querySelector('#watched .card').dataset.status !== 'paused'; }; \
     new MutationObserver(look).observe(document.querySelector('#watched'), { childList: true }); \
     window.kept[0](); \
     return new Promise((go) => setTimeout(() => go(window.others))); })()";

#[tokio::test]
async fn what_a_button_did_is_not_taken_back_by_a_page_of_a_time_before() {
    let gateway = Gateway::start(&script(), "delta", false);
    let window = Window::open(&gateway.base).await;
    let thread = gateway.thread().await;
    gateway.delegate(&thread, "please submit").await;
    window.go(&format!("/threads/{thread}/runs")).await;
    window.click(".card a").await;
    window.until(&item("hang", "running")).await;
    window.value(KEEP).await;
    window.until("window.kept.length === 1").await;
    window.value("window.keeps = false").await;
    window.click("button[data-post$='/pause']").await;
    window.until("document.querySelector('.card[data-status=paused]')").await;
    assert_eq!(window.value(HAND_ON).await, Value::Bool(false));
}
