//! Following the configuration file while the gateway runs.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::environment::Environment;
use super::error::{ConfigError, Origin};
use super::find::Location;
use super::stamp::Stamp;
use super::{Config, LoadOptions, SourceFile};

/// The configuration as the file has it now. Clones share one state.
///
/// Each access looks at the file's path, time stamp and size, and reads it only when one of them changed (or
/// is too young to be trusted); unchanged content is never built again. An edit that cannot be loaded, and a
/// file that vanishes, keep the last good configuration, are logged once, and show in
/// [`ConfigHandle::last_error`] until they are mended. Variables and `.env` are those of the start.
#[derive(Clone)]
pub struct ConfigHandle {
    shared: Arc<Shared>,
}

struct Shared {
    location: Location,
    state: Mutex<State>,
}

struct State {
    current: Arc<Config>,
    /// The first one, whose restart-only sections stay in use.
    first: Arc<Config>,
    /// What `current` was built from; none is the built-in defaults.
    good: Option<SourceFile>,
    /// What was read last, good or broken; none if there was nothing to read.
    last: Option<SourceFile>,
    /// The stamp that vouches for `last`, once it is old enough.
    stamp: Option<Stamp>,
    last_error: Option<Arc<ConfigError>>,
}

impl ConfigHandle {
    /// Loads the configuration and starts to follow it. Reads files, so it blocks.
    ///
    /// # Errors
    /// As [`Config::load`]: there is no last good configuration yet.
    pub fn open(options: &LoadOptions) -> Result<Self, ConfigError> {
        let location = Location::of(options)?;
        let good = location.config_file()?.map(SourceFile::read).transpose()?;
        let (config, _logged) = Config::build(&location, good.as_ref())?;
        let current = Arc::new(config);
        let first = Arc::clone(&current);
        let state = State { current, first, last: good.clone(), good, stamp: None, last_error: None };
        Ok(Self { shared: Arc::new(Shared { location, state: Mutex::new(state) }) })
    }

    /// The configuration as the file has it now, or the last good one. Looks at the file system, so it
    /// blocks for a moment; within async code use [`ConfigHandle::current_async`].
    pub fn current(&self) -> Arc<Config> {
        let mut state = self.state();
        state.refresh(&self.shared.location);
        Arc::clone(&state.current)
    }

    /// [`ConfigHandle::current`] off the reactor.
    pub async fn current_async(&self) -> Arc<Config> {
        let handle = self.clone();
        let refreshed = tokio::task::spawn_blocking(move || handle.current()).await;
        // The runtime is shutting down: what was good last is good enough.
        refreshed.unwrap_or_else(|_| self.last_known())
    }

    /// The configuration as it was when the file was last looked at: for what must not wait for a look at it.
    pub fn last_known(&self) -> Arc<Config> {
        Arc::clone(&self.state().current)
    }

    /// Why the file as it was last looked at is not in use; none if it is.
    pub fn last_error(&self) -> Option<Arc<ConfigError>> {
        self.state().last_error.clone()
    }

    /// The variables of the start, completed by the `.env` file.
    pub fn environment(&self) -> &Environment {
        &self.shared.location.environment
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic while the lock was held leaves a state that is complete, if perhaps not the newest.
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for ConfigHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ConfigHandle").field("root", &self.shared.location.root).finish_non_exhaustive()
    }
}

impl State {
    fn refresh(&mut self, location: &Location) {
        match self.look(location) {
            Ok(Some(read)) => self.take(read, location),
            Ok(None) => {}
            Err(error) => self.keep_without_file(error),
        }
    }

    /// What stands in the file, unless it is what was read last.
    fn look(&mut self, location: &Location) -> Result<Option<SourceFile>, ConfigError> {
        let path = match (location.config_file()?, &self.good) {
            (Some(path), _) => path,
            (None, Some(good)) => {
                return Err(ConfigError::Missing { path: good.path.clone(), origin: Origin::ProjectRoot });
            }
            (None, None) => {
                // A broken file that came has gone again.
                (self.last, self.stamp, self.last_error) = (None, None, None);
                return Ok(None);
            }
        };
        let unreadable = |source| ConfigError::Unreadable { path: path.clone(), source };
        let stamp = Stamp::of(&path).map_err(unreadable)?;
        if self.stamp.as_ref() == Some(&stamp) {
            return Ok(None);
        }
        let read = SourceFile::read(path)?;
        self.stamp = Some(stamp).filter(Stamp::is_trusted);
        Ok(Some(read).filter(|read| self.last.as_ref() != Some(read)))
    }

    /// Builds what was read, unless it is what is in use already.
    fn take(&mut self, read: SourceFile, location: &Location) {
        self.last = Some(read.clone());
        if self.good.as_ref() == Some(&read) {
            self.last_error = None;
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
                        "edited sections that are read at start only; they count after a restart"
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
#[path = "handle_tests.rs"]
mod tests;
