//! Deferred tools: the model sees their names, and loads those that it needs with `tool_search` before it calls them.
//!
//! What is loaded follows from the conversation since the user's last message, so that it survives a restart and ends with
//! the run. Each agent has its own conversation, and so its own loaded tools. A tool that is neither loaded nor known to
//! the catalog is neither shown nor run.

mod query;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Value as Json, json};
use threadkeep_config::{ToolRouting, ToolSearch};

use super::pool::Stop;
use super::{Tool, ToolContext, ToolError, ToolOutput, ToolSpec, Toolbox, blocking};
use crate::model::message;
use crate::receipts::sha256;

/// The name of the tool that loads others.
pub const TOOL_SEARCH: &str = "tool_search";
/// The key of a result's `additional_kwargs` with what it loaded.
const PROMOTION: &str = "svc_tool_promotion";
/// The longest result, in characters. What does not fit is not loaded.
const RESULT_MAX: usize = 60_000;

/// The deferred tools of one agent.
#[derive(Debug)]
pub struct Deferred {
    /// By name.
    tools: Vec<(ToolSpec, Option<ToolRouting>)>,
    /// Tells one set of tools from another.
    hash: String,
    /// How many tools are loaded without a search.
    auto_promote: usize,
}

impl Deferred {
    /// The tools of `toolbox` that are deferred: those that can be, all of them, if the configuration says so; else `None`.
    pub fn of(toolbox: &Toolbox, settings: &ToolSearch) -> Option<Arc<Self>> {
        if !settings.enabled {
            return None;
        }
        let mut tools: Vec<(ToolSpec, Option<ToolRouting>)> = toolbox.deferrable().collect();
        tools.sort_by(|(one, _), (other, _)| one.name.cmp(&other.name));
        let specs: Vec<Json> = tools.iter().map(|(spec, _)| shown(spec)).collect();
        let mut hash = sha256(&json!(specs).to_string());
        hash.truncate(16);
        let auto_promote = usize::try_from(settings.auto_promote_top_k).unwrap_or_default();
        Some(Arc::new(Self { tools, hash, auto_promote }))
    }

    /// The tool that loads them; `None` if there are none.
    pub fn tool(self: &Arc<Self>) -> Option<Arc<dyn Tool>> {
        (!self.tools.is_empty()).then(|| Arc::new(Search(Arc::clone(self))) as Arc<dyn Tool>)
    }

    /// What the system prompt says about them; `None` if there are none.
    pub fn section(&self) -> Option<String> {
        if self.tools.is_empty() {
            return None;
        }
        let lines = self.tools.iter().map(|(spec, routing)| match routing {
            Some(routing) => format!("- {} (for: {})", spec.name, routing.keywords.join(", ")),
            None => format!("- {}", spec.name),
        });
        let lines: Vec<String> = lines.collect();
        Some(format!(
            "There are further tools. Load those that you need with `{TOOL_SEARCH}`; you can call them from your next answer \
             on. Their names:\n{}",
            lines.join("\n")
        ))
    }

    /// The tools that are loaded after these messages, which begin with the user's last one.
    pub(crate) fn loaded(&self, turn: &[Json]) -> BTreeSet<String> {
        let (mut hash, mut names) = (String::new(), BTreeSet::new());
        for message in turn.iter().filter(|message| message["name"] == TOOL_SEARCH) {
            let promotion = &message["additional_kwargs"][PROMOTION];
            let Some(of) = promotion["catalog_hash"].as_str() else { continue };
            if of != hash {
                names.clear();
                of.clone_into(&mut hash);
            }
            let found = promotion["names"].as_array().into_iter().flatten().filter_map(Json::as_str);
            names.extend(found.map(str::to_owned));
        }
        names.extend(self.promoted(turn));
        // Another process may have had other tools.
        names.retain(|name| self.tools.iter().any(|(spec, _)| spec.name == *name));
        names
    }

