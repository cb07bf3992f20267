//! A log that tests read.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tracing::Dispatch;
use tracing::subscriber::NoSubscriber;
use tracing_subscriber::fmt::MakeWriter;

/// What a subscriber of `tracing` writes, for `with_writer`. Clones share it.
#[derive(Debug, Clone)]
pub struct Log(Arc<Mutex<Vec<u8>>>);

impl Default for Log {
    fn default() -> Self {
        // While there is one subscriber, `tracing` lets the first thread that meets an event decide for all threads
        // whether it is wanted, and the thread of another test does not want it. Of two subscribers it asks each.
        static SECOND: OnceLock<Dispatch> = OnceLock::new();
        SECOND.get_or_init(|| Dispatch::new(NoSubscriber::new()));
        Self(Arc::default())
    }
}

impl Log {
    /// Everything so far.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap_or_else(PoisonError::into_inner)).into_owned()
    }

    /// How often it contains `text`.
    pub fn count(&self, text: &str) -> usize {
        self.text().matches(text).count()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Log {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_that_another_thread_met_first_is_logged() {
        fn warn() {
            tracing::warn!("met");
        }
        let log = Log::default();
        let subscriber = tracing_subscriber::fmt().with_writer(log.clone()).finish();
        let _logged = tracing::subscriber::set_default(subscriber);
        std::thread::spawn(warn).join().unwrap_or_default();
        assert_eq!(log.count("met"), 0, "it has no subscriber");
        warn();
        assert_eq!(log.count("met"), 1);
    }
}
