//! The queries of `tool_search`.

use std::cmp::Reverse;

use regex::RegexBuilder;

use super::super::pool::Stop;
use crate::model::ToolSpec;

/// The most tools that a search finds; a selection by name finds all.
const FOUND_MAX: usize = 5;
/// The longest query that is looked at, in characters.
const QUERY_MAX: usize = 1_000;
/// How large a compiled pattern may be, in bytes.
const PATTERN_MAX: usize = 256 * 1024;

/// The tools of `catalog` that a query names: `select:a,b` these, `+word more words` those whose name has the word, else those
/// whose name or description matches the pattern. An invalid pattern is a literal text; a blank query finds nothing.
/// When it has to stop, it returns what it has found by then.
pub(super) fn search<'c>(catalog: &[&'c ToolSpec], query: &str, stop: &Stop) -> Vec<&'c ToolSpec> {
    let query = query.trim();
    if let Some(names) = query.strip_prefix("select:") {
        return select(catalog, names, stop);
    }
    let query: String = query.chars().take(QUERY_MAX).collect();
    if query.is_empty() {
        return Vec::new();
    }
    let mut found = match query.strip_prefix('+') {
        Some(words) => with_word(catalog, words),
        None => matching(catalog, &query, stop),
    };
    found.truncate(FOUND_MAX);
    found
}

fn select<'c>(catalog: &[&'c ToolSpec], names: &str, stop: &Stop) -> Vec<&'c ToolSpec> {
    let mut found: Vec<&ToolSpec> = Vec::new();
    for name in names.split(',').map(str::trim).take_while(|_| !stop.is_due()) {
        if let Some(spec) = catalog.iter().find(|spec| spec.name == name)
            && !found.iter().any(|known| known.name == name)
        {
            found.push(spec);
        }
    }
    found
}

fn with_word<'c>(catalog: &[&'c ToolSpec], words: &str) -> Vec<&'c ToolSpec> {
    let words = words.to_lowercase();
    let mut words = words.split_whitespace();
    let Some(required) = words.next() else { return Vec::new() };
    let others: Vec<&str> = words.collect();
    let rank = |spec: &ToolSpec| -> usize {
        let (name, description) = (spec.name.to_lowercase(), spec.description.to_lowercase());
        // A word in the name says more than one in the description.
        let of_word =
            |word: &&str| 2 * usize::from(name.contains(word)) + usize::from(description.contains(word));
        others.iter().map(of_word).sum()
    };
    let mut found: Vec<&ToolSpec> =
        catalog.iter().filter(|spec| spec.name.to_lowercase().contains(required)).copied().collect();
    found.sort_by_key(|spec| Reverse(rank(spec)));
    found
}

fn matching<'c>(catalog: &[&'c ToolSpec], pattern: &str, stop: &Stop) -> Vec<&'c ToolSpec> {
    let build =
        |pattern: &str| RegexBuilder::new(pattern).case_insensitive(true).size_limit(PATTERN_MAX).build();
    let Ok(pattern) = build(pattern).or_else(|_| build(&regex::escape(pattern))) else { return Vec::new() };
    let matches = |text: &str| !stop.is_due() && pattern.is_match(text);
    let (by_name, others): (Vec<&ToolSpec>, Vec<&ToolSpec>) =
        catalog.iter().copied().partition(|spec| matches(&spec.name));
    let by_description = others.into_iter().filter(|spec| matches(&spec.description));
    by_name.into_iter().chain(by_description).collect()
}
