//! The page in a real browser, against the gateway's own process.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test.

mod axe;
mod batches;
mod connection;
mod driver;
mod gateway;
mod waiting;

use serde_json::{Value, json};

use crate::driver::Window;
use crate::gateway::Gateway;

/// Sends a message with the Enter key.
const ENTER: &str = "\u{e007}";
/// A conversation without a run at work, whose page is connected.
const AT_REST: &str = "document.querySelector('#stop').hidden && document.querySelector('main').dataset.stream === 'open' \
     && !document.querySelector('#live').hasChildNodes()";

/// From now on each answer with the page that is shown is kept, and handed on by `window.kept[0]()` and so on, with a
/// function as what it makes of its text. While `window.keeps` is false, answers are handed on at once.
const KEEP: &str = "(() => { const real = window.fetch; window.kept = []; window.keeps = true; \
     window.fetch = async (to, ...how) => { \
         const answer = await real(to, ...how); \
         if (to !== location.href || !window.keeps) return answer; \
         const text = await answer.text(); \
         const change = await new Promise((go) => window.kept.push(go)); \
         return { status: answer.status, ok: answer.ok, text: async () => (change ? change(text) : text) }; \
     }; })()";

fn script() -> Value {
    let task = |what: &str| json!({"name": "task", "args": {"prompt": what, "description": what, "subagent_type": "general-purpose"}});
    let read = json!({"name": "read_file", "args": {"path": "flag.txt"}});
    let item = |what: &str| json!({"key": what, "prompt": format!("item: {what}")});
    let batch = json!({"name": "batch_task", "args": {"title": "Three items", "subagent_type": "general-purpose",
        "items": [item("plain"), item("flag"), item("hang")]}});
    let reached =
        json!({"satisfied": true, "blocker": "none", "reason": "it is there", "evidence_summary": ""});
    json!({"chunk_chars": 4, "rules": [
        {"when": {"caller": "middleware:goal"}, "answers": [{"text": reached.to_string()}], "repeat_last": true},
        {"when": {"caller": "middleware"}, "answers": [{"text": "A title"}]},
        {"when": {"caller": "subagent", "contains": ["item: hang"]}, "answers": [{"text": "never", "gate": {"name": "shut"}}]},
        {"when": {"caller": "subagent", "contains": ["item: flag"], "anywhere": ["the flag is up"]}, "answers": [
            {"tool_calls": [read]}, {"text": "It is up."},
        ]},
        {"when": {"caller": "subagent", "contains": ["item: flag"]}, "answers": [
            {"tool_calls": [read]}, {"error": {"kind": "fatal", "message": "no flag"}},
        ]},
        {"when": {"caller": "subagent", "contains": ["slow"]}, "answers": [
            {"text": "I look around.", "tool_calls": [{"name": "ls", "args": {}}]},
            {"text": "never", "gate": {"name": "shut"}},
        ]},
        {"when": {"caller": "subagent"}, "answers": [
            {"text": "Looking.", "tool_calls": [{"name": "ls", "args": {}}], "delay_ms": 400},
            {"text": "Report: {{input}}", "delay_ms": 100, "usage": {"input_tokens": 7, "output_tokens": 2}},
        ]},
        {"when": {"contains": ["delegate slowly"]}, "answers": [{"tool_calls": [task("slow streams")]}]},
        {"when": {"contains": ["delegate"]}, "answers": [
            {"text": "I delegate.", "tool_calls": [task("rivers"), task("lakes")]},
            {"text": "Both reports are in."},
        ]},
        {"when": {"contains": ["submit"]}, "answers": [{"tool_calls": [batch]}, {"text": "Submitted."}]},
        {"when": {"contains": ["paint"]}, "answers": [{"text": "I ask.", "tool_calls": [
            {"name": "ask_clarification", "args": {"question": "Which colour?", "options": ["red", "blue"]}},
        ]}]},
        {"when": {"contains": ["broad call"]}, "answers": [
            {"tool_calls": [{"name": "a".repeat(64), "args": {}}]}, {"text": "Done."},
        ]},
        {"when": {"contains": ["hang"]}, "answers": [
            {"text": "This answer stops in its middle.", "gate": {"name": "shut", "after_chunks": 3}},
        ]},
        {"when": {"contains": ["hostile"]}, "answers": [
            {"text": "</div><script>window.broken = 1</script><img src=x onerror='window.broken = 2'>\u{202e}backwards",
             "tool_calls": [{"name": "ls", "args": {"path": "\"><script>window.broken = 3</script>"}}]},
            {"text": "<script>window.broken = 4</script> done"},
        ]},
        {"answers": [{"text": "You said: {{input}}", "usage": {"input_tokens": 3, "output_tokens": 4}}]},
    ]})
}

