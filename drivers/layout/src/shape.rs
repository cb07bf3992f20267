//! Manifests in memory, from which the manifest of a list's next version is built.

use std::sync::Arc;

use crate::manifest::{Manifest, Run, chunk_bytes, push_run};

/// Runs in a chunk. A manifest keeps between one and two chunks' worth of runs unpacked, because a list mostly changes
/// at its end.
const CHUNK: usize = 8;

/// A stored chunk and what it holds.
#[derive(Debug, Clone)]
struct Chunk {
    seq: u32,
    runs: Arc<[Run]>,
    len: usize,
}

/// A manifest whose chunks are in memory: what the writer caches for a stored list, to build the manifest of its next
/// version without looking at its elements again.
#[derive(Debug, Clone, Default)]
pub struct Shape {
    chunks: Vec<Chunk>,
    tail: Vec<Run>,
    len: usize,
}

impl Shape {
    /// How many elements it has.
    #[allow(clippy::len_without_is_empty, reason = "nobody asks")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Its bytes in memory. Chunks that it shares with other shapes are counted.
    pub fn bytes(&self) -> usize {
        let runs = self.chunks.iter().map(|chunk| chunk.runs.len()).sum::<usize>() + self.tail.len();
        self.chunks.len() * size_of::<Chunk>() + runs * size_of::<Run>()
    }

    /// The number of the last element.
    pub fn last(&self) -> Option<u32> {
        self.number_at(self.len.checked_sub(1)?)
    }

    /// The number of the element at `index`. Searches from the end, where lists change.
    pub fn number_at(&self, index: usize) -> Option<u32> {
        let mut end = self.len;
        let tail = self.tail.iter().rev();
        let packed = self.chunks.iter().rev();
        for run in tail {
            let start = end - run.len as usize;
            if (start..end).contains(&index) {
                return u32::try_from(index - start).ok().map(|offset| run.start + offset);
            }
            end = start;
        }
        for chunk in packed {
            let start = end - chunk.len;
            if (start..end).contains(&index) {
                let mut offset = index - start;
                for run in &*chunk.runs {
                    if offset < run.len as usize {
                        return u32::try_from(offset).ok().map(|offset| run.start + offset);
                    }
                    offset -= run.len as usize;
                }
            }
            end = start;
        }
        None
    }

    /// The shape of a stored list. `chunk` reads the runs in the chunk with a number; a list that only grew has none.
    ///
    /// # Errors
    /// Those of `chunk`.
    pub fn stored<E>(
        manifest: &Manifest,
        mut chunk: impl FnMut(u32) -> Result<Vec<Run>, E>,
    ) -> Result<Self, E> {
        let mut shape = Self { chunks: Vec::new(), tail: manifest.tail.clone(), len: total(&manifest.tail) };
        for seq in manifest.chunks.iter().flat_map(|run| run.numbers()) {
            let runs = chunk(seq)?;
            let len = total(&runs);
            shape.len += len;
            shape.chunks.push(Chunk { seq, runs: runs.into(), len });
        }
        Ok(shape)
    }

    /// Its stored form.
    pub fn manifest(&self) -> Manifest {
        let mut chunks = Vec::new();
        for chunk in &self.chunks {
            push_run(&mut chunks, Run { start: chunk.seq, len: 1 });
        }
        Manifest { chunks, tail: self.tail.clone() }
    }
}

/// Builds a [`Shape`] from parts of another one and from new numbers, in list order.
#[derive(Debug, Default)]
pub struct Builder {
    /// Chunks reused whole, each after the runs (still to be packed) that precede it.
    packed: Vec<(Vec<Run>, Chunk)>,
    tail: Vec<Run>,
}

impl Builder {
    /// Appends one element.
    pub fn push(&mut self, seq: u32) {
        push_run(&mut self.tail, Run { start: seq, len: 1 });
    }

