use super::*;
use serde_json::json;
use threadkeep_config::ToolFrequency;

fn human() -> Value {
    json!({"type": "human", "content": "go"})
}

fn call(name: &str, args: Value) -> Value {
    json!({"type": "tool_call", "name": name, "args": args, "id": "x"})
}

fn ai(calls: &[Value]) -> Value {
    json!({"type": "ai", "content": "", "tool_calls": calls})
}

fn ls(path: &str) -> Value {
    ai(&[call("ls", json!({"path": path}))])
}

/// A call of a tool that is never called twice.
fn other(n: usize) -> Value {
    ai(&[call(&format!("tool_{n}"), json!({}))])
}

/// A turn with these answers.
fn turn(answers: impl IntoIterator<Item = Value>) -> Vec<Value> {
    std::iter::once(human()).chain(answers).collect()
}

fn assess(messages: &[Value]) -> Verdict {
    super::assess(&LoopDetection::default(), messages)
}

/// The verdict after each answer of the turn.
fn course(detection: &LoopDetection, answers: &[Value]) -> Vec<&'static str> {
    (1..=answers.len())
        .map(|end| match super::assess(detection, &turn(answers[..end].iter().cloned())) {
            Verdict::Proceed => "proceed",
            Verdict::Warn(_) => "warn",
            Verdict::Stop(_) => "stop",
        })
        .collect()
}

/// The tools of each warning after the last of these answers.
fn warned(detection: &LoopDetection, answers: &[Value]) -> Vec<Vec<String>> {
    match super::assess(detection, &turn(answers.iter().cloned())) {
        Verdict::Warn(findings) => findings.into_iter().map(|finding| finding.tool_names).collect(),
        verdict => panic!("no warning: {verdict:?}"),
    }
}

#[test]
fn the_same_call_warns_once_at_three_and_stops_at_five() {
    let answers: Vec<Value> = (0..5).map(|_| ls("a")).collect();
    let course = course(&LoopDetection::default(), &answers);
    assert_eq!(course, ["proceed", "proceed", "warn", "proceed", "stop"]);
    let finding =
        Finding { layer: Layer::IdenticalCallSet, tool_names: vec!["ls".into()], count: 5, threshold: 5 };
    assert_eq!(assess(&turn(answers)), Verdict::Stop(finding.clone()));
    assert!(finding.stop_notice().contains("the same call of ls was made 5 times"));
    assert!(finding.warning().starts_with("[loop warning] the same call of ls"));
}

#[test]
fn different_calls_and_a_final_answer_are_no_loop() {
    let different: Vec<Value> = (0..25).map(|n| ls(&n.to_string())).collect();
    assert_eq!(assess(&turn(different)), Verdict::Proceed);
    let answered = (0..5).map(|_| ls("a")).chain([json!({"type": "ai", "content": "done"})]);
    assert_eq!(assess(&turn(answered)), Verdict::Proceed);
    assert_eq!(assess(&[]), Verdict::Proceed);
}

#[test]
fn the_order_of_the_calls_in_an_answer_does_not_matter_but_their_number_does() {
    let (a, b) = (call("ls", json!({"path": "a"})), call("grep", json!({"pattern": "b"})));
    let swapped = [ai(&[a.clone(), b.clone()]), ai(&[b.clone(), a.clone()]), ai(&[a.clone(), b.clone()])];
    assert_eq!(warned(&LoopDetection::default(), &swapped), [["grep", "ls"]]);
    let doubled = [ai(&[a.clone(), b.clone()]), ai(&[a.clone(), a.clone(), b.clone()]), ai(&[a, b])];
    assert_eq!(assess(&turn(doubled)), Verdict::Proceed);
}

#[test]
fn only_the_arguments_that_matter_make_a_call_a_different_one() {
    let three = |tool: &str, arg: &str, salient: Value| {
        let answer = |n: usize| {
            let mut args = salient.clone();
            args[arg] = json!(n);
            ai(&[call(tool, args)])
        };
        matches!(assess(&turn((0..3).map(answer))), Verdict::Warn(_))
    };
    assert!(three("bash", "description", json!({"command": "make"})), "a description does not matter");
    assert!(!three("bash", "command", json!({"description": "build"})), "the command does");
    assert!(!three("other", "anything", json!({})), "without salient arguments all of them count");
    assert!(!three("read_file", "start_line", json!({"path": "a"})), "another range is different work");
    assert!(!three("write_file", "content", json!({"path": "a"})), "different content is different work");
    assert!(!three("str_replace", "old_str", json!({"path": "a"})), "another edit is different work");
}

#[test]
fn unreadable_calls_repeat_too() {
    let invalid = json!({"type": "ai", "invalid_tool_calls": [{"name": "ls", "args": "{"}]});
    assert!(matches!(assess(&turn(vec![invalid; 3])), Verdict::Warn(_)));
}

#[test]
fn only_the_window_counts() {
    // The same call in every eighth answer: three within a window of 20, but fewer in a smaller one.
    let answers: Vec<Value> = (0..26).map(|n| ls(&if n % 8 == 0 { 0 } else { n }.to_string())).collect();
    let wide = LoopDetection::default();
    assert_eq!(course(&wide, &answers[..24]).iter().filter(|verdict| **verdict == "warn").count(), 1);
    let narrow = LoopDetection { window_size: 16, ..wide };
    assert!(course(&narrow, &answers).iter().all(|verdict| *verdict == "proceed"));
}

