//! A store of one process: opened by its first call, at rest while the process forks, closed in the end.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use threadkeep::Error;
use threadkeep::saver::Saver;
use threadkeep_langgraph::{Fence, LangGraph, after};
use threadkeep_memory::MemorySaver;
use threadkeep_postgres::PostgresSaver;
use threadkeep_sqlite::SqliteSaver;

use crate::fork::Running;
use crate::runtime;

/// Where a store is.
#[derive(Clone)]
pub(crate) enum Kind {
    Memory(MemorySaver),
    Sqlite(String, threadkeep_sqlite::Options),
    Postgres(String, threadkeep_postgres::Options),
}

/// An open store, and how to close it.
#[derive(Clone)]
struct Open {
    graphs: Arc<LangGraph>,
    closing: Closing,
}

#[derive(Clone)]
enum Closing {
    Memory,
    Sqlite(Arc<SqliteSaver>),
    Postgres(Arc<PostgresSaver>),
}

/// The store of one process.
#[derive(Default)]
enum State {
    #[default]
    New,
    /// Opened by a process.
    Open(u32, Open),
    /// Closed by a process that was about to fork, and opened again by its next call: what is remembered of the store then.
    AtRest(u32, Arc<LangGraph>),
    /// The process was forked, and nobody said so before, with the file open.
    Torn,
    Closed,
}

/// Every store of the process.
static STORES: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());

fn stores() -> MutexGuard<'static, Vec<Weak<Shared>>> {
    STORES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Closes the files of all stores until their next calls.
pub(crate) async fn rest() {
    let all: Vec<_> = stores().iter().filter_map(Weak::upgrade).collect();
    for shared in all {
        if let Ok(Some(Open { graphs, closing: Closing::Sqlite(saver) })) = shared.opened() {
            saver.close().await;
            *shared.lock() = State::AtRest(std::process::id(), graphs);
        }
    }
}

/// A store, which its first call opens.
pub(crate) struct Shared {
    kind: Kind,
    fence: Fence,
    state: Mutex<State>,
    /// Of two calls that find the store closed, one opens it.
    opening: tokio::sync::Mutex<()>,
}

/// A store that nobody closed is closed on the way: a process that forks meanwhile waits for that, too.
impl Drop for Shared {
    fn drop(&mut self) {
        let state = std::mem::take(self.state.get_mut().unwrap_or_else(PoisonError::into_inner));
        match state {
            State::Open(process, Open { closing: Closing::Sqlite(saver), .. })
                if process == std::process::id() =>
            {
                // Counted although the process may be waiting for the last call, which drops the store.
                let running = Running::now();
                if let Ok(runtime) = runtime::current() {
                    runtime.spawn(async move {
                        saver.close().await;
                        drop(running);
                    });
                }
            }
            State::Open(process, open) if process != std::process::id() => std::mem::forget(open),
            _ => {}
        }
    }
}

impl Shared {
    pub(crate) fn new(kind: Kind, fence: Fence) -> Arc<Self> {
        let (state, opening) = (Mutex::default(), tokio::sync::Mutex::default());
        let shared = Arc::new(Self { kind, fence, state, opening });
        let mut stores = stores();
        stores.retain(|store| store.strong_count() > 0);
        stores.push(Arc::downgrade(&shared));
        shared
    }

    /// What is remembered of the store, if this process has it open.
    pub(crate) fn known(&self) -> threadkeep::Result<Option<Arc<LangGraph>>> {
        Ok(self.opened()?.map(|open| open.graphs))
    }

    /// Does something with the open store. A process that forks meanwhile waits for that.
    pub(crate) async fn call<F, T>(
        self: Arc<Self>,
        call: impl FnOnce(Arc<LangGraph>) -> F,
    ) -> threadkeep::Result<T>
    where
        F: Future<Output = threadkeep::Result<T>>,
    {
        let mut running = Some(Running::begin().await?);
        // Dropped while the call counts, also if it fails: the last call of a store closes it.
        let shared = self;
        let open = shared.open().await?;
        // A connection to a server may be open while a process forks: the child does not use it.
        if matches!(shared.kind, Kind::Postgres(..)) {
            running = None;
        }
        let done = call(open.graphs).await;
        drop(shared);
        drop(running);
        done.map_err(or_locked)
    }

    /// Opens the store; creates its tables.
    pub(crate) async fn setup(self: Arc<Self>) -> threadkeep::Result<()> {
        let on_server = match &self.kind {
            Kind::Postgres(address, options) => {
                threadkeep_postgres::setup(address, options).await?;
                true
            }
            Kind::Memory(_) | Kind::Sqlite(..) => false,
        };
        let opened = async move {
            let _running = Running::begin().await?;
            // Dropped first, as in a call.
            let shared = self;
            shared.open().await.map(drop)
        };
        match opened.await {
            Err(error) if on_server => Err(after("the tables are there", error)),
            opened => opened,
        }
    }

