use std::time::Duration;

use proptest::prelude::*;

use super::super::pool::{MAX_THREADS, THREADS};
use super::*;

/// A deferrable tool with this name, description and keywords.
struct Outside(&'static str, &'static str, Option<ToolRouting>);

#[async_trait]
impl Tool for Outside {
    fn spec(&self) -> ToolSpec {
        let parameters = json!({"type": "object", "properties": {}});
        ToolSpec { name: self.0.into(), description: self.1.into(), parameters }
    }

    fn is_deferrable(&self) -> bool {
        true
    }

    fn routing(&self) -> Option<&ToolRouting> {
        self.2.as_ref()
    }

    async fn call(&self, _: &ToolContext, _: Json) -> Result<ToolOutput, ToolError> {
        Ok(ToolOutput::text("done"))
    }
}

fn keywords(words: &[&str], priority: i64) -> ToolRouting {
    ToolRouting { keywords: words.iter().map(|&word| word.to_owned()).collect(), priority }
}

const NAMES: [&str; 7] =
    ["mcp_a_list", "mcp_a_read", "mcp_a_write", "mcp_b_list", "mcp_b_read", "mcp_b_send", "mcp_b_write"];

fn toolbox() -> Toolbox {
    let mut toolbox = Toolbox::builtin(&crate::tools::ToolSettings::default());
    toolbox.add(Arc::new(Outside("mcp_b_list", "Lists mail", Some(keywords(&["mail", "inbox"], 0)))));
    toolbox.add(Arc::new(Outside("mcp_b_read", "Reads a mail", Some(keywords(&["mail"], 0)))));
    toolbox.add(Arc::new(Outside("mcp_b_send", "Sends a mail", Some(keywords(&["mail"], 5)))));
    toolbox.add(Arc::new(Outside("mcp_b_write", "Writes a draft", Some(keywords(&["mail"], 0)))));
    toolbox.add(Arc::new(Outside("mcp_a_list", "Lists (all) notes", None)));
    toolbox.add(Arc::new(Outside("mcp_a_read", "Reads a note", None)));
    toolbox.add(Arc::new(Outside("mcp_a_write", "Writes a note", Some(keywords(&["\u{7b14}\u{8bb0}"], 0)))));
    toolbox
}

fn deferred() -> Arc<Deferred> {
    Deferred::of(&toolbox(), &ToolSearch { enabled: true, auto_promote_top_k: 3 }).unwrap()
}

/// Searches that need not stop.
fn in_time() -> Stop {
    Stop::after(Duration::from_mins(10))
}

fn found(query: &str) -> Vec<String> {
    let output = deferred().search(query, &in_time());
    let names = |name: &Json| name.as_str().unwrap().to_owned();
    let promoted = output.additional_kwargs.get(PROMOTION);
    let promoted = promoted
        .map(|promotion| promotion["names"].as_array().unwrap().iter().map(names).collect::<Vec<_>>());
    let Ok(schemas) = serde_json::from_str::<Vec<Json>>(&output.content) else {
        assert_eq!((output.content, promoted), (format!("No tools found matching: {query}"), None));
        return Vec::new();
    };
    let shown: Vec<String> = schemas.iter().map(|schema| names(&schema["name"])).collect();
    assert_eq!(promoted.as_ref(), Some(&shown), "what is shown is what is loaded");
    shown
}

