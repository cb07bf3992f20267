//! Files of each version of the format, kept in the repository: whatever changes later, they are read as they were
//! written.
//!
//! A new version needs files of its own. `WRITE_FIXTURE=1 cargo test -p threadkeep-ops archive::fixture` writes those of
//! the current version, once.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value as Json};
use threadkeep::saver::{Revision, Rewrite, Saver};
use threadkeep_memory::MemorySaver;

use super::{Record, Source, VERSION, read, write};

#[path = "../../../../drivers/sqlite/tests/common/kept.rs"]
mod kept;

/// The versions that have files: one for each thread, and the contents of all.
const VERSIONS: [u64; 1] = [1];

fn fixture(version: u64, name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/version_{version}_{name}"))
}

fn stored(file: &Path) -> Vec<u8> {
    std::fs::read(file).unwrap_or_else(|error| panic!("the fixture {}: {error}", file.display()))
}

fn record() -> Record {
    let (title, assistant) = (Some("a title".to_owned()), Some("lead_agent".to_owned()));
    Record { title, owner: None, assistant, metadata: Map::from_iter([("pinned".to_owned(), true.into())]) }
}

/// Writes the files of the current version.
async fn write_fixture() {
    let saver: Arc<dyn Saver> = Arc::new(MemorySaver::default());
    kept::write(&saver).await;
    let expected = fixture(VERSION, "contents.json");
    std::fs::create_dir_all(expected.parent().unwrap()).unwrap();
    for (thread, _) in kept::THREADS {
        let image = saver.read_thread(&thread.into()).await.unwrap();
        let source = Source { program: "threadkeep test".to_owned(), saver: "memory".to_owned() };
        let mut file = Vec::new();
        write(&image, source, Some(record()), &mut file).unwrap();
        std::fs::write(fixture(VERSION, &format!("{thread}.ndjson")), file).unwrap();
    }
    let contents = serde_json::to_string(&kept::contents(&*saver).await).unwrap();
    std::fs::write(expected, contents + "\n").unwrap();
}

#[tokio::test]
async fn files_of_each_version_are_read_as_they_were_written_and_go_on() {
    if std::env::var_os("WRITE_FIXTURE").is_some() {
        write_fixture().await;
    }
    assert!(VERSIONS.contains(&VERSION), "version {VERSION} has no fixture");
    for version in VERSIONS {
        let saver: Arc<dyn Saver> = Arc::new(MemorySaver::default());
        for (thread, _) in kept::THREADS {
            let archive = read(&stored(&fixture(version, &format!("{thread}.ndjson")))[..]).unwrap();
            assert_eq!(archive.record, Some(record()));
            let rewrite = Rewrite { put: archive.checkpoints, ..Rewrite::default() };
            saver.rewrite_thread(&archive.thread, &Revision::absent(), rewrite).await.unwrap();
        }
        let expected: Json = serde_json::from_slice(&stored(&fixture(version, "contents.json"))).unwrap();
        assert_eq!(kept::contents(&*saver).await, expected);
        kept::goes_on(&saver, 0).await;
    }
}