    /// Appends the elements `start .. start + len` of `base`.
    pub fn take(&mut self, base: &Shape, start: usize, len: usize) {
        let (mut skip, mut left) = (start, len);
        for chunk in &base.chunks {
            if skip == 0 && left >= chunk.len {
                left -= chunk.len;
                self.packed.push((std::mem::take(&mut self.tail), chunk.clone()));
            } else if left > 0 {
                self.take_runs(&chunk.runs, &mut skip, &mut left);
            }
        }
        self.take_runs(&base.tail, &mut skip, &mut left);
    }

    fn take_runs(&mut self, runs: &[Run], skip: &mut usize, left: &mut usize) {
        for run in runs {
            let len = run.len as usize;
            let skipped = len.min(*skip);
            *skip -= skipped;
            let taken = (len - skipped).min(*left);
            *left -= taken;
            // Both are at most the length of a run.
            if let (Ok(skipped), Ok(taken @ 1..)) = (u32::try_from(skipped), u32::try_from(taken)) {
                push_run(&mut self.tail, Run { start: run.start + skipped, len: taken });
            }
        }
    }

    /// The finished shape. `store` stores the bytes of a new chunk and returns its number.
    pub fn finish<E>(self, mut store: impl FnMut(&[u8]) -> Result<u32, E>) -> Result<Shape, E> {
        let mut shape = Shape::default();
        let mut pack = |shape: &mut Shape, runs: &[Run]| {
            let seq = store(&chunk_bytes(runs))?;
            let len = total(runs);
            shape.len += len;
            shape.chunks.push(Chunk { seq, runs: runs.into(), len });
            Ok(())
        };
        for (before, chunk) in self.packed {
            for runs in before.chunks(CHUNK) {
                pack(&mut shape, runs)?;
            }
            shape.len += chunk.len;
            shape.chunks.push(chunk);
        }
        let mut tail = self.tail;
        let mut packed = 0;
        while tail.len() - packed > 2 * CHUNK {
            pack(&mut shape, &tail[packed..packed + CHUNK])?;
            packed += CHUNK;
        }
        tail.drain(..packed);
        shape.len += total(&tail);
        shape.tail = tail;
        Ok(shape)
    }
}

