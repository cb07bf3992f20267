//! A page that was not looked at, that could not be read for a moment, or whose gateway is slow, shows what is true in
//! the end.

use serde_json::json;

use crate::driver::Window;
use crate::gateway::Gateway;
use crate::{AT_REST, ENTER, KEEP, conversation, opened, script};

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

/// From now on, the answer to what changes something is handed on when `window.proceed` is called. It is noted that a
/// run has ended.
const ANSWER_LATER: &str = "(() => { \
     source.addEventListener('metadata', (event) => window.done ||= event.data.includes('run_done')); \
     const real = window.fetch; \
     window.fetch = async (to, how) => { \
         const answer = await real(to, how); \
         if (how?.method === 'POST') await new Promise((go) => { window.proceed = go; }); \
         return answer; \
     }; })()";

/// Starts a run as another client does.
const START_ELSEWHERE: &str = "call('POST', ofThread('/runs'), \
     { input: { messages: [{ role: 'user', content: 'please hang' }] }, ...options() }).then(() => true)";

/// The last of the answers that stream.
const STREAMED: &str = "[...document.querySelectorAll('#live .agent .text')].at(-1)?.textContent";
/// How many questions are shown that the conversation does not have yet.
const SAID: &str = "document.querySelectorAll('#live .person').length";
/// Hands on the second page that was kept, and from then on each at once.
const HAND_ON: &str = "(window.keeps = false, window.kept[1]())";

/// The page as it is now is read, and kept.
async fn keep(window: &Window) {
    window.value(KEEP).await;
    window.value("void refresh()").await;
    window.until("window.kept.length === 1").await;
}

/// Waits until the answer that hangs has streamed as far as it does.
async fn until_it_hangs(window: &Window) {
    window.until(&format!("{STREAMED} === 'This answer '")).await;
}

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

#[tokio::test]
async fn a_page_of_a_time_before_a_run_hides_nothing_of_the_run() {
    let gateway = Gateway::start(&script(), "delta", false);
    for is_own in [true, false] {
        let (window, _) = conversation(&gateway).await;
        keep(&window).await;
        if is_own {
            window.type_into("#say", &format!("please hang{ENTER}")).await;
            window.until(&format!("{SAID} === 1")).await;
        } else {
            window.value(START_ELSEWHERE).await;
        }
        until_it_hangs(&window).await;
        window.value("window.kept[0]()").await;
        // The page is read again, which it is only when it has done with that one.
        window.until("window.kept.length === 2").await;
        assert_eq!(window.value(STREAMED).await, json!("This answer "), "{is_own}");
        assert_eq!(window.value("document.querySelector('#stop').hidden").await, json!(false), "{is_own}");
        assert_eq!(window.value(SAID).await, json!(u8::from(is_own)));
        window.value(HAND_ON).await;
        window.until("document.querySelector('#conversation').innerText.includes('please hang')").await;
        window.until(&format!("{SAID} === 0")).await;
        assert_eq!(window.value(STREAMED).await, json!("This answer "), "{is_own}");
        window.click("#stop").await;
        window.until(AT_REST).await;
    }
}

#[tokio::test]
async fn a_page_of_the_run_before_takes_nothing_from_the_next_one() {
    let gateway = Gateway::start(&script(), "delta", false);
    let (window, _) = conversation(&gateway).await;
    window.type_into("#say", &format!("please hang{ENTER}")).await;
    until_it_hangs(&window).await;
    window.until("!document.querySelector('#send').disabled").await;
    window.until(&format!("{SAID} === 0")).await;
    keep(&window).await;
    let first = window.value("run").await;
    window.value("call('POST', ofThread(`/runs/${run}/cancel?wait=true`))").await;
    window.type_into("#say", &format!("hang again{ENTER}")).await;
    window.until(&format!("{SAID} === 1")).await;
    window.until("document.querySelectorAll('#live .agent').length === 2").await;
    until_it_hangs(&window).await;
    let next = window.value("run").await;
    assert_ne!(next, first);
    window.value("window.kept[0]()").await;
    window.until("window.kept.length === 2").await;
    // This is what the button stops.
    assert_eq!(window.value("run").await, next);
    assert_eq!(window.value(SAID).await, json!(1));
    // What the first run did not store goes, although a run is at work.
    window.value(HAND_ON).await;
    window.until("document.querySelectorAll('#live .agent').length === 1").await;
    window.until(&format!("{SAID} === 0")).await;
    assert_eq!(window.value(STREAMED).await, json!("This answer "));
    window.click("#stop").await;
    window.until(AT_REST).await;
}

#[tokio::test]
async fn a_question_is_in_sight_until_the_conversation_has_it() {
    let gateway = Gateway::start(&script(), "delta", false);
    let (window, thread) = conversation(&gateway).await;
    keep(&window).await;
    gateway.ask(&thread, "hello").await;
    window.type_into("#say", &format!("please hang{ENTER}")).await;
    window.until(&format!("{SAID} === 1")).await;
    until_it_hangs(&window).await;
    window.value("window.kept[0]()").await;
    window.until("window.kept.length === 2").await;
    // As of the moment before it was stored: the last question is that of the other client.
    let without = "window.kept[1]((text) => { \
         const page = new DOMParser().parseFromString(text, 'text/html'); \
         const questions = [...page.querySelectorAll('#conversation .person')]; \
         questions.find((question) => question.textContent.includes('please hang'))?.remove(); \
         return page.documentElement.outerHTML; })";
    window.value(without).await;
    window.until("refreshing === null || window.kept.length === 3").await;
    window.until("document.querySelector('#conversation').innerText.includes('You said: hello')").await;
    assert_eq!(window.value(SAID).await, json!(1));
    window.value("(window.keeps = false, window.kept[2]?.(), void refresh())").await;
    window.until("document.querySelector('#conversation').innerText.includes('please hang')").await;
    window.until(&format!("{SAID} === 0")).await;
    window.click("#stop").await;
    window.until(AT_REST).await;
}

#[tokio::test]
async fn a_run_that_has_ended_before_its_start_is_answered_is_over() {
    let gateway = Gateway::start(&script(), "delta", false);
    let (window, _) = conversation(&gateway).await;
    window.value(ANSWER_LATER).await;
    window.type_into("#say", &format!("hello{ENTER}")).await;
    window.until("window.proceed && window.done && refreshing === null && soon === undefined").await;
    window.until("document.querySelector('#conversation').innerText.includes('You said: hello')").await;
    window.value("window.proceed()").await;
    window.until("!document.querySelector('#send').disabled").await;
    window.until(AT_REST).await;
}
