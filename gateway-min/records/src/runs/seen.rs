//! What a process has seen of the leases of others.
//!
//! A lease says by a wall clock when it ends, and wall clocks are set: to one that has jumped, every lease is over, and
//! a machine that was suspended wakes up after the end of all its own. So a process takes another one for dead only if
//! it has also seen that the lease did not change for a lease's length by a clock that nobody sets. By then the owner
//! has missed three renewals, and has given its runs up by such a clock of its own.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

/// The leases at the last look of a process that looks for dead ones, and since when they have been as they are.
#[derive(Debug)]
pub struct SeenLeases {
    length: Duration,
    rows: HashMap<String, (String, Instant)>,
}

impl SeenLeases {
    /// Nothing is seen yet. A lease that is not renewed for this `length` may be of a dead process.
    pub fn new(length: Duration) -> Self {
        Self { length, rows: HashMap::new() }
    }

    /// Looks at all rows at work that have leases, each with its end as text, which were read before `now`. Returns the
    /// [marks](mark) of those that are over: by their text before `over_before`, and unchanged for long enough.
    pub(super) fn look(
        &mut self,
        leases: Vec<(String, String)>,
        now: Instant,
        over_before: &str,
    ) -> Vec<String> {
        let mut earlier = std::mem::take(&mut self.rows);
        let mut over = Vec::new();
        for (row, end) in leases {
            let since = match earlier.remove(&row) {
                Some((known, since)) if known == end => since,
                _ => now,
            };
            if end.as_str() < over_before && now.saturating_duration_since(since) >= self.length {
                over.push(mark(&row, &end));
            }
            self.rows.insert(row, (end, since));
        }
        over
    }
}

/// A row with the lease that was seen, so that one that was renewed after the look is left alone.
pub(super) const MARK: &str = "(run_id || ' ' || lease_expires_at)";

fn mark(row: &str, end: &str) -> String {
    format!("{row} {end}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_over_when_both_clocks_say_so() {
        let (length, began) = (Duration::from_secs(30), Instant::now());
        let mut seen = SeenLeases::new(length);
        let mut look = |leases: &[(&str, &str)], seconds: u64, over_before: &str| {
            let leases = leases.iter().map(|(row, end)| ((*row).to_owned(), (*end).to_owned()));
            seen.look(leases.collect(), began + Duration::from_secs(seconds), over_before)
        };
        // The wall clock has jumped to 900.
        assert_eq!(look(&[("lives", "130"), ("dead", "130")], 0, "900"), [""; 0]);
        assert_eq!(look(&[("lives", "140"), ("dead", "130")], 10, "900"), [""; 0]);
        assert_eq!(look(&[("lives", "150"), ("dead", "130")], 29, "900"), [""; 0]);
        assert_eq!(look(&[("lives", "160"), ("dead", "130")], 30, "900"), ["dead 130"]);
        // It was set back: nothing is over, however long it has not changed.
        assert_eq!(look(&[("lives", "170"), ("dead", "130")], 300, "100"), [""; 0]);
        assert_eq!(look(&[("lives", "170"), ("dead", "130")], 330, "131"), ["dead 130"]);
        // What has ended is forgotten.
        assert_eq!(look(&[], 331, "900"), [""; 0]);
        assert_eq!(look(&[("dead", "130")], 400, "900"), [""; 0]);
    }
}
