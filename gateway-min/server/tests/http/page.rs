//! The page for browsers: what it shows, what it never does, and who may see it.

use axum::body::Body;
use axum::http::{HeaderMap, Method, Request};
use serde_json::json;
use threadkeep_config::{KeyFile, Role};

use crate::support::{Answer, Gateway, MODES, Setup};

pub(crate) const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; \
     form-action 'self'; frame-ancestors 'none'; base-uri 'none'";
/// What a model or a person may say to break out of the page.
const HOSTILE: &str =
    "</textarea></pre><script>alert(1)</script><img src=x onerror=alert(2)>\" autofocus onfocus=\"x\u{202e}";

/// The text of a page.
#[track_caller]
pub(crate) fn html(answer: &Answer) -> &str {
    assert_eq!(answer.headers["content-type"], "text/html; charset=utf-8");
    answer.body.as_str().unwrap()
}

/// A gateway with keys.
pub(crate) struct Guarded {
    pub(crate) gateway: Gateway,
    pub(crate) keys: KeyFile,
}

impl Guarded {
    pub(crate) async fn start() -> Self {
        Self::with(Setup::on("sqlite", "delta")).await
    }

    /// This gateway, with keys.
    pub(crate) async fn with(mut setup: Setup) -> Self {
        setup.sections["auth"] = json!({"enabled": true});
        let gateway = setup.start().await;
        let keys = KeyFile::new(&gateway.data().parent().unwrap().join("api-keys.json"));
        Self { gateway, keys }
    }

    /// The id of a new key of this user, and the cookie of a session that was signed in with it.
    pub(crate) async fn signed_in(&self, user: &str) -> (String, String) {
        let (record, key) = self.keys.create(user, Role::User).unwrap();
        let answer = self.form("/sign-in", "", &format!("key={}&next=%2F", key.expose()), &[]).await;
        assert_eq!(
            (answer.status, &answer.headers["location"]),
            (303, &"/".parse().unwrap()),
            "{}",
            answer.body
        );
        (record.id, cookie(&answer.headers))
    }

    pub(crate) async fn form(
        &self,
        path: &str,
        cookie: &str,
        body: &str,
        headers: &[(&str, &str)],
    ) -> Answer {
        let mut request = Request::post(path)
            .header("content-type", "application/x-www-form-urlencoded")
            .header("host", "gateway.example")
            .header("cookie", cookie);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        self.gateway.send(request.body(Body::from(body.to_owned())).unwrap()).await
    }

    pub(crate) async fn get(&self, path: &str, cookie: &str) -> Answer {
        let request = Request::get(path).header("cookie", cookie).body(Body::empty());
        self.gateway.send(request.unwrap()).await
    }

    /// A request of the API with a session, and with a token if there is one.
    pub(crate) async fn api(&self, method: Method, path: &str, cookie: &str, token: Option<&str>) -> Answer {
        let mut request = Request::builder().method(method).uri(path).header("cookie", cookie);
        request = request.header("content-type", "application/json");
        if let Some(token) = token {
            request = request.header("x-page-token", token);
        }
        self.gateway.send(request.body("{}".into()).unwrap()).await
    }

    /// The token in a page.
    pub(crate) async fn token(&self, cookie: &str) -> String {
        let answer = self.get("/", cookie).await;
        let rest = html(&answer).split("name=\"page-token\" content=\"").nth(1).unwrap();
        rest.split('"').next().unwrap().to_owned()
    }
}

/// The name and value of the cookie that an answer sets.
pub(crate) fn cookie(headers: &HeaderMap) -> String {
    headers["set-cookie"].to_str().unwrap().split(';').next().unwrap().to_owned()
}

