//! Failures that tests inject at the writer's statements.

use std::sync::{Mutex, MutexGuard, PoisonError};

use rusqlite::{Connection, ffi};

/// How a statement fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum How {
    /// It was not carried out.
    NotDone,
    /// It was carried out all the same.
    Done,
    /// It was not carried out, because the disk is full.
    NoRoom,
    /// It rolled the whole transaction back, as SQLite may do when the disk is full.
    RolledBack,
    /// Its caller panics.
    Panic,
}

/// The failures of one connection.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Which of the following statements fails, from 0.
    armed: Option<(u32, How)>,
    /// Only statements that begin with this text count.
    only: &'static str,
    /// Statements since it was armed.
    count: u32,
    /// The largest size of the database in pages.
    max_pages: Option<u32>,
    /// What each COMMIT waited for: the value of `PRAGMA synchronous`.
    commits: Vec<u8>,
}

impl Faults {
    /// Makes the `nth` statement from now on fail, counting those that begin with `only`.
    pub(crate) fn arm(&self, nth: u32, how: How, only: &'static str) {
        *self.state() = State { armed: Some((nth, how)), only, ..State::default() };
    }

    /// Disarms it; returns whether the failure took place.
    pub(crate) fn disarm(&self) -> bool {
        let mut state = self.state();
        state.armed.take().is_none()
    }

    /// Bounds the size of databases that are opened from now on.
    pub(crate) fn bound(&self, pages: u32) {
        self.state().max_pages = Some(pages);
    }

    /// What the COMMITs since the last call waited for: 2 is `FULL`, 1 is `NORMAL`.
    pub(crate) fn commits(&self) -> Vec<u8> {
        std::mem::take(&mut self.state().commits)
    }

    pub(crate) fn apply(&self, conn: &Connection) {
        if let Some(pages) = self.state().max_pages {
            conn.pragma_update_and_check(None, "max_page_count", pages, |_| Ok(())).unwrap();
        }
    }

    pub(crate) fn strike<T>(
        &self,
        conn: &Connection,
        sql: &str,
        run: impl FnOnce() -> rusqlite::Result<T>,
    ) -> rusqlite::Result<T> {
        if sql == "COMMIT" {
            let level = conn.pragma_query_value(None, "synchronous", |row| row.get(0))?;
            self.state().commits.push(level);
        }
        let how = {
            let mut state = self.state();
            match state.armed {
                Some((nth, how)) if sql.starts_with(state.only) => {
                    state.count += 1;
                    (state.count > nth).then(|| {
                        state.armed = None;
                        how
                    })
                }
                _ => None,
            }
        };
        match how {
            None => return run(),
            Some(How::NotDone | How::NoRoom) => {}
            Some(How::Done) => {
                run()?;
            }
            Some(How::Panic) => panic!("arranged by the test"),
            Some(How::RolledBack) => {
                if !conn.is_autocommit() {
                    conn.execute_batch("ROLLBACK")?;
                }
            }
        }
        let code = if how == Some(How::NoRoom) { ffi::SQLITE_FULL } else { ffi::SQLITE_IOERR };
        let failure = ffi::Error::new(code);
        Err(rusqlite::Error::SqliteFailure(failure, Some("arranged by the test".to_owned())))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
