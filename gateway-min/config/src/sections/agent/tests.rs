use serde_json::json;

use super::super::testing::{assert_refused, read};
use super::*;

#[test]
fn missing_and_null_sections_are_the_documented_defaults() {
    let null = json!({
        "title": null, "loop_detection": null, "token_usage": null, "token_budget": null,
        "summarization": null, "tool_search": null, "verification": null,
    });
    for tree in [json!({}), null] {
        assert_eq!(
            read(&tree, Title::read).unwrap(),
            Title { enabled: true, max_words: 6, max_chars: 60, model_name: None }
        );
        assert_eq!(
            read(&tree, LoopDetection::read).unwrap(),
            LoopDetection {
                enabled: true,
                warn_threshold: 3,
                hard_limit: 5,
                window_size: 20,
                max_tracked_threads: 100,
                tool_frequency: ToolFrequency { warn: 30, hard_limit: 50 },
                tool_freq_overrides: BTreeMap::new(),
            }
        );
        assert_eq!(read(&tree, TokenUsage::read).unwrap(), TokenUsage { enabled: true });
        assert_eq!(
            read(&tree, TokenBudget::read).unwrap(),
            TokenBudget {
                enabled: false,
                max_tokens: 200_000,
                max_input_tokens: None,
                max_output_tokens: None,
                warn_threshold: 0.8,
                hard_stop_threshold: 1.0,
            }
        );
        assert_eq!(
            read(&tree, Summarization::read).unwrap(),
            Summarization {
                enabled: false,
                model_name: None,
                trigger: vec![],
                keep: ContextSize::Messages(20),
                trim_tokens_to_summarize: 4000,
                summary_prompt: None,
                skill_file_read_tool_names: None,
            }
        );
        assert_eq!(
            read(&tree, ToolSearch::read).unwrap(),
            ToolSearch { enabled: false, auto_promote_top_k: 3 }
        );
        assert_eq!(
            read(&tree, Verification::read).unwrap(),
            Verification { receipts_enabled: true, receipts_render_mode: ReceiptsRenderMode::DelegationOnly }
        );
    }
}

#[test]
fn title_is_read_and_checked() {
    let tree = json!({"title": {"enabled": false, "max_words": 9, "max_chars": "80", "model_name": "m"}});
    assert_eq!(
        read(&tree, Title::read).unwrap(),
        Title { enabled: false, max_words: 9, max_chars: 80, model_name: Some("m".into()) }
    );
    assert_refused(
        "title",
        &[(json!({"max_words": 0}), "max_words"), (json!({"max_chars": 0}), "max_chars")],
        Title::read,
    );
}

#[test]
fn loop_detection_is_read_and_overrides_fill_up_from_the_general_limits() {
    let tree = json!({"loop_detection": {
        "enabled": false, "warn_threshold": 4, "hard_limit": 4, "window_size": 5, "max_tracked_threads": 6,
        "tool_freq_warn": 7, "tool_freq_hard_limit": 80,
        "tool_freq_overrides": {"bash": {"warn": 50, "hard_limit": 60}, "ls": {"warn": 70}},
    }});
    let tool = |warn, hard_limit| ToolFrequency { warn, hard_limit };
    assert_eq!(
        read(&tree, LoopDetection::read).unwrap(),
        LoopDetection {
            enabled: false,
            warn_threshold: 4,
            hard_limit: 4,
            window_size: 5,
            max_tracked_threads: 6,
            tool_frequency: tool(7, 80),
            tool_freq_overrides: [("bash".into(), tool(50, 60)), ("ls".into(), tool(70, 80))].into(),
        }
    );
}

#[test]
fn loop_limits_outside_their_ranges_are_problems() {
    assert_refused(
        "loop_detection",
        &[
            (json!({"warn_threshold": 0}), "warn_threshold"),
            (json!({"hard_limit": 0}), "hard_limit"),
            (json!({"warn_threshold": 6}), "hard_limit"),
            (json!({"window_size": 0}), "window_size"),
            (json!({"max_tracked_threads": 0}), "max_tracked_threads"),
            (json!({"tool_freq_warn": 51}), "tool_freq_hard_limit"),
            (json!({"tool_freq_overrides": {"bash": {"warn": 0}}}), "tool_freq_overrides.bash.warn"),
            (json!({"tool_freq_overrides": {"bash": {"warn": 51}}}), "tool_freq_overrides.bash.hard_limit"),
            (json!({"tool_freq_overrides": {"bash": 5}}), "tool_freq_overrides.bash"),
        ],
        LoopDetection::read,
    );
}

