//! The page for browsers: what it shows, what it never does, and who may see it.

use axum::body::Body;
use axum::http::{HeaderMap, Method, Request};
use serde_json::json;
use threadkeep_config::{KeyFile, Role};

use crate::support::{Answer, Gateway, MODES, Setup, question};

const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; \
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
    keys: KeyFile,
}

impl Guarded {
    async fn start() -> Self {
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

    async fn form(&self, path: &str, cookie: &str, body: &str, headers: &[(&str, &str)]) -> Answer {
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
fn cookie(headers: &HeaderMap) -> String {
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
async fn a_person_signs_in_with_a_key_and_out() {
    let guarded = Guarded::start().await;
    for path in ["/", "/threads/t?at=1"] {
        let answer = guarded.get(path, "").await;
        let to = answer.headers["location"].to_str().unwrap();
        let expected = format!("/sign-in?next={}", path.replace('?', "%3F").replace('=', "%3D"));
        assert_eq!((answer.status, to), (303, expected.as_str()));
        assert_eq!(answer.headers["content-security-policy"], POLICY);
    }
    assert!(html(&guarded.get("/sign-in?next=%2Fthreads%2Ft", "").await).contains("value=\"/threads/t\""));
    for path in ["/page/style.css", "/page/script.js"] {
        assert_eq!(guarded.get(path, "").await.status, 200, "{path}");
    }
    for key in ["", "tk_wrong", "%22%3E%3Cscript%3E", "a%0Ab"] {
        let answer = guarded.form("/sign-in", "", &format!("key={key}&next=%2F"), &[]).await;
        assert!(html(&answer).contains("This key is not valid."), "{}", answer.body);
        assert!(answer.status == 401 && !answer.headers.contains_key("set-cookie"));
    }

    let (id, session) = guarded.signed_in("ann").await;
    assert!(session.starts_with("threadkeep_key=tk_"));
    assert!(html(&guarded.get("/", &session).await).contains("<bdi>ann</bdi>"));
    guarded.api(Method::GET, "/api/models", &session, None).await.ok();
    let token = guarded.token(&session).await;
    let out = guarded.form("/sign-out", &session, &format!("token={token}"), &[]).await;
    assert_eq!((out.status, out.headers["location"].to_str().unwrap()), (303, "/sign-in"));
    // Also a session that began with HTTPS, or without: the browser may have both.
    let gone: Vec<_> = out.headers.get_all("set-cookie").iter().map(|gone| gone.to_str().unwrap()).collect();
    let plain = "threadkeep_key=; Path=/; Max-Age=0; HttpOnly; SameSite=Strict";
    assert_eq!(gone, [plain, &format!("__Host-{plain}; Secure")]);

    guarded.keys.revoke(&id).unwrap();
    assert_eq!(guarded.get("/", &session).await.status, 303, "a session ends with its key");
}

#[tokio::test]
async fn a_cookie_is_kept_from_scripts_other_sites_and_plain_connections() {
    let guarded = Guarded::start().await;
    let (_, key) = guarded.keys.create("ann", Role::User).unwrap();
    let body = format!("key={}&next=%2Fthreads%2Ft", key.expose());
    let plain = guarded.form("/sign-in", "", &body, &[("origin", "http://gateway.example")]).await;
    assert_eq!(plain.headers["location"], "/threads/t");
    let expected =
        format!("threadkeep_key={}; Path=/; Max-Age=43200; HttpOnly; SameSite=Strict", key.expose());
    assert_eq!(plain.headers["set-cookie"], expected);
    let https = guarded.form("/sign-in", "", &body, &[("origin", "https://gateway.example")]).await;
    assert_eq!(https.headers["set-cookie"], format!("__Host-{expected}; Secure"));
    guarded.api(Method::GET, "/api/models", &cookie(&https.headers), None).await.ok();
    let away = guarded.form("/sign-in", "", &body.replace("%2Fthreads", "%2F%2Fevil"), &[]).await;
    assert_eq!(away.headers["location"], "/", "nobody is sent to another host");
}

#[tokio::test]
async fn with_keys_other_sites_change_nothing() {
    let guarded = Guarded::start().await;
    let (_, session) = guarded.signed_in("ann").await;
    let (_, other) = guarded.signed_in("bob").await;
    let (token, wrong) = (guarded.token(&session).await, guarded.token(&other).await);
    assert_ne!(token, wrong);
    // The API needs the token for what changes something, whatever the method is.
    for (method, path) in [
        (Method::POST, "/api/threads"),
        (Method::DELETE, "/api/threads/t"),
        (Method::PATCH, "/api/threads/t"),
        (Method::GET, "/api/threads/t/runs/r/stream?action=interrupt"),
        (Method::GET, "/api/langgraph/threads/t/runs/r/join?cancel_on_disconnect=true"),
    ] {
        for proof in [None, Some(""), Some(wrong.as_str())] {
            let answer = guarded.api(method.clone(), path, &session, proof).await;
            assert_eq!(answer.status, 403, "{method} {path} {proof:?}: {}", answer.body);
        }
    }
    guarded.api(Method::POST, "/api/threads", &session, Some(&token)).await.ok();
    // So do all forms.
    for path in ["/threads", "/threads/t/delete", "/threads/t/storage", "/sign-out"] {
        for body in [String::new(), "token=".to_owned(), format!("token={wrong}")] {
            let answer = guarded.form(path, &session, &body, &[]).await;
            assert_eq!(answer.status, 403, "{path} {body}");
            assert!(html(&answer).contains("does not come from the page"), "{}", answer.body);
        }
    }
    assert_eq!(guarded.form("/threads", &session, &format!("token={token}"), &[]).await.status, 303);
    let (_, key) = guarded.keys.create("eve", Role::User).unwrap();
    let body = format!("key={}", key.expose());
    for foreign in [("origin", "https://evil.example"), ("sec-fetch-site", "cross-site")] {
        let answer = guarded.form("/sign-in", "", &body, &[foreign]).await;
        assert!(answer.status == 403 && !answer.headers.contains_key("set-cookie"), "{foreign:?}");
    }
}

#[tokio::test]
async fn another_users_thread_is_not_found_on_any_page() {
    let guarded = Guarded::start().await;
    let (_, ann) = guarded.signed_in("ann").await;
    let (_, bob) = guarded.signed_in("bob").await;
    let token = guarded.token(&ann).await;
    let create = |cookie: &str, token: &str| {
        let request = Request::post("/api/threads").header("cookie", cookie).header("x-page-token", token);
        request
            .header("content-type", "application/json")
            .body(json!({"thread_id": "t"}).to_string().into())
            .unwrap()
    };
    guarded.gateway.send(create(&ann, &token)).await.ok();
    let ask = Request::post("/api/threads/t/runs/wait").header("cookie", &ann).header("x-page-token", &token);
    let ask =
        ask.header("content-type", "application/json").body(question("secret").to_string().into()).unwrap();
    guarded.gateway.send(ask).await.ok();
    assert!(html(&guarded.get("/threads/t", &ann).await).contains("secret"));
    let state = guarded.api(Method::GET, "/api/threads/t/state", &ann, None).await.ok();
    let message = state["values"]["messages"][0]["id"].as_str().unwrap();
    let checkpoint = state["checkpoint_id"].as_str().unwrap();
    for path in [
        "/threads/t",
        "/threads/t/delete",
        "/threads/t/checkpoints",
        "/threads/t/storage",
        "/threads/t/runs",
        &format!("/threads/t/checkpoints/{checkpoint}"),
        &format!("/threads/t/diff?a={checkpoint}&b={checkpoint}"),
        &format!("/threads/t/messages/{message}"),
    ] {
        assert_eq!(guarded.get(path, &ann).await.status, 200, "{path}");
        let answer = guarded.get(path, &bob).await;
        assert_eq!(answer.status, 404, "{path}");
        assert!(html(&answer).contains("Thread t not found"), "{}", answer.body);
        assert!(html(&answer).contains("<bdi>bob</bdi>"), "he is still signed in: {}", answer.body);
    }
    let proof = format!("token={}", guarded.token(&bob).await);
    assert_eq!(guarded.form("/threads/t/delete", &bob, &proof, &[]).await.status, 404);
    let remove = format!("{proof}&keep=latest&plan={}", "0".repeat(64));
    assert_eq!(guarded.form("/threads/t/storage", &bob, &remove, &[]).await.status, 404);
    assert!(!html(&guarded.get("/?q=t", &bob).await).contains("/threads/t\""));
    assert!(html(&guarded.get("/", &ann).await).contains("/threads/t\""));
}

/// A thread with a fork: the second turn was asked twice, from the same checkpoint.
async fn forked(mode: &'static str) -> (Gateway, String) {
    let gateway = Setup::on("sqlite", mode).start().await;
    gateway.create("t").await;
    gateway.ask("t", "first question").await;
    let first = gateway.state("t").await["checkpoint_id"].as_str().unwrap().to_owned();
    gateway.ask("t", "the abandoned question").await;
    let mut body = question("the other question");
    body["checkpoint_id"] = json!(first);
    gateway.post("/api/threads/t/runs/wait", body).await.ok();
    (gateway, first)
}

#[tokio::test]
async fn the_tree_shows_forks_abandoned_branches_and_what_is_stored() {
    for mode in MODES {
        let (gateway, first) = forked(mode).await;
        let answer = gateway.get("/threads/t/checkpoints").await;
        let page = html(&answer);
        let all = gateway.history("t").await.len();
        assert_eq!(page.matches("class=\"lanes\"").count(), all + 3, "a row each, and the legend: {page}");
        assert!(page.contains(&format!("<b>{all}</b> checkpoints")), "{page}");
        assert!(page.contains(&format!("/checkpoints/{first}\"")), "{page}");
        assert_eq!(page.matches("head-tag").count(), 1);
        let side = page.matches("<tr class=\"side\"").count();
        assert_eq!(side, page.matches(", on an abandoned branch").count());
        // In delta mode a run that goes on from an older state writes it onto the head, so that there is one line.
        let forks = mode == "full";
        assert_eq!(
            (page.contains("fork of 2"), page.contains("<b>1</b> fork"), side >= 2),
            (forks, forks, forks),
            "{page}"
        );
        assert_eq!(page.contains("checkpoint_resume"), !forks, "{page}");
        assert_eq!(page.contains("<td>sentinel"), mode == "delta", "{page}");
        let end = gateway.get(&format!("/threads/t/checkpoints?offset={}", all - 1)).await;
        assert!(html(&end).contains("rel=\"prev\"") && html(&end).matches("name=\"a\"").count() == 1);
        assert_eq!(gateway.get("/threads/t/checkpoints?offset=999999").await.status, 200);
    }
}

#[tokio::test]
async fn a_state_can_be_read_at_any_checkpoint_and_two_can_be_compared() {
    let (gateway, first) = forked("delta").await;
    let newest = gateway.state("t").await["checkpoint_id"].as_str().unwrap().to_owned();
    let answer = gateway.get(&format!("/threads/t/checkpoints/{first}")).await;
    let page = html(&answer);
    assert!(page.contains("first question") && !page.contains("other question"), "{page}");
    assert!(page.contains(&format!("href=\"/threads/t?at={first}\"")), "continue from here: {page}");
    assert!(page.contains(&format!("threadkeep state get --thread t --checkpoint {first}")), "{page}");
    let answer = gateway.get(&format!("/threads/t/diff?a={first}&b={newest}")).await;
    let page = html(&answer);
    assert_eq!(page.matches("data-what=\"added\"").count(), 2, "question and answer: {page}");
    assert!(page.contains("<b>2</b> messages alike") && !page.contains("abandoned"), "{page}");
    let same = gateway.get(&format!("/threads/t/diff?a={first}&b={first}")).await;
    assert!(html(&same).contains("These states are the same."));
    for (path, status) in [
        ("/threads/t/checkpoints/none", 400),
        ("/threads/t/checkpoints/01a1fcab-c4a2-7779-938b-69cfe3835bcf", 404),
        ("/threads/t/diff", 400),
        ("/threads/t/diff?a=1&b=2", 400),
        ("/threads/none/checkpoints", 404),
        ("/threads/none/storage", 404),
        ("/threads/t/storage?keep=everything", 400),
    ] {
        let answer = gateway.get(path).await;
        assert_eq!(
            (answer.status, &answer.headers["content-security-policy"]),
            (status, &POLICY.parse().unwrap()),
            "{path}"
        );
        html(&answer);
    }
}

/// What identifies the plan of a preview.
fn plan_of(preview: &Answer) -> String {
    let (_, rest) = html(preview).split_once("name=\"plan\" value=\"").expect("there is something to remove");
    rest[..64].to_owned()
}

#[tokio::test]
async fn a_thread_that_was_made_again_is_not_the_one_that_was_shown() {
    let gateway = Setup::on("sqlite", "full").start().await;
    let filled = async || {
        gateway.create("t").await;
        gateway.ask("t", "question").await;
        gateway.history("t").await.len()
    };
    let before = filled().await;
    let shown = plan_of(&gateway.get("/threads/t/storage?keep=latest").await);
    gateway.delete("/api/threads/t").await.ok();
    assert_eq!(filled().await, before, "the numbers are the same");
    let request =
        Request::post("/threads/t/storage").header("content-type", "application/x-www-form-urlencoded");
    let refused = gateway.send(request.body(Body::from(format!("keep=latest&plan={shown}"))).unwrap()).await;
    assert_eq!(refused.status, 409, "{}", refused.body);
    assert_eq!(gateway.history("t").await.len(), before);
}

#[tokio::test]
async fn checkpoints_are_removed_only_as_they_were_shown() {
    for mode in MODES {
        let (gateway, _) = forked(mode).await;
        let remove = async |body: String| {
            let request = Request::post("/threads/t/storage")
                .header("content-type", "application/x-www-form-urlencoded");
            gateway.send(request.body(Body::from(body)).unwrap()).await
        };
        let before = gateway.history("t").await;
        let page = gateway.get("/threads/t/storage").await;
        assert!(
            html(&page).contains("By channel") && html(&page).contains("<bdi>messages</bdi>"),
            "{}",
            page.body
        );
        let preview = gateway.get("/threads/t/storage?keep=latest").await;
        let removed = before.len() - 1;
        assert!(html(&preview).contains(&format!("Remove {removed} checkpoints")), "{}", preview.body);
        let shown = plan_of(&preview);
        assert!(
            html(&preview).contains("older than what is kept")
                && html(&preview).contains("the newest of its namespace")
        );
        assert_eq!(gateway.history("t").await, before, "a preview changes nothing");

        // The thread goes on after the person has looked.
        let state = gateway.state("t").await;
        gateway.ask("t", "one more").await;
        let refused = remove(format!("keep=latest&plan={shown}")).await;
        assert_eq!(refused.status, 409);
        assert!(html(&refused).contains("has changed since you saw"), "{}", refused.body);
        assert!(gateway.history("t").await.len() > before.len(), "nothing was removed");
        let plan = format!("plan={shown}");
        for bad in ["keep=latest", "keep=latest&plan=1", &format!("keep=nothing&{plan}"), &plan] {
            assert_eq!(remove(bad.to_owned()).await.status, 400, "{bad}");
        }
        // What was shown for one policy is not what another one removes.
        assert_eq!(remove(format!("keep=last:2&{plan}")).await.status, 409);
        let shown = plan_of(&gateway.get("/threads/t/storage?keep=latest").await);
        let now = gateway.history("t").await.len() - 1;
        let texts_before = gateway.state("t").await["values"].clone();
        let done = remove(format!("keep=latest&plan={shown}")).await;
        let to = done.headers["location"].to_str().unwrap().to_owned();
        assert_eq!(
            (done.status, to.as_str()),
            (303, format!("/threads/t/storage?removed={now}").as_str()),
            "{}",
            done.body
        );
        assert!(html(&gateway.get(&to).await).contains("checkpoints removed."));
        assert_eq!(gateway.history("t").await.len(), 1);
        assert_eq!(gateway.state("t").await["values"], texts_before, "the state stays ({mode}): {state}");
        let verified = gateway.get("/threads/t/storage?verify=1").await;
        assert!(html(&verified).contains("No violations"), "{}", verified.body);
    }
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
