//! Each operation of each driver, on a thread of realistic messages.
//!
//! ```text
//! cargo bench -p threadkeep-benches --bench drivers -- 'sqlite/head'
//! ```
//!
//! Postgres is a private server with fsync on; SQLite flushes every commit and keeps its file in a temporary directory.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, unreachable_pub, missing_docs)]

mod shared;

use std::sync::Arc;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use shared::{accessor, grown, step, transcript};
use tempfile::TempDir;
use threadkeep::deletion::{Boundary, Keep, Prune, copy_thread, prune};
use threadkeep::id::ThreadId;
use threadkeep::saver::Saver;
use threadkeep::state::HistoryQuery;
use threadkeep::verify::verify;
use threadkeep_benches::case::{Backend, Mode};
use threadkeep_benches::store::Store;
use threadkeep_testing::Postgres;
use tokio::runtime::Runtime;

/// Messages in the thread, one per superstep.
const MESSAGES: usize = 400;

fn drivers(c: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let directory = TempDir::new().unwrap();
    memory_and_files(c, &runtime, &directory);
    let server = Postgres::start_flushing().unwrap();
    let database = runtime.block_on(server.database()).unwrap();
    driver(c, &runtime, Backend::Postgres, database.url());
}

fn memory_and_files(c: &mut Criterion, runtime: &Runtime, directory: &TempDir) {
    driver(c, runtime, Backend::Memory, "");
    driver(c, runtime, Backend::Sqlite, directory.path().join("c.db").to_str().unwrap());
}

fn driver(c: &mut Criterion, runtime: &Runtime, backend: Backend, target: &str) {
    let store = runtime.block_on(Store::open(backend, target)).unwrap();
    let saver = store.saver.clone();
    for mode in [Mode::Full, Mode::Delta(10)] {
        let mut group = c.benchmark_group(format!("{backend}/{mode}"));
        group.sample_size(20);
        thread(&mut group, runtime, &saver, mode);
        group.finish();
    }
    runtime.block_on(store.close());
}

type Group<'a> = criterion::BenchmarkGroup<'a, criterion::measurement::WallTime>;

fn thread(group: &mut Group<'_>, runtime: &Runtime, saver: &Arc<dyn Saver>, mode: Mode) {
    let messages = transcript(MESSAGES);
    let thread = ThreadId::new(format!("thread {mode}"));
    let writer = accessor(saver, mode);
    let mut run = runtime.block_on(grown(&writer, &thread, &messages, MESSAGES));

    group.bench_function("head/cold", |b| {
        b.iter(|| runtime.block_on(accessor(saver, mode).get(&thread, None)).unwrap());
    });
    group.bench_function("head/warm", |b| b.iter(|| runtime.block_on(writer.get(&thread, None)).unwrap()));
    let page = || HistoryQuery { limit: Some(100), ..HistoryQuery::default() };
    group.bench_function("history/100", |b| {
        b.iter(|| runtime.block_on(accessor(saver, mode).history(&thread, page())).unwrap().len());
    });
    let table = mode.table().unwrap();
    group.bench_function("verify", |b| {
        b.iter(|| assert!(runtime.block_on(verify(&**saver, &thread, &table)).unwrap().is_empty()));
    });
    let (mut copies, mut pruned) = (0, 0);
    let fresh = |copies: &mut usize| {
        *copies += 1;
        ThreadId::new(format!("copy {mode} {copies}"))
    };
    group.bench_function("copy", |b| {
        b.iter(|| {
            let copy = fresh(&mut copies);
            runtime.block_on(copy_thread(&**saver, &thread, &copy)).unwrap()
        });
    });
    for (name, boundary) in
        [("prune/keep set", Boundary::KeepSet), ("prune/fresh snapshot", Boundary::FreshSnapshot)]
    {
        let what = Prune { boundary, ..Prune::keeping(Keep::Last(20)) };
        group.bench_function(name, |b| {
            b.iter_batched(
                || {
                    pruned += 1;
                    let copy = ThreadId::new(format!("pruned {mode} {pruned}"));
                    runtime.block_on(copy_thread(&**saver, &thread, &copy)).unwrap();
                    copy
                },
                |copy| runtime.block_on(prune(&**saver, &copy, &what, &table)).unwrap(),
                BatchSize::PerIteration,
            );
        });
    }
    // Last, because it grows the thread.
    let mut next = transcript(MESSAGES + 2_000).into_iter().skip(MESSAGES).cycle();
    group.bench_function("commit", |b| {
        b.iter_batched(
            || {
                let mut message = next.next().unwrap();
                message["id"] = threadkeep::id::IdSource::default().text().into();
                message
            },
            |message| runtime.block_on(step(&mut run, message)),
            BatchSize::PerIteration,
        );
    });
}

criterion_group!(benches, drivers);
criterion_main!(benches);
