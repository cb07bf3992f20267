//! Converts the value of a field.

use std::collections::HashSet;
use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::{Fields, Flaw, Loc, Pattern, Problems};

/// A field taken from its object. Each way to read it returns `None` if the field is absent, or if it was refused and
/// the problem reported.
#[derive(Debug)]
#[must_use = "a field that is not read is not checked"]
pub struct Field<'p> {
    value: Option<Value>,
    loc: Vec<Loc>,
    problems: &'p mut Problems,
}

/// A value, or its flaw.
type Read<T> = Result<T, (Flaw, Value)>;

impl<'p> Field<'p> {
    pub(super) fn new(value: Option<Value>, loc: Vec<Loc>, problems: &'p mut Problems) -> Self {
        Self { value, loc, problems }
    }

    /// Reports the field if it is absent.
    pub fn required(self) -> Self {
        if self.value.is_none() {
            self.problems.add(self.loc.clone(), Flaw::missing(), Value::Null);
        }
        self
    }

    /// Treats null as absent.
    pub fn nullable(mut self) -> Self {
        self.value = self.value.filter(|value| !value.is_null());
        self
    }

    /// Reports a list with more items than this, none of which is read then.
    pub fn at_most(mut self, max: usize) -> Self {
        let found = self.value.as_ref().and_then(Value::as_array).map_or(0, Vec::len);
        if found > max {
            self.value = None;
            self.problems.add(self.loc.clone(), Flaw::too_long(max, found), Value::Null);
        }
        self
    }

    /// Whether the field is present and a string, for a field with alternatives.
    pub fn is_text(&self) -> bool {
        self.value.as_ref().is_some_and(Value::is_string)
    }

    /// Whether the field is a string of which this is true.
    pub fn is_text_of(&self, is: impl FnOnce(&str) -> bool) -> bool {
        self.value.as_ref().and_then(Value::as_str).is_some_and(is)
    }

    /// The value converted by `read`; reports the flaw that it returns.
    pub fn read<T>(self, read: impl FnOnce(Value) -> Read<T>) -> Option<T> {
        match read(self.value?) {
            Ok(value) => Some(value),
            Err((flaw, input)) => {
                self.problems.add(self.loc, flaw, input);
                None
            }
        }
    }

    /// Any value.
    pub fn any(self) -> Option<Value> {
        self.value
    }

    /// A string.
    pub fn text(self) -> Option<String> {
        self.read(text)
    }

    /// A string that is not blank, without the space around it.
    pub fn text_trimmed(self) -> Option<String> {
        self.read(|value| {
            let text = text(value)?;
            match Flaw::bad_length(text.trim().chars().count(), &(1..=usize::MAX)) {
                Some(flaw) => Err((flaw, text.into())),
                None => Ok(text.trim().to_owned()),
            }
        })
    }

    /// A string whose length in characters is in the range.
    pub fn text_sized(self, range: &RangeInclusive<usize>) -> Option<String> {
        self.read(|value| {
            let text = text(value)?;
            match Flaw::bad_length(text.chars().count(), range) {
                Some(flaw) => Err((flaw, text.into())),
                None => Ok(text),
            }
        })
    }

    /// A string that matches the pattern.
    pub fn text_matching(self, pattern: &Pattern) -> Option<String> {
        self.read(|value| {
            let text = text(value)?;
            if pattern.matches(&text) { Ok(text) } else { Err((Flaw::pattern(pattern), text.into())) }
        })
    }

