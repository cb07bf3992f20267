//! Deferred tools of a lead agent and of its subagents.

use std::sync::{Arc, LazyLock};

use async_trait::async_trait;
use serde_json::{Value as Json, json};
use threadkeep_agent::tools::{Tool, ToolContext, ToolError, ToolOutput, ToolSource, ToolSpec};
use threadkeep_agent::{Ended, Observer};
use threadkeep_config::{Config, ToolRouting};
use tokio::sync::Notify;

use crate::support::{House, Seen, lead, subagent, task};

const DEFERRED: &str = "tool_search: {enabled: true}";

/// A server with two tools: one answers, the other one does not.
#[derive(Default)]
struct Server {
    hangs: Arc<Notify>,
}

struct Outside(&'static str, Arc<Notify>);

#[async_trait]
impl ToolSource for Server {
    async fn tools(&self, _: &Config) -> Vec<Arc<dyn Tool>> {
        ["mcp_x_do", "mcp_x_hang"]
            .map(|name| Arc::new(Outside(name, Arc::clone(&self.hangs))) as Arc<dyn Tool>)
            .into()
    }
}

#[async_trait]
impl Tool for Outside {
    fn spec(&self) -> ToolSpec {
        let parameters = json!({"type": "object", "properties": {}});
        ToolSpec { name: self.0.into(), description: "Does".into(), parameters }
    }

    fn is_deferrable(&self) -> bool {
        true
    }

    fn group(&self) -> Option<&str> {
        Some("outside")
    }

    fn routing(&self) -> Option<&ToolRouting> {
        static VIEW: LazyLock<ToolRouting> =
            LazyLock::new(|| ToolRouting { keywords: vec!["view".to_owned()], priority: 0 });
        (self.0 == "mcp_x_do").then_some(&*VIEW)
    }

    async fn call(&self, _: &ToolContext, _: Json) -> Result<ToolOutput, ToolError> {
        if self.0 == "mcp_x_hang" {
            self.1.notify_one();
            return std::future::pending().await;
        }
        Ok(ToolOutput::text("done"))
    }
}

fn call(name: &str) -> Json {
    json!({"text": "", "tool_calls": [{"name": name, "args": {}}]})
}

fn search(query: &str) -> Json {
    json!({"text": "", "tool_calls": [{"name": "tool_search", "args": {"query": query}}]})
}

async fn house(script: Json, sections: &str, server: &Arc<Server>) -> House {
    let sections = format!("{DEFERRED}\n{sections}");
    House::new(script, &sections).await.with_source(Arc::clone(server) as Arc<dyn ToolSource>)
}

/// The deferred tools, and the one that loads them, that each request of this caller could call.
fn could_call(house: &House, caller: &str) -> Vec<Vec<String>> {
    let deferred = |name: &&str| name.starts_with("mcp_") || *name == "tool_search";
    let of_request = |request: &Json| {
        let tools = request["tools"].as_array().unwrap().iter();
        let names = tools.map(|tool| tool["name"].as_str().or(tool.as_str()).unwrap()).filter(deferred);
        names.map(str::to_owned).collect()
    };
    house.requests(caller).iter().map(of_request).collect()
}

/// Scenario 79: a tool is loaded, then called; the next run starts without it.
#[tokio::test]
async fn s79_a_tool_has_to_be_loaded_in_each_run() {
    let answers =
        json!([call("mcp_x_do"), search("select:mcp_x_do"), call("mcp_x_do"), {"text": "{{tool_result}}"}]);
    let house = house(json!({"rules": [{"answers": answers}]}), "", &Arc::default()).await;
    house.ask("Go").await;
    let results = house.results().await;
    let refused = results[0]["content"].as_str().unwrap();
    assert!(refused.starts_with("Error: there is no tool `mcp_x_do`. Available: "), "{refused}");
    assert!(refused.ends_with("Load further tools with `tool_search` before you call them"), "{refused}");
    assert_eq!(results[2]["content"], "done");
    let loaded = vec!["mcp_x_do".to_owned(), "tool_search".to_owned()];
    let none = vec!["tool_search".to_owned()];
    let first = [none.clone(), none.clone(), loaded.clone(), loaded];
    assert_eq!(could_call(&house, "lead_agent"), first);
    house.run("r2", Some("Again"), &mut Seen::default()).await.unwrap();
    assert_eq!(could_call(&house, "lead_agent")[4], none);
}

/// Scenario 79: what the lead agent has loaded, its subagent has not, and the other way round; a denied tool is not even found.
#[tokio::test]
async fn s79_loaded_tools_are_an_agents_own_and_deny_lists_come_first() {
    let agents = "subagents: {custom_agents: {some: {description: d, system_prompt: s, disallowed_tools: [mcp_x_hang]}}}";
    let mut script = lead(&[], vec![]);
    script["rules"] = json!([
        {"when": {"caller": "lead_agent"}, "answers": [
            search("select:mcp_x_hang"), {"text": "", "tool_calls": [task("Do it", "some")]}, {"text": "ok"},
        ]},
        subagent(json!([search("mcp"), call("mcp_x_do"), call("mcp_x_hang"), {"text": "{{tool_result}}"}])),
    ]);
    let house = house(script, agents, &Arc::default()).await;
    house.ask("Go").await;
    let own = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
    let (none, denied) = (own(&["tool_search"]), own(&["mcp_x_do", "tool_search"]));
    assert_eq!(could_call(&house, "subagent:some"), [none.clone(), denied.clone(), denied.clone(), denied]);
    let hang = own(&["mcp_x_hang", "tool_search"]);
    assert_eq!(could_call(&house, "lead_agent"), [none, hang.clone(), hang]);
    let result = house.results().await[1]["content"].to_string();
    assert!(result.contains("there is no tool `mcp_x_hang`"), "{result}");
    let prompt = house.requests("subagent:some")[0].to_string();
    assert!(!prompt.contains("mcp_x_hang") && prompt.contains("- mcp_x_do"), "{prompt}");
}

/// What is loaded follows from the conversation: the process that goes on has it.
#[tokio::test]
async fn a_loaded_tool_stays_loaded_over_a_restart() {
    let answers = json!([search("select:mcp_x_hang"), call("mcp_x_hang"), {"text": "ok"}]);
    let server = Arc::<Server>::default();
    let house = house(json!({"rules": [{"answers": answers}]}), "", &server).await;
    let mut seen = Seen::default();
    tokio::select! {
        ended = house.run("r1", Some("Go"), &mut seen) => panic!("{ended:?}"),
        () = server.hangs.notified() => {}
    }
    let next = house.restarted().with_source(Arc::clone(&server) as Arc<dyn ToolSource>);
    let mut seen = Seen::default();
    tokio::select! {
        ended = next.run("r2", None, &mut seen) => panic!("{ended:?}"),
        () = server.hangs.notified() => {}
    }
}

#[tokio::test]
async fn without_the_setting_all_tools_are_shown() {
    let script = json!({"rules": [{"answers": [call("mcp_x_do"), {"text": "{{tool_result}}"}]}]});
    let server = Arc::<Server>::default();
    let house = House::new(script, "").await.with_source(server);
    let ended = house.run("r", Some("Go"), &mut Seen::default()).await.unwrap();
    assert!(matches!(ended, Ended::Done { .. }));
    assert_eq!(could_call(&house, "lead_agent")[0], ["mcp_x_do", "mcp_x_hang"]);
    assert_eq!(house.results().await[0]["content"], "done");
}

/// Which agents loaded which tools by the words of their questions.
#[derive(Default)]
struct Promoted(Vec<(Option<String>, Vec<String>)>);

#[async_trait]
impl Observer for Promoted {
    fn tools_promoted(&mut self, subagent: Option<&str>, names: &[String]) {
        if !names.is_empty() {
            self.0.push((subagent.map(str::to_owned), names.to_vec()));
        }
    }
}

/// A word of the question loads a tool without a search, for the lead agent and for each subagent by its own task, and the
/// run hears of both.
#[tokio::test]
async fn s79_a_tool_that_a_word_loads_is_reported_also_of_a_subagent() {
    let calls = [task("A view, please", "general-purpose"), task("Nothing", "general-purpose")];
    let answers = json!([call("mcp_x_do"), {"text": "{{tool_result}}"}]);
    for (question, by_the_lead) in [("View it", true), ("Go", false)] {
        let house = house(lead(&calls, vec![subagent(answers.clone())]), "", &Arc::default()).await;
        let mut promoted = Promoted::default();
        house.run_observed("r", Some(question), &mut promoted).await.unwrap();
        let names = vec!["mcp_x_do".to_owned()];
        let mut expected = vec![(Some("general-purpose".to_owned()), names.clone())];
        if by_the_lead {
            expected.insert(0, (None, names));
        }
        assert_eq!(promoted.0, expected);
        let results = house.results().await;
        assert!(results[0]["content"].to_string().contains("done"), "{results:?}");
        assert!(results[1]["content"].to_string().contains("there is no tool"), "{results:?}");
    }
}

/// Groups that are off are off for the lead agent and for its subagents, built-in tools and those of servers alike.
#[tokio::test]
async fn the_tools_of_a_group_that_is_not_listed_are_nobodys() {
    let tools = "tools: [{name: ls, group: files, use: ls}, {name: glob, group: search, use: glob}, {name: grep, use: grep}]";
    let server = "mcp_servers: {x: {command: none, group: outside, enabled: false}}";
    for (groups, expected) in [
        ("", &["ls", "glob", "grep", "mcp_x_do", "mcp_x_hang"][..]),
        ("tool_groups: [{name: files}]", &["ls", "grep"]),
        ("tool_groups: [{name: search}, {name: outside}]", &["glob", "grep", "mcp_x_do", "mcp_x_hang"]),
    ] {
        let script = lead(&[task("Do it", "general-purpose")], vec![subagent(json!([{"text": "ok"}]))]);
        let house = House::new(script, &format!("{tools}\n{server}\n{groups}")).await;
        let house = house.with_source(Arc::new(Server::default()));
        house.ask("Go").await;
        let offered = |caller: &str| {
            let request = house.requests(caller).remove(0);
            let names = request["tools"].as_array().unwrap().iter();
            let names = names.map(|tool| tool["name"].as_str().or(tool.as_str()).unwrap().to_owned());
            names.collect::<Vec<_>>()
        };
        assert_eq!(offered("subagent:general-purpose"), expected, "{groups}");
        let mut of_lead = offered("lead_agent");
        assert_eq!(of_lead.pop().as_deref(), Some("task"));
        assert_eq!(of_lead, expected, "{groups}");
    }
}