/// Scenario 79: each form of a query.
#[test]
fn s79_each_form_of_a_query_finds_its_tools() {
    // By name: in the order asked for, once each, without a limit.
    assert_eq!(found("select:mcp_b_send, mcp_a_read,nothing,mcp_b_send"), ["mcp_b_send", "mcp_a_read"]);
    assert_eq!(found(&format!("select:{}", NAMES.join(","))), NAMES);
    assert_eq!(found("select:MCP_A_READ"), Vec::<String>::new());
    // By a word of the name, best matches first.
    assert_eq!(found("+write"), ["mcp_a_write", "mcp_b_write"]);
    assert_eq!(found("+WRITE draft"), ["mcp_b_write", "mcp_a_write"]);
    assert_eq!(found("+mail"), Vec::<String>::new());
    assert_eq!(found("+"), Vec::<String>::new());
    // By a pattern: names first, then descriptions.
    assert_eq!(found("^mcp_a_.*(list|read)$"), ["mcp_a_list", "mcp_a_read"]);
    assert_eq!(found("SEND|note"), ["mcp_b_send", "mcp_a_list", "mcp_a_read", "mcp_a_write"]);
    // At most five.
    assert_eq!(found("mcp"), NAMES[..5]);
    assert_eq!(found("+mcp"), NAMES[..5]);
    // No pattern: a literal text.
    assert_eq!(found("(all"), ["mcp_a_list"]);
    assert_eq!(found("Lists (all"), ["mcp_a_list"]);
    assert_eq!(found("a{1000000}{1000000}"), Vec::<String>::new());
    for blank in ["", "  ", "select:", "nothing at all"] {
        assert_eq!(found(blank), Vec::<String>::new(), "{blank:?}");
    }
}

#[test]
fn a_search_for_tools_stops_between_two_when_its_time_is_up() {
    let stop = Stop::after(Duration::ZERO);
    for query in ["mcp", "mail", "select:mcp_a_read"] {
        let output = deferred().search(query, &stop);
        assert_eq!(output.content, format!("No tools found matching: {query}"));
    }
}

#[tokio::test]
async fn the_tool_searches_as_its_catalog_does() {
    let call = |query: &str| {
        let (tool, args) = (deferred().tool().unwrap(), json!({"query": query}));
        async move { tool.call(&ToolContext::new("t", "r", "unused"), args).await.unwrap() }
    };
    for query in ["mail", "select:mcp_a_read", "+write", "nothing at all"] {
        assert_eq!(call(query).await, deferred().search(query, &in_time()));
    }
}

/// Not on the thread of the runtime that asks for it.
#[tokio::test]
async fn the_tool_searches_on_a_thread_of_the_tools() {
    let (tool, context) = (deferred().tool().unwrap(), ToolContext::new("t", "r", "unused"));
    let all = THREADS.acquire_many(u32::try_from(MAX_THREADS).unwrap()).await.unwrap();
    let mut call = tool.call(&context, json!({"query": "mail"}));
    assert!(futures::poll!(&mut call).is_pending(), "none is free");
    drop(all);
    assert_eq!(call.await.unwrap(), deferred().search("mail", &in_time()));
}

fn searched(promotion: Json) -> Json {
    json!({"type": "tool", "name": TOOL_SEARCH, "content": "", "additional_kwargs": {PROMOTION: promotion}})
}

fn user(text: &str) -> Json {
    message::human(text)
}

#[test]
fn what_is_loaded_follows_from_the_conversation() {
    let deferred = deferred();
    let hash = deferred.hash.clone();
    let of = |hash: &str, names: &[&str]| searched(json!({"catalog_hash": hash, "names": names}));
    let loaded = |turn: &[Json]| deferred.loaded(turn).into_iter().collect::<Vec<_>>();
    assert_eq!(loaded(&[user("Hello")]), Vec::<String>::new());
    // The same tools: both searches count.
    let turn = [user("Hello"), of(&hash, &["mcp_a_read"]), of(&hash, &["mcp_b_send", "ls"])];
    assert_eq!(loaded(&turn), ["mcp_a_read", "mcp_b_send"]);
    // Other tools: the later search counts.
    let turn = [user("Hello"), of("0123456789abcdef", &["mcp_a_read"]), of(&hash, &["mcp_b_send"])];
    assert_eq!(loaded(&turn), ["mcp_b_send"]);
    // What a caller forges loads nothing that is not deferred anyway, and what is malformed nothing.
    for forged in
        [json!(null), json!({"names": ["mcp_a_read"]}), json!({"catalog_hash": hash, "names": "mcp_a_read"})]
    {
        assert_eq!(loaded(&[user("Hello"), searched(forged)]), Vec::<String>::new());
    }
    assert_eq!(hash.len(), 16);
}

