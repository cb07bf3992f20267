//! Where new ids, versions and times come from.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::{CheckpointId, TaskId, Version};

/// Ids of version 6 count tenths of microseconds.
const TICKS_PER_MS: u64 = 10_000;
/// The Unix epoch in such ticks, which begin with the Gregorian calendar.
const GREGORIAN_TICKS: u64 = 0x01b2_1dd2_1381_4000;
/// The last millisecond that an id of version 7 can hold.
const MAX_MS: u64 = (1 << 48) - 1;
/// The last tick that an id can hold: in the year 5236.
const MAX_TICKS: u64 = (1 << 60) - 1;

/// The source of the current time. Tests provide their own.
pub trait Clock: Send + Sync {
    /// Milliseconds since the Unix epoch.
    fn now_ms(&self) -> u64;
}

/// The machine's clock.
#[derive(Debug, Default, Clone, Copy)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now_ms(&self) -> u64 {
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |past| u64::try_from(past.as_millis()).unwrap_or(u64::MAX))
    }
}

impl<C: Clock + ?Sized> Clock for Arc<C> {
    fn now_ms(&self) -> u64 {
        (**self).now_ms()
    }
}

/// Generates ids and tells the time. With a seed and a given clock both are reproducible, so a test can be replayed.
///
/// Ids depend on the order in which they are drawn. What works at the same time as something else therefore draws from
/// a source of its own, [`derived`](Self::derived) from its identity.
pub struct IdSource {
    clock: Arc<dyn Clock>,
    /// What the ids are made from: a seed, and of a derived source, who it is for. `None` for chance.
    origin: Option<[u8; 32]>,
    random: Mutex<StdRng>,
}

impl fmt::Debug for IdSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdSource").finish_non_exhaustive()
    }
}

impl Clock for IdSource {
    fn now_ms(&self) -> u64 {
        self.clock.now_ms()
    }
}

impl Default for IdSource {
    fn default() -> Self {
        Self { clock: Arc::new(SystemClock), origin: None, random: Mutex::new(rand::make_rng()) }
    }
}

impl IdSource {
    /// A source with this clock and this seed.
    pub fn seeded(clock: impl Clock + 'static, seed: u64) -> Self {
        let origin = *blake3::hash(&seed.to_be_bytes()).as_bytes();
        Self { clock: Arc::new(clock), origin: Some(origin), random: Mutex::new(StdRng::seed_from_u64(seed)) }
    }

    /// The source of what has this identity, with the same clock. Of a seeded source it is seeded too, by its parent's
    /// seed and the identity alone: what was drawn from either before makes no difference.
    #[must_use]
    pub fn derived(&self, identity: &str) -> Self {
        let origin = self.origin.map(|parent| *blake3::keyed_hash(&parent, identity.as_bytes()).as_bytes());
        let random = origin.map_or_else(rand::make_rng, StdRng::from_seed);
        Self { clock: Arc::clone(&self.clock), origin, random: Mutex::new(random) }
    }

    /// The current time, in whole milliseconds.
    pub fn now(&self) -> chrono::DateTime<chrono::Utc> {
        let ms = i64::try_from(self.clock.now_ms()).unwrap_or(i64::MAX);
        chrono::DateTime::from_timestamp_millis(ms).unwrap_or(chrono::DateTime::<chrono::Utc>::MAX_UTC)
    }