    /// Closes the store. Later calls fail.
    pub(crate) async fn close(&self) {
        // In the thread that forks, no file is open, and no call is running.
        let _running = Running::begin().await.unwrap_or_else(|_| Running::now());
        // A call may be opening it: what is opened is closed.
        let _alone = self.opening.lock().await;
        let open = self.opened().unwrap_or_default();
        *self.lock() = State::Closed;
        match open.map(|open| open.closing) {
            Some(Closing::Sqlite(saver)) => saver.close().await,
            Some(Closing::Postgres(saver)) => saver.close(),
            Some(Closing::Memory) | None => {}
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The store, if this process has opened it.
    fn opened(&self) -> threadkeep::Result<Option<Open>> {
        let mut state = self.lock();
        if let State::Open(process, _) | State::AtRest(process, _) = &*state
            && *process != std::process::id()
        {
            // The parent's: its threads do not run in this process, and its locks are not this process's.
            let torn = matches!(&*state, State::Open(_, Open { closing: Closing::Sqlite(_), .. }));
            let new = if torn { State::Torn } else { State::New };
            std::mem::forget(std::mem::replace(&mut *state, new));
        }
        match &*state {
            State::Open(_, open) => Ok(Some(open.clone())),
            State::New | State::AtRest(..) => Ok(None),
            State::Torn => Err(unavailable(
                "the process was forked by a program that did not tell Python (as os.fork does) while the file was open, so \
                 SQLite holds no locks here; make the saver after the fork",
            )),
            State::Closed => Err(unavailable("the saver was closed; make another one")),
        }
    }

    /// What was remembered when this process came to rest.
    fn rested(&self) -> Option<Arc<LangGraph>> {
        match &*self.lock() {
            State::AtRest(_, graphs) => Some(graphs.clone()),
            _ => None,
        }
    }

    async fn open(&self) -> threadkeep::Result<Open> {
        if let Some(open) = self.opened()? {
            return Ok(open);
        }
        let _alone = self.opening.lock().await;
        if let Some(open) = self.opened()? {
            return Ok(open);
        }
        let (saver, closing): (Arc<dyn Saver>, Closing) = match &self.kind {
            Kind::Memory(saver) => (Arc::new(saver.clone()), Closing::Memory),
            Kind::Sqlite(path, options) => {
                let opened = SqliteSaver::open_async(path, options.clone()).await;
                let saver = Arc::new(opened.map_err(or_moved).map_err(or_locked)?);
                (saver.clone(), Closing::Sqlite(saver))
            }
            Kind::Postgres(address, options) => {
                let opened = PostgresSaver::connect(address, options.clone()).await;
                let saver = Arc::new(opened.map_err(or_set_up)?);
                (saver.clone(), Closing::Postgres(saver))
            }
        };
        let graphs = match self.rested() {
            Some(rested) => rested.on(saver),
            None => LangGraph::new(saver, self.fence),
        };
        let open = Open { graphs: Arc::new(graphs), closing };
        *self.lock() = State::Open(std::process::id(), open.clone());
        Ok(open)
    }
}

fn unavailable(reason: &str) -> Error {
    Error::Unavailable { saver: "python", reason: reason.to_owned() }
}

/// Another program's file, that mostly is one of LangGraph's own saver: only the import was changed.
fn or_moved(error: Error) -> Error {
    match error {
        Error::InvalidInput(reason) => Error::InvalidInput(format!(
            "{reason}; if LangGraph's own saver wrote it, `threadkeep import-langgraph` moves its threads there"
        )),
        other => other,
    }
}

/// A lock that another process holds for too long, with what waits longer here.
fn or_locked(mut error: Error) -> Error {
    if threadkeep_sqlite::is_locked(&error)
        && let Error::Unavailable { reason, .. } | Error::InDoubt { reason, .. } = &mut error
    {
        let more = "; in Python, make the saver from a connection with a longer timeout: \
             SqliteSaver(sqlite3.connect(path, timeout=30))";
        reason.push_str(more);
    }
    error
}

/// Missing tables, with what creates them here.
fn or_set_up(error: Error) -> Error {
    let is_wanted = threadkeep_postgres::schema::is_wanted(&error);
    match error {
        Error::Unavailable { saver, reason } if is_wanted => Error::Unavailable {
            saver,
            reason: format!(
                "{reason}; in Python, saver.setup() does it, awaited on the savers for event loops"
            ),
        },
        other => other,
    }
}
