//! People who sign in to the page with a key, and what their sessions may see and do.

use axum::http::{Method, Request};
use serde_json::json;
use threadkeep_config::Role;

use crate::page::{Guarded, POLICY, cookie, html};
use crate::support::question;

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
async fn a_form_to_sign_in_has_room_for_a_key_and_not_for_much_more() {
    let guarded = Guarded::start().await;
    let sent = async |bytes: usize| {
        guarded.form("/sign-in", "", &format!("key={}", "x".repeat(bytes)), &[]).await.status
    };
    assert_eq!((sent(1024).await, sent(64 * 1024).await), (401, 413));
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
