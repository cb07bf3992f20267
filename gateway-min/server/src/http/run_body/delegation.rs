//! What a request says about delegation: three keys of the run's context. A value of another type would switch
//! delegation on or off unnoticed.

use serde_json::{Map, Value};
use threadkeep_subagents::admission::{concurrency, total};

use super::RunLimits;
use super::context::{boolean, typed};
use crate::http::fields::{Fields, Flaw};
use crate::runs::request::Delegation;

const ENABLED: &str = "subagent_enabled";
const CONCURRENT: &str = "max_concurrent_subagents";
const TOTAL: &str = "max_total_subagents";

/// Refuses a key with a value of another type than JSON's boolean or integer; null is an absent value.
pub(super) fn check(context: &mut Fields<'_>) {
    typed(context, ENABLED, Value::is_boolean, boolean);
    for key in [CONCURRENT, TOTAL] {
        typed(context, key, is_integer, || Flaw::new("int_type", "Input should be a valid integer"));
    }
}

/// Whether it is an integer: `3`, or `3.0`, which is the same number to JSON.
fn is_integer(value: &Value) -> bool {
    value.as_f64().is_some_and(|number| number.fract() == 0.0)
}

/// What the run may delegate, by the context that reaches it (service reference, "Request context keys (runs)").
pub(super) fn of_context(context: &Map<String, Value>, limits: RunLimits) -> Delegation {
    // The conversion saturates: what is beyond the range of `i64` is beyond every limit.
    #[allow(clippy::cast_possible_truncation)]
    let number = |key: &str| {
        let number = context.get(key)?;
        number.as_i64().or_else(|| Some(number.as_f64()? as i64))
    };
    Delegation {
        enabled: context.get(ENABLED).and_then(Value::as_bool).unwrap_or(false),
        max_concurrent: concurrency(number(CONCURRENT), limits.max_running),
        max_total: total(number(TOTAL), limits.max_total_per_run),
    }
}