/// A window with a conversation, at this path.
async fn opened(gateway: &Gateway, path: &str) -> Window {
    let window = Window::open(&gateway.base).await;
    window.go(path).await;
    window.until(AT_REST).await;
    window
}

/// A window with a new conversation.
async fn conversation(gateway: &Gateway) -> (Window, String) {
    let thread = gateway.thread().await;
    (opened(gateway, &format!("/threads/{thread}")).await, thread)
}

/// Writes a message and waits for the end of its run.
async fn say(window: &Window, text: &str, answer: &str) {
    window.until(AT_REST).await;
    window.type_into("#say", &format!("{text}{ENTER}")).await;
    window.sees(answer).await;
    window.until(AT_REST).await;
}

/// From now on notices are kept: each is shown for some seconds, unless another one takes its place.
const KEEP_NOTICES: &str = "(() => { window.notices = []; \
     const keep = (changes) => changes.forEach((change) => window.notices.push(change.target.textContent)); \
     new MutationObserver(keep).observe($('#notice'), { childList: true }); })()";

/// Clicks, and waits until a notice with this text was shown.
async fn click_for_notice(window: &Window, selector: &str, text: &str) {
    window.value(KEEP_NOTICES).await;
    window.click(selector).await;
    window.until(&format!("window.notices.some((notice) => notice.includes({}))", json!(text))).await;
}

/// What the browser complained about, without lost connections.
async fn complaints(window: &Window) -> Vec<String> {
    let lost =
        |line: &String| line.contains("ERR_CONNECTION_REFUSED") || line.contains("ERR_INCOMPLETE_CHUNKED");
    window.log().await.into_iter().filter(|line| !lost(line)).collect()
}

#[tokio::test]
async fn a_person_talks_stops_branches_and_returns_to_an_old_checkpoint() {
    // In delta mode the thread stays one line: the old state is written onto the head.
    let gateway = Gateway::start(&script(), "full", false);
    let window = Window::open(&gateway.base).await;
    window.go("/").await;
    window.sees("No threads yet.").await;
    window.click("main form button").await;
    say(&window, "first question", "You said: first question").await;

    click_for_notice(&window, "button[data-do=compact]", "Nothing was compacted").await;

    // The answer streams: its beginning is seen although its end never comes.
    window.type_into("#say", &format!("please hang{ENTER}")).await;
    window.until("document.querySelector('#live .agent .text')?.textContent.startsWith('This answer')").await;
    window.click("#stop").await;
    window.until(AT_REST).await;
    say(&window, "second question", "You said: second question").await;

    // A branch is a thread of its own.
    let first = window.place().await;
    window.click("article.agent[data-message] button[data-do=branch]").await;
    window.until(&format!("location.pathname !== {}", json!(first))).await;
    window.sees("You said: first question").await;
    assert_eq!(window.value("document.body.innerText.includes('second question')").await, false);

    // From an old checkpoint the thread goes on as a fork.
    window.go(&format!("{first}/checkpoints")).await;
    window.until("document.querySelectorAll('.lanes').length > 6").await;
    window.click(".tree tbody tr:last-child a").await;
    window.sees("State at").await;
    window.click("a[href*='?at=']").await;
    window.sees("This is an older state.").await;
    window.type_into("#say", &format!("another beginning{ENTER}")).await;
    window.until(&format!("location.pathname === {} && location.search === ''", json!(first))).await;
    window.sees("You said: another beginning").await;
    // Until the fork is the head, the page may still have what was the newest before.
    window.until("!document.body.innerText.includes('second question')").await;
    window.go(&format!("{first}/checkpoints")).await;
    window.sees("fork of 2").await;
    assert_eq!(complaints(&window).await, Vec::<String>::new());
}