#[tokio::test]
async fn every_response_of_the_page_has_a_policy_that_allows_only_its_own_files() {
    let gateway = Setup::default().start().await;
    gateway.create("t").await;
    gateway.ask("t", "hello").await;
    let message = gateway.state("t").await["values"]["messages"][0]["id"].as_str().unwrap().to_owned();
    for (path, status, kind) in [
        ("/", 200, "text/html; charset=utf-8"),
        ("/threads", 303, ""),
        ("/threads/t", 200, "text/html; charset=utf-8"),
        ("/threads/t/delete", 200, "text/html; charset=utf-8"),
        ("/threads/t/checkpoints", 200, "text/html; charset=utf-8"),
        ("/threads/t/runs", 200, "text/html; charset=utf-8"),
        ("/threads/t/runs/none", 404, "text/html; charset=utf-8"),
        ("/status", 200, "text/html; charset=utf-8"),
        ("/threads/t/storage?keep=branches&verify=1", 200, "text/html; charset=utf-8"),
        (&format!("/threads/t/messages/{message}"), 200, "text/plain; charset=utf-8"),
        ("/threads/t/messages/none", 404, "text/html; charset=utf-8"),
        ("/threads/none", 404, "text/html; charset=utf-8"),
        ("/threads/t?at=none", 400, "text/html; charset=utf-8"),
        ("/threads/t?at=01a1fcab-c4a2-7779-938b-69cfe3835bcf", 404, "text/html; charset=utf-8"),
        ("/threads/%3Cscript%3E", 422, "text/html; charset=utf-8"),
        ("/sign-in", 303, ""),
        ("/page/style.css", 200, "text/css; charset=utf-8"),
        ("/page/script.js", 200, "text/javascript; charset=utf-8"),
    ] {
        let answer = gateway.get(path).await;
        let headers = &answer.headers;
        assert_eq!(answer.status, status, "{path}: {}", answer.body);
        assert_eq!(headers["content-security-policy"], POLICY, "{path}");
        assert_eq!(headers["x-content-type-options"], "nosniff", "{path}");
        assert_eq!(headers.get("content-type").map_or("", |kind| kind.to_str().unwrap()), kind, "{path}");
        let lasting = path.starts_with("/page/");
        assert_eq!(headers["cache-control"].to_str().unwrap().contains("immutable"), lasting, "{path}");
        if kind.starts_with("text/html") {
            let page = html(&answer);
            for part in [" style=", "<style", " onclick=", "http://", "https://"] {
                assert!(!page.contains(part), "{path} has {part}: {page}");
            }
            assert_eq!(page.matches("<script").count(), 1, "{path}: {page}");
        }
    }
    let answer = gateway.get("/api/threads/t").await;
    assert!(!answer.headers.contains_key("content-security-policy"), "the API is as it was");
    gateway.get("/unknown").await.refused(404, "Not Found");
}

#[tokio::test]
async fn what_models_and_people_say_is_text() {
    let script = json!({"rules": [{"answers": [
        {"text": HOSTILE, "tool_calls": [{"name": "ls", "id": HOSTILE, "args": {"path": HOSTILE}}]},
        {"text": HOSTILE},
    ]}]});
    let gateway = Setup { script, ..Setup::on("sqlite", "delta") }.start().await;
    gateway.create("t").await;
    let run = gateway.ask("t", HOSTILE).await;
    let checkpoint = gateway.state("t").await["checkpoint_id"].as_str().unwrap().to_owned();
    for path in [
        "/",
        "/threads/t",
        "/threads/t/delete",
        "/?q=%3Cscript%3E%22",
        "/threads/t/checkpoints",
        "/threads/t/storage",
        "/threads/t/runs",
        &format!("/threads/t/runs/{run}"),
        &format!("/threads/t/checkpoints/{checkpoint}"),
    ] {
        let answer = gateway.get(path).await;
        let page = html(&answer);
        assert_eq!(page.matches("<script").count(), 1, "{path}: {page}");
        assert!(!page.contains("<img") && !page.contains("\" autofocus onfocus"), "{path}: {page}");
    }
    let answer = gateway.get("/threads/t").await;
    assert!(
        html(&answer).matches("&lt;script&gt;alert(1)").count() >= 4,
        "question, answers, call: {}",
        answer.body
    );
    let id = gateway.state("t").await["values"]["messages"][0]["id"].as_str().unwrap().to_owned();
    let whole = gateway.get(&format!("/threads/t/messages/{id}")).await;
    assert_eq!(
        (whole.body.as_str(), whole.headers["content-type"].to_str().unwrap()),
        (Some(HOSTILE), "text/plain; charset=utf-8")
    );
}