#[test]
fn token_usage_and_budget_are_read_and_checked() {
    let tree = json!({"token_usage": {"enabled": "false"}});
    assert_eq!(read(&tree, TokenUsage::read).unwrap(), TokenUsage { enabled: false });
    let tree = json!({"token_budget": {
        "enabled": true, "max_tokens": 1000, "max_input_tokens": 10, "max_output_tokens": 20,
        "warn_threshold": 0.5, "hard_stop_threshold": 0.5,
    }});
    assert_eq!(
        read(&tree, TokenBudget::read).unwrap(),
        TokenBudget {
            enabled: true,
            max_tokens: 1000,
            max_input_tokens: Some(10),
            max_output_tokens: Some(20),
            warn_threshold: 0.5,
            hard_stop_threshold: 0.5,
        }
    );
    assert_refused(
        "token_budget",
        &[
            (json!({"max_tokens": 999}), "max_tokens"),
            (json!({"max_input_tokens": 0}), "max_input_tokens"),
            (json!({"max_output_tokens": 0}), "max_output_tokens"),
            (json!({"warn_threshold": 1.1}), "warn_threshold"),
            (json!({"hard_stop_threshold": -0.1}), "hard_stop_threshold"),
            (json!({"hard_stop_threshold": 0.7}), "hard_stop_threshold"),
        ],
        TokenBudget::read,
    );
}

#[test]
fn summarization_is_read_with_one_trigger_or_several() {
    let tree = json!({"summarization": {
        "enabled": true, "model_name": "m", "trigger": {"type": "tokens", "value": "4000"},
        "keep": {"type": "fraction", "value": 0.5}, "trim_tokens_to_summarize": 100,
        "summary_prompt": "p", "skill_file_read_tool_names": ["read_file"],
    }});
    assert_eq!(
        read(&tree, Summarization::read).unwrap(),
        Summarization {
            enabled: true,
            model_name: Some("m".into()),
            trigger: vec![ContextSize::Tokens(4000)],
            keep: ContextSize::Fraction(0.5),
            trim_tokens_to_summarize: 100,
            summary_prompt: Some("p".into()),
            skill_file_read_tool_names: Some(vec!["read_file".into()]),
        }
    );
    let tree = json!({"summarization": {"trigger": [
        {"type": "messages", "value": 50}, {"type": "fraction", "value": 1},
    ]}});
    assert_eq!(
        read(&tree, Summarization::read).unwrap().trigger,
        [ContextSize::Messages(50), ContextSize::Fraction(1.0)]
    );
}

#[test]
fn amounts_of_context_are_checked() {
    assert_refused(
        "summarization",
        &[
            (json!({"trigger": {"type": "tokens"}}), "trigger.value"),
            (json!({"trigger": {"value": 5}}), "trigger.type"),
            (json!({"trigger": [{"type": "tokens", "value": 0}]}), "trigger[0].value"),
            (json!({"trigger": "often"}), "trigger"),
            (json!({"keep": {"type": "words", "value": 5}}), "keep.type"),
            (json!({"keep": {"type": "messages", "value": 0.5}}), "keep.value"),
            (json!({"keep": {"type": "fraction", "value": 0}}), "keep.value"),
            (json!({"keep": {"type": "fraction", "value": 1.5}}), "keep.value"),
            (json!({"trim_tokens_to_summarize": 0}), "trim_tokens_to_summarize"),
        ],
        Summarization::read,
    );
}

#[test]
fn tool_search_is_read_and_moved_into_its_range() {
    for (given, expected) in [(-1, 1), (0, 1), (5, 5), (9, 5)] {
        let tree = json!({"tool_search": {"enabled": true, "auto_promote_top_k": given}});
        assert_eq!(
            read(&tree, ToolSearch::read).unwrap(),
            ToolSearch { enabled: true, auto_promote_top_k: expected }
        );
    }
}

#[test]
fn verification_is_read_and_knows_no_judge() {
    let tree = json!({"verification": {
        "receipts_enabled": false, "receipts_render_mode": "always",
        "judge_enabled": false, "judge_model_name": null,
    }});
    assert_eq!(
        read(&tree, Verification::read).unwrap(),
        Verification { receipts_enabled: false, receipts_render_mode: ReceiptsRenderMode::Always }
    );
    assert_refused(
        "verification",
        &[
            (json!({"judge_enabled": true}), "judge_enabled"),
            (json!({"judge_model_name": "m"}), "judge_model_name"),
            (json!({"receipts_render_mode": "never"}), "receipts_render_mode"),
        ],
        Verification::read,
    );
}
