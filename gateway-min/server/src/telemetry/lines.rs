//! One line of the log for each event. Events quote what clients, providers and programs have said: with a line break
//! in that, any of them could write lines that look like those of the gateway.

use std::io::{self, Write};

use tracing::Metadata;
use tracing_subscriber::fmt::MakeWriter;

/// A writer of whole events, which writes the line breaks within one as `\n` and `\r`.
pub(super) struct OneLine<W>(pub(super) W);

impl<'a, W: MakeWriter<'a>> MakeWriter<'a> for OneLine<W> {
    type Writer = OneLine<W::Writer>;

    fn make_writer(&'a self) -> Self::Writer {
        OneLine(self.0.make_writer())
    }

    fn make_writer_for(&'a self, metadata: &Metadata<'_>) -> Self::Writer {
        OneLine(self.0.make_writer_for(metadata))
    }
}

impl<W: Write> Write for OneLine<W> {
    /// The layer writes each event with its end in one call.
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let text = event.strip_suffix(b"\n").unwrap_or(event);
        let mut line = Vec::with_capacity(event.len());
        for byte in text {
            match byte {
                b'\n' => line.extend_from_slice(b"\\n"),
                b'\r' => line.extend_from_slice(b"\\r"),
                other => line.push(*other),
            }
        }
        line.extend_from_slice(&event[text.len()..]);
        self.0.write_all(&line)?;
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}