    /// The tools that the user's message loads by its words: those with the highest priority, then those with the most
    /// matching keywords.
    pub(crate) fn promoted(&self, turn: &[Json]) -> Vec<String> {
        let Some(question) = turn.iter().rfind(|message| message::is_from_user(message)) else {
            return Vec::new();
        };
        let question = message::text(question).to_lowercase();
        let mut found: Vec<(Reverse<(i64, usize)>, &str)> = Vec::new();
        for (spec, routing) in &self.tools {
            let Some(routing) = routing else { continue };
            let hits = routing
                .keywords
                .iter()
                .filter(|keyword| has_words(&question, &keyword.trim().to_lowercase()));
            let hits = hits.count();
            if hits > 0 {
                found.push((Reverse((routing.priority, hits)), &spec.name));
            }
        }
        found.sort_unstable();
        found.into_iter().take(self.auto_promote).map(|(_, name)| name.to_owned()).collect()
    }

    fn search(&self, query: &str, stop: &Stop) -> ToolOutput {
        let catalog: Vec<&ToolSpec> = self.tools.iter().map(|(spec, _)| spec).collect();
        let found = query::search(&catalog, query, stop);
        if found.is_empty() {
            let query: String = query.chars().take(200).collect();
            return ToolOutput::text(format!("No tools found matching: {query}"));
        }
        let (mut size, mut schemas, mut names, mut left_out) = (0, Vec::new(), Vec::new(), Vec::new());
        for spec in found {
            let schema = shown(spec);
            size += schema.to_string().chars().count() + 1;
            if size > RESULT_MAX {
                left_out.push(spec.name.as_str());
            } else {
                schemas.push(schema);
                names.push(spec.name.as_str());
            }
        }
        let mut text = Json::Array(schemas).to_string();
        if !left_out.is_empty() {
            text.push_str("\nToo much for one result, not loaded; select fewer at a time: ");
            text.push_str(&left_out.join(", "));
        }
        let promotion = json!({"catalog_hash": self.hash, "names": names});
        let mut output = ToolOutput::text(text);
        output.additional_kwargs.insert(PROMOTION.to_owned(), promotion);
        output
    }
}

/// A tool as the model reads it.
fn shown(spec: &ToolSpec) -> Json {
    json!({"name": spec.name, "description": spec.description, "parameters": spec.parameters})
}

/// Whether a text has these words, with none of its letters around them. Scripts without spaces have no such border.
fn has_words(text: &str, words: &str) -> bool {
    let is_inside =
        |neighbour: Option<char>| words.is_ascii() && neighbour.is_some_and(char::is_alphanumeric);
    !words.is_empty()
        && text.match_indices(words).any(|(at, _)| {
            !is_inside(text[..at].chars().next_back()) && !is_inside(text[at + words.len()..].chars().next())
        })
}

/// The tool `tool_search`.
struct Search(Arc<Deferred>);

#[async_trait]
impl Tool for Search {
    fn spec(&self) -> ToolSpec {
        ToolSpec {
            name: TOOL_SEARCH.to_owned(),
            description: "Loads further tools, so that you can call them, and shows what they take. Queries: \
                `select:name,other_name` loads these; `+word more words` finds tools whose name has the word, best matches first; \
                anything else is a pattern (a regular expression) for names and descriptions. A search finds at most five."
                .to_owned(),
            parameters: json!({
                "type": "object",
                "properties": {"query": {"type": "string", "description": "The query."}},
                "required": ["query"],
            }),
        }
    }

    fn output_max_chars(&self) -> usize {
        // With the names of what is left out.
        2 * RESULT_MAX
    }

    async fn call(&self, _: &ToolContext, args: Json) -> Result<ToolOutput, ToolError> {
        let query = args["query"].as_str().unwrap_or_default().to_owned();
        let deferred = Arc::clone(&self.0);
        blocking(move |stop| {
            let output = deferred.search(&query, stop);
            if stop.is_due() { Err(ToolError::Failed(Stop::notice())) } else { Ok(output) }
        })
        .await
    }
}
