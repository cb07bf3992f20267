//! How the suite accesses the stores that it tests.

use std::error::Error;
use std::fmt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use async_trait::async_trait;
use threadkeep::checkpoint::CheckpointKey;
use threadkeep::id::TaskId;
use threadkeep::saver::Saver;

use crate::case::Claim;
use crate::settings::Settings;
use crate::waits::{Waits, Watched};

/// Any error of a factory, such as a directory that cannot be created or a server that does not answer.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// Creates stores for the suite. Each case gets its own store, and its own runtime, which ends with it: a client that a
/// factory keeps from one case to the next loses its connections and background tasks.
#[async_trait]
pub trait Factory: Send + Sync + 'static {
    /// Keeps a store alive while no handle is open: a temporary directory, a database, a shared map. Dropping it
    /// removes the store. It is dropped in async code, which may not wait for a future.
    type Storage: Send + Sync + 'static;

    /// The prefix of each case's name, for example `sqlite`.
    fn name(&self) -> &'static str;

    /// What this saver and this factory offer beyond the required behaviour.
    fn claims(&self) -> &'static [Claim] {
        &[]
    }

    /// A place with an empty store. Other cases run at the same time, some test runners in processes of their own.
    ///
    /// # Errors
    /// If it cannot be created; the case fails with it.
    async fn create(&self) -> Result<Self::Storage, BoxError>;

    /// A handle on the store of a place. Several handles may be open at the same time; what one wrote, the others
    /// read.
    ///
    /// # Errors
    /// If it cannot be opened; the case fails with it.
    async fn open(&self, place: &Self::Storage) -> Result<Arc<dyn Saver>, BoxError>;

    /// Damages the store without going through the saver, so that the suite can check that damage is reported. No
    /// handle is open at that time. Implement it for the claimed kinds of damage.
    ///
    /// # Errors
    /// If the damage is not possible; the case fails with it.
    async fn damage(&self, place: &Self::Storage, damage: &Damage) -> Result<(), BoxError> {
        let _ = (place, damage);
        Err("this factory cannot damage its stores".into())
    }

    /// The bytes that the store of a place takes for what it holds, at this moment: not what a file keeps free. Handles may be
    /// open. Implement it for [`Claim::StoredBytes`] and [`Claim::SharedElements`].
    ///
    /// # Errors
    /// If they cannot be measured; the case fails with it.
    async fn stored_bytes(&self, place: &Self::Storage) -> Result<u64, BoxError> {
        let _ = place;
        Err("this factory cannot measure its stores".into())
    }

    /// Where another process finds the store of a place: a path, a URL. Implement it, with [`Self::open_at`], for
    /// [`Claim::Killable`].
    ///
    /// # Errors
    /// If it has none; the case fails with it.
    fn address(&self, place: &Self::Storage) -> Result<String, BoxError> {
        let _ = place;
        Err("this factory has no addresses for its stores".into())
    }

    /// A handle on the store at an address, in a process other than the one that created its place.
    ///
    /// # Errors
    /// If it cannot be opened; the child ends with it.
    async fn open_at(&self, address: &str) -> Result<Arc<dyn Saver>, BoxError> {
        let _ = address;
        Err("this factory opens no store by its address".into())
    }

    /// The program to run as a child process, which the suite kills: by default this one. It must call [`crate::main`]
    /// or [`crate::child`] with the same kind of factory; its environment says what to do.
    ///
    /// # Errors
    /// If it cannot be found; the case fails with it.
    fn child_command(&self) -> Result<Command, BoxError> {
        Ok(Command::new(std::env::current_exe()?))
    }

    /// A handle on the store of a place, whose `nth` operation on its medium fails, counted from 0: a statement, a
    /// request, a write to a file. A request can also fail by losing its answer after it was carried out, so each may
    /// have two numbers. Implement it for [`Claim::FailOperations`].
    ///
    /// # Errors
    /// If it cannot be opened; the case fails with it.
    async fn open_failing(&self, place: &Self::Storage, nth: u32) -> Result<Failing, BoxError> {
        let _ = (place, nth);
        Err("this factory cannot let operations fail".into())
    }
}

/// A handle on a store, one of whose operations fails.
#[derive(Clone)]
pub struct Failing {
    /// The handle.
    pub saver: Arc<dyn Saver>,
    /// Set when the operation failed.
    pub failed: Arc<AtomicBool>,
}