#[tokio::test]
async fn a_long_message_is_cut_and_can_be_read_whole() {
    let gateway = Setup::on("sqlite", "delta").start().await;
    gateway.create("t").await;
    let long = "0123456789".repeat(100_000);
    gateway.ask("t", &long).await;
    let answer = gateway.get("/threads/t").await;
    assert!(
        html(&answer).len() < 100_000 && html(&answer).contains("Show all 1.0 MB"),
        "{}",
        html(&answer).len()
    );
    let id = gateway.state("t").await["values"]["messages"][0]["id"].as_str().unwrap().to_owned();
    assert_eq!(gateway.get(&format!("/threads/t/messages/{id}")).await.body, long);
}

#[tokio::test]
async fn threads_are_listed_searched_created_and_deleted() {
    let gateway = Setup::on("sqlite", "full").start().await;
    for number in 0..51 {
        gateway.create(&format!("thread-{number}")).await;
    }
    gateway.ask("thread-7", "Plan the Garden").await;
    let list = gateway.get("/").await;
    assert_eq!(
        html(&list).matches("href=\"/threads/thread-").count(),
        100,
        "50 lines, each also with its deletion"
    );
    assert!(html(&list).contains("/?offset=50") && html(&list).contains(">51<"), "{}", html(&list));
    for beyond in ["51", "9223372036854775807", "18446744073709551615", "18446744073709551616", "-1", "x"] {
        assert_eq!(gateway.get(&format!("/?offset={beyond}")).await.status, 200, "{beyond}");
        assert_eq!(gateway.get(&format!("/?q=thread&offset={beyond}")).await.status, 200, "{beyond}");
    }
    let older = gateway.get("/?offset=50").await;
    assert_eq!(html(&older).matches("/delete\"").count(), 1);
    let found = gateway.get("/?q=READ-7").await;
    assert!(html(&found).contains("/threads/thread-7\"") && html(&found).matches("/delete\"").count() == 1);
    assert!(html(&gateway.get("/?q=thread&status=error").await).contains("No thread matches."));

    let asked = gateway.get("/threads/thread-7/delete").await;
    assert!(html(&asked).contains("checkpoints, with every state") && html(&asked).contains("<b>1</b> runs"));
    let post = async |path: &str| gateway.send(Request::post(path).body(Body::empty()).unwrap()).await;
    assert_eq!(post("/threads/thread-7/delete").await.status, 303);
    gateway.get("/api/threads/thread-7").await.refused(404, "Thread thread-7 not found");
    let created = post("/threads").await;
    assert_eq!(created.status, 303);
    let page = gateway.get(created.headers["location"].to_str().unwrap()).await;
    assert!(html(&page).contains("Nothing has been said yet."), "{}", page.body);
}

#[tokio::test]
async fn a_conversation_can_be_shown_at_an_older_checkpoint() {
    let gateway = Setup::on("sqlite", "delta").start().await;
    gateway.create("t").await;
    gateway.ask("t", "first question").await;
    let first = gateway.state("t").await["checkpoint_id"].as_str().unwrap().to_owned();
    gateway.ask("t", "second question").await;
    let page = gateway.get(&format!("/threads/t?at={first}")).await;
    assert!(html(&page).contains(&format!("data-at=\"{first}\"")), "{}", page.body);
    assert!(html(&page).contains("first question") && !html(&page).contains("second question"));
    assert!(!html(&page).contains("data-do="), "an older state is not regenerated");
    let page = gateway.get("/threads/t").await;
    assert_eq!(html(&page).matches("data-do=\"repeat\"").count(), 1);
    assert_eq!(html(&page).matches("data-do=\"edit\"").count(), 1);
    assert_eq!(html(&page).matches("data-do=\"branch\"").count(), 2, "after each turn");
}

