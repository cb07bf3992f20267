//! The saver.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use futures::FutureExt;
use threadkeep::Result;
use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple, TaskWrites};
use threadkeep::id::{ChannelName, CheckpointId, ThreadId};
use threadkeep::saver::{
    Capabilities, CheckpointSelector, Coming, DeltaHistory, ListQuery, Revision, Rewrite, Saver, StepCommit,
    Summary, ThreadImage,
};
use tokio::sync::Mutex;

use crate::applied::{Children, is_stored};
use crate::aside::dropped;
use crate::config::{Options, Target, name_as_command};
use crate::convoy::Convoys;
use crate::copy::Copying;
use crate::create::Comes;
use crate::doubt::Asked;
use crate::error::{SAVER, Trouble};
use crate::keys;
use crate::plan;
use crate::pool::Connections;
use crate::schema;
use crate::sql::Sql;
use crate::store::{Store, Wanted};
use crate::thread::Threads;

/// The result of an attempt at a write.
type Attempted = Result<(), Trouble>;

/// A store of checkpoints in a Postgres database.
///
/// Its futures must run in a tokio runtime with time and I/O. Any number of processes may work on the same database;
/// each commit checks that its head is still the one that the caller saw.
pub struct PostgresSaver {
    schema: String,
    pub(crate) store: Store,
}

impl fmt::Debug for PostgresSaver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresSaver").field("schema", &self.schema).finish_non_exhaustive()
    }
}

impl PostgresSaver {
    /// Connects to the database at `address`: a URL (`postgres://user:password@host:port/database`), or `key=value`
    /// pairs. The tables must exist: see [`crate::setup`].
    ///
    /// The connection is encrypted where the server offers TLS. With `sslmode=require` nothing else is accepted, and the
    /// server's certificate is checked, against the file in `sslrootcert`, or else the system's certificates.
    ///
    /// # Errors
    /// [`threadkeep::Error::NewerFormat`] if a newer version of this program created the tables;
    /// [`threadkeep::Error::InvalidInput`] for an invalid address or schema name; [`threadkeep::Error::Unavailable`] if
    /// the server does not answer or the tables are missing.
    pub async fn connect(address: &str, options: Options) -> Result<Self> {
        let quoted = options.quoted_schema()?;
        let mut target = Target::parse(address, options.patience)?;
        if options.is_command {
            name_as_command(&mut target.config);
        }
        let connections = Arc::new(Connections::new(target, &options)?);
        let store = Store {
            sql: Sql::new(&quoted),
            convoys: Convoys::new(&quoted, connections.clone()),
            connections,
            threads: Threads::default(),
            memory: Arc::default(),
            patience: options.patience,
        };
        let check = || async {
            let mut lease = store.connections.lease().await?;
            lease.run(async |client| schema::check(client, &options, &quoted).await).await?;
            store.connections.meet(&mut lease).await;
            Ok(())
        };
        store.reading(|| check().boxed()).await?;
        store.connections.close_idle();
        Ok(Self { schema: options.schema, store })
    }

    /// The bytes of a thread's rows of checkpoints and elements, as they are stored: compressed, and without what the server
    /// adds for indexes and for rows that it has not cleared away yet.
    ///
    /// # Errors
    /// As a read: [`threadkeep::Error::Unavailable`].
    pub async fn stored_bytes(&self, thread: &ThreadId) -> Result<u64> {
        self.store.reading(|| self.store.stored_bytes(thread).boxed()).await
    }

    /// Whether another program than a command (see [`Options::is_command`]) works on the database, or did within the last
    /// second. A pooler's sessions, and those of roles of which the server does not say what they do, count as long as they
    /// are open.
    ///
    /// # Errors
    /// As a read: [`threadkeep::Error::Unavailable`].
    pub async fn is_serving(&self) -> Result<bool> {
        self.store.reading(|| self.store.is_serving().boxed()).await
    }

    /// Closes the connections: those in use as soon as they are returned. Later calls return
    /// [`threadkeep::Error::Unavailable`].
    pub fn close(&self) {
        self.store.connections.close();
    }
}

