//! Why connections are closed and requests refused.

/// Why a connection was closed, or a request refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The head of a request did not arrive in time, or the connection was not used.
    HeaderTimeout,
    /// The body of a request did not arrive in time.
    BodyTimeout,
    /// It waited for a request, and made room for another connection.
    Displaced,
    /// All connections were at work.
    Full,
}

impl Refusal {
    pub(crate) const ALL: [Self; 4] = [Self::HeaderTimeout, Self::BodyTimeout, Self::Displaced, Self::Full];

    /// Its name in the metrics.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::HeaderTimeout => "header_timeout",
            Self::BodyTimeout => "body_timeout",
            Self::Displaced => "displaced",
            Self::Full => "full",
        }
    }
}