/// The address of its client lacks `/api`; a form would create a thread.
#[tokio::test]
async fn a_request_of_the_api_to_the_page_does_nothing_and_is_answered_with_where_the_api_is() {
    let gateway = Setup::default().start().await;
    gateway.create("t").await;
    for path in ["/threads", "/threads/search", "/threads/t/runs", "/threads/t/delete"] {
        let answer = gateway.post(path, json!({})).await;
        answer.refused(404, "Not Found. The API is below /api: its threads are at /api/threads");
        assert!(!answer.headers.contains_key("content-security-policy"), "{path}");
    }
    assert_eq!(gateway.post("/api/threads/count", json!({})).await.ok(), json!(1));
}

#[tokio::test]
async fn without_the_page_nothing_is_at_its_addresses() {
    let gateway = Setup { sections: json!({"page": {"enabled": false}}), ..Setup::default() }.start().await;
    gateway.create("t").await;
    for path in ["/", "/threads", "/threads/t", "/sign-in", "/page/script.js"] {
        let answer = gateway.get(path).await;
        answer.refused(404, "Not Found");
        assert!(!answer.headers.contains_key("content-security-policy"));
    }
    gateway.post("/threads", json!({})).await.refused(404, "Not Found");
}

#[tokio::test]
async fn without_keys_other_sites_change_nothing() {
    let gateway = Setup::default().start().await;
    gateway.create("t").await;
    for path in ["/threads", "/threads/t/delete"] {
        let request =
            Request::post(path).header("host", "127.0.0.1:8001").header("origin", "https://evil.example");
        let answer = gateway.send(request.body(Body::empty()).unwrap()).await;
        assert_eq!(answer.status, 403, "{path}");
        assert!(html(&answer).contains("Cross-site request denied"), "{}", answer.body);
        assert_eq!(answer.headers["content-security-policy"], POLICY);
    }
    gateway.get("/api/threads/t").await.ok();
    let request = Request::get("/").header("host", "rebound.example");
    assert_eq!(gateway.send(request.body(Body::empty()).unwrap()).await.status, 403);
}

#[tokio::test]
async fn runs_are_listed_with_their_events() {
    let gateway = Setup::on("sqlite", "delta").start().await;
    gateway.create("t").await;
    let run = gateway.ask("t", "hello").await;
    let list = gateway.get("/threads/t/runs").await;
    let page = html(&list);
    assert!(
        page.contains(&format!("/threads/t/runs/{run}\"")) && page.contains("data-status=\"success\""),
        "{page}"
    );
    let events = gateway.get(&format!("/threads/t/runs/{run}")).await;
    let page = html(&events);
    assert!(page.contains("run.start") && page.contains("llm.ai.response"), "{page}");
    gateway.create("other").await;
    assert_eq!(
        gateway.get(&format!("/threads/other/runs/{run}")).await.status,
        404,
        "a run is one of its thread"
    );
}

