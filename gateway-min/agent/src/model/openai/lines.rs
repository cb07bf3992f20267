//! The lines of an event stream, one at a time, within bounds.
//!
//! The parser of events searches all it has whenever more arrives, so it gets whole lines: then each byte is searched
//! once, however small the parts in which a server sends them.

use bytes::{Bytes, BytesMut};
use futures::{Stream, StreamExt, stream};

/// The bounds of an answer, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Of one event.
    pub(super) event: usize,
    /// Of the whole stream.
    pub(super) total: usize,
}

impl Default for Limits {
    /// 4 MiB and 256 MiB: an event has a token, or at most a whole tool call, and hundreds of bytes around it.
    fn default() -> Self {
        Self { event: 4 << 20, total: 256 << 20 }
    }
}

/// Why there are no more lines.
#[derive(Debug)]
pub(super) enum Broken<E> {
    /// The connection failed.
    Transport(E),
    /// An event has more bytes than this.
    Event(usize),
    /// The stream has more bytes than this.
    Total(usize),
}

struct Lines<S> {
    parts: S,
    limits: Limits,
    buffer: BytesMut,
    /// The part of the buffer without an end of line.
    searched: usize,
    /// Bytes of the current event in lines that were returned.
    event: usize,
    total: usize,
    /// Whether the last line ended with a carriage return, so that a line feed belongs to it.
    after_cr: bool,
    over: bool,
}

/// The lines of `parts`, with their ends.
pub(super) fn lines<S, B, E>(parts: S, limits: Limits) -> impl Stream<Item = Result<Bytes, Broken<E>>> + Send
where
    S: Stream<Item = Result<B, E>> + Send + Unpin,
    B: AsRef<[u8]> + Send,
    E: Send,
{
    let lines = Lines {
        parts,
        limits,
        buffer: BytesMut::new(),
        searched: 0,
        event: 0,
        total: 0,
        after_cr: false,
        over: false,
    };
    stream::unfold(lines, async move |mut lines| {
        let line = lines.next().await?;
        lines.over |= line.is_err();
        Some((line, lines))
    })
}

impl<S, B, E> Lines<S>
where
    S: Stream<Item = Result<B, E>> + Unpin,
    B: AsRef<[u8]>,
{
    async fn next(&mut self) -> Option<Result<Bytes, Broken<E>>> {
        if self.over {
            return None;
        }
        loop {
            let found = self.buffer[self.searched..].iter().position(|byte| matches!(byte, b'\n' | b'\r'));
            let length = found.map_or(self.buffer.len(), |at| self.searched + at + 1);
            if self.event + length > self.limits.event {
                return Some(Err(Broken::Event(self.limits.event)));
            }
            if found.is_some() {
                return Some(Ok(self.line(length)));
            }
            self.searched = length;
            match self.parts.next().await {
                Some(Ok(part)) => {
                    self.total += part.as_ref().len();
                    if self.total > self.limits.total {
                        return Some(Err(Broken::Total(self.limits.total)));
                    }
                    self.buffer.extend_from_slice(part.as_ref());
                }
                Some(Err(error)) => return Some(Err(Broken::Transport(error))),
                None => {
                    self.over = true;
                    return (length > 0).then(|| Ok(self.buffer.split().freeze()));
                }
            }
        }
    }

    /// Takes the next line, of `length` bytes.
    fn line(&mut self, length: usize) -> Bytes {
        self.searched = 0;
        let line = self.buffer.split_to(length).freeze();
        let rest_of_end = self.after_cr && line == b"\n"[..];
        self.after_cr = line.ends_with(b"\r");
        // An empty line ends an event.
        self.event = if length == 1 && !rest_of_end { 0 } else { self.event + length };
        line
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    const SMALL: Limits = Limits { event: 20, total: 60 };

    /// The lines of a stream that arrives in these parts, and why it ended early.
    fn read(parts: &[&str]) -> (Vec<String>, Option<Broken<&'static str>>) {
        let parts = stream::iter(parts.to_vec()).map(|part| if part == "!" { Err("!") } else { Ok(part) });
        let found: Vec<_> = lines(parts, SMALL).collect().now_or_never().unwrap();
        let (mut all, mut broken) = (Vec::new(), None);
        for line in found {
            assert!(broken.is_none(), "nothing follows");
            match line {
                Ok(line) => all.push(String::from_utf8(line.to_vec()).unwrap()),
                Err(error) => broken = Some(error),
            }
        }
        (all, broken)
    }

    #[test]
    fn lines_are_whole_however_they_arrive() {
        let expected = ["data: 1\n", "\n", "data: 2\r", "\n", "\r", "\n", "rest"];
        let text = expected.concat();
        let pieces: Vec<&str> = (0..text.len()).map(|at| &text[at..=at]).collect();
        for parts in [vec![text.as_str()], pieces, vec!["", &text[..9], "", &text[9..]]] {
            let (lines, broken) = read(&parts);
            assert_eq!(lines, expected);
            assert!(broken.is_none());
        }
        let (lines, broken) = read(&["a\nb", "!", "c\n"]);
        assert_eq!(lines, ["a\n"]);
        assert!(matches!(broken, Some(Broken::Transport("!"))), "{broken:?}");
    }

    #[test]
    fn a_line_without_end_an_event_without_end_and_a_stream_without_end_are_refused() {
        for parts in [
            vec!["xxxxx"; 5],
            vec!["x\n"; 11],
            vec!["x\r\n"; 7],
            vec!["data: 1\n", "\n", "xxxxxxxxxxxxxxxxxxxxx"],
        ] {
            let (_, broken) = read(&parts);
            assert!(matches!(broken, Some(Broken::Event(20))), "{parts:?}: {broken:?}");
        }
        let (lines, broken) = read(&["data: 1\n\n"; 7]);
        assert_eq!(lines.len(), 12);
        assert!(matches!(broken, Some(Broken::Total(60))), "{broken:?}");
        let (lines, broken) = read(&["data: 1\r\n\r\n"; 5]);
        assert_eq!((lines.len(), broken.is_none()), (20, true), "an empty line begins the next event");
    }
}
