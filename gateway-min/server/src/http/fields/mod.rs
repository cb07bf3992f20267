//! Reads the fields of a request, and collects its problems.
//!
//! A route describes its input by implementing [`FromFields`]; the extractors of [`extract`](super::extract) apply it
//! to a JSON body, a query string or a path. Every flaw becomes an item `{type, loc, msg, input, ctx?}` of a 422
//! response, in the vocabulary of the validation library that the service's clients know, and all flaws are reported at
//! once. In a query, which consists of strings, a string that spells a number or a boolean is accepted as one; in a body it
//! is not: there a client that sends one means something else.

mod problem;
mod read;

use serde_json::{Map, Value};

pub use problem::{Flaw, Loc, Problems, bounded, shortened};
pub use read::{Field, positive};
pub use threadkeep_agent::Pattern;

/// The input of a route: its body, its query or its path parameters.
pub trait FromFields: Sized {
    /// Whether a missing body counts as `{}`.
    const BODY_OPTIONAL: bool = false;

    /// Reads the fields. The replacement for a refused field does not matter: if any problem was reported, the value is
    /// discarded. Fields that are left are refused: nothing that a client sends is dropped.
    fn from_fields(fields: &mut Fields<'_>) -> Self;
}

/// The fields of an object of the request.
#[derive(Debug)]
pub struct Fields<'p> {
    values: Map<String, Value>,
    loc: Vec<Loc>,
    problems: &'p mut Problems,
}

impl<'p> Fields<'p> {
    /// The fields of `values`, which is at `loc` in the request; flaws are added to `problems`.
    pub fn new(values: Map<String, Value>, loc: Vec<Loc>, problems: &'p mut Problems) -> Self {
        Self { values, loc, problems }
    }

    /// The value of a field that has not been taken yet.
    pub fn peek(&self, name: &str) -> Option<&Value> {
        self.values.get(name)
    }

    /// The fields that have not been taken.
    pub fn into_rest(self) -> Map<String, Value> {
        self.values
    }

    /// Takes a field. It may be absent but not null, unless the [`Field`] allows it.
    pub fn field(&mut self, name: &str) -> Field<'_> {
        let mut loc = self.loc.clone();
        loc.push(name.into());
        Field::new(self.values.remove(name), loc, self.problems)
    }

    /// Renames every field by `name`. A field that then meets another one of that name is dropped if it is the same value
    /// again, and else keeps its name.
    pub fn rename(&mut self, name: impl Fn(&str) -> String) {
        let sent = std::mem::take(&mut self.values).into_iter();
        let (renamed, kept): (Vec<_>, Vec<_>) = sent.partition(|(sent, _)| name(sent) != *sent);
        self.values.extend(kept);
        for (sent, value) in renamed {
            let name = name(&sent);
            match self.values.get(&name) {
                Some(same) if *same == value => {}
                Some(_) => _ = self.values.insert(sent, value),
                None => _ = self.values.insert(name, value),
            }
        }
    }

    /// Reports a flaw of a taken field.
    pub fn refuse(&mut self, name: &str, flaw: Flaw, input: Value) {
        let loc = self.loc.iter().cloned().chain([name.into()]).collect();
        self.problems.add(loc, flaw, input);
    }

    /// Reports a flaw of a field of the taken object `within`.
    pub fn refuse_in(&mut self, within: &str, name: &str, flaw: Flaw, input: Value) {
        let loc = self.loc.iter().cloned().chain([within.into(), name.into()]).collect();
        self.problems.add(loc, flaw, input);
    }

    /// Drops every field that has not been taken: for a route whose contract says so.
    pub fn ignore_others(&mut self) {
        self.values.clear();
    }

    /// Refuses every field that has not been taken.
    pub fn deny_others(&mut self) {
        for (name, value) in std::mem::take(&mut self.values) {
            self.refuse(&name, Flaw::extra_forbidden(), value);
        }
    }
}

#[cfg(test)]
mod tests;
