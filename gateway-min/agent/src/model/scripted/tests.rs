use std::io::Write;
use std::sync::Arc;

use serde_json::json;

use super::super::message::{ToolStatus, human, tool_result};
use super::super::{ChunkAssembler, ModelKind, RetryingModel, build, message};
use super::*;

fn model(script: Value) -> ScriptedModel {
    ScriptedModel::from_json("test", &script.to_string()).unwrap()
}

fn asking(messages: Vec<Value>) -> ModelRequest {
    ModelRequest { messages, caller: "lead_agent".into(), ..ModelRequest::default() }
}

async fn chunks(model: &ScriptedModel, request: &ModelRequest) -> Vec<Result<ModelChunk, ModelError>> {
    model.stream(request).await.unwrap().collect().await
}

async fn answer(model: &dyn ChatModel, request: &ModelRequest) -> Value {
    let mut assembler = ChunkAssembler::new("id", model.name());
    let mut chunks = model.stream(request).await.unwrap();
    while let Some(chunk) = chunks.next().await {
        assembler.push(&chunk.unwrap());
    }
    assembler.finish()
}

async fn answer_text(model: &ScriptedModel, messages: Vec<Value>) -> String {
    text(&answer(model, &asking(messages)).await)
}

fn ai(text: &str) -> Value {
    json!({"type": "ai", "content": text})
}

#[tokio::test]
async fn text_is_cut_into_chunks_of_the_given_length_and_the_last_one_has_the_usage() {
    let model = model(json!({"chunk_chars": 3, "rules": [{"answers": [
        {"text": "h\u{e9}llo", "usage": {"input_tokens": 4, "output_tokens": 2}},
    ]}]}));
    let chunks = chunks(&model, &asking(vec![human("x")])).await;
    let texts: Vec<&str> = chunks.iter().map(|chunk| chunk.as_ref().unwrap().text.as_str()).collect();
    assert_eq!(texts, ["h\u{e9}l", "lo", ""]);
    let last = chunks[2].as_ref().unwrap();
    assert_eq!(last.finish_reason.as_deref(), Some("stop"));
    let usage = Usage { input_tokens: 4, output_tokens: 2, total_tokens: 6, ..Usage::default() };
    assert_eq!(last.usage, Some(usage));
}

#[tokio::test]
async fn several_tool_calls_come_in_one_answer_with_arguments_expanded() {
    let model = model(json!({"chunk_chars": 4, "rules": [{"answers": [{"tool_calls": [
        {"name": "write_file", "args": {"path": "a", "content": "<{{input}}>", "deep": ["{{input}}", 1]}},
        {"name": "ls", "id": "mine"},
    ]}]}]}));
    let mut question = human("say \"hi\"");
    question["id"] = "h1".into();
    let message = answer(&model, &asking(vec![question])).await;
    assert_eq!(
        message["tool_calls"],
        json!([
            {"type": "tool_call", "name": "write_file", "id": "call_h1_0_0",
             "args": {"path": "a", "content": "<say \"hi\">", "deep": ["say \"hi\"", 1]}},
            {"type": "tool_call", "name": "ls", "args": {}, "id": "mine"},
        ])
    );
    assert_eq!(message["response_metadata"]["finish_reason"], "tool_calls");
}

#[tokio::test]
async fn the_next_answer_depends_on_the_conversation_alone() {
    let model = model(json!({"rules": [{"answers": [{"text": "one"}, {"text": "two {{tool_result}}"}]}]}));
    let call = json!({"name": "ls", "id": "a"});
    let asked = vec![human("q")];
    let called = vec![human("q"), ai("one"), tool_result(&call, ToolStatus::Success, "R")];
    // In any order and any number of times, because asking changes nothing.
    for _ in 0..2 {
        assert_eq!(answer_text(&model, called.clone()).await, "two R");
        assert_eq!(answer_text(&model, asked.clone()).await, "one");
    }
    let next_turn = vec![human("q"), ai("one"), ai("two"), human("again")];
    assert_eq!(answer_text(&model, next_turn).await, "one");
    // A hidden message does not start a turn.
    let warned = vec![human("q"), ai("one"), message::hidden("loop_warning", "stop")];
    assert_eq!(answer_text(&model, warned).await, "two ");
}

