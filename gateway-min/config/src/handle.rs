//! Follows the configuration file while the gateway runs.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::environment::Environment;
use super::error::{ConfigError, Origin};
use super::find::Location;
use super::stamp::Stamp;
use super::{Config, LoadOptions, SourceFile};

/// The current configuration. Clones share one state.
///
/// Each access checks the file's path, time stamp and size, and reads the file only if one of them changed (or is too
/// recent to be trusted); unchanged content is never parsed again. If an edit cannot be loaded, or the file disappears
/// or becomes empty, the last good configuration stays in use; the error is logged once and returned by
/// [`ConfigHandle::last_error`] until it is fixed. Variables and `.env` are those read at start.
#[derive(Clone)]
pub struct ConfigHandle {
    shared: Arc<Shared>,
}

struct Shared {
    location: Location,
    state: Mutex<Loaded>,
}

struct Loaded {
    current: Arc<Config>,
    /// The first configuration, whose restart-only sections stay in use.
    first: Arc<Config>,
    /// What `current` was built from; `None` for the built-in defaults.
    good: Option<SourceFile>,
    /// What was read last, good or broken; `None` if there was nothing to read.
    last: Option<SourceFile>,
    /// The stamp of `last`, once it is old enough to be trusted.
    stamp: Option<Stamp>,
    last_error: Option<Arc<ConfigError>>,
}

impl ConfigHandle {
    /// Loads the configuration and starts to follow it. Reads files, so it blocks.
    ///
    /// # Errors
    /// As [`Config::load`]: there is no last good configuration yet.
    pub fn open(options: &LoadOptions) -> Result<Self, ConfigError> {
        Self::at(Location::of(options)?)
    }

    /// [`open`](Self::open) for a program that is started in any directory: its files count only if the user
    /// [trusts](super::UserDirs::trust) it, and an edit of them only once that is trusted. [`withheld`](Self::withheld)
    /// has what does not count.
    ///
    /// # Errors
    /// As [`open`](Self::open), and [`ConfigError::NoHome`].
    pub fn open_trusted(options: &LoadOptions) -> Result<Self, ConfigError> {
        Self::at(Location::trusted(options)?)
    }

    fn at(location: Location) -> Result<Self, ConfigError> {
        let good = location.config_file()?.map(|path| location.read(path)).transpose()?;
        let (config, _logged) = Config::build(&location, good.as_ref())?;
        let current = Arc::new(config);
        let first = Arc::clone(&current);
        let state = Loaded { current, first, last: good.clone(), good, stamp: None, last_error: None };
        Ok(Self { shared: Arc::new(Shared { location, state: Mutex::new(state) }) })
    }

    /// The current configuration, or the last good one. Reads from the file system, so it blocks briefly; in async code
    /// use [`ConfigHandle::current_async`].
    pub fn current(&self) -> Arc<Config> {
        let mut state = self.state();
        state.refresh(&self.shared.location);
        Arc::clone(&state.current)
    }

    /// [`ConfigHandle::current`] without blocking the reactor: in place if one look at the file shows that it is
    /// unchanged, else on another thread.
    pub async fn current_async(&self) -> Arc<Config> {
        if let Some(current) = self.unchanged() {
            return current;
        }
        let handle = self.clone();
        let refreshed = tokio::task::spawn_blocking(move || handle.current()).await;
        // The runtime is shutting down; the last good configuration suffices.
        refreshed.unwrap_or_else(|_| self.last_known())
    }

    /// The current configuration, if the file's stamp is the trusted one.
    fn unchanged(&self) -> Option<Arc<Config>> {
        // Another thread may be reading the file.
        let state = self.shared.state.try_lock().ok()?;
        let known = state.stamp.as_ref()?;
        Stamp::of(known.path()).is_ok_and(|now| now == *known).then(|| Arc::clone(&state.current))
    }

    /// The configuration as of the last check of the file, without blocking.
    pub fn last_known(&self) -> Arc<Config> {
        Arc::clone(&self.state().current)
    }

