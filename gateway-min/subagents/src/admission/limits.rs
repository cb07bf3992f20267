//! The limits of one run: how many delegations at once, and how many in total.

/// The most delegations at once that a response of the model may ask for, and the default.
const CONCURRENT_MAX: i64 = 64;
const CONCURRENT_DEFAULT: i64 = 3;
/// The most delegations of a run.
const TOTAL_MAX: i64 = 50;

/// How many delegations one response of the model may start: what the request asks for, or 3; at least 1, at most 64 and
/// at most `max_running`, the slots of this process (service reference, "Request context keys (runs)"). The prompt and
/// the enforcement use this one value.
pub fn concurrency(requested: Option<i64>, max_running: u32) -> u32 {
    let most = CONCURRENT_MAX.min(i64::from(max_running));
    clamped(requested.unwrap_or(CONCURRENT_DEFAULT).min(most), CONCURRENT_MAX)
}

/// How many delegations a run may start in total: what the request asks for, or `subagents.max_total_per_run`; at least
/// 1, at most 50 (service reference, "Request context keys (runs)").
pub fn total(requested: Option<i64>, configured: u32) -> u32 {
    clamped(requested.unwrap_or(configured.into()), TOTAL_MAX)
}

fn clamped(number: i64, most: i64) -> u32 {
    u32::try_from(number.clamp(1, most)).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s41_concurrency_is_clamped_to_the_slots_of_the_process() {
        for (requested, max_running, expected) in [
            (None, 3, 3),
            (Some(0), 3, 1),
            (Some(1), 3, 1),
            (Some(64), 3, 3),
            (Some(65), 3, 3),
            (Some(i64::MIN), 3, 1),
            (None, 1, 1),
            (None, 64, 3),
            (Some(65), 64, 64),
            (Some(i64::MAX), 64, 64),
        ] {
            assert_eq!(concurrency(requested, max_running), expected, "{requested:?} of {max_running}");
        }
    }

    #[test]
    fn s44_totals_are_clamped_to_1_and_50() {
        for (requested, configured, expected) in [
            (None, 6, 6),
            (Some(0), 6, 1),
            (Some(1), 6, 1),
            (Some(50), 6, 50),
            (Some(51), 6, 50),
            (Some(-3), 6, 1),
        ] {
            assert_eq!(total(requested, configured), expected, "{requested:?}");
        }
    }
}
