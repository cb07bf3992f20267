//! The arguments of a tool call, as a model writes them.

use serde_json::{Map, Value, json};
use threadkeep::json::is_deeper;

/// The deepest nesting of the arguments of a call. Messages, events and the rows of delegations contain them, and are
/// stored as JSON, of which more than 127 levels cannot be read back.
const MAX_ARGS_DEPTH: usize = 64;

/// The arguments of a tool call, from the text that the model wrote: none if that is empty.
///
/// # Errors
/// Why they are invalid.
pub fn parse_arguments(text: &str) -> Result<Value, String> {
    if text.trim().is_empty() {
        return Ok(json!({}));
    }
    let args = threadkeep::json::from_str::<Map<String, Value>>(text);
    let args = args.map_err(|error| format!("the arguments are not a JSON object: {error}"))?;
    if args.values().any(|arg| is_deeper(arg, MAX_ARGS_DEPTH - 1)) {
        return Err(format!("the arguments are nested more than {MAX_ARGS_DEPTH} levels deep"));
    }
    Ok(Value::Object(args))
}