#[tokio::test]
async fn the_same_question_has_the_same_chunks() {
    let model = model(json!({"rules": [{"answers": [{"text": "same", "tool_calls": [{"name": "ls"}]}]}]}));
    let request = asking(vec![human("x")]);
    assert_eq!(chunks(&model, &request).await, chunks(&model, &request).await);
}

#[tokio::test]
async fn the_first_rule_whose_conditions_all_hold_answers() {
    let model = model(json!({"rules": [
        {"when": {"caller": "middleware"}, "answers": [{"text": "middleware"}]},
        {"when": {"contains": ["file", "Folder"], "turn": 1}, "answers": [{"text": "second turn"}]},
        {"when": {"contains": ["file", "Folder"]}, "answers": [{"text": "any turn"}]},
        {"answers": [{"text": "else"}]},
    ]}));
    assert_eq!(answer_text(&model, vec![human("A FOLDER please")]).await, "any turn");
    assert_eq!(answer_text(&model, vec![human("x"), ai("y"), human("my file")]).await, "second turn");
    assert_eq!(answer_text(&model, vec![human("file"), ai("y"), human("thanks")]).await, "else");
    for (caller, expected) in
        [("middleware", "middleware"), ("middleware:title", "middleware"), ("middlewares", "else")]
    {
        let request = ModelRequest { caller: caller.into(), ..asking(vec![human("x")]) };
        assert_eq!(text(&answer(&model, &request).await), expected, "{caller}");
    }
}

#[tokio::test]
async fn a_script_that_is_used_up_says_where() {
    let only = model(json!({"rules": [{"when": {"turn": 0}, "answers": [{"text": "only"}]}]}));
    for (messages, place) in [
        (vec![human("x"), ai("only")], "answer 1 in turn 0"),
        (vec![human("x"), ai("only"), human("y")], "answer 0 in turn 1"),
    ] {
        let error = only.stream(&asking(messages)).await.err().unwrap();
        assert_eq!(error.kind, ModelErrorKind::Script);
        assert!(error.detail.contains(place) && error.detail.contains("`lead_agent`"), "{error}");
    }
    let repeating =
        model(json!({"rules": [{"repeat_last": true, "answers": [{"text": "a"}, {"text": "b"}]}]}));
    assert_eq!(answer_text(&repeating, vec![human("x"), ai("a"), ai("b"), ai("b")]).await, "b");
}

#[tokio::test]
async fn placeholders_are_replaced_once_and_others_left_alone() {
    let model = model(json!({"rules": [{"answers": [{"text": "{{input}} {{x}} {{{input}} {{"}]}]}));
    let said = answer_text(&model, vec![human("{{tool_result}}")]).await;
    assert_eq!(said, "{{tool_result}} {{x}} {{{input}} {{");
}

fn failing(error: Value) -> ScriptedModel {
    model(json!({"chunk_chars": 1, "rules": [{"answers": [{"text": "abc", "error": error}]}]}))
}

#[tokio::test]
async fn an_error_comes_at_its_place_and_with_its_kind() {
    let fatal = failing(json!({"kind": "fatal", "message": "no", "after_chunks": 2}));
    let items = chunks(&fatal, &asking(vec![human("x")])).await;
    assert_eq!(items.len(), 3);
    let error = items[2].as_ref().unwrap_err();
    assert_eq!((error.kind, error.detail.as_str()), (ModelErrorKind::Rejected, "no"));
    assert!(!error.kind.is_transient());

    // Never after the last chunk, where it would have no effect.
    let late = failing(json!({"kind": "transient", "message": "late", "after_chunks": 99}));
    let items = chunks(&late, &asking(vec![human("x")])).await;
    assert!(items.last().unwrap().as_ref().unwrap_err().kind.is_transient());
}

