//! A page that was not looked at, that could not be read for a moment, or whose gateway is slow, shows what is true in
//! the end.

use serde_json::json;

use crate::driver::Window;
use crate::gateway::Gateway;
use crate::{AT_REST, ENTER, conversation, opened, script};

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

/// From now on, what changes something is sent when `window.proceed` is called. It is counted.
const HOLD: &str = "(() => { const real = window.fetch; window.sent = 0; \
     window.fetch = (to, how) => how?.method !== 'POST' ? real(to, how) \
         : (window.sent++, new Promise((go) => { window.proceed = go; }).then(() => real(to, how))); })()";

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

#[tokio::test]
async fn a_message_is_sent_once_and_what_is_written_meanwhile_stays() {
    let gateway = Gateway::start(&script(), "delta", false);
    let (window, _) = conversation(&gateway).await;
    window.value(HOLD).await;
    window.type_into("#say", &format!("one{ENTER}")).await;
    window.until("window.sent === 1").await;
    window.type_into("#say", &format!(" two{ENTER}")).await;
    window.value("window.proceed()").await;
    window.until("document.querySelector('#conversation').innerText.includes('You said: one')").await;
    window.until(AT_REST).await;
    assert_eq!(window.value("window.sent").await, json!(1));
    assert_eq!(window.value("document.querySelector('#say').value").await, json!(" two"));
}

#[tokio::test]
async fn a_question_in_a_long_conversation_is_shown_once() {
    let gateway = Gateway::start(&script(), "delta", false);
    // The first message shown is a question, which leaves the page when another one is asked.
    let thread = gateway.long(250).await;
    let window = opened(&gateway, &format!("/threads/{thread}")).await;
    window.type_into("#say", &format!("please hang{ENTER}")).await;
    window.until("document.querySelector('#conversation').innerText.includes('please hang')").await;
    window.until("document.querySelector('#live .agent')").await;
    window.until("document.querySelector('#live .person') === null").await;
    window.click("#stop").await;
    window.until(AT_REST).await;
}

#[tokio::test]
async fn a_message_below_earlier_ones_leads_to_the_newest() {
    let gateway = Gateway::start(&script(), "delta", false);
    let thread = gateway.long(20).await;
    let window = opened(&gateway, &format!("/threads/{thread}?end=10")).await;
    window.type_into("#say", &format!("hello{ENTER}")).await;
    window.until("location.search === ''").await;
    window.until("document.querySelector('#conversation')?.innerText.includes('You said: hello')").await;
}

#[tokio::test]
async fn what_is_written_stays_when_the_page_is_not_available_any_more() {
    let gateway = Gateway::start(&script(), "delta", true);
    let key = gateway.key("ann");
    let window = Window::open(&gateway.base).await;
    window.go("/").await;
    window.type_into("#key", &format!("{key}{ENTER}")).await;
    window.sees("No threads yet.").await;
    window.click("main form button").await;
    window.until(AT_REST).await;
    window.type_into("#say", "a long thought").await;
    window.value("window.here = true").await;
    // As when the session has ended: each request leads to the page that asks for a key.
    window
        .value(
            "fetch('/sign-out', { method: 'POST', body: new URLSearchParams({ token }) }).then(() => true)",
        )
        .await;
    window.value("refresh()").await;
    window.sees("you may be signed out").await;
    window.type_into("#say", ENTER).await;
    window.until("!document.querySelector('#send').disabled").await;
    assert_eq!(window.value("window.here").await, json!(true));
    assert_eq!(window.value("document.querySelector('#say').value").await, json!("a long thought"));
    // Without a text the person is asked for a key.
    window.value("document.querySelector('#say').value = ''").await;
    window.value("void refresh()").await;
    window.sees("This gateway needs an API key.").await;
}
