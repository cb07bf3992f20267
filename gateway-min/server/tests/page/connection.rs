//! A page that was not looked at, or that could not be read for a moment, shows what is true in the end.

use serde_json::json;

use crate::driver::Window;
use crate::gateway::Gateway;
use crate::{AT_REST, ENTER, conversation, script};

/// The window is not seen for a moment; then the pieces of answers are counted that come.
const LOOK_AWAY: &str = "(() => { \
     for (const value of [true, false]) { \
         Object.defineProperty(document, 'hidden', { configurable: true, value }); \
         document.dispatchEvent(new Event('visibilitychange')); \
     } \
     window.pieces = 0; source.addEventListener('messages', () => window.pieces++); })()";

/// From now on the page that is shown cannot be read, as while a database is away. It is noted that a run has ended.
const FAIL: &str = "(() => { source?.addEventListener('metadata', (event) => window.done ||= event.data.includes('run_done')); \
     const real = window.fetch; window.failed = 0; window.failing = true; \
     window.fetch = (to, ...how) => to === location.href && window.failing \
         ? (window.failed++, Promise.resolve(new Response('', { status: 503 }))) : real(to, ...how); })()";

#[tokio::test]
async fn an_answer_that_streams_is_shown_once_when_the_page_is_seen_again() {
    let gateway = Gateway::start(&script(), "delta", false);
    let (window, _) = conversation(&gateway).await;
    window.type_into("#say", &format!("please hang{ENTER}")).await;
    let shown = "document.querySelector('#live .agent .text')?.textContent";
    window.until(&format!("{shown} === 'This answer '")).await;
    window.value(LOOK_AWAY).await;
    window.until("window.pieces === 3").await;
    assert_eq!(window.value(shown).await, json!("This answer "));
    window.click("#stop").await;
    window.until(AT_REST).await;
}

#[tokio::test]
async fn a_conversation_that_cannot_be_read_for_a_moment_is_read_again() {
    let gateway = Gateway::start(&script(), "delta", false);
    let (window, _) = conversation(&gateway).await;
    window.value(FAIL).await;
    window.type_into("#say", &format!("hello{ENTER}")).await;
    // Its end is not announced again.
    window.until("window.done && window.failed > 0 && refreshing === null").await;
    window.value("window.failing = false").await;
    window.until("document.querySelector('#conversation').innerText.includes('You said: hello')").await;
    window.until(AT_REST).await;
}

#[tokio::test]
async fn a_page_of_what_is_at_work_that_cannot_be_read_for_a_moment_is_read_again() {
    let gateway = Gateway::start(&script(), "delta", false);
    let window = Window::open(&gateway.base).await;
    window.go("/runs").await;
    window.sees("No run is at work.").await;
    window.value(FAIL).await;
    window.until("window.failed > 0").await;
    window.value("window.failing = false").await;
    let thread = gateway.thread().await;
    gateway.start_run(&thread, "please hang").await;
    window.sees("please hang").await;
}
