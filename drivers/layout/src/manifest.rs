//! Manifests: which elements a list has, as runs of their numbers.
//!
//! A list that only grows is one run. A list whose elements are often replaced is thousands of runs; they are packed
//! into *chunks*, which are stored like elements, so that the manifest of a list of any length stays small and a change
//! costs only what it changes.

use crate::codec::{Decoder, Malformed, put_int, put_len, put_uint};

/// Element numbers are below this.
pub const NUMBER_LIMIT: u32 = 1 << 30;

/// Consecutive numbers of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Run {
    /// The first one.
    pub start: u32,
    /// How many.
    pub len: u32,
}

impl Run {
    /// The number after the last one.
    pub fn end(self) -> u32 {
        self.start + self.len
    }

    /// The run, if its numbers are in range.
    pub(crate) fn checked(self) -> Result<Self, Malformed> {
        if self.len == 0 || u64::from(self.start) + u64::from(self.len) > u64::from(NUMBER_LIMIT) {
            return Err(Malformed("a run is empty or ends out of range"));
        }
        Ok(self)
    }

    /// Each number.
    pub fn numbers(self) -> impl Iterator<Item = u32> {
        self.start..self.end()
    }
}

/// Appends a run to `runs`, merging it into the last one if it continues it.
pub fn push_run(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some(last) if last.end() == run.start => last.len += run.len,
        _ => runs.push(run),
    }
}

/// The runs that follow `have`, if a list of these runs starts with `have`.
pub fn continuation(have: &[Run], runs: &[Run]) -> Option<Vec<Run>> {
    let Some((last, whole)) = have.split_last() else { return Some(runs.to_vec()) };
    let (next, more) = runs.strip_prefix(whole)?.split_first()?;
    if next.start != last.start || next.len < last.len {
        return None;
    }
    let grown = Run { start: last.end(), len: next.len - last.len };
    Some([grown].into_iter().filter(|run| run.len > 0).chain(more.iter().copied()).collect())
}

/// A stored manifest: runs of chunks, then runs of elements.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Manifest {
    /// The chunks.
    pub chunks: Vec<Run>,
    /// The elements after those of the chunks.
    pub tail: Vec<Run>,
}

/// Appends runs, prefixed with their count.
pub fn put_runs(out: &mut Vec<u8>, runs: &[Run]) {
    put_len(out, runs.len());
    let mut expected = 0;
    for run in runs {
        put_int(out, i64::from(run.start) - i64::from(expected));
        put_uint(out, run.len);
        expected = run.end();
    }
}

/// Reads what [`put_runs`] wrote.
pub fn take_runs(decoder: &mut Decoder<'_>) -> Result<Vec<Run>, Malformed> {
    let count = decoder.count()?;
    let mut runs = Vec::with_capacity(count);
    let mut expected = 0;
    for _ in 0..count {
        let start = i64::from(expected).checked_add(decoder.int()?);
        let start = start.and_then(|start| u32::try_from(start).ok());
        let start = start.ok_or(Malformed("a run starts out of range"))?;
        let run = Run { start, len: decoder.u32()? }.checked()?;
        expected = run.end();
        runs.push(run);
    }
    Ok(runs)
}

/// The bytes of a chunk.
pub fn chunk_bytes(runs: &[Run]) -> Vec<u8> {
    let mut out = Vec::new();
    put_runs(&mut out, runs);
    out
}

/// The runs of a chunk.
pub fn chunk_runs(bytes: &[u8]) -> Result<Vec<Run>, Malformed> {
    let mut decoder = Decoder::new(bytes);
    let runs = take_runs(&mut decoder)?;
    decoder.finish()?;
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            let _ = chunk_runs(&bytes);
        }
    }
}