/// Attempts at writes that leave rows alone which a child has applied. Where the children are needed and not read,
/// nothing is written, and a second transaction reads them. Both are parts of one attempt: what an earlier attempt asked
/// for is in doubt in both, and one that can do without the children is the whole call.
impl PostgresSaver {
    async fn try_put(&self, at: &CheckpointKey, task: &TaskWrites, before: (&Asked, bool)) -> Attempted {
        let children = Children::unread();
        self.put_unless(at, task, before, &children).await?;
        if children.are_wanted() {
            self.put_unless(at, task, before, &Children::Read).await?;
        }
        Ok(())
    }

    async fn try_commit(&self, step: &StepCommit, before: (&Asked, bool)) -> Attempted {
        let children = Children::unread();
        self.commit_unless(step, before, &children).await?;
        if children.are_wanted() {
            self.commit_unless(step, before, &Children::Read).await?;
        }
        Ok(())
    }

    async fn put_unless(
        &self,
        at: &CheckpointKey,
        task: &TaskWrites,
        before: (&Asked, bool),
        children: &Children,
    ) -> Attempted {
        let ns = &keys::of_namespace(&at.namespace);
        let wanted = Wanted {
            thread: &at.thread,
            namespace: &at.namespace,
            ids: vec![at.id],
            children_of: children.of(at.id),
        };
        self.store
            .write(
                wanted,
                before,
                |state| {
                    let head = state.heads.peek(&at.namespace)?.as_ref().filter(|head| head.id == at.id)?;
                    plan::put_writes(at, task, state, Some(head), true).ok().flatten()
                },
                |state, snapshot| {
                    let node = snapshot.nodes.get(ns).and_then(|nodes| nodes.get(&at.id));
                    let is_head = snapshot.heads.get(ns).is_some_and(|(_, head)| *head == at.id);
                    let planned = plan::put_writes(at, task, state, node, is_head)?;
                    let stored = node.is_some_and(|node| is_stored(&node.tasks, task.task));
                    if planned.is_none() || is_head || !stored {
                        return Ok(planned);
                    }
                    let applied = children.applied(snapshot, ns, at.id);
                    Ok(planned.filter(|_| applied.is_some_and(|of| !of.contains(&task.task))))
                },
            )
            .await
    }

    async fn commit_unless(
        &self,
        step: &StepCommit,
        before: (&Asked, bool),
        children: &Children,
    ) -> Attempted {
        let ns = &keys::of_namespace(&step.namespace);
        let first = step.parent.is_none() && step.expected_head.is_none();
        let wanted = Wanted {
            thread: &step.thread,
            namespace: &step.namespace,
            ids: [Some(step.checkpoint.id), step.parent].into_iter().flatten().collect(),
            children_of: step.parent.and_then(|parent| children.of(parent)),
        };
        self.store
            .write(
                wanted,
                before,
                |state| match state.heads.peek(&step.namespace) {
                    Some(head) => {
                        let head = head.as_deref();
                        let parent = head.filter(|head| Some(head.id) == step.parent);
                        plan::commit(step, state, head, parent).ok()
                    }
                    // A first checkpoint is mostly that of a new thread.
                    None if first && state.history.is_none() => plan::commit(step, state, None, None).ok(),
                    None => None,
                },
                |state, snapshot| {
                    let nodes = snapshot.nodes.get(ns);
                    let node = |id| nodes.and_then(|nodes| nodes.get(&id));
                    if node(step.checkpoint.id).is_some() {
                        return Ok(None);
                    }
                    let parent = step.parent.and_then(node);
                    let head = snapshot.head(&step.thread, ns)?;
                    let known =
                        |row: &TaskWrites| parent.is_some_and(|parent| is_stored(&parent.tasks, row.task));
                    let below = step.parent.filter(|parent| head.map(|head| head.id) != Some(*parent));
                    let Some(below) = below.filter(|_| step.writes.iter().any(known)) else {
                        return plan::commit(step, state, head, parent).map(Some);
                    };
                    let Some(applied) = children.applied(snapshot, ns, below) else {
                        return Ok(None);
                    };
                    let mut step = step.clone();
                    step.writes.retain(|row| !applied.contains(&row.task));
                    plan::commit(&step, state, head, parent).map(Some)
                },
            )
            .await
    }
}