#[tokio::test]
async fn an_error_of_the_first_attempts_is_overcome_by_retrying() {
    let flaky = failing(json!({"kind": "transient", "message": "busy", "attempts": 2}));
    let retrying = RetryingModel::with_sleeper(Arc::new(flaky), Arc::new(|_| Box::pin(async {})));
    let chunks: Vec<ModelChunk> = retrying.stream(asking(vec![human("x")])).collect().await;
    assert_eq!(chunks.iter().map(|chunk| chunk.text.as_str()).collect::<String>(), "abc");

    let hopeless = failing(json!({"kind": "transient", "message": "busy"}));
    let retrying = RetryingModel::with_sleeper(Arc::new(hopeless), Arc::new(|_| Box::pin(async {})));
    let chunks: Vec<ModelChunk> = retrying.stream(asking(vec![human("x")])).collect().await;
    assert!(chunks[0].fallback.is_some());
}

#[tokio::test]
async fn a_gate_holds_the_answer_until_it_is_opened() {
    let model = model(json!({"chunk_chars": 1, "rules": [{"answers": [
        {"text": "abc", "gate": {"name": "scripted-hold", "after_chunks": 2}},
    ]}]}));
    let mut stream = model.stream(&asking(vec![human("x")])).await.unwrap();
    assert_eq!(stream.next().await.unwrap().unwrap().text, "a");
    assert_eq!(stream.next().await.unwrap().unwrap().text, "b");
    // Polled again, the answer waits at the gate and returns nothing.
    assert!(futures::poll!(stream.next()).is_pending());
    gate("scripted-hold").reached().await;
    assert!(futures::poll!(stream.next()).is_pending());
    gate("scripted-hold").open();
    assert_eq!(stream.next().await.unwrap().unwrap().text, "c");
    // Open from now on.
    assert_eq!(chunks(&model, &asking(vec![human("x")])).await.len(), 4);
}

#[tokio::test]
async fn a_delay_comes_before_each_chunk() {
    let script = json!({"chunk_chars": 1, "rules": [{"answers": [{"text": "ab", "delay_ms": 1}]}]});
    let slow = model(script.clone());
    let plan = slow.plan(
        slow.script.answer(&situation(&[human("x")], &asking(Vec::new()), false)).unwrap(),
        &situation(&[human("x")], &asking(Vec::new()), false),
        0,
    );
    let pauses = plan.iter().filter(|event| matches!(event, Event::Pause(time) if time.as_millis() == 1));
    assert_eq!((pauses.count(), plan.len()), (3, 6));
    assert_eq!(answer_text(&slow, vec![human("x")]).await, "ab");
}

#[test]
fn unknown_keys_and_bad_json_are_refused_with_their_place() {
    for script in [
        json!({"rules": [], "chunks": 1}),
        json!({"rules": [{"answers": [{"txt": "a"}]}]}),
        json!({"rules": [{"answers": [], "when": {"contain": ["a"]}}]}),
    ] {
        let error = ScriptedModel::from_json("test", &script.to_string()).unwrap_err();
        assert_eq!(error.kind, ModelErrorKind::Configuration);
        assert!(error.detail.contains("unknown field") && error.detail.contains("line 1"), "{error}");
    }
}

#[tokio::test]
async fn build_reads_the_script_file_and_names_it_in_errors() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    write!(file, "{}", json!({"rules": [{"answers": [{"text": "from file"}]}]})).unwrap();
    let mut settings = ModelSettings::new("mine", ModelKind::Scripted, "scripted");
    settings.script = Some(file.path().to_owned());
    let built = build(settings.clone()).unwrap();
    assert_eq!((built.name(), built.provider()), ("mine", "scripted"));
    assert_eq!(text(&answer(&*built, &asking(vec![human("x")])).await), "from file");

    file.write_all(b"junk").unwrap();
    let broken = build(settings.clone()).err().unwrap();
    settings.script = Some("/nowhere/script.json".into());
    let missing = build(settings).err().unwrap();
    for (error, path) in [(broken, file.path().to_str().unwrap()), (missing, "/nowhere/script.json")] {
        assert_eq!(error.kind, ModelErrorKind::Configuration);
        assert!(error.detail.contains(path), "{error}");
    }
}

mod demo {
    use super::*;

    fn demo() -> Arc<dyn ChatModel> {
        build(ModelSettings::new("demo", ModelKind::Scripted, "demo")).unwrap()
    }

    #[tokio::test]
    async fn it_says_what_it_is_and_how_to_get_a_real_model_and_echoes_the_user() {
        let said = text(&answer(&*demo(), &asking(vec![human("good morning")])).await);
        for part in ["demo", "without an API key", "config.yaml", "api_key: $OPENAI_API_KEY", "good morning"]
        {
            assert!(said.contains(part), "{part} is missing in: {said}");
        }
    }

