//! Agents that do not end, say too much, or leave processes behind.

use std::time::{Duration, Instant};

use threadkeep_agent::tools::{Tool as _, ToolStatus};

use crate::support::{Scene, tool};

/// What an agent does that wants to stay: it ignores signals and the end of its input.
const STAY: &str = "trap '' TERM HUP INT; while :; do sleep 1000; done";

const TIMED_OUT: &str = "Error: ACP agent 'a' timed out after 1 seconds. The ACP invocation was not completed, and its process \
     was ended. For longer tasks raise `acp_agents.a.timeout_seconds`.";

/// And check 12 of the design.
#[tokio::test]
async fn s75_an_agent_that_hangs_at_any_stage_is_ended_with_all_its_processes() {
    for stage in [
        "",
        "initialized;",
        "opened;",
        "prompted;",
        "prompted; say partly;",
        // A daemon in a session of its own, which survives the group of its parent.
        "prompted; (setsid sh -c \"trap '' TERM; sleep 1000\" &);",
    ] {
        let mut reached = false;
        // All cores may be busy: an agent that did not reach its stage gets more time.
        for timeout_seconds in [1, 4, 16, 64] {
            let mut scene = Scene::new();
            let agent = scene.agent(&format!("{stage} touch \"$ROOT/reached\"; {STAY}"));
            let before = Instant::now();
            let output = scene.call(threadkeep_config::AcpAgent { timeout_seconds, ..agent }).await;
            let took = before.elapsed();
            assert_eq!((output.content.as_str(), output.status), (TIMED_OUT, ToolStatus::Error), "{stage}");
            scene.assert_nobody_is_left();
            // Not a measure of speed: without the bounds it would be a thousand seconds.
            assert!(took < Duration::from_mins(5), "{stage}: {took:?}");
            reached = scene.has("reached");
            if reached {
                break;
            }
        }
        assert!(reached, "{stage}");
    }
}

#[tokio::test]
async fn an_agent_that_is_told_to_stop_may_do_so_and_gets_no_permission_then() {
    let permission = r#"{"options":[{"optionId":"o","name":"o","kind":"allow_once"}]}"#;
    let script =
        format!("prompted; hear; ask p session/request_permission '{permission}'; hear; stop cancelled; cat");
    let mut heard = Vec::new();
    // All cores may be busy: an agent that did not come to its question gets more time.
    for timeout_seconds in [1, 4, 16, 64] {
        let mut scene = Scene::new();
        let mut agent = scene.agent(&script);
        agent.timeout_seconds = timeout_seconds;
        agent.auto_approve_permissions = true;
        assert_eq!(scene.call(agent).await.content, TIMED_OUT);
        scene.assert_nobody_is_left();
        heard = scene.heard();
        if heard.len() > 4 {
            break;
        }
    }
    assert_eq!(heard[3]["method"], "session/cancel");
    assert_eq!(heard[3]["params"]["sessionId"], "s");
    assert_eq!(heard[4]["result"]["outcome"]["outcome"], "cancelled");
}

#[tokio::test]
async fn a_cancelled_run_ends_the_agent() {
    let mut scene = Scene::new();
    let agent = scene.agent(&format!("prompted; touch \"$ROOT/reached\"; {STAY}"));
    let cancel = scene.context.cancel.clone();
    let call = scene.call(agent);
    let cancelling = async {
        while !scene.has("reached") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        cancel.cancel();
    };
    let (output, ()) = tokio::join!(call, cancelling);
    assert_eq!(output.content, "Error invoking ACP agent 'a': the run was cancelled");
    scene.assert_nobody_is_left();
    let bound = tool(&[("a".to_owned(), scene.agent(""))].into(), vec![]).unwrap().stops_within();
    assert!(bound.is_some_and(|bound| bound < Duration::from_secs(10)));
}

/// The run was dropped: nobody waits, and nothing may stay.
#[tokio::test]
async fn a_call_that_is_dropped_leaves_nothing() {
    let mut scene = Scene::new();
    let agent = scene.agent(&format!("prompted; touch \"$ROOT/reached\"; {STAY}"));
    {
        let mut call = std::pin::pin!(scene.call(agent));
        let reached = async {
            while !scene.has("reached") {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::select! {
            _ = &mut call => panic!("it hangs"),
            () = reached => {}
        }
    }
    let patience = Instant::now() + Duration::from_mins(10);
    let left = || {
        let mut pipe = std::io::Read::bytes(scene.pipe());
        // `None` at its end, an error while somebody holds it.
        pipe.next().is_some()
    };
    while left() {
        assert!(Instant::now() < patience, "a process of the agent is left");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    scene.assert_nobody_is_left();
}

/// Also if no number of ours holds it, or if it is nested too deeply to be read.
#[tokio::test]
async fn any_id_of_a_request_comes_back_as_it_was_sent() {
    let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
    for id in ["1e999", "12345678901234567890123", "-0.10", "\"a\"", deep.as_str()] {
        let scene = Scene::new();
        let sent = |method: &str| {
            format!(r#"printf '%s\n' '{{"jsonrpc":"2.0","id":{id},"method":"{method}"}}'; hear"#)
        };
        let (unknown, permission) = (sent("x"), sent("session/request_permission"));
        let output = scene.run(&format!("prompted; {unknown}; {permission}; say ok; stop")).await;
        assert_eq!((output.content.as_str(), output.status), ("ok", ToolStatus::Success), "{id}");
        let refused = |error: &str| format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{error}}}"#);
        let expected = [
            refused(r#"{"code":-32601,"message":"Method not found"}"#),
            refused(r#"{"code":-32602,"message":"Invalid params: options are required"}"#),
        ];
        let heard = scene.heard_text();
        assert_eq!(heard.lines().skip(3).collect::<Vec<_>>(), expected);
    }
}

#[tokio::test]
async fn a_line_without_an_end_is_refused() {
    let mut scene = Scene::new();
    let output = scene.run(&format!("prompted; head -c 100000000 /dev/zero | tr '\\0' x; {STAY}")).await;
    assert_eq!(output.content, "Error invoking ACP agent 'a': it sent a line of more than 8388608 bytes");
    scene.assert_nobody_is_left();
}

#[tokio::test]
async fn of_a_long_answer_the_beginning_and_the_end_are_kept() {
    let scene = Scene::new();
    let script = "long=$(head -c 100000 /dev/zero | tr '\\0' x); prompted; say begin; \
        for i in 1 2 3 4; do say \"$long\"; done; say end; stop";
    let content = scene.run(script).await.content;
    assert!(content.starts_with("beginxxx") && content.ends_with("xxxend"), "{}", content.len());
    assert!(content.chars().count() <= 100_000 && content.contains("[output cut: "));
}