#[tokio::test]
async fn a_question_is_edited_and_an_answer_regenerated() {
    let gateway = Gateway::start(&script(), "full", false);
    let window = Window::open(&gateway.base).await;
    let thread = gateway.thread().await;
    window.go(&format!("/threads/{thread}")).await;
    say(&window, "one", "You said: one").await;
    window.click("button[data-do=edit]").await;
    window.clear("article form textarea").await;
    window.type_into("article form textarea", "two").await;
    window.click("article form button").await;
    window.sees("You said: two").await;
    window.until(AT_REST).await;
    assert_eq!(window.value("document.body.innerText.includes('You said: one')").await, false);
    window.click("button[data-do=repeat]").await;
    window.until(AT_REST).await;
    window.until("document.querySelectorAll('article.person').length === 1").await;
    assert_eq!(complaints(&window).await, Vec::<String>::new());
}

#[tokio::test]
async fn the_key_that_ends_a_composition_does_not_send() {
    let gateway = Gateway::start(&script(), "delta", false);
    let (window, _) = conversation(&gateway).await;
    window.type_into("#say", "half a word").await;
    // As browsers say it, and as Safari does.
    for composing in ["isComposing: true", "keyCode: 229"] {
        let key = format!("{{ key: 'Enter', bubbles: true, cancelable: true, {composing} }}");
        let press =
            format!("document.querySelector('#say').dispatchEvent(new KeyboardEvent('keydown', {key}))");
        assert_eq!(window.value(&press).await, true, "{composing}: nothing takes the key");
    }
    assert_eq!(window.value("document.querySelector('#say').value").await, "half a word");
    window.type_into("#say", ENTER).await;
    window.sees("You said: half a word").await;
}

#[tokio::test]
async fn nothing_hostile_runs_or_leaves_its_place() {
    let gateway = Gateway::start(&script(), "delta", false);
    let window = Window::open(&gateway.base).await;
    let thread = gateway.thread().await;
    window.go(&format!("/threads/{thread}")).await;
    say(&window, "hostile <img src=x onerror='window.broken = 5'>", "done").await;
    // 1 MB, which no person types.
    gateway.ask(&thread, &"0123456789".repeat(100_000)).await;
    window.until("document.body.innerText.includes('Show all 1.0 MB')").await;
    for path in ["", "/checkpoints", "/storage", "/delete"] {
        window.go(&format!("/threads/{thread}{path}")).await;
        window.until("document.readyState === 'complete'").await;
        assert_eq!(window.value("window.broken ?? null").await, Value::Null, "{path}");
        assert_eq!(
            window.value("document.querySelectorAll('main img, main script').length").await,
            0,
            "{path}"
        );
        let wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth";
        assert_eq!(window.value(wide).await, false, "{path}");
    }
    assert_eq!(complaints(&window).await, Vec::<String>::new());
}

#[tokio::test]
async fn a_long_name_of_a_tool_fits_into_a_narrow_window() {
    let gateway = Gateway::start(&script(), "delta", false);
    let (window, thread) = conversation(&gateway).await;
    window.resize(420, 900).await;
    gateway.ask(&thread, "a broad call").await;
    window.until("document.querySelector('.call .tool')?.textContent.length === 64").await;
    let wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth";
    assert_eq!(window.value(wide).await, false);
}

#[tokio::test]
async fn delegations_are_watched_while_they_work() {
    let gateway = Gateway::start(&script(), "delta", false);
    let (window, thread) = conversation(&gateway).await;
    window.type_into("#say", &format!("please delegate{ENTER}")).await;
    window.until("document.querySelectorAll('.card[data-status=completed]').length === 2").await;
    window.sees("Both reports are in.").await;
    window.until(AT_REST).await;

    // What happens inside of one that works on is seen without its end. The others may end before anybody looks.
    window.type_into("#say", &format!("delegate slowly{ENTER}")).await;
    window.until("document.querySelector('.card[data-status=running]')").await;
    let step = |kind: &str, text: &str| {
        format!(
            "[...document.querySelectorAll('.card[data-status=running] li[data-kind={kind}]')]\
             .some((step) => step.innerText.includes('{text}'))"
        )
    };
    window.until(&step("ai", "I look around.")).await;
    window.until(&step("tool", "ls")).await;
    window.click(".card[data-status=running] a").await;
    window.sees("2 steps").await;
    window.go(&format!("/threads/{thread}")).await;
    window.click("#stop").await;
    window.until("document.querySelector('.card[data-status=cancelled]')").await;
    assert_eq!(complaints(&window).await, Vec::<String>::new());
}