fn total(runs: &[Run]) -> usize {
    runs.iter().map(|run| run.len as usize).sum()
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use proptest::prelude::*;

    use super::*;
    use crate::codec::Decoder;
    use crate::manifest::{chunk_runs, put_runs, take_runs};

    /// Stores chunks in a vector and reads shapes back from their stored form.
    #[derive(Default)]
    struct Chunks(Vec<Vec<u8>>);

    impl Chunks {
        fn finish(&mut self, builder: Builder) -> Shape {
            let store = |bytes: &[u8]| -> Result<u32, Infallible> {
                let at = self.0.iter().position(|have| have == bytes);
                Ok(u32::try_from(at.unwrap_or_else(|| {
                    self.0.push(bytes.to_vec());
                    self.0.len() - 1
                }))
                .unwrap())
            };
            let Ok(shape) = builder.finish(store);
            shape
        }

        fn seqs(&self, shape: &Shape) -> Vec<u32> {
            let manifest = shape.manifest();
            let mut out = Vec::new();
            put_runs(&mut out, &manifest.chunks);
            put_runs(&mut out, &manifest.tail);
            let mut decoder = Decoder::new(&out);
            let chunks = take_runs(&mut decoder).unwrap();
            let tail = take_runs(&mut decoder).unwrap();
            decoder.finish().unwrap();
            let packed = chunks
                .into_iter()
                .flat_map(Run::numbers)
                .flat_map(|seq| chunk_runs(&self.0[seq as usize]).unwrap());
            packed.chain(tail).flat_map(Run::numbers).collect()
        }
    }

    #[derive(Debug, Clone)]
    enum Op {
        Push,
        Jump,
        Replace(usize),
        Remove(usize),
        Reorder(usize, usize),
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let op = prop_oneof![
            6 => Just(Op::Push),
            3 => Just(Op::Jump),
            3 => any::<usize>().prop_map(Op::Replace),
            2 => any::<usize>().prop_map(Op::Remove),
            1 => (any::<usize>(), any::<usize>()).prop_map(|(a, b)| Op::Reorder(a, b)),
        ];
        prop::collection::vec(op, 0..150)
    }

    proptest! {
        /// Whatever is cut out of a shape and put together again, the stored manifest lists the same elements.
        #[test]
        fn a_shape_is_the_list_it_was_made_of(ops in ops()) {
            let mut chunks = Chunks::default();
            let mut shape = Shape::default();
            let mut model: Vec<u32> = Vec::new();
            let mut next = 0;
            for op in ops {
                let len = model.len();
                let mut builder = Builder::default();
                match op {
                    Op::Push | Op::Jump => {
                        next += if matches!(op, Op::Jump) { 2 } else { 1 };
                        builder.take(&shape, 0, len);
                        builder.push(next);
                        model.push(next);
                    }
                    Op::Replace(i) if len > 0 => {
                        let i = i % len;
                        next += 1;
                        builder.take(&shape, 0, i);
                        builder.push(next);
                        builder.take(&shape, i + 1, len - i - 1);
                        model[i] = next;
                    }
                    Op::Remove(i) if len > 0 => {
                        let i = i % len;
                        builder.take(&shape, 0, i);
                        builder.take(&shape, i + 1, len - i - 1);
                        model.remove(i);
                    }
                    Op::Reorder(a, b) if len > 0 => {
                        let (a, b) = (a % len, b % len);
                        let (a, b) = (a.min(b), a.max(b));
                        builder.take(&shape, a, b - a);
                        builder.take(&shape, 0, a);
                        builder.take(&shape, b, len - b);
                        model[..b].rotate_left(a);
                    }
                    _ => continue,
                }
                shape = chunks.finish(builder);
                prop_assert_eq!(shape.len(), model.len());
                prop_assert_eq!(chunks.seqs(&shape), model.clone());
                for (i, seq) in model.iter().enumerate() {
                    prop_assert_eq!(shape.number_at(i), Some(*seq));
                }
                prop_assert_eq!(shape.number_at(model.len()), None);
                prop_assert!(shape.tail.len() <= 2 * CHUNK);
            }
        }
    }

    #[test]
    fn an_append_only_list_is_one_run_and_a_much_edited_one_stays_small() {
        let mut chunks = Chunks::default();
        let (mut plain, mut edited) = (Shape::default(), Shape::default());
        for step in 0..4000_u32 {
            let mut builder = Builder::default();
            builder.take(&plain, 0, plain.len());
            builder.push(step);
            plain = chunks.finish(builder);
            let mut builder = Builder::default();
            builder.take(&edited, 0, edited.len());
            builder.push(2 * step);
            edited = chunks.finish(builder);
        }
        assert_eq!(plain.manifest(), Manifest { chunks: vec![], tail: vec![Run { start: 0, len: 4000 }] });
        let manifest = edited.manifest();
        assert_eq!(manifest.chunks.len(), 1, "the chunks of a list are consecutive");
        assert!(manifest.tail.len() <= 2 * CHUNK);
        assert_eq!(chunks.0.len() * CHUNK + manifest.tail.len(), 4000, "each run was packed once");
    }

    #[test]
    fn an_edit_in_the_middle_repacks_one_chunk() {
        let mut chunks = Chunks::default();
        let mut builder = Builder::default();
        for seq in 0..1000 {
            builder.push(2 * seq);
        }
        let shape = chunks.finish(builder);
        let before = chunks.0.len();
        let mut builder = Builder::default();
        builder.take(&shape, 0, 500);
        builder.push(5000);
        builder.take(&shape, 501, 499);
        let edited = chunks.finish(builder);
        assert_eq!(edited.len(), 1000);
        assert_eq!(chunks.0.len(), before + 1);
    }
}
