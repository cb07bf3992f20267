//! Managed definitions as files: one JSON file per name in a directory.

use std::fs;
use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use threadkeep_files::{NewFile, create_private_dir, replace, sync_directory};

use super::{Document, ManagedStore, Replaced, StoreError, is_name};

/// The directory, below the state directory.
const DIRECTORY: &str = "subagents";
/// How the files' names end.
const EXTENSION: &str = ".json";
/// System prompts may be confidential, as the API shows.
const MODE: u32 = 0o600;

/// Keeps each definition in a file of its own, `subagents/NAME.json` in the state directory. A person may edit, add or
/// remove files.
#[derive(Debug, Clone)]
pub struct FileStore {
    directory: PathBuf,
    /// Held while a file is compared and replaced.
    replacing: Arc<Mutex<()>>,
}

impl FileStore {
    /// The store in this state directory. Nothing is created before the first definition.
    pub fn new(state_dir: &Path) -> Self {
        Self { directory: state_dir.join(DIRECTORY), replacing: Arc::default() }
    }

    fn path(&self, name: &str) -> io::Result<PathBuf> {
        // The name comes from a request: it must not lead to another directory.
        if !is_name(name) {
            return Err(ErrorKind::InvalidInput.into());
        }
        Ok(self.directory.join(format!("{name}{EXTENSION}")))
    }

    /// Does blocking work.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> io::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let store = self.clone();
        let done = tokio::task::spawn_blocking(move || work(&store)).await;
        // It panicked, or the runtime is shutting down.
        let done = done.unwrap_or_else(|error| Err(error.into()));
        done.map_err(|source| StoreError::File { directory: self.directory.clone(), source })
    }

    fn read_all(&self) -> io::Result<Vec<Document>> {
        let entries = match fs::read_dir(&self.directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut documents = Vec::new();
        for entry in entries {
            let entry = entry?;
            let file = entry.file_name();
            let Some(name) = file.to_str().and_then(|file| file.strip_suffix(EXTENSION)) else { continue };
            match fs::read(entry.path()) {
                // It was removed meanwhile.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                content => documents.push(Document {
                    name: name.to_owned(),
                    content: content.map_err(|error| error.to_string()),
                }),
            }
        }
        Ok(documents)
    }

    fn create(&self, name: &str, content: &[u8]) -> io::Result<bool> {
        let path = self.path(name)?;
        create_private_dir(&self.directory)?;
        let created = NewFile::create(&path).and_then(|file| {
            file.file().write_all(content)?;
            file.finish()
        });
        match created {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
            created => created.map(|()| true),
        }
    }

    fn exchange(&self, name: &str, old: &[u8], new: &[u8]) -> io::Result<Replaced> {
        let path = self.path(name)?;
        // A panic while it was held leaves a file that is complete.
        let _held = self.replacing.lock().unwrap_or_else(PoisonError::into_inner);
        match fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Replaced::Missing),
            Ok(found) if found != old => Ok(Replaced::Changed),
            found => found.and_then(|_| replace(&path, new, MODE)).map(|()| Replaced::Done),
        }
    }

    fn delete(&self, name: &str) -> io::Result<bool> {
        let path = self.path(name)?;
        let _held = self.replacing.lock().unwrap_or_else(PoisonError::into_inner);
        match fs::remove_file(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            removed => removed.and_then(|()| sync_directory(&path)).map(|()| true),
        }
    }
}

#[async_trait]
impl ManagedStore for FileStore {
    async fn documents(&self) -> Result<Vec<Document>, StoreError> {
        self.blocking(Self::read_all).await
    }

    async fn insert(&self, name: &str, content: &[u8]) -> Result<bool, StoreError> {
        let (name, content) = (name.to_owned(), content.to_vec());
        self.blocking(move |store| store.create(&name, &content)).await
    }

    async fn replace(&self, name: &str, old: &[u8], new: &[u8]) -> Result<Replaced, StoreError> {
        let (name, old, new) = (name.to_owned(), old.to_vec(), new.to_vec());
        self.blocking(move |store| store.exchange(&name, &old, &new)).await
    }

    async fn remove(&self, name: &str) -> Result<bool, StoreError> {
        let name = name.to_owned();
        self.blocking(move |store| store.delete(&name)).await
    }
}
