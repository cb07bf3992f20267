//! What a process knows to be flushed of a thread, which the server must never lose.

use std::time::{Duration, Instant, SystemTime};

use crate::history::{History, Mark, Moment, Since};

/// How long a deletion can be distinguished from a loss: somewhat less than the server keeps graves.
const GRAVES: Duration = Duration::from_hours(5);

/// When something was learned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Learned {
    at: Instant,
    /// The other one may not count the time that the machine sleeps.
    clock: SystemTime,
}

impl Learned {
    fn now() -> Self {
        Self { at: Instant::now(), clock: SystemTime::now() }
    }

    /// Whether a grave of that time may be gone.
    fn is_older_than_graves(&self) -> bool {
        self.at.elapsed() > GRAVES || self.clock.elapsed().is_ok_and(|age| age > GRAVES)
    }
}

/// What this process knows to be flushed of a thread.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Known {
    /// The last moment, and when it was learned.
    flushed: Option<(Moment, Learned)>,
    /// The last moment that was acknowledged without a flush, if it may not be flushed: no flushed history that was
    /// found since contains it, and no later write was flushed. If the server lost it, a flush reports that.
    unflushed: Option<Moment>,
    /// The most recently deleted life of the thread.
    ended: Option<i64>,
}

/// Whether what was found agrees with what is known.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Agreement {
    Agrees,
    /// It lacks this, which was flushed.
    Lacks(Mark),
    /// It agrees if the thread has a grave of this life.
    IfBuried(Moment),
}

impl Known {
    /// Compares what is known with the row of the thread that a later statement found.
    pub(crate) fn compare(&self, found: Option<&History>) -> Agreement {
        let missing = |then: Moment| match found.map(|found| found.since(&then)) {
            Some(Since::Contained | Since::TooLongAgo) => Agreement::Agrees,
            Some(Since::Missing) => Agreement::Lacks(then.mark),
            None | Some(Since::AnotherLife) => Agreement::IfBuried(then),
        };
        if let Some(found) = found.filter(|found| Some(found.life) == self.ended) {
            return Agreement::Lacks(found.mark);
        }
        match self.flushed {
            None => Agreement::Agrees,
            Some((then, learned)) => match missing(then) {
                Agreement::IfBuried(_) if learned.is_older_than_graves() => Agreement::Agrees,
                agreement => agreement,
            },
        }
    }

    /// Whether the last moment may not be flushed.
    pub(crate) fn is_unflushed(&self) -> bool {
        self.unflushed.is_some()
    }

    /// Learns that a history of the thread is flushed. What it does not contain remains unflushed.
    pub(super) fn learn_flushed(&mut self, history: &History) {
        self.flushed = Some((history.moment(), Learned::now()));
        let contains = |then: &Moment| matches!(history.since(then), Since::Contained | Since::TooLongAgo);
        self.unflushed = self.unflushed.filter(|then| !contains(then));
    }

    /// The last moment that a flush has to reach.
    pub(crate) fn newest(&self) -> Option<Moment> {
        self.unflushed.or(self.flushed.map(|(moment, _)| moment))
    }

    /// Learns of an acknowledged write, which goes on from what the server had.
    pub(super) fn acknowledged(&mut self, moment: Moment) {
        if moment.mark.is_flushed() {
            (self.flushed, self.unflushed) = (Some((moment, Learned::now())), None);
        } else {
            self.unflushed = Some(moment);
        }
    }

    /// Learns that everything up to a moment was flushed.
    pub(super) fn flushed(&mut self, moment: Moment) {
        if self.unflushed != Some(moment) {
            return;
        }
        self.unflushed = None;
        // What is known of another life, or of a later moment, is worth more.
        let before = |then: Moment| then.life == moment.life && then.mark.revision < moment.mark.revision;
        if self.flushed.is_none_or(|(then, _)| before(then)) {
            self.flushed = Some((moment, Learned::now()));
        }
    }

    /// Learns what was found, which agrees with what is known.
    pub(super) fn found(&mut self, found: Option<&History>) {
        let life = found.map(|found| found.life);
        if let Some((old, _)) = self.flushed.filter(|(old, _)| Some(old.life) != life) {
            let unflushed = self.unflushed.filter(|then| then.life != old.life);
            *self = Self { flushed: None, unflushed, ended: Some(old.life) };
        }
        if let Some(found) = found.filter(|found| found.mark.is_flushed()) {
            self.learn_flushed(found);
        }
    }

    /// What is known of a thread whose life was deleted.
    pub(super) fn buried(life: i64) -> Self {
        Self { ended: Some(life), ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use threadkeep::saver::Flush;

    use super::*;

    /// The time in which the machine sleeps is missing in one of them.
    #[test]
    fn a_deletion_is_not_called_a_loss_once_its_grave_may_be_gone_by_either_time() {
        let moment = History::first(Flush::Now).moment();
        let after =
            |learned: Learned| Known { flushed: Some((moment, learned)), ..Known::default() }.compare(None);
        let now = Learned::now();
        assert_eq!(after(now), Agreement::IfBuried(moment));
        let clock = now.clock.checked_sub(2 * GRAVES).unwrap();
        assert_eq!(after(Learned { clock, ..now }), Agreement::Agrees);
        // A clock that was set back says nothing.
        let clock = now.clock.checked_add(2 * GRAVES).unwrap();
        assert_eq!(after(Learned { clock, ..now }), Agreement::IfBuried(moment));
    }
}
