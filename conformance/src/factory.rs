//! How the suite gets at the stores that it tests.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use threadkeep::checkpoint::CheckpointKey;
use threadkeep::id::TaskId;
use threadkeep::saver::Saver;

use crate::case::Claim;

/// Any error of a factory: a directory that cannot be made, a server that does not answer.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// Makes stores for the suite. Each case gets a store of its own.
#[async_trait]
pub trait Factory: Send + Sync + 'static {
    /// What keeps a store in being while no handle is open: a temporary directory, a database, a shared map. Dropping
    /// it removes the store.
    type Place: Send + Sync + 'static;

    /// The name in front of each case, for example `sqlite`.
    fn name(&self) -> &'static str;

    /// What this saver and this factory offer beyond the required.
    fn claims(&self) -> &'static [Claim] {
        &[]
    }

    /// A place with an empty store.
    ///
    /// # Errors
    /// If it cannot be made; the case fails with it.
    async fn create(&self) -> Result<Self::Place, BoxError>;

    /// A handle on the store of a place. Several handles may be open at the same time; what one wrote, the others
    /// read.
    ///
    /// # Errors
    /// If it cannot be opened; the case fails with it.
    async fn open(&self, place: &Self::Place) -> Result<Arc<dyn Saver>, BoxError>;

    /// Damages the store behind the saver's back, so that the suite can see that damage is reported. No handle is open
    /// at that time. Implement it for the kinds of damage that are claimed.
    ///
    /// # Errors
    /// If the damage could not be done; the case fails with it.
    async fn damage(&self, place: &Self::Place, damage: &Damage) -> Result<(), BoxError> {
        let _ = (place, damage);
        Err("this factory cannot damage its stores".into())
    }
}

/// What no method of a saver ever does, and a broken disk or a wrong deletion may have done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Damage {
    /// The checkpoint is gone, with the writes under it; its children are there.
    LoseCheckpoint(CheckpointKey),
    /// The writes of a task are gone from under the checkpoint it ran from; the child that applied them is there.
    LoseWrites(CheckpointKey, TaskId),
    /// The checkpoint has no parent any more.
    LoseParentLink(CheckpointKey),
}

/// A factory could not do what the suite asked of it.
#[derive(Debug)]
pub(crate) struct Unprepared(BoxError);

impl fmt::Display for Unprepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "from the factory: {}", self.0)
    }
}

impl Error for Unprepared {}

/// A store of any factory: what a case works on.
#[derive(Clone)]
pub(crate) struct Store(Arc<dyn AnyStore>);

impl Store {
    /// A new, empty store.
    pub(crate) async fn create<F: Factory>(factory: Arc<F>) -> Result<Self, Unprepared> {
        let place = factory.create().await.map_err(Unprepared)?;
        Ok(Self(Arc::new(Placed { factory, place })))
    }

    /// Another handle on it.
    pub(crate) async fn open(&self) -> Result<Arc<dyn Saver>, Unprepared> {
        self.0.open().await.map_err(Unprepared)
    }

    /// Whether saver and factory claim to offer something.
    pub(crate) fn claims(&self, claim: Claim) -> bool {
        self.0.claims().contains(&claim)
    }

    /// Damages it. All handles must have been dropped.
    pub(crate) async fn damage(&self, damage: Damage) -> Result<(), Unprepared> {
        self.0.damage(&damage).await.map_err(Unprepared)
    }
}

/// [`Factory`] with a place, without its type.
#[async_trait]
trait AnyStore: Send + Sync {
    fn claims(&self) -> &'static [Claim];
    async fn open(&self) -> Result<Arc<dyn Saver>, BoxError>;
    async fn damage(&self, damage: &Damage) -> Result<(), BoxError>;
}

struct Placed<F: Factory> {
    factory: Arc<F>,
    place: F::Place,
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
}
