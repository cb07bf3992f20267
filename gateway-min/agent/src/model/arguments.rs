//! The arguments of a tool call, as a model writes them.

use serde_json::{Map, Value, json};
use threadkeep::json::is_deeper;

/// The deepest nesting of the arguments of a call. Messages, events and the rows of delegations contain them, and are
/// stored as JSON, of which more than 127 levels cannot be read back.
const MAX_ARGS_DEPTH: usize = 64;

/// What the model reads of a call whose arguments do not end: the same call would be cut off again.
pub(super) const CUT_OFF: &str =
    "the answer was cut off in the middle of the arguments. If it was too long, write less at once";

/// The stop reason of a run whose last answer was as long as one may be.
pub(crate) const LENGTH_CAPPED: &str = "model_length_capped";

/// Whether a provider that gives this reason ended an answer, and so its last call, before the end.
pub fn is_cut_off(finish_reason: Option<&str>) -> bool {
    capped(finish_reason).is_some()
}

/// Why a run stopped early whose last answer the provider ended before the end, for this reason.
pub(crate) fn capped(finish_reason: Option<&str>) -> Option<&'static str> {
    match finish_reason? {
        "length" | "model_length" | "max_tokens" => Some(LENGTH_CAPPED),
        "content_filter" => Some("safety_capped"),
        _ => None,
    }
}

/// The arguments of a call of the tool `name`, from the text that the model wrote. The last call of an answer that
/// [was cut off](is_cut_off) needs a text: it would run without arguments.
///
/// # Errors
/// Why the call is invalid.
pub fn call_arguments(name: Option<&str>, text: &str, is_cut_off: bool) -> Result<Value, String> {
    if name.is_none() {
        return Err("the call names no tool".to_owned());
    }
    if is_cut_off && text.trim().is_empty() {
        return Err("the answer was cut off before the arguments".to_owned());
    }
    parse_arguments(text).map_err(|error| if is_cut_off { CUT_OFF.to_owned() } else { error })
}

/// The arguments of a tool call, from the text that the model wrote: none if that is empty or `null`. Some models write
/// the object as JSON within a string.
///
/// # Errors
/// Why they are invalid.
fn parse_arguments(text: &str) -> Result<Value, String> {
    if matches!(text.trim(), "" | "null") {
        return Ok(json!({}));
    }
    let object = threadkeep::json::from_str::<Map<String, Value>>;
    let within_string = || serde_json::from_str::<String>(text).ok().and_then(|text| object(&text).ok());
    let args = object(text).or_else(|error| within_string().ok_or(error));
    let args = args.map_err(|error| format!("the arguments are not a JSON object: {error}"))?;
    if args.values().any(|arg| is_deeper(arg, MAX_ARGS_DEPTH - 1)) {
        return Err(format!("the arguments are nested more than {MAX_ARGS_DEPTH} levels deep"));
    }
    Ok(Value::Object(args))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_an_object_also_as_null_or_within_a_string() {
        for text in ["", " \n", "null", " null\n", "{}", r#""{}""#] {
            assert_eq!(parse_arguments(text), Ok(json!({})), "{text}");
        }
        assert_eq!(parse_arguments(r#" "{\"path\": \"x\"}" "#), Ok(json!({"path": "x"})));
        for text in [r#""x""#, r#""null""#, r#""[1]""#, "[]", "0", r#""{\"n\": 18446744073709551616}""#] {
            assert!(parse_arguments(text).unwrap_err().contains("not a JSON object"), "{text}");
        }
    }
}