    #[tokio::test]
    async fn it_uses_tools_when_asked_for_files_and_then_reports() {
        let cases = [
            ("Please WRITE a file about cats", "write_file"),
            ("read the file again", "read_file"),
            ("list my files", "ls"),
        ];
        for (asked, tool) in cases {
            let question = human(asked);
            let called = answer(&*demo(), &asking(vec![question.clone()])).await;
            let call = &called["tool_calls"][0];
            assert_eq!(call["name"], tool, "{asked}");
            let result = tool_result(call, ToolStatus::Success, "THE RESULT");
            let report = answer(&*demo(), &asking(vec![question, called.clone(), result])).await;
            assert!(text(&report).contains("THE RESULT"), "{report}");
            assert_eq!(report["tool_calls"], json!([]));
        }
    }

    #[tokio::test]
    async fn it_has_a_title_for_the_middleware_and_usage_for_everyone() {
        let request =
            ModelRequest { caller: "middleware:title".into(), ..asking(vec![human("write a file")]) };
        let title = answer(&*demo(), &request).await;
        assert!(text(&title).chars().count() <= 60 && !text(&title).contains('\n'), "{title}");
        assert_eq!(title["tool_calls"], json!([]));
        assert!(title["usage_metadata"]["total_tokens"].as_u64().unwrap() > 0);
    }
}

#[tokio::test]
async fn agents_are_told_apart_by_their_prompt_their_tools_and_what_was_said() {
    let model = model(json!({"rules": [
        {"when": {"system": ["You are a BASH"]}, "answers": [{"text": "bash"}]},
        {"when": {"offered": ["task", "ls"]}, "answers": [{"text": "lead"}]},
        {"when": {"anywhere": ["snapshot"]}, "answers": [{"text": "informed"}]},
        {"answers": [{"text": "other"}]},
    ]}));
    let tool = |name: &str| crate::tools::ToolSpec {
        name: name.to_owned(),
        description: String::new(),
        parameters: json!({}),
    };
    let hidden = message::hidden("parent", "a Snapshot");
    for (system, tools, messages, expected) in [
        ("you are a bash agent", vec!["task", "ls"], vec![human("x")], "bash"),
        ("", vec!["ls", "task", "grep"], vec![human("x")], "lead"),
        ("", vec!["task"], vec![human("x")], "other"),
        ("", vec![], vec![hidden, human("x")], "informed"),
    ] {
        let request = ModelRequest {
            system: Some(system.to_owned()),
            tools: tools.into_iter().map(tool).collect(),
            ..asking(messages)
        };
        assert_eq!(text(&answer(&model, &request).await), expected);
    }
}

#[tokio::test]
async fn results_are_shown_by_the_id_of_their_call() {
    let model =
        model(json!({"rules": [{"answers": [{"text": "{{result:b}}, {{result:a}}, [{{result:c}}]"}]}]}));
    let result =
        |id: &str, text: &str| tool_result(&json!({"name": "t", "id": id}), ToolStatus::Success, text);
    let messages = vec![result("a", "old"), result("a", "A"), result("b", "{{input}}"), human("x")];
    assert_eq!(answer_text(&model, messages).await, "{{input}}, A, []");
}

#[tokio::test]
async fn every_request_is_recorded_before_it_is_answered() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let model = model(json!({"record": file.path(), "rules": [{"answers": [{"text": "one"}]}]}));
    answer_text(&model, vec![human("first")]).await;
    let request =
        ModelRequest { attempt: 2, system: Some("s".into()), ..asking(vec![human("q"), ai("one")]) };
    assert!(model.stream(&request).await.is_err(), "the script has no second answer");
    let lines = std::fs::read_to_string(file.path()).unwrap();
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 2);
    assert_eq!(lines[0]["messages"][0]["content"], "first");
    assert_eq!(
        (&lines[1]["attempt"], &lines[1]["system"], &lines[1]["caller"]),
        (&json!(2), &json!("s"), &json!("lead_agent"))
    );
    assert_eq!(lines[1]["messages"].as_array().unwrap().len(), 2);
}