/// Damage that no method of a saver does, but a broken disk or a faulty deletion may have done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Damage {
    /// The checkpoint is missing, with the writes under it; its children exist.
    LoseCheckpoint(CheckpointKey),
    /// The writes of a task are missing under the checkpoint it ran from; the child that applied them exists.
    LoseWrites(CheckpointKey, TaskId),
    /// The checkpoint has lost its parent link.
    LoseParentLink(CheckpointKey),
    /// A byte of the values that were first stored with this checkpoint has changed; it is the newest of its store.
    ChangeByte(CheckpointKey),
}

/// A factory could not do what the suite requested.
#[derive(Debug)]
pub(crate) struct Unprepared(BoxError);

impl fmt::Display for Unprepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "from the factory: {}", self.0)
    }
}

impl Error for Unprepared {}

/// A store of any factory, for a case.
#[derive(Clone)]
pub(crate) struct Store {
    any: Arc<dyn AnyStore>,
    pub(crate) settings: Settings,
    pub(crate) waits: Waits,
}

impl Store {
    /// A new, empty store; `waits` is where its calls are noted.
    pub(crate) async fn create<F: Factory>(
        factory: Arc<F>,
        settings: Settings,
        waits: Waits,
    ) -> Result<Self, Unprepared> {
        let place = {
            let _wait = waits.begin("a new store of the factory");
            factory.create().await.map_err(Unprepared)?
        };
        Ok(Self { any: Arc::new(Placed { factory, place }), settings, waits })
    }

    /// Another handle on it.
    pub(crate) async fn open(&self) -> Result<Arc<dyn Saver>, Unprepared> {
        let _wait = self.waits.begin("a handle that the factory opens");
        let saver = self.any.open().await.map_err(Unprepared)?;
        Ok(self.watched(saver))
    }

    fn watched(&self, saver: Arc<dyn Saver>) -> Arc<dyn Saver> {
        Arc::new(Watched { saver, waits: self.waits.clone() })
    }

    /// Whether saver and factory claim to offer something.
    pub(crate) fn claims(&self, claim: Claim) -> bool {
        self.any.claims().contains(&claim)
    }

    /// Damages it. All handles must have been dropped.
    pub(crate) async fn damage(&self, damage: Damage) -> Result<(), Unprepared> {
        let _wait = self.waits.begin("damage that the factory does");
        self.any.damage(&damage).await.map_err(Unprepared)
    }

    /// What it takes for what it holds.
    pub(crate) async fn stored_bytes(&self) -> Result<u64, Unprepared> {
        let _wait = self.waits.begin("bytes that the factory counts");
        self.any.stored_bytes().await.map_err(Unprepared)
    }

    /// A handle one of whose operations fails.
    pub(crate) async fn open_failing(&self, nth: u32) -> Result<Failing, Unprepared> {
        let _wait = self.waits.begin("a failing handle that the factory opens");
        let Failing { saver, failed } = self.any.open_failing(nth).await.map_err(Unprepared)?;
        Ok(Failing { saver: self.watched(saver), failed })
    }

    /// For a child process: the name of the factory, the address of the store, and the program.
    pub(crate) fn child(&self) -> Result<(&'static str, String, Command), Unprepared> {
        self.any.child().map_err(Unprepared)
    }
}

/// [`Factory`] with a place, type-erased.
#[async_trait]
trait AnyStore: Send + Sync {
    fn claims(&self) -> &'static [Claim];
    async fn open(&self) -> Result<Arc<dyn Saver>, BoxError>;
    async fn damage(&self, damage: &Damage) -> Result<(), BoxError>;
    async fn stored_bytes(&self) -> Result<u64, BoxError>;
    async fn open_failing(&self, nth: u32) -> Result<Failing, BoxError>;
    fn child(&self) -> Result<(&'static str, String, Command), BoxError>;
}

struct Placed<F: Factory> {
    factory: Arc<F>,
    place: F::Storage,
}

#[async_trait]
impl<F: Factory> AnyStore for Placed<F> {
    fn claims(&self) -> &'static [Claim] {
        self.factory.claims()
    }

    async fn open(&self) -> Result<Arc<dyn Saver>, BoxError> {
        self.factory.open(&self.place).await
    }

    async fn damage(&self, damage: &Damage) -> Result<(), BoxError> {
        self.factory.damage(&self.place, damage).await
    }

    async fn stored_bytes(&self) -> Result<u64, BoxError> {
        self.factory.stored_bytes(&self.place).await
    }

    async fn open_failing(&self, nth: u32) -> Result<Failing, BoxError> {
        self.factory.open_failing(&self.place, nth).await
    }

    fn child(&self) -> Result<(&'static str, String, Command), BoxError> {
        Ok((self.factory.name(), self.factory.address(&self.place)?, self.factory.child_command()?))
    }
}