/// How often each tool is called decides only within the largest of the window and the limits.
#[test]
fn a_tool_is_counted_in_the_last_answers_only() {
    let detection = LoopDetection {
        window_size: 6,
        tool_frequency: ToolFrequency { warn: 3, hard_limit: 4 },
        ..LoopDetection::default()
    };
    // Every third answer lists: two in any six.
    let answers: Vec<Value> =
        (0..30).map(|n| if n % 3 == 0 { ls(&n.to_string()) } else { other(n) }).collect();
    assert!(course(&detection, &answers).iter().all(|verdict| *verdict == "proceed"));
    // A limit beyond the window widens it for all tools.
    let mut wide = detection;
    wide.tool_freq_overrides.insert("bash".into(), ToolFrequency { warn: 9, hard_limit: 9 });
    let verdicts = course(&wide, &answers[..7]);
    assert_eq!(verdicts, ["proceed", "proceed", "proceed", "proceed", "proceed", "proceed", "warn"]);
}

#[test]
fn a_warning_is_armed_again_when_the_count_falls_below_its_threshold() {
    let detection = LoopDetection {
        window_size: 5,
        tool_frequency: ToolFrequency { warn: 3, hard_limit: 5 },
        ..LoopDetection::default()
    };
    let pause = || (0..4).map(other);
    // Three times the same, four other calls, and three times the same again.
    let same: Vec<Value> = std::iter::repeat_n(ls("a"), 3).chain(pause()).chain(vec![ls("a"); 3]).collect();
    // The same course of one tool with different arguments.
    let different: Vec<Value> =
        (0..3).map(|n| ls(&n.to_string())).chain(pause()).chain((3..6).map(|n| ls(&n.to_string()))).collect();
    for answers in [same, different] {
        let warned: Vec<usize> =
            (0..).zip(course(&detection, &answers)).filter(|(_, v)| *v == "warn").map(|(n, _)| n).collect();
        assert_eq!(warned, [2, 9]);
    }
}

#[test]
fn a_new_turn_starts_from_nothing_but_a_hidden_message_is_no_turn() {
    let mut messages = turn((0..4).map(|_| ls("a")));
    messages.push(human());
    messages.push(ls("a"));
    assert_eq!(assess(&messages), Verdict::Proceed);

    let mut messages = turn((0..4).map(|_| ls("a")));
    messages.push(crate::model::message::hidden(WARNING_NAME, "careful"));
    messages.push(ls("a"));
    assert!(matches!(assess(&messages), Verdict::Stop(_)));
}

#[test]
fn one_tool_too_often_warns_at_thirty_and_stops_at_fifty() {
    let answers: Vec<Value> = (0..50).map(|n| ls(&n.to_string())).collect();
    let course = course(&LoopDetection::default(), &answers);
    let expected: Vec<&str> = (1..=50)
        .map(|n| match n {
            30 => "warn",
            50 => "stop",
            _ => "proceed",
        })
        .collect();
    assert_eq!(course, expected);
    let Verdict::Stop(finding) = assess(&turn(answers)) else { panic!("no stop") };
    assert_eq!((finding.layer.as_str(), finding.count, finding.threshold), ("tool_frequency", 50, 50));
    assert!(finding.stop_notice().contains("ls was called 50 times"));
}

#[test]
fn each_sign_that_reaches_its_threshold_with_an_answer_is_warned_of() {
    let calls = |a: &str, b: &str| ai(&[call("ls", json!({"path": a})), call("grep", json!({"pattern": b}))]);
    let often: Vec<Value> = (0..30).map(|n| calls(&n.to_string(), &n.to_string())).collect();
    assert_eq!(warned(&LoopDetection::default(), &often), [["grep"], ["ls"]]);
    let mut detection = LoopDetection::default();
    detection.tool_freq_overrides.insert("ls".into(), ToolFrequency { warn: 3, hard_limit: 9 });
    let same: Vec<Value> = std::iter::repeat_n(calls("a", "b"), 3).collect();
    assert_eq!(warned(&detection, &same), [vec!["grep", "ls"], vec!["ls"]]);
}

#[test]
fn several_calls_in_one_answer_can_pass_the_thresholds_at_once() {
    let many = |count: usize| ai(&(0..count).map(|n| call("ls", json!({"path": n}))).collect::<Vec<_>>());
    assert!(matches!(assess(&turn([many(29), many(5)])), Verdict::Warn(_)));
    assert!(matches!(assess(&turn([many(49), many(5)])), Verdict::Stop(_)));
}

#[test]
fn a_tool_can_have_limits_of_its_own() {
    let mut detection = LoopDetection::default();
    detection.tool_freq_overrides.insert("ls".into(), ToolFrequency { warn: 2, hard_limit: 3 });
    let answers: Vec<Value> = (0..3).map(|n| ls(&n.to_string())).collect();
    assert_eq!(course(&detection, &answers), ["proceed", "warn", "stop"]);
    let others: Vec<Value> = (0..3).map(|n| ai(&[call("bash", json!({"command": n}))])).collect();
    assert_eq!(course(&detection, &others), ["proceed", "proceed", "proceed"]);
}

#[test]
fn nothing_is_found_when_it_is_disabled() {
    let off = LoopDetection { enabled: false, ..LoopDetection::default() };
    let answers: Vec<Value> = (0..9).map(|_| ls("a")).collect();
    assert!(course(&off, &answers).iter().all(|verdict| *verdict == "proceed"));
}
