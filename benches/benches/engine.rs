//! The engine's steps, without I/O.
//!
//! ```text
//! cargo bench -p threadkeep-benches --bench engine -- materialize
//! ```
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, unreachable_pub, missing_docs)]

mod shared;

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use serde_json::Value as Json;
use shared::{accessor, grown, step, transcript};
use threadkeep::channel::{MESSAGES_CHANNEL, Messages, Reducer};
use threadkeep::id::{ThreadId, Version};
use threadkeep::saver::Saver;
use threadkeep::step::StepWriter;
use threadkeep::value::{ChannelValue, Element, ListValue};
use threadkeep_benches::case::Mode;
use threadkeep_memory::MemorySaver;
use tokio::runtime::Runtime;

const LENGTHS: [usize; 2] = [40, 4_000];

/// From JSON to stored bytes and back, by message size.
fn values(c: &mut Criterion) {
    let messages = transcript(200);
    let bytes: usize = messages.iter().map(|message| message.to_string().len()).sum();
    let value = ChannelValue::from_json(&Json::Array(messages.clone())).unwrap();
    let encoded = value.to_encoded();
    let mut group = c.benchmark_group("value");
    group.throughput(Throughput::Bytes(bytes as u64));
    group.bench_function("encode/200 messages", |b| {
        b.iter(|| messages.iter().map(|m| Element::from_json(m).unwrap().bytes().len()).sum::<usize>());
    });
    group.bench_function("decode/200 messages", |b| b.iter(|| value.to_json().unwrap()));
    group.bench_function("split/200 messages", |b| {
        b.iter(|| ChannelValue::from_encoded(black_box(encoded.clone())).unwrap());
    });
    group.bench_function("join/200 messages", |b| b.iter(|| value.to_encoded()));
    group.bench_function("hash/200 messages", |b| {
        let list = value.as_list().unwrap();
        b.iter(|| list.iter().map(|element| Element::hash_of(element.bytes())[0]).fold(0, u8::wrapping_add));
    });
    group.finish();
}

/// Folding one message into a list, by list length: an append, and a replacement in the middle.
fn apply(c: &mut Criterion) {
    let mut group = c.benchmark_group("apply");
    for length in LENGTHS {
        let list = list(length);
        let new = ChannelValue::from_json(&Json::Array(vec![transcript(length + 1).pop().unwrap()])).unwrap();
        let mut edited = list.get(length / 2).unwrap().to_json().unwrap();
        edited["content"] = "edited".into();
        let edited = ChannelValue::from_json(&Json::Array(vec![edited])).unwrap();
        for (name, write) in [("append", &new), ("replace", &edited)] {
            group.bench_with_input(BenchmarkId::new(name, length), write, |b, write| {
                b.iter_batched(
                    || ChannelValue::from(list.clone()),
                    |list| Messages.reduce(list, write).unwrap(),
                    BatchSize::SmallInput,
                );
            });
        }
    }
    group.finish();
}

/// Changing a stored list and finding what is new in it, and comparing two lists.
fn diff(c: &mut Criterion) {
    let mut group = c.benchmark_group("diff");
    for length in LENGTHS {
        let mut stored = list(length);
        stored.rebase(Version { counter: 1, random: 1 });
        let [changed, new] = ["edited", "new"].map(|text| Element::from_json(&Json::from(text)).unwrap());
        group.bench_function(BenchmarkId::new("parts", length), |b| {
            b.iter_batched(
                || (stored.clone(), changed.clone(), new.clone()),
                |(mut edited, changed, new)| {
                    edited.replace(length / 2, changed);
                    edited.push(new);
                    let parts = edited.parts().len();
                    (edited, parts)
                },
                BatchSize::SmallInput,
            );
        });
        let (apart, again) = (list(length), list(length));
        group.bench_function(BenchmarkId::new("equal and shared", length), |b| {
            b.iter(|| black_box(&stored) == black_box(&stored.clone()));
        });
        group.bench_function(BenchmarkId::new("equal and apart", length), |b| {
            b.iter(|| black_box(&apart) == black_box(&again));
        });
    }
    group.finish();
}

/// A superstep on the memory saver (plan, values, commit), with and without a snapshot, by list length.
fn superstep(c: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let mut group = c.benchmark_group("superstep");
    for (name, mode) in
        [("full", Mode::Full), ("snapshot", Mode::Delta(1)), ("sentinel", Mode::Delta(1_000_000))]
    {
        for length in LENGTHS {
            let messages = transcript(length);
            let saver: Arc<dyn Saver> = Arc::new(MemorySaver::new());
            let accessor = accessor(&saver, mode);
            let mut run = runtime.block_on(grown(&accessor, &ThreadId::from("t"), &messages, 1));
            // Replace one message by another, so that the list changes and keeps its length.
            let mut message = messages.last().unwrap().clone();
            let mut texts = ["one", "another"].into_iter().cycle();
            group.bench_function(BenchmarkId::new(name, length), |b| {
                b.iter(|| {
                    message["content"] = texts.next().into();
                    runtime.block_on(step(&mut run, message.clone()));
                });
            });
        }
    }
    group.finish();
}

/// The head of a delta thread, by the number of updates since its last snapshot.
fn materialize(c: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let mut group = c.benchmark_group("materialize");
    for depth in [0, 9, 99, 999] {
        let messages = transcript(1_000);
        let saver: Arc<dyn Saver> = Arc::new(MemorySaver::new());
        let (thread, mode) = (ThreadId::from("t"), Mode::Delta(1_000_000));
        let (before, after) = messages.split_at(messages.len() - depth);
        let head = runtime.block_on(async {
            // The first step stores a snapshot.
            drop(grown(&accessor(&saver, Mode::Delta(1)), &thread, before, 0).await);
            let accessor = accessor(&saver, mode);
            let mut run = StepWriter::open(&accessor, &thread, None).await.unwrap();
            for message in after {
                step(&mut run, message.clone()).await;
            }
            accessor.get(&thread, None).await.unwrap().unwrap()
        });
        let updates = head.metadata.counters.get(MESSAGES_CHANNEL).map_or(0, |counters| counters.updates);
        assert_eq!(updates, depth as u64, "updates since the snapshot");
        group.bench_function(BenchmarkId::new("head at depth", depth), |b| {
            b.iter(|| {
                let state = runtime.block_on(accessor(&saver, mode).get(&thread, None)).unwrap().unwrap();
                state.value(MESSAGES_CHANNEL).unwrap().as_list().unwrap().len()
            });
        });
    }
    group.finish();
}

fn list(length: usize) -> ListValue {
    let mut list: ListValue = transcript(length).iter().map(|m| Element::from_json(m).unwrap()).collect();
    // Build the id index once, as in a thread that continues.
    list.position("");
    list
}

criterion_group!(benches, values, apply, diff, superstep, materialize);
criterion_main!(benches);