#[tokio::test]
async fn checkpoints_are_removed_after_a_preview() {
    let gateway = Gateway::start(&script(), "delta", false);
    let window = Window::open(&gateway.base).await;
    let thread = gateway.thread().await;
    for turn in 0..3 {
        gateway.ask(&thread, &format!("turn {turn}")).await;
    }
    window.go(&format!("/threads/{thread}/storage")).await;
    window.value("document.querySelector('#keep').value = 'latest'").await;
    window.click("#prune form button").await;
    window.sees("older than what is kept").await;
    window.click("#prune button.danger").await;
    window.sees("checkpoints removed.").await;
    window.click("#verify button").await;
    window.sees("No violations").await;
    window.go(&format!("/threads/{thread}")).await;
    window.sees("You said: turn 2").await;
    assert_eq!(complaints(&window).await, Vec::<String>::new());
}

#[tokio::test]
async fn an_open_page_outlives_a_killed_gateway() {
    let mut gateway = Gateway::start(&script(), "delta", false);
    let window = Window::open(&gateway.base).await;
    let thread = gateway.thread().await;
    window.go(&format!("/threads/{thread}")).await;
    say(&window, "before", "You said: before").await;
    gateway.kill();
    window.sees("The connection to the gateway is lost").await;
    gateway.start_again();
    window.until("document.querySelector('main').dataset.stream === 'open'").await;
    say(&window, "after", "You said: after").await;
    assert_eq!(window.value("document.body.innerText.includes('You said: before')").await, true);
}

#[tokio::test]
async fn a_person_signs_in_talks_and_signs_out() {
    let gateway = Gateway::start(&script(), "delta", true);
    let key = gateway.key("ann");
    let window = Window::open(&gateway.base).await;
    window.go("/").await;
    window.sees("This gateway needs an API key.").await;
    window.type_into("#key", &format!("tk_wrong{ENTER}")).await;
    window.sees("This key is not valid.").await;
    window.log().await;
    window.type_into("#key", &format!("{key}{ENTER}")).await;
    window.sees("No threads yet.").await;
    assert_eq!(window.value("document.cookie").await, "", "a script cannot read the cookie");
    window.click("main form button").await;
    say(&window, "hello", "You said: hello").await;
    assert_eq!(complaints(&window).await, Vec::<String>::new());
    window.click(".leave button").await;
    window.sees("This gateway needs an API key.").await;
    window.go("/").await;
    assert_eq!(window.place().await, "/sign-in?next=/");
}

#[tokio::test]
async fn a_thread_of_ten_thousand_checkpoints_is_opened_and_scrolled() {
    let gateway = Gateway::start(&script(), "delta", false);
    let window = Window::open(&gateway.base).await;
    let thread = gateway.long(9_999).await;
    window.go(&format!("/threads/{thread}")).await;
    window.sees("message 9998").await;
    assert_eq!(window.value("document.querySelectorAll('article').length").await, 200);
    window.go(&format!("/threads/{thread}/checkpoints")).await;
    window.sees("1–250 of 10,000").await;
    let rows = "document.querySelectorAll('.tree tbody tr').length";
    assert_eq!(window.value(rows).await, 250);
    window.value("window.scrollTo(0, document.documentElement.scrollHeight)").await;
    window.until("window.innerHeight + window.scrollY >= document.documentElement.scrollHeight - 1").await;
    window.click("a[rel=next]").await;
    window.sees("251–500 of 10,000").await;
    assert_eq!(window.value(rows).await, 250);
    window.go(&format!("/threads/{thread}/checkpoints?offset=9990")).await;
    window.sees("9,991–10,000 of 10,000").await;
    assert_eq!(window.value(rows).await, 10);
    assert_eq!(complaints(&window).await, Vec::<String>::new());
}

#[tokio::test]
async fn runs_of_all_threads_are_watched_and_one_is_cancelled() {
    let gateway = Gateway::start(&script(), "delta", false);
    let window = Window::open(&gateway.base).await;
    window.go("/runs").await;
    window.sees("No run is at work.").await;
    // Another client starts one.
    let thread = gateway.thread().await;
    gateway.start_run(&thread, "please hang").await;
    window.sees("please hang").await;
    window.click("button[data-post$='/cancel']").await;
    window.sees("No run is at work.").await;
    window.go("/status").await;
    window.sees("Errors of the last hour").await;
    assert_eq!(complaints(&window).await, Vec::<String>::new());
}
