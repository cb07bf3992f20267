//! The pages of a thread's checkpoints: their tree, their states, and what is stored and removed.

use axum::body::Body;
use axum::http::Request;
use serde_json::json;

use crate::page::{POLICY, html};
use crate::support::{Answer, Gateway, MODES, Setup, question};

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
pub(crate) fn plan_of(preview: &Answer) -> String {
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
