//! What the context of a request asks for: keys of the service that the gateway does, each with its type, and those that it
//! does not do, which are refused by name. Keys that the service does not know are the caller's own.

use serde_json::Value;

use super::delegation;
use crate::http::assistants::{is_lead_agent, only_one};
use crate::http::fields::{Fields, Flaw};
use crate::runs::request::{DISABLE_CLARIFICATION, NON_INTERACTIVE};

/// Modes of the service that the gateway does not have, each with what to do instead.
const NOT_DONE: [(&str, &str); 2] = [
    ("is_plan_mode", "Threadkeep has no plan mode; leave the key out, and ask for a plan in the message"),
    ("is_bootstrap", "Threadkeep has no agents that a conversation sets up; leave the key out"),
];
/// The keys of credentials.
const CREDENTIALS: [&str; 2] = ["secrets", "github_token"];
const NO_CREDENTIALS: &str = "No tool of Threadkeep takes credentials from a request; leave the key out, and configure the tool with them";

/// Checks the keys of a context, or of `config.configurable`, which has the same keys.
pub(super) fn check(context: &mut Fields<'_>) {
    delegation::check(context);
    for key in ["thinking_enabled", DISABLE_CLARIFICATION, NON_INTERACTIVE] {
        typed(context, key, Value::is_boolean, boolean);
    }
    for key in ["mode", "reasoning_effort"] {
        typed(context, key, Value::is_string, || Flaw::new("string_type", "Input should be a valid string"));
    }
    for (key, sentence) in NOT_DONE {
        typed(context, key, Value::is_boolean, boolean);
        typed(context, key, |value| value != true, || Flaw::unsupported(sentence));
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
    for key in CREDENTIALS {
        let is_there = |value: &Value| match value {
            Value::Null => false,
            Value::Object(entries) => !entries.is_empty(),
            _ => true,
        };
        if context.peek(key).is_some_and(is_there) {
            context.refuse(key, Flaw::unsupported(NO_CREDENTIALS), Value::Null);
        }
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
