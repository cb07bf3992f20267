//! The history cache in front of SQLite: a head whose path is cached, one whose cached path ends a few supersteps
//! earlier, and one that is not cached.
//!
//! ```text
//! cargo bench -p threadkeep-benches --bench cache
//! ```
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, unreachable_pub, missing_docs)]

mod shared;

use std::num::NonZeroUsize;
use std::sync::Arc;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use shared::{accessor, grown, step, transcript};
use tempfile::TempDir;
use threadkeep::cache::{CachedSaver, HistoryCache, MemoryCache};
use threadkeep::id::ThreadId;
use threadkeep::saver::Saver;
use threadkeep_benches::case::{Backend, Mode};
use threadkeep_benches::store::Store;
use tokio::runtime::Runtime;

/// Far from the last snapshot, so that there is a path worth caching.
const MODE: Mode = Mode::Delta(1_000_000);
const MESSAGES: usize = 400;

fn cache(c: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("c.db");
    let store = runtime.block_on(Store::open(Backend::SqliteNormal, path.to_str().unwrap())).unwrap();
    let thread = ThreadId::from("t");
    let messages = transcript(MESSAGES);
    let mut run = runtime.block_on(grown(&accessor(&store.saver, MODE), &thread, &messages, MESSAGES));
    let cache = Arc::new(MemoryCache::new(NonZeroUsize::MIN));
    let cached: Arc<dyn Saver> = Arc::new(CachedSaver::new(store.saver.clone(), cache.clone()));
    let head =
        |saver: &Arc<dyn Saver>| runtime.block_on(accessor(saver, MODE).get(&thread, None)).unwrap().unwrap();

    let mut group = c.benchmark_group("cache");
    group.sample_size(20);
    group.bench_function("none", |b| b.iter(|| head(&store.saver)));
    group.bench_function("hit", |b| {
        head(&cached);
        b.iter(|| head(&cached));
    });
    group.bench_function("miss", |b| {
        b.iter_batched(
            || runtime.block_on(cache.purge(&thread)),
            |()| head(&cached),
            BatchSize::PerIteration,
        );
    });
    group.bench_function("hit, one superstep behind", |b| {
        b.iter_batched(
            || {
                head(&cached);
                // Write the same message again, so that the list keeps its length.
                runtime.block_on(step(&mut run, messages[MESSAGES - 1].clone()));
            },
            |()| head(&cached),
            BatchSize::PerIteration,
        );
    });
    group.finish();
    runtime.block_on(store.close());
}

criterion_group!(benches, cache);
criterion_main!(benches);
