//! The rules of axe-core, which finds what keeps people from using a page with other means than eyes and a mouse.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::driver::Window;
use crate::gateway::Gateway;

const PACKAGE: &str = "axe-core@4.14.1";

/// The script of axe-core, which npm fetches once.
fn source() -> String {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("axe");
    let script = folder.join("node_modules/axe-core/axe.min.js");
    if !script.exists() {
        std::fs::create_dir_all(&folder).unwrap();
        let npm = Command::new("npm")
            .args(["install", "--no-fund", "--no-audit", "--no-save", "--prefix", ".", PACKAGE])
            .current_dir(&folder)
            .output()
            .expect("install npm first");
        assert!(npm.status.success(), "{}", String::from_utf8_lossy(&npm.stderr));
    }
    std::fs::read_to_string(script).unwrap()
}

#[tokio::test]
async fn no_page_has_a_violation_nor_is_wider_than_its_window() {
    let axe = source();
    let gateway = Gateway::start(&crate::script(), "full", false);
    let window = Window::open(&gateway.base).await;
    let thread = gateway.thread().await;
    gateway.ask(&thread, "hostile").await;
    gateway.delegate(&thread, "please delegate").await;
    gateway.delegate(&thread, "please submit").await;
    let batches = gateway.get(&format!("/api/threads/{thread}/subagent-batches")).await;
    let batch = batches[0]["id"].as_str().unwrap();
    let executions = gateway.get(&format!("/api/threads/{thread}/executions")).await;
    let execution = executions["executions"][0]["execution_id"].as_str().unwrap();
    // It ends with a question.
    gateway.ask(&thread, "paint").await;
    let runs = gateway.get(&format!("/api/threads/{thread}/runs")).await;
    let run = runs[0]["run_id"].as_str().unwrap();
    let head = gateway.get(&format!("/api/threads/{thread}/state")).await;
    let (head, parent) =
        (&head["checkpoint_id"].as_str().unwrap(), head["parent_checkpoint_id"].as_str().unwrap());
    let of_thread = [
        String::new(),
        format!("?at={parent}"),
        "/checkpoints".to_owned(),
        format!("/checkpoints/{head}"),
        format!("/diff?a={parent}&b={head}"),
        "/runs".to_owned(),
        format!("/runs/{run}"),
        format!("/batches/{batch}"),
        format!("/executions/{execution}"),
        "/storage?keep=latest&verify=1".to_owned(),
        "/delete".to_owned(),
    ];
    let of_thread = of_thread.iter().map(|place| format!("/threads/{thread}{place}"));
    let places = ["/", "/runs", "/status", "/threads/none"].map(str::to_owned).into_iter().chain(of_thread);
    for place in places {
        for (width, height) in [(1200, 900), (420, 900)] {
            window.resize(width, height).await;
            window.go(&place).await;
            window.until("document.readyState === 'complete'").await;
            window
                .value("document.querySelectorAll('main details').forEach((item) => item.open = true)")
                .await;
            let wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth";
            assert_eq!(window.value(wide).await, false, "{place} is wider than {width} pixels");
            let cut = "[...document.querySelectorAll('.stacked')].some((table) => table.scrollWidth > table.parentElement.clientWidth)";
            assert_eq!(
                window.value(cut).await,
                false,
                "{place}: of a row, not all is seen at {width} pixels"
            );
            let script = format!(
                "{axe}; const done = arguments[arguments.length - 1]; \
                 axe.run(document).then((found) => done(found.violations.map((rule) => [rule.id, rule.nodes[0].html])))"
            );
            let violations: Value = window.called_back(&script).await;
            assert_eq!(violations, json!([]), "{place}");
        }
    }
}
