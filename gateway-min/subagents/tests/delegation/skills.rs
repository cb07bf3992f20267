//! Skills of a lead agent and of its subagents.

use std::path::Path;

use serde_json::{Value as Json, json};

use crate::support::{House, lead, subagent, task};

/// What each caller's first request says of skills: the names in its index, and whether it can read them.
fn known(house: &House, caller: &str) -> (Vec<String>, bool) {
    let request = house.requests(caller).remove(0).to_string();
    let names = ["deploy", "review"].map(str::to_owned).into_iter();
    let names = names.filter(|name| request.contains(&format!("- {name}: Does {name}"))).collect();
    (names, request.contains("read_skill"))
}

fn write_skills(directory: &Path) {
    for name in ["deploy", "review"] {
        std::fs::write(directory.join(format!("{name}.md")), format!("Does {name}\nIn this way.")).unwrap();
    }
}

/// Scenarios 16 and 74: null is all, a list these, an empty list none; an override wins over the definition.
#[tokio::test]
async fn s74_a_subagent_has_the_skills_that_its_definition_or_its_override_names() {
    let directory = tempfile::tempdir().unwrap();
    write_skills(directory.path());
    let both = vec!["deploy".to_owned(), "review".to_owned()];
    let own = "custom_agents: {some: {description: d, system_prompt: s, skills: [review, unknown]}}";
    for (name, subagents, expected) in [
        ("general-purpose", String::new(), both.clone()),
        ("general-purpose", "agents: {general-purpose: {skills: []}}".to_owned(), vec![]),
        ("some", own.to_owned(), vec!["review".to_owned()]),
        ("some", format!("{own}, agents: {{some: {{skills: [deploy]}}}}"), vec!["deploy".to_owned()]),
    ] {
        let answers: Json = json!([{"text": "", "tool_calls": [{"name": "read_skill", "args": {"name": "review"}}]},
            {"text": "{{tool_result}}"}]);
        let script = lead(&[task("Do it", name)], vec![subagent(answers)]);
        let sections =
            format!("skills: {{path: {}}}\nsubagents: {{{subagents}}}", directory.path().display());
        let house = House::new(script, &sections).await;
        house.ask("Go").await;
        assert_eq!(known(&house, "lead_agent"), (both.clone(), true));
        let readable = !expected.is_empty();
        assert_eq!(
            known(&house, &format!("subagent:{name}")),
            (expected.clone(), readable),
            "{name} {subagents}"
        );
        let result = house.results().await[0]["content"].to_string();
        assert_eq!(result.contains("In this way."), expected.contains(&"review".to_owned()), "{result}");
    }
}

/// An absent directory has no skills.
#[tokio::test]
async fn without_a_directory_there_are_no_skills() {
    for sections in ["", "skills: {path: /no/such/directory}"] {
        let house = House::new(lead(&[], vec![]), sections).await;
        house.ask("Go").await;
        assert_eq!(known(&house, "lead_agent"), (vec![], false));
    }
}