    fn random<T>(&self, draw: impl FnOnce(&mut StdRng) -> T) -> T {
        draw(&mut self.random.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A checkpoint id with the current time, strictly greater than `floor` (the greater of the parent and the head
    /// that it follows). One that follows an id of version 6 is of version 6: those sort after all of version 7 of
    /// their time, so one of version 7 could only follow with a time a thousand years ahead.
    pub fn checkpoint_after(&self, floor: Option<CheckpointId>) -> CheckpointId {
        let now = self.clock.now_ms();
        let (start, tail) = self.random(|rng| (rng.random_range(0..0x800_u16), rng.random::<u64>()));
        if let Some(last) = floor.and_then(|floor| floor.ticks()) {
            let now = GREGORIAN_TICKS.saturating_add(now.saturating_mul(TICKS_PER_MS));
            return CheckpointId::from_ticks(now.max(last + 1).min(MAX_TICKS), tail);
        }
        match floor {
            Some(floor) if floor.leading() >= now => {
                let next = floor.counter() + 1;
                if next > 0x0fff {
                    CheckpointId::from_parts((floor.leading() + 1).min(MAX_MS), 0, tail)
                } else {
                    CheckpointId::from_parts(floor.leading(), next, tail)
                }
            }
            _ => CheckpointId::from_parts(now, start, tail),
        }
    }

    /// The version for a channel that a superstep writes, greater than `last` unless its counter is at its end.
    pub fn version_after(&self, last: Option<Version>) -> Version {
        let counter = last.map_or(1, |v| v.counter.saturating_add(1));
        Version { counter, random: self.random(RngExt::random) }
    }

    /// The id of a new task attempt.
    pub fn task(&self) -> TaskId {
        TaskId(uuid::Builder::from_random_bytes(self.random(RngExt::random)).into_uuid())
    }

    /// The id of something new that has no type of its own here: a message, a run, a thread. A UUID (version 4).
    pub fn text(&self) -> String {
        self.task().to_string()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use uuid::Uuid;

    use super::*;

    struct Steps(AtomicU64, i64);

    impl Clock for Steps {
        fn now_ms(&self) -> u64 {
            let delta = u64::try_from(self.1.abs()).unwrap();
            if self.1 < 0 {
                self.0.fetch_sub(delta, Ordering::Relaxed)
            } else {
                self.0.fetch_add(delta, Ordering::Relaxed)
            }
        }
    }

    #[test]
    fn checkpoint_ids_grow_strictly_with_a_stopped_and_a_backward_clock() {
        for pace in [0, -7, 1] {
            let ids = IdSource::seeded(Steps(AtomicU64::new(1_700_000_000_000), pace), 1);
            let mut last = None;
            for _ in 0..10_000 {
                let id = ids.checkpoint_after(last);
                assert!(last < Some(id), "{last:?} then {id}");
                assert!(last.map(|l| l.to_string()) < Some(id.to_string()));
                last = Some(id);
            }
        }
    }

    #[test]
    fn checkpoint_ids_are_uuid_v7_and_carry_their_time() {
        let ids = IdSource::seeded(Steps(AtomicU64::new(1_700_000_000_123), 0), 2);
        let id = ids.checkpoint_after(None);
        assert_eq!(Uuid::from_bytes(*id.as_bytes()).get_version_num(), 7);
        assert_eq!(id.unix_ms(), 1_700_000_000_123);
        assert_eq!(id.created_at(), "2023-11-14T22:13:20.123000+00:00");
        assert_eq!(id.to_string().parse::<CheckpointId>().unwrap(), id);
    }

    #[test]
    fn ids_of_version_6_have_their_time_and_are_followed() {
        let id: CheckpointId = "1f1e71ba-99e6-63da-8001-bd4e2277491d".parse().unwrap();
        assert_eq!(id.created_at(), "2026-11-23T08:55:42.105000+00:00");
        for (clock, step) in [(1_795_424_142_105, 0), (1_795_424_132_000, 1), (1_795_424_152_000, -1), (0, 0)]
        {
            let ids = IdSource::seeded(Steps(AtomicU64::new(clock), step), 4);
            let mut last = id;
            for _ in 0..20 {
                let next = ids.checkpoint_after(Some(last));
                assert!(next > last, "{next} follows {last}");
                assert_eq!(Uuid::from_bytes(*next.as_bytes()).get_version_num(), 6);
                assert_eq!(next.to_string().parse::<CheckpointId>().unwrap(), next);
                let expected = ids.now().timestamp_millis().unsigned_abs().max(id.unix_ms());
                assert!(next.unix_ms().abs_diff(expected) <= 50, "{} for {expected}", next.unix_ms());
                last = next;
            }
        }
    }

    /// None can follow: a saver refuses the next one, which must not sort before all others.
    #[test]
    fn after_the_last_id_and_version_comes_none_that_is_first() {
        let ids = IdSource::seeded(Steps(AtomicU64::new(1_700_000_000_000), 0), 5);
        let version_7 = [0xff; 16];
        let mut version_6 = version_7;
        version_6[6] = 0x6f;
        for bytes in [version_7, version_6] {
            let last = CheckpointId::from_bytes(bytes);
            let next = ids.checkpoint_after(Some(last));
            assert!(next.as_bytes().starts_with(&[0xff; 6]), "{next} after {last}");
        }
        let last = Version { counter: u64::MAX, random: 0 };
        assert_eq!(ids.version_after(Some(last)).counter, u64::MAX);
    }

    #[test]
    fn a_derived_source_depends_on_its_identity_alone() {
        let source = || IdSource::seeded(Steps(AtomicU64::new(1_700_000_000_000), 0), 3);
        let (one, other) = (source(), source());
        let first = one.derived("a").text();
        other.text();
        let _ = other.derived("b").text();
        assert_eq!(other.derived("a").text(), first, "whatever was drawn before");
        assert_ne!(one.derived("b").text(), first);
        assert_ne!(one.derived("a").derived("a").text(), first);
        assert_ne!(IdSource::default().derived("a").text(), IdSource::default().derived("a").text());
        assert_eq!(one.derived("a").now().to_rfc3339(), "2023-11-14T22:13:20+00:00");
    }

    #[test]
    fn sibling_versions_differ_and_sort_after_their_parent() {
        let ids = IdSource::default();
        let parent = ids.version_after(None);
        let (a, b) = (ids.version_after(Some(parent)), ids.version_after(Some(parent)));
        assert_ne!(a, b);
        assert!(a > parent && b > parent);
        assert_eq!(Version { counter: 3, random: 255 }.to_string(), format!("{:032}.00000000000000ff", 3));
    }
}
