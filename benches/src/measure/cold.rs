//! Reads in a process that has not read the store before. The machine's page cache and the server stay warm.

use std::time::Instant;

use anyhow::{Context as _, Result};

use super::{Job, Phase, ms};
use crate::conversation::{accessor, messages, thread};
use crate::row::Found;
use crate::store::Store;
use crate::workload::digest;

pub(super) async fn read(job: &Job, found: &mut Found) -> Result<()> {
    let started = Instant::now();
    let store = Store::open(job.case.backend, &job.target).await?;
    let opened = started.elapsed();
    let accessor = accessor(job.case.mode, store.saver.clone())?;
    let thread = thread(0);
    let at = match job.phase {
        // Looking up the parent warms only the head's own row.
        Phase::ColdBack => {
            let head = accessor.get_loading(&thread, None, threadkeep::saver::Load::None).await?;
            head.context("the thread is gone")?.parent
        }
        Phase::Write | Phase::ColdHead => None,
    };
    let started = Instant::now();
    let state = accessor.get(&thread, at).await?.context("the checkpoint is gone")?;
    let list = messages(&state)?;
    let read = started.elapsed();
    if job.phase == Phase::ColdBack {
        found.cold_back_ms = Some(ms(read));
    } else {
        found.cold_open_ms = Some(ms(opened));
        found.cold_head_ms = Some(ms(read));
        found.cold_digest = Some(digest(&list));
    }
    store.close().await;
    Ok(())
}