#[tokio::test]
async fn the_whole_of_an_event_that_is_cut_is_a_link_away() {
    let gateway = Setup::on("sqlite", "delta").start().await;
    gateway.create("t").await;
    let long = "long ".repeat(4_000);
    for turn in 0..2 {
        let run = gateway.ask("t", &long).await;
        let events = gateway.get(&format!("/threads/t/runs/{run}")).await;
        let links = html(&events).split("href=\"").filter_map(|rest| rest.split('"').next());
        let links: Vec<String> =
            links.filter(|link| link.contains("/events")).map(|link| link.replace("&amp;", "&")).collect();
        assert!(!links.is_empty(), "{}", events.body);
        let mut shown = Vec::new();
        for link in &links {
            let found = gateway.get(link).await.ok();
            let [event] = found.as_array().unwrap().as_slice() else { panic!("{link}: {found}") };
            assert!(event.to_string().len() > 16_000, "{link}: {event}");
            shown.push(event["seq"].as_i64().unwrap());
        }
        assert!(shown.is_sorted_by(|one, next| one < next), "{turn}: {shown:?}");
    }
}

#[tokio::test]
async fn figures_are_for_administrators() {
    // Neither mode nor cadence, in nobody's page: service reference, "Thread, checkpoint and run records".
    let says_how_it_stores = |page: &str| {
        ["<dt>Mode</dt>", "Snapshot every", "<bdi>delta</bdi>", "<bdi>full</bdi>"]
            .iter()
            .any(|text| page.contains(text))
    };
    let guarded = Guarded::start().await;
    let (_, ann) = guarded.signed_in("ann").await;
    let page = guarded.get("/status", &ann).await;
    assert!(html(&page).contains("Administrators also see"), "{}", page.body);
    assert!(!says_how_it_stores(html(&page)), "{}", page.body);
    for mode in MODES {
        let gateway = Setup::on("sqlite", mode).start().await;
        let page = gateway.get("/status").await;
        assert!(
            html(&page).contains("runs_active")
                && html(&page).contains("Runs that this process is working on.")
        );
        assert!(!says_how_it_stores(html(&page)), "{}", page.body);
    }
}

/// The link below a text that is cut leads to all of it.
#[tokio::test]
async fn a_long_summary_is_cut_and_can_be_read_whole() {
    let long = "They talked. ".repeat(2_000);
    let script = json!({"rules": [
        {"when": {"caller": "middleware"}, "answers": [{"text": long}]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]});
    let sections = json!({"summarization": {"enabled": true}});
    let gateway = Setup { script, sections, ..Setup::on("sqlite", "delta") }.start().await;
    gateway.create("t").await;
    for text in ["one", "two", "three"] {
        gateway.ask("t", text).await;
    }
    gateway.post("/api/threads/t/compact", json!({"keep": {"type": "messages", "value": 2}})).await.ok();
    let page = gateway.get("/threads/t").await;
    let (_, rest) = html(&page).split_once("Cut here. <a href=\"").expect("the summary is cut");
    let whole = gateway.get(rest.split('"').next().unwrap()).await;
    assert!(whole.status == 200 && whole.body.as_str().map(str::trim) == Some(long.trim()));
}

#[tokio::test]
async fn the_summary_of_a_compacted_conversation_is_shown() {
    let script = json!({"rules": [
        {"when": {"caller": "middleware"}, "answers": [{"text": "They <talked>."}]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]});
    let plain = Setup::default().start().await;
    plain.create("t").await;
    assert!(
        !html(&plain.get("/threads/t").await).contains("data-do=\"compact\""),
        "compaction is switched off"
    );
    let sections = json!({"summarization": {"enabled": true}});
    let gateway = Setup { script, sections, ..Setup::on("sqlite", "delta") }.start().await;
    gateway.create("t").await;
    for text in ["one", "two", "three"] {
        gateway.ask("t", text).await;
    }
    let keep = json!({"keep": {"type": "messages", "value": 2}});
    gateway.post("/api/threads/t/compact", keep).await.ok();
    let page = gateway.get("/threads/t").await;
    assert!(
        html(&page).contains("Summary of earlier messages") && html(&page).contains("They &lt;talked&gt;."),
        "{}",
        page.body
    );
    assert!(html(&page).contains("data-do=\"compact\""), "{}", page.body);
    assert!(html(&page).contains("You said: three") && !html(&page).contains("You said: one"));
}