#[async_trait]
impl Saver for PostgresSaver {
    async fn get(&self, at: &CheckpointSelector) -> Result<Option<CheckpointTuple>> {
        self.store.reading(|| self.store.get(at).boxed()).await
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<CheckpointTuple>> {
        self.store.reading(|| self.store.list(query).boxed()).await
    }

    async fn put_writes(&self, at: &CheckpointKey, task: &TaskWrites) -> Result<()> {
        let asked = Asked::default();
        self.store.writing(|again| self.try_put(at, task, (&asked, again)).boxed()).await
    }

    async fn commit(&self, step: StepCommit) -> Result<CheckpointKey> {
        step.validate()?;
        let asked = Asked::default();
        self.store.writing(|again| self.try_commit(&step, (&asked, again)).boxed()).await?;
        Ok(step.key())
    }

    async fn flush(&self, thread: &ThreadId) -> Result<()> {
        self.store.writing(|_| self.store.flush(thread).boxed()).await
    }

    async fn delta_history(
        &self,
        at: &CheckpointKey,
        channels: &BTreeSet<ChannelName>,
        reach: Option<CheckpointId>,
    ) -> Result<DeltaHistory> {
        self.store.reading(|| self.store.delta_history(at, channels, reach).boxed()).await
    }

    async fn delete_thread(&self, thread: &ThreadId) -> Result<()> {
        let target = OnceLock::new();
        self.store.writing(|_| self.store.delete_thread(thread, &target).boxed()).await
    }

    async fn threads(&self, after: Option<&ThreadId>, limit: usize) -> Result<Vec<ThreadId>> {
        self.store.reading(|| self.store.threads_after(after, limit).boxed()).await
    }

    async fn read_thread(&self, thread: &ThreadId) -> Result<ThreadImage> {
        self.store.reading(|| self.store.read_thread(thread).boxed()).await
    }

    async fn revision(&self, thread: &ThreadId) -> Result<Revision> {
        self.store.reading(|| self.store.revision(thread).boxed()).await
    }

    async fn delete_seen(&self, thread: &ThreadId, expected: &Revision) -> Result<()> {
        let asked = Asked::default();
        self.store.writing(|again| self.store.delete_seen(thread, expected, (&asked, again)).boxed()).await
    }

    async fn summary(&self, thread: &ThreadId) -> Result<Summary> {
        self.store.reading(|| self.store.summary(thread).boxed()).await
    }

    async fn rewrite_thread(&self, thread: &ThreadId, expected: &Revision, rewrite: Rewrite) -> Result<()> {
        let (asked, epoch) = (Asked::default(), rand::random());
        let rewrite = Arc::new(rewrite);
        let change = (expected, &rewrite);
        let rewriting = |again| self.store.rewrite(thread, change, epoch, (&asked, again)).boxed();
        let rewritten = self.store.writing(rewriting).await;
        dropped(rewrite.put.len(), rewrite);
        rewritten
    }

    async fn create_thread(&self, thread: &ThreadId, coming: &mut dyn Coming) -> Result<()> {
        let (asked, coming) = (Asked::default(), Mutex::new(Comes { thread, coming }));
        self.store.writing(|again| self.store.make(thread, &coming, (&asked, again)).boxed()).await
    }

    async fn copy_thread(&self, from: &ThreadId, to: &ThreadId) -> Result<usize> {
        let (asked, copying) = (Asked::default(), Mutex::new(Copying::new(from, to)));
        self.store.writing(|again| self.store.make(to, &copying, (&asked, again)).boxed()).await?;
        Ok(copying.into_inner().count)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { name: SAVER, durable: true, shared_elements: true }
    }
}
