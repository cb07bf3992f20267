//! What the context of a request asks for: keys of the service, each with its type, and what the gateway refuses by name: another
//! agent, and credentials. Keys that the service does not know are the caller's own.

use serde_json::Value;

use super::delegation;
use crate::http::assistants::{is_lead_agent, only_one};
use crate::http::fields::{Fields, Flaw};
use crate::runs::request::{DISABLE_CLARIFICATION, NON_INTERACTIVE};

/// The key of credentials of any name. The one with its own name, `github_token`, is of the service: it is accepted, and dropped,
/// because no tool takes it.
const SECRETS: &str = "secrets";
const NO_CREDENTIALS: &str = "No tool of Threadkeep takes credentials from a request; leave the key out, and configure the tool with them";

/// Checks the keys of a context, or of `config.configurable`, which has the same keys.
pub(super) fn check(context: &mut Fields<'_>) {
    delegation::check(context);
    for key in ["thinking_enabled", "is_plan_mode", "is_bootstrap", DISABLE_CLARIFICATION, NON_INTERACTIVE] {
        typed(context, key, Value::is_boolean, boolean);
    }
    for key in ["mode", "reasoning_effort"] {
        typed(context, key, Value::is_string, || Flaw::new("string_type", "Input should be a valid string"));
    }
    typed(
        context,
        "agent_name",
        |value| value.as_str().is_some_and(is_lead_agent),
        || Flaw::new("unknown_assistant", only_one()),
    );
}

/// Refuses credentials, which nothing would use. Their values are not repeated.
pub(super) fn check_credentials(context: &mut Fields<'_>) {
    let is_there = |value: &Value| match value {
        Value::Null => false,
        Value::Object(entries) => !entries.is_empty(),
        _ => true,
    };
    if context.peek(SECRETS).is_some_and(is_there) {
        context.refuse(SECRETS, Flaw::unsupported(NO_CREDENTIALS), Value::Null);
    }
}

/// Refuses the key if its value is not valid; null is an absent value.
pub(super) fn typed(
    context: &mut Fields<'_>,
    key: &str,
    is_valid: impl Fn(&Value) -> bool,
    flaw: impl Fn() -> Flaw,
) {
    let sent = context.peek(key).filter(|value| !value.is_null() && !is_valid(value)).cloned();
    if let Some(value) = sent {
        context.refuse(key, flaw(), value);
    }
}

pub(super) fn boolean() -> Flaw {
    Flaw::new("bool_type", "Input should be a valid boolean")
}