    /// One of these strings.
    pub fn one_of(self, allowed: &[&'static str]) -> Option<&'static str> {
        self.read(|value| match allowed.iter().find(|text| value == **text) {
            Some(text) => Ok(*text),
            None => Err((Flaw::literal(allowed), value)),
        })
    }

    /// An integer in this range, also one with a fraction of zero; outside of a body, a string that spells an integer.
    pub fn integer(self, range: &RangeInclusive<i64>) -> Option<i64> {
        self.integer_as(range, |number| number)
    }

    /// The same, except that an integer above the range, however large, counts as the end of the range.
    pub fn clamped(self, range: &RangeInclusive<i64>) -> Option<i64> {
        self.integer_as(range, |number| number.min((*range.end()).into()))
    }

    fn integer_as(self, range: &RangeInclusive<i64>, counts_as: impl FnOnce(i128) -> i128) -> Option<i64> {
        let spelt = self.is_spelt();
        self.read(|value| {
            let number = integer(&value, spelt).map_err(|flaw| (flaw, value.clone()))?;
            match i64::try_from(counts_as(number)).ok().filter(|number| range.contains(number)) {
                Some(number) => Ok(number),
                None => Err((Flaw::out_of_range(number, range), value)),
            }
        })
    }

    /// A boolean; outside of a body, one of the usual words for it.
    pub fn flag(self) -> Option<bool> {
        let spelt = self.is_spelt();
        self.read(|value| flag(&value, spelt).map_err(|flaw| (flaw, value)))
    }

    /// Whether the field comes from where everything is a string.
    fn is_spelt(&self) -> bool {
        self.loc.first() != Some(&Loc::from("body"))
    }

    /// An object.
    pub fn object(self) -> Option<Map<String, Value>> {
        self.read(object)
    }

    /// An object, to read its fields.
    pub fn fields(self) -> Option<Fields<'p>> {
        match object(self.value?) {
            Ok(values) => Some(Fields::new(values, self.loc, self.problems)),
            Err((flaw, input)) => {
                self.problems.add(self.loc, flaw, input);
                None
            }
        }
    }

    /// A list of strings. Any other item is reported at its index.
    #[allow(
        clippy::redundant_closure_for_method_calls,
        reason = "the method is not general over the lifetime"
    )]
    pub fn texts(self) -> Option<Vec<String>> {
        self.each(|item| item.text())
    }

    /// A list of strings that are not blank, without the space around them; one that is there twice counts once.
    #[allow(
        clippy::redundant_closure_for_method_calls,
        reason = "the method is not general over the lifetime"
    )]
    pub fn names(self) -> Option<Vec<String>> {
        let mut names = self.each(|item| item.text_trimmed())?;
        let mut seen = HashSet::new();
        names.retain(|name| seen.insert(name.clone()));
        Some(names)
    }

    /// A list of these strings. Any other item is reported at its index. One that is there twice counts once: a body
    /// has room for millions, which would be gone through for each field of each item of a response.
    pub fn each_of(self, allowed: &[&'static str]) -> Option<Vec<&'static str>> {
        let mut chosen = self.each(|item| item.one_of(allowed))?;
        let mut seen = HashSet::new();
        chosen.retain(|name| seen.insert(*name));
        Some(chosen)
    }

    /// A list of objects, each read by `read`. A field that it does not take is refused.
    pub fn items<T>(self, mut read: impl FnMut(&mut Fields<'_>) -> T) -> Option<Vec<T>> {
        self.each(|item| {
            let mut fields = item.fields()?;
            let value = read(&mut fields);
            fields.deny_others();
            Some(value)
        })
    }

    /// A list, in the forms that a query has for it: the parameter repeated, one name, names separated by commas, or the
    /// JSON of a list. A body has one form.
    pub fn listed(mut self) -> Self {
        if self.loc.first() == Some(&Loc::from("query"))
            && let Some(Value::String(text)) = &self.value
        {
            let list = match threadkeep::json::from_slice(text.as_bytes()) {
                // What a client sends for none.
                _ if text.is_empty() => Value::Array(Vec::new()),
                Ok(list @ Value::Array(_)) => list,
                _ => text.split(',').map(Value::from).collect(),
            };
            self.value = Some(list);
        }
        self
    }

    /// A list whose items are read by `read`.
    pub fn each<T>(self, mut read: impl FnMut(Field<'_>) -> Option<T>) -> Option<Vec<T>> {
        let list = match self.value? {
            Value::Array(list) => list,
            other => {
                let flaw = Flaw::new("list_type", "Input should be a valid list");
                self.problems.add(self.loc, flaw, other);
                return None;
            }
        };
        let mut items = Vec::with_capacity(list.len());
        for (index, value) in list.into_iter().enumerate() {
            let loc = self.loc.iter().cloned().chain([index.into()]).collect();
            items.extend(read(Field::new(Some(value), loc, self.problems)));
        }
        Some(items)
    }

    /// Nothing but null: what the gateway does not do, with the sentence that says so.
    pub fn unsupported(self, sentence: &str) {
        let _: Option<()> = self.nullable().read(|value| Err((Flaw::unsupported(sentence), value)));
    }
}

fn text(value: Value) -> Read<String> {
    match value {
        Value::String(text) => Ok(text),
        other => Err((Flaw::new("string_type", "Input should be a valid string"), other)),
    }
}

fn object(value: Value) -> Read<Map<String, Value>> {
    match value {
        Value::Object(map) => Ok(map),
        other => Err((Flaw::new("dict_type", "Input should be a valid dictionary"), other)),
    }
}

/// The positive integer that a number is, also if it is written as `3.0`, which is the same number to JSON. What is larger
/// than a `u64` is the largest.
pub fn positive(value: &Value) -> Option<u64> {
    let number = integer(value, false).ok().filter(|number| *number > 0)?;
    Some(u64::try_from(number).unwrap_or(u64::MAX))
}

fn integer(value: &Value, spelt: bool) -> Result<i128, Flaw> {
    const INTEGER: &str = "Input should be a valid integer";
    match value {
        Value::Number(number) => {
            if let Some(number) = number.as_i64() {
                return Ok(number.into());
            }
            match number.as_f64() {
                // Also what is beyond `i64`, which no range contains.
                #[allow(clippy::cast_possible_truncation)]
                Some(float) if float.fract() == 0.0 => Ok(float as i128),
                _ => Err(Flaw::new(
                    "int_from_float",
                    format!("{INTEGER}, got a number with a fractional part"),
                )),
            }
        }
        Value::String(text) if spelt => text.trim().parse().map_err(|_| {
            Flaw::new("int_parsing", format!("{INTEGER}, unable to parse string as an integer"))
        }),
        _ => Err(Flaw::new("int_type", INTEGER)),
    }
}

fn flag(value: &Value, spelt: bool) -> Result<bool, Flaw> {
    const BOOLEAN: &str = "Input should be a valid boolean";
    let unclear = || Flaw::new("bool_parsing", format!("{BOOLEAN}, unable to interpret input"));
    match value {
        Value::Bool(flag) => Ok(*flag),
        Value::String(text) if spelt => match text.to_ascii_lowercase().as_str() {
            "0" | "off" | "f" | "false" | "n" | "no" => Ok(false),
            "1" | "on" | "t" | "true" | "y" | "yes" => Ok(true),
            _ => Err(unclear()),
        },
        _ => Err(Flaw::new("bool_type", BOOLEAN)),
    }
}
