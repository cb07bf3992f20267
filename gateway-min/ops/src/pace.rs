//! A command that goes over many threads leaves a server to those that it serves, half of the time.

use std::time::Duration;

use tokio::time::Instant;

use super::target::Target;

/// A shorter time is not worth a pause yet.
const LEAST: Duration = Duration::from_millis(5);
/// The longest pause.
const LONGEST: Duration = Duration::from_millis(250);
/// How long it is believed that others use the server, or do not.
const BELIEVED: Duration = Duration::from_secs(1);

/// When a command pauses between two threads.
pub(crate) struct Pace {
    /// The end of the last pause.
    since: Instant,
    /// Whether others used the server, and when that was asked.
    serving: Option<(bool, Instant)>,
}

impl Pace {
    /// That of a command which begins to work now.
    pub(crate) fn new() -> Self {
        Self { since: Instant::now(), serving: None }
    }

    /// Pauses for as long as the command worked since the last pause, if others use the server of this store.
    pub(crate) async fn rest(&mut self, target: &Target) {
        // What keeps the server from answering keeps the next thread from being read, which says why.
        self.rest_if(async || target.is_serving().await.unwrap_or_default()).await;
    }

    async fn rest_if(&mut self, is_serving: impl AsyncFnOnce() -> bool) {
        let worked = self.since.elapsed();
        if worked < LEAST {
            return;
        }
        let known = self.serving.filter(|(_, asked)| asked.elapsed() < BELIEVED);
        let (serving, asked) = match known {
            Some(known) => known,
            None => (is_serving().await, Instant::now()),
        };
        self.serving = Some((serving, asked));
        if serving {
            tokio::time::sleep(worked.min(LONGEST)).await;
        }
        self.since = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Works for a while, and rests. Returns how long the pause was, and whether the server was asked.
    async fn work(pace: &mut Pace, millis: u64, serving: bool) -> (Duration, bool) {
        tokio::time::advance(Duration::from_millis(millis)).await;
        let (began, mut asked) = (Instant::now(), false);
        let answer = async || {
            asked = true;
            serving
        };
        pace.rest_if(answer).await;
        (began.elapsed(), asked)
    }

    #[tokio::test(start_paused = true)]
    async fn a_command_rests_for_as_long_as_it_worked_while_others_use_the_server() {
        let mut pace = Pace::new();
        let ms = Duration::from_millis;
        assert_eq!(work(&mut pace, 3, true).await, (ms(0), false), "that is not worth a pause");
        assert_eq!(work(&mut pace, 3, true).await, (ms(6), true), "but twice that is");
        assert_eq!(work(&mut pace, 40, false).await, (ms(40), false), "it is believed");
        assert_eq!(work(&mut pace, 5_000, true).await, (LONGEST, true));
        assert_eq!(work(&mut pace, 1_000, false).await, (ms(0), true), "others are gone");
        assert_eq!(work(&mut pace, 900, true).await, (ms(0), false));
        assert_eq!(work(&mut pace, 100, true).await, (ms(100), true), "others have come");
    }
}
