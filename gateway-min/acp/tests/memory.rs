//! How much memory a hostile agent can take. Alone in its program, so that nothing else counts.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test.

use std::collections::BTreeMap;
use std::fs;

use serde_json::json;
use threadkeep_acp::InvokeAcpAgent;
use threadkeep_agent::tools::{Tool as _, ToolContext};
use threadkeep_config::AcpAgent;
use threadkeep_processes::Guard;

/// Check 12 of the design.
const MAX_GROWTH: u64 = 32 * 1024 * 1024;

/// The most memory that this process has had since the last reset, in bytes.
fn peak() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// Check 12 of the design: 100 MB without a newline; and as much in messages, and in requests whose answers are not read.
#[tokio::test]
async fn a_hundred_megabytes_of_any_kind_take_at_most_32_mib() {
    let start = r#"
        read -r l; printf '{"jsonrpc":"2.0","id":0,"result":{"protocolVersion":1}}\n'
        read -r l; printf '{"jsonrpc":"2.0","id":1,"result":{"sessionId":"s"}}\n'
        read -r l
    "#;
    let text = r#"{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"s","update":{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"0123456789012345678901234567890123456789"}}}}"#;
    let request = r#"{"jsonrpc":"2.0","id":"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx","method":"x","params":{}}"#;
    let end = r#"printf '{"jsonrpc":"2.0","id":2,"result":{"stopReason":"end_turn"}}\n'"#;
    let folder = tempfile::tempdir().unwrap();
    for (flood, answer) in [
        ("head -c 100000000 /dev/zero | tr '\\0' x".to_owned(), "it sent a line of more than 8388608 bytes"),
        (format!("yes '{text}' | head -c 100000000 | sed '$d'; {end}"), "[output cut: "),
        (format!("yes '{request}' | head -c 100000000; {end}"), "timed out after 3 seconds"),
    ] {
        let agent = AcpAgent {
            command: "sh".into(),
            args: vec!["-c".into(), format!("{start}{flood}")],
            env: BTreeMap::new(),
            description: "Floods".into(),
            model: None,
            auto_approve_permissions: false,
            // Only the last one needs it: nobody reads on while nobody reads its answers.
            timeout_seconds: if answer.starts_with("timed") { 3 } else { 300 },
        };
        let guard = Guard::program(env!("CARGO_BIN_EXE_threadkeep-acp-guard"));
        let tool = InvokeAcpAgent::new(guard, &[("a".to_owned(), agent)].into(), vec![]).unwrap();
        let context = ToolContext::new("t", "r", folder.path());
        // Sets the peak to what is there now.
        fs::write("/proc/self/clear_refs", "5").unwrap();
        let before = peak();
        let output = tool.call(&context, json!({"agent": "a", "prompt": "Flood"})).await.unwrap();
        assert!(output.content.contains(answer), "{flood}: {:.300}", output.content);
        let growth = peak() - before;
        println!("{growth} bytes for {answer}");
        assert!(growth <= MAX_GROWTH, "{flood}: {growth} bytes");
    }
}