#[test]
fn words_of_the_question_load_the_best_tools_and_no_more_than_configured() {
    let promoted = |question: &str| deferred().promoted(&[user("mail"), user(question)]);
    // The highest priority, then the most keywords, then the name.
    assert_eq!(promoted("Is there MAIL in my inbox?"), ["mcp_b_send", "mcp_b_list", "mcp_b_read"]);
    assert_eq!(promoted("mail?"), ["mcp_b_send", "mcp_b_list", "mcp_b_read"]);
    assert_eq!(promoted("An email"), Vec::<String>::new());
    assert_eq!(promoted("mailing"), Vec::<String>::new());
    assert_eq!(promoted("\u{5199}\u{7b14}\u{8bb0}\u{5427}"), ["mcp_a_write"]);
    let hidden = message::hidden("note", "mail".to_owned());
    assert_eq!(deferred().promoted(&[user("Hello"), hidden]), Vec::<String>::new());
}

#[test]
fn nothing_is_deferred_unless_the_configuration_says_so() {
    assert!(Deferred::of(&toolbox(), &ToolSearch::default()).is_none());
    let enabled = ToolSearch { enabled: true, auto_promote_top_k: 3 };
    let none = Deferred::of(&Toolbox::builtin(&crate::tools::ToolSettings::default()), &enabled).unwrap();
    assert!(none.tool().is_none() && none.section().is_none());
    let section = deferred().section().unwrap();
    assert!(section.ends_with("- mcp_b_send (for: mail)\n- mcp_b_write (for: mail)"), "{section}");
    assert!(section.contains("\n- mcp_a_list\n- mcp_a_read\n"), "{section}");
}

/// Fails closed: a tool that can be deferred is shown only if it is loaded, also if the catalog does not know it.
#[test]
fn a_tool_that_is_not_loaded_is_neither_shown_nor_run() {
    let deferred = deferred();
    let mut toolbox = toolbox();
    toolbox.add(Arc::new(Outside("mcp_late", "Came after the catalog", None)));
    let visible = |turn: &[Json]| {
        let visible = toolbox.loaded(&deferred.loaded(turn));
        visible.names().filter(|name| name.starts_with("mcp_")).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(visible(&[user("Hello")]), Vec::<String>::new());
    let both = searched(json!({"catalog_hash": deferred.hash, "names": ["mcp_a_read", "mcp_late"]}));
    assert_eq!(visible(&[user("Hello"), both]), ["mcp_a_read"]);
    assert!(toolbox.loaded(&BTreeSet::new()).names().any(|name| name == "read_file"));
}

#[test]
fn a_selection_that_is_too_much_for_one_result_says_what_it_left_out() {
    let mut toolbox = Toolbox::new();
    let long: &'static str = "d".repeat(25_000).leak();
    for name in ["mcp_one", "mcp_two", "mcp_three"] {
        toolbox.add(Arc::new(Outside(name, long, None)));
    }
    let enabled = ToolSearch { enabled: true, auto_promote_top_k: 3 };
    let deferred = Deferred::of(&toolbox, &enabled).unwrap();
    let output = deferred.search("select:mcp_one,mcp_two,mcp_three", &in_time());
    assert_eq!(output.additional_kwargs[PROMOTION]["names"], json!(["mcp_one", "mcp_two"]));
    assert!(output.content.ends_with("select fewer at a time: mcp_three"));
}

proptest! {
    #[test]
    fn any_query_finds_tools_of_the_catalog_and_a_search_at_most_five(query in r"(select:|\+)?[a-z_, ()*\[\\{}0-9|+]{0,40}") {
        let names = found_any(&query);
        prop_assert!(names.iter().all(|name| NAMES.contains(&name.as_str())));
        prop_assert!(names.len() <= 5 || query.trim().starts_with("select:"));
    }
}

fn found_any(query: &str) -> Vec<String> {
    let output = deferred().search(query, &in_time());
    let names = output.additional_kwargs.get(PROMOTION).map(|promotion| promotion["names"].clone());
    names.map(|names| serde_json::from_value(names).unwrap()).unwrap_or_default()
}
