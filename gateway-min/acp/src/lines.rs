//! The lines that an agent sends, each of a bounded length.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt as _};

/// The longest line, in bytes. Agents send whole files and pictures in one line; what they tell the model is far less.
pub(crate) const LINE_MAX: usize = 8 * 1024 * 1024;
/// How much is read at once.
const CHUNK: usize = 64 * 1024;

/// Reads lines.
pub(crate) struct Lines<R> {
    source: R,
    /// What was read and not returned.
    buffer: Vec<u8>,
    /// Where in the buffer the next line begins.
    begin: usize,
    /// Up to where it contains no end of a line.
    searched: usize,
}

impl<R: AsyncRead + Unpin> Lines<R> {
    pub(crate) fn new(source: R) -> Self {
        Self { source, buffer: Vec::new(), begin: 0, searched: 0 }
    }

    /// The next line, without its end; `None` at the end. Nothing is lost if the future is dropped.
    ///
    /// # Errors
    /// The source's, and [`io::ErrorKind::InvalidData`] if a line is longer than [`LINE_MAX`].
    pub(crate) async fn next(&mut self) -> io::Result<Option<&[u8]>> {
        loop {
            if let Some(length) = self.buffer[self.searched..].iter().position(|byte| *byte == b'\n') {
                let (begin, end) = (self.begin, self.searched + length);
                self.begin = end + 1;
                self.searched = end + 1;
                return Ok(Some(&self.buffer[begin..end]));
            }
            self.buffer.drain(..self.begin);
            self.begin = 0;
            self.searched = self.buffer.len();
            if self.buffer.len() > LINE_MAX {
                let problem = format!("it sent a line of more than {LINE_MAX} bytes");
                return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
            }
            if self.buffer.is_empty() && self.buffer.capacity() > CHUNK {
                // A long line was an exception.
                self.buffer = Vec::with_capacity(CHUNK);
            }
            self.buffer.reserve(CHUNK);
            if self.source.read_buf(&mut self.buffer).await? == 0 {
                return Ok(None);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lines_are_the_same_however_they_arrive() {
        let text = b"one\n\ntwo two\nthree".repeat(3);
        for size in [1, 2, 3, 7, 100] {
            let source = tokio_test_chunks(&text, size);
            let mut lines = Lines::new(source);
            let mut found = Vec::new();
            while let Some(line) = lines.next().await.unwrap() {
                found.push(String::from_utf8(line.to_vec()).unwrap());
            }
            // What has no end is no line.
            assert_eq!(found, ["one", "", "two two", "threeone", "", "two two", "threeone", "", "two two"]);
        }
    }

    fn tokio_test_chunks(text: &[u8], size: usize) -> tokio::io::DuplexStream {
        let (mut sender, receiver) = tokio::io::duplex(size);
        let text = text.to_vec();
        tokio::spawn(async move {
            tokio::io::AsyncWriteExt::write_all(&mut sender, &text).await.unwrap();
        });
        receiver
    }

    #[tokio::test]
    async fn a_line_without_an_end_is_refused_at_the_limit() {
        let mut endless = Lines::new(tokio::io::repeat(b'x'));
        assert_eq!(endless.next().await.unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert!(endless.buffer.capacity() <= 2 * LINE_MAX, "{}", endless.buffer.capacity());
        let mut longest = vec![b'x'; LINE_MAX];
        longest.push(b'\n');
        let mut lines = Lines::new(&longest[..]);
        assert_eq!(lines.next().await.unwrap().unwrap().len(), LINE_MAX);
        assert!(lines.next().await.unwrap().is_none());
        assert_eq!(lines.buffer.capacity(), CHUNK);
    }
}
