//! Files that go to the disk while the next ones are written.

use std::path::PathBuf;

use threadkeep_files::NewFile;
use tokio::task::JoinSet;

use super::error::{OpsError, Result};
use super::transfer::failed;

/// The number of files that go to the disk at the same time: it then flushes several at once.
const FLUSHED_TOGETHER: usize = 16;

/// Written files on their way to the disk, and how much has arrived.
#[derive(Default)]
pub(crate) struct Flushing {
    pending: JoinSet<Result<u64>>,
    /// The files that have arrived.
    pub(crate) files: usize,
    /// Their bytes.
    pub(crate) bytes: u64,
}

impl Flushing {
    /// Finishes a file in the background. Waits while there are too many.
    pub(crate) async fn add(&mut self, path: PathBuf, file: NewFile, bytes: u64) -> Result<()> {
        self.pending
            .spawn_blocking(move || file.finish().map(|()| bytes).map_err(|cause| failed(&path, cause)));
        self.wait_until(FLUSHED_TOGETHER).await
    }

    /// Waits until at most `left` files are on their way. Returns the first error, after the others have arrived.
    pub(crate) async fn wait_until(&mut self, left: usize) -> Result<()> {
        let mut result = Ok(());
        while self.pending.len() > left || (result.is_err() && !self.pending.is_empty()) {
            let Some(done) = self.pending.join_next().await else { break };
            match done.map_err(std::io::Error::from).map_err(OpsError::from).flatten() {
                Ok(bytes) => (self.files, self.bytes) = (self.files + 1, self.bytes + bytes),
                Err(error) => result = result.and(Err(error)),
            }
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_error_comes_after_the_files_that_are_whole() {
        let directory = tempfile::tempdir().unwrap();
        let mut flushing = Flushing::default();
        let paths = ["a", "b", "c"].map(|name| directory.path().join(name));
        let files = paths.clone().map(|path| NewFile::create(&path).unwrap());
        // Somebody else makes the second one before it has its name.
        std::fs::write(&paths[1], "theirs").unwrap();
        for (path, file) in paths.clone().into_iter().zip(files) {
            flushing.add(path, file, 10).await.unwrap();
        }
        let error = flushing.wait_until(0).await.unwrap_err().to_string();
        assert!(error.contains(&paths[1].display().to_string()), "{error}");
        assert_eq!((flushing.files, flushing.bytes), (2, 20));
        assert_eq!(std::fs::read(&paths[1]).unwrap(), b"theirs");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 3, "nothing else is left");
    }
}