    /// The configuration with which the handle was opened. What is only read at start is read from this one, whenever
    /// that is: an edit meanwhile waits for the next start, and all parts agree on what the program has checked.
    pub fn at_start(&self) -> Arc<Config> {
        Arc::clone(&self.state().first)
    }

    /// Why the file, as last read, is not in use; `None` if it is.
    pub fn last_error(&self) -> Option<Arc<ConfigError>> {
        self.state().last_error.clone()
    }

    /// The file in use; `None` if there is none and the built-in defaults apply.
    pub fn source(&self) -> Option<PathBuf> {
        self.state().good.as_ref().map(|file| file.path.clone())
    }

    /// The variables at start, plus those of the `.env` file.
    pub fn environment(&self) -> &Environment {
        &self.shared.location.environment
    }

    /// Files of the working directory that are not used because nobody trusted it.
    pub fn withheld(&self) -> &[PathBuf] {
        &self.shared.location.withheld
    }

    fn state(&self) -> MutexGuard<'_, Loaded> {
        // A panic while the lock was held leaves a complete state, if perhaps not the latest.
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for ConfigHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ConfigHandle").field("root", &self.shared.location.root).finish_non_exhaustive()
    }
}

impl Loaded {
    fn refresh(&mut self, location: &Location) {
        match self.look(location) {
            Ok(Some(read)) => self.take(read, location),
            Ok(None) => {}
            Err(error) => self.keep_without_file(error),
        }
    }

    /// The file's content, unless it equals what was read last.
    fn look(&mut self, location: &Location) -> Result<Option<SourceFile>, ConfigError> {
        let path = match (location.config_file()?, &self.good) {
            (Some(path), _) => path,
            (None, Some(good)) => {
                return Err(ConfigError::Missing { path: good.path.clone(), origin: Origin::ProjectRoot });
            }
            (None, None) => {
                // A broken file was removed again.
                (self.last, self.stamp, self.last_error) = (None, None, None);
                return Ok(None);
            }
        };
        let unreadable = |source| ConfigError::Unreadable { path: path.clone(), source };
        let stamp = Stamp::of(&path).map_err(unreadable)?;
        if self.stamp.as_ref() == Some(&stamp) {
            return Ok(None);
        }
        let read = location.read(path)?;
        self.stamp = Some(stamp).filter(Stamp::is_trusted);
        Ok(Some(read).filter(|read| self.last.as_ref() != Some(read)))
    }

    /// Builds what was read, unless it is already in use.
    fn take(&mut self, read: SourceFile, location: &Location) {
        self.last = Some(read.clone());
        if self.good.as_ref() == Some(&read) {
            self.last_error = None;
            return;
        }
        if read.is_blank() && self.good.as_ref().is_some_and(|good| !good.is_blank()) {
            // Many editors empty a file before they write it. Nobody wants the defaults for that moment.
            self.keep(ConfigError::Empty { path: read.path });
            return;
        }
        match Config::build(location, Some(&read)) {
            Ok((config, _logged)) => {
                tracing::info!(path = %read.path.display(), "configuration reloaded");
                let waiting = config.restart_only_changes(&self.first);
                if !waiting.is_empty() {
                    let sections = waiting.join(", ");
                    tracing::warn!(
                        sections,
                        "edited sections that are only read at start; restart to apply them"
                    );
                }
                (self.current, self.good, self.last_error) = (Arc::new(config), Some(read), None);
            }
            Err(error) => self.keep(error),
        }
    }

    fn keep_without_file(&mut self, error: ConfigError) {
        (self.last, self.stamp) = (None, None);
        let known = self.last_error.as_ref().is_some_and(|last| last.to_string() == error.to_string());
        if !known {
            self.keep(error);
        }
    }

    fn keep(&mut self, error: ConfigError) {
        tracing::warn!(%error, "the configuration cannot be reloaded; the last good one stays in use");
        self.last_error = Some(Arc::new(error));
    }
}

#[cfg(test)]
mod tests;
