//! The elements of a thread that are referred to.

use std::collections::{HashMap, HashSet};

use threadkeep::Result;
use threadkeep_layout::{Form, Manifest, NUMBER_LIMIT, Run};

use crate::rows::directory::ThreadKey;
use crate::rows::element::{self, Elements, SPACES, Space};
use crate::rows::record::{CheckpointRecord, Kept, Rest, StoredChannel, TaskRecord};
use crate::sql::Db;

/// The elements that rows refer to. The checkpoints of a thread mostly refer to the same runs and chunks.
#[derive(Default)]
pub(crate) struct Used {
    /// By space.
    runs: [HashSet<Run>; 3],
    /// The runs of chunks that were read: their starts, and how many chunks of each; by the space of the elements. A list and a
    /// map whose elements have the same numbers share their chunks.
    chunks: [HashMap<u32, u32>; 3],
}

impl Used {
    /// Notes what a checkpoint and the tasks that ran from it refer to.
    pub(crate) fn note(
        &mut self,
        record: &CheckpointRecord,
        tasks: &[TaskRecord],
        elements: &mut Elements<'_>,
    ) -> Result<()> {
        for (_, entry) in &record.channels {
            if let StoredChannel::Own(_, Kept::Value(form) | Kept::Snapshot(form)) = entry {
                self.form(form, elements)?;
            }
        }
        for write in tasks.iter().flat_map(|task| &task.writes) {
            self.form(&write.value, elements)?;
        }
        if let Rest::Shared(seq) = record.extra.rest {
            self.add(Space::Metadata, [Run { start: seq, len: 1 }]);
        }
        for (_, manifest) in &record.extra.maps {
            self.manifest(Space::Metadata, manifest, elements)?;
        }
        Ok(())
    }

    fn form(&mut self, form: &Form, elements: &mut Elements<'_>) -> Result<()> {
        match form {
            Form::Plain(_) | Form::Tiny(_) => {}
            Form::Shared(seq) => self.add(Space::Values, [Run { start: *seq, len: 1 }]),
            Form::List(manifest) => self.manifest(Space::Values, manifest, elements)?,
        }
        Ok(())
    }

    fn manifest(&mut self, space: Space, manifest: &Manifest, elements: &mut Elements<'_>) -> Result<()> {
        self.add(space, manifest.tail.iter().copied());
        for run in &manifest.chunks {
            // Each chunk is read once for each space, however many manifests have it.
            let known = self.chunks[space as usize].get(&run.start).copied().unwrap_or_default();
            if run.len > known {
                let more = Run { start: run.start + known, len: run.len - known };
                let runs = elements.runs(&Manifest { chunks: vec![more], tail: Vec::new() })?;
                self.add(space, runs);
                self.add(Space::Chunks, [*run]);
                self.chunks[space as usize].insert(run.start, run.len);
            }
        }
        Ok(())
    }

    fn add(&mut self, space: Space, runs: impl IntoIterator<Item = Run>) {
        self.runs[space as usize].extend(runs);
    }

    /// The noted sequence numbers of a space as disjoint runs, in order.
    pub(crate) fn runs(&self, space: Space) -> Vec<Run> {
        let mut noted: Vec<Run> = self.runs[space as usize].iter().copied().collect();
        noted.sort_unstable_by_key(|run| run.start);
        let mut runs: Vec<Run> = Vec::new();
        for run in noted {
            match runs.last_mut() {
                Some(last) if run.start <= last.end() => last.len = last.len.max(run.end() - last.start),
                _ => runs.push(run),
            }
        }
        runs
    }

    /// Whether a thread has elements that were not noted.
    pub(crate) fn lacks_any(&self, db: &Db, thread: ThreadKey) -> Result<bool> {
        let mut lacking = false;
        let noted = SPACES.map(|space| self.runs(space));
        element::each_number(db, thread, |space, seq| {
            let runs = &noted[space as usize];
            let after = runs.partition_point(|run| run.start <= seq);
            lacking |= after == 0 || seq >= runs[after - 1].end();
        })?;
        Ok(lacking)
    }

    /// Deletes what was not noted. Returns the number of deleted elements.
    pub(crate) fn keep_only(&self, db: &Db, thread: ThreadKey) -> Result<usize> {
        let mut dropped = 0;
        for space in SPACES {
            let mut next = 0;
            for run in self.runs(space) {
                dropped += element::drop_range(db, thread, space, next, run.start)?;
                next = run.end();
            }
            dropped += element::drop_range(db, thread, space, next, NUMBER_LIMIT)?;
        }
        Ok(dropped)
    }
}
