//! The date in agents' prompts.

use std::sync::Arc;

use chrono::{DateTime, Local, Utc};
use chrono_tz::Tz;
use threadkeep_config::Environment;

/// The variable that names the zone, such as `Europe/Berlin` (service reference, "Subagent settings").
pub const DATE_TIMEZONE_VARIABLE: &str = "SVC_DATE_TIMEZONE";

/// The zone of the dates in agents' prompts. By default the server's.
#[derive(Debug, Clone, Default)]
pub struct DateZone(Option<Arc<Tz>>);

impl DateZone {
    /// The zone that [`DATE_TIMEZONE_VARIABLE`] names. Without the variable, or with a name that is none, it is the
    /// server's; the latter is logged, so call this once.
    pub fn of(environment: &Environment) -> Self {
        let Some(name) = environment.non_empty(DATE_TIMEZONE_VARIABLE) else { return Self::default() };
        let zone = name.trim().parse::<Tz>().inspect_err(|_| {
            tracing::warn!(
                "{DATE_TIMEZONE_VARIABLE} is '{name}', which is no IANA time zone; dates are in the server's zone. Set it to \
                 a name such as Europe/Berlin"
            );
        });
        Self(zone.ok().map(Arc::new))
    }

    /// The date at `now` with its day of the week, for example `2026-01-31, Saturday`.
    pub fn date(&self, now: DateTime<Utc>) -> String {
        let format = "%Y-%m-%d, %A";
        match &self.0 {
            Some(zone) => now.with_timezone(&**zone).format(format).to_string(),
            None => now.with_timezone(&Local).format(format).to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use threadkeep_testing::Log;

    use super::*;

    fn zone(value: Option<&str>) -> DateZone {
        DateZone::of(&value.map(|value| (DATE_TIMEZONE_VARIABLE, value)).into_iter().collect())
    }

    fn at(time: &str) -> DateTime<Utc> {
        time.parse().unwrap()
    }

    #[test]
    fn s80_a_date_is_that_of_the_zone_on_both_sides_of_midnight() {
        for (name, time, date) in [
            ("UTC", "2026-01-31T23:59:59Z", "2026-01-31, Saturday"),
            ("UTC", "2026-02-01T00:00:00Z", "2026-02-01, Sunday"),
            ("Pacific/Auckland", "2026-01-31T10:59:59Z", "2026-01-31, Saturday"),
            ("Pacific/Auckland", "2026-01-31T11:00:00Z", "2026-02-01, Sunday"),
            ("America/Los_Angeles", "2026-02-01T07:59:59Z", "2026-01-31, Saturday"),
            ("America/Los_Angeles", "2026-02-01T08:00:00Z", "2026-02-01, Sunday"),
            // Daylight saving time.
            ("Europe/Berlin", "2026-07-01T21:59:59Z", "2026-07-01, Wednesday"),
            ("Europe/Berlin", "2026-07-01T22:00:00Z", "2026-07-02, Thursday"),
        ] {
            assert_eq!(zone(Some(name)).date(at(time)), date, "{name} {time}");
        }
    }

    #[test]
    fn s80_without_a_zone_or_with_an_unknown_one_it_is_the_servers() {
        let log = Log::default();
        let subscriber = tracing_subscriber::fmt().with_writer(log.clone()).finish();
        tracing::subscriber::with_default(subscriber, || {
            let zones = [zone(None), zone(Some("")), zone(Some("Mars/Olympus"))];
            for hour in 0..24 {
                let now = at(&format!("2026-03-01T{hour:02}:30:00Z"));
                let local = now.with_timezone(&Local).format("%Y-%m-%d, %A").to_string();
                for zone in &zones {
                    assert_eq!(zone.date(now), local, "{zone:?}");
                }
            }
        });
        let log = log.text();
        assert_eq!(log.matches("WARN").count(), 1, "{log}");
        assert!(log.contains("SVC_DATE_TIMEZONE is 'Mars/Olympus'"), "{log}");
    }
}
