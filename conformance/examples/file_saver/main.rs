//! A worked example: a complete saver in `saver.rs`, and the suite run on it.
//!
//! The saver is simple and slow, because each commit writes its whole thread. But it is correct: it passes every case.
//! Run it with `cargo run -p threadkeep-conformance --example file_saver`.

mod saver;

use std::process::ExitCode;
use std::sync::Arc;

use async_trait::async_trait;
use saver::{FileSaver, NAME};
use tempfile::TempDir;
use threadkeep::saver::Saver;
use threadkeep_conformance::{BoxError, Claim, Factory};

struct Files;

#[async_trait]
impl Factory for Files {
    type Storage = TempDir;

    fn name(&self) -> &'static str {
        NAME
    }

    fn claims(&self) -> &'static [Claim] {
        &[Claim::Durable, Claim::StoredBytes, Claim::Killable]
    }

    async fn create(&self) -> Result<TempDir, BoxError> {
        Ok(tempfile::tempdir()?)
    }

    async fn open(&self, place: &TempDir) -> Result<Arc<dyn Saver>, BoxError> {
        Ok(Arc::new(FileSaver(place.path().to_owned())))
    }

    async fn stored_bytes(&self, place: &TempDir) -> Result<u64, BoxError> {
        let mut bytes = 0;
        for file in std::fs::read_dir(place.path())? {
            bytes += file?.metadata()?.len();
        }
        Ok(bytes)
    }

    fn address(&self, place: &TempDir) -> Result<String, BoxError> {
        Ok(place.path().to_str().ok_or("the temporary directory's name is not UTF-8")?.to_owned())
    }

    async fn open_at(&self, address: &str) -> Result<Arc<dyn Saver>, BoxError> {
        Ok(Arc::new(FileSaver(address.into())))
    }
}

fn main() -> ExitCode {
    threadkeep_conformance::main(Files)
}
