//! The signals that ask the process to end.

/// What the process is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Signal {
    /// To stop what it does: Ctrl-C.
    Interrupt,
    /// To end: its terminal is gone, or a supervisor wants it to.
    Terminate,
}

impl Signal {
    /// The exit code that shells give a process which the signal ended.
    pub(super) const fn exit_code(self) -> u8 {
        match self {
            Self::Interrupt => 130,
            Self::Terminate => 143,
        }
    }
}

/// The signals that arrive from its creation on. They do nothing else from then on.
pub(super) struct Signals {
    #[cfg(unix)]
    streams: Option<[tokio::signal::unix::Signal; 3]>,
}

impl Signals {
    /// Listens. If that fails, a signal ends the process as it would without this.
    pub(super) fn listen() -> Self {
        Self {
            #[cfg(unix)]
            streams: {
                use tokio::signal::unix::{SignalKind, signal};
                let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
                match kinds.map(signal) {
                    [Ok(interrupt), Ok(terminate), Ok(hangup)] => Some([interrupt, terminate, hangup]),
                    _ => None,
                }
            },
        }
    }

    /// The next one. Cancel-safe.
    pub(super) async fn next(&mut self) -> Signal {
        #[cfg(unix)]
        if let Some([interrupt, terminate, hangup]) = &mut self.streams {
            return tokio::select! {
                _ = interrupt.recv() => Signal::Interrupt,
                _ = terminate.recv() => Signal::Terminate,
                _ = hangup.recv() => Signal::Terminate,
            };
        }
        std::future::pending().await
    }
}
