//! The body of a fuzz target: random programs of calls, derived from bytes instead of a seed.
#![allow(clippy::expect_used, clippy::panic, missing_docs, reason = "a fuzz target fails by panicking")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::runtime::Runtime;

use crate::factory::{Factory, Store};
use crate::model::play_bytes;
use crate::settings::Settings;
use crate::waits::Waits;

/// A store on which programs run, one after the other.
pub struct Programs {
    store: Store,
    runtime: Runtime,
    played: AtomicU64,
}

impl Programs {
    /// On a store of this factory.
    pub fn on<F: Factory>(factory: F) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let store = Store::create(Arc::new(factory), Settings::default(), Waits::default());
        let store = runtime.block_on(store).expect("a store");
        Self { store, runtime, played: AtomicU64::new(0) }
    }

    /// Runs the program that these bytes encode on the store and on the naive model; fails if the two differ.
    pub fn play(&self, data: &[u8]) {
        let name = self.played.fetch_add(1, Ordering::Relaxed).to_string();
        if let Err(failure) = self.runtime.block_on(play_bytes(&self.store, &name, data)) {
            panic!("{failure}");
        }
    }
}

#[cfg(all(test, feature = "memory"))]
mod tests {
    use super::Programs;
    use crate::savers::Memory;

    #[test]
    fn the_corpus_of_programs_agrees_with_the_model() {
        let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/program");
        let programs = Programs::on(Memory);
        let files: Vec<_> = std::fs::read_dir(corpus).expect(corpus).collect();
        assert!(!files.is_empty(), "{corpus} is empty");
        for file in files {
            programs.play(&std::fs::read(file.expect(corpus).path()).expect(corpus));
        }
    }
}
