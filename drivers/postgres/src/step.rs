//! The usual commit: one checkpoint onto a thread that has its namespace. It is one call of the function
//! `threadkeep_commit`, which takes a fraction of the server's time that any [`Change`](crate::change::Change) takes, and
//! several of them, of different threads, are one statement.

use tokio_postgres::types::Type;
use uuid::Uuid;

use crate::history::Mark;
use crate::pool::Param;
use crate::sql::WARNED;

/// The most commits in one statement.
pub(crate) const MOST: usize = 16;
/// The number of arguments of the function.
const ARGUMENTS: usize = 24;

/// A commit, as the arguments of the function.
pub(crate) struct Step {
    pub(crate) thread: Uuid,
    pub(crate) from: Mark,
    pub(crate) to: Mark,
    pub(crate) body: Vec<u8>,
    /// The new elements. Arrays of nothing are null, also the sizes if none has one: the server unpacks each array.
    pub(crate) seqs: Option<Vec<i64>>,
    pub(crate) hashes: Option<Vec<Uuid>>,
    pub(crate) sizes: Option<Vec<Option<i32>>>,
    pub(crate) elements: Option<Vec<Vec<u8>>>,
    pub(crate) ns: Vec<u8>,
    pub(crate) id: Uuid,
    pub(crate) parent: Option<Uuid>,
    /// The parent's tasks and what is needed to read them, if there are more than before.
    pub(crate) tasks: Option<Vec<u8>>,
    pub(crate) parent_needs: Option<Vec<i64>>,
    pub(crate) seed: Option<Uuid>,
    pub(crate) names: i32,
    pub(crate) extra: Option<i32>,
    pub(crate) needs: Option<Vec<i64>>,
    pub(crate) row: Vec<u8>,
    pub(crate) head_sum: Vec<u8>,
}

/// A commit waits for a lock that somebody else holds on its thread. The function could skip locked threads instead; it
/// would lock each one by a statement of its own, which takes a tenth of its time, and adds to the log.
const WAITS: bool = true;
/// Several commits wait for a moment only: then the server refuses the statement, and a thread that somebody has locked
/// for longer does not hold the others up.
const BRIEFLY: &str = "pg_catalog.set_config('lock_timeout', '10ms', true)";

impl Step {
    /// Adds its arguments. `flushed`: it is on the disk before it is acknowledged.
    pub(crate) fn add<'a>(&'a self, params: &mut Vec<Param<'a>>, flushed: bool) {
        let flushed: &'static bool = if flushed { &true } else { &false };
        params.extend::<[Param<'a>; ARGUMENTS]>([
            (&self.thread, Type::UUID),
            (&self.from.epoch, Type::INT8),
            (&self.from.revision, Type::INT8),
            (&self.from.nonce, Type::UUID),
            (&self.to.revision, Type::INT8),
            (&self.to.nonce, Type::UUID),
            (&self.body, Type::BYTEA),
            (flushed, Type::BOOL),
            (&WAITS, Type::BOOL),
            (&self.seqs, Type::INT8_ARRAY),
            (&self.hashes, Type::UUID_ARRAY),
            (&self.sizes, Type::INT4_ARRAY),
            (&self.elements, Type::BYTEA_ARRAY),
            (&self.ns, Type::BYTEA),
            (&self.id, Type::UUID),
            (&self.parent, Type::UUID),
            (&self.tasks, Type::BYTEA),
            (&self.parent_needs, Type::INT8_ARRAY),
            (&self.seed, Type::UUID),
            (&self.names, Type::INT4),
            (&self.extra, Type::INT4),
            (&self.needs, Type::INT8_ARRAY),
            (&self.row, Type::BYTEA),
            (&self.head_sum, Type::BYTEA),
        ]);
    }

    /// Whether it is on the disk before it is acknowledged.
    pub(crate) fn is_flushed(&self) -> bool {
        self.to.is_flushed()
    }

    /// Its size, without the small parts.
    pub(crate) fn bytes(&self) -> usize {
        self.elements.iter().flatten().map(Vec::len).sum::<usize>()
            + self.row.len()
            + self.tasks.as_ref().map_or(0, Vec::len)
    }
}

/// The statement that carries out this many commits, and answers for each whether its thread was as expected, after the
/// new nonce of the first: see [`crate::change::answers`].
pub(crate) fn statement(schema: &str, commits: usize) -> String {
    let call = |n: usize| {
        let arguments: Vec<_> = (n * ARGUMENTS + 1..=(n + 1) * ARGUMENTS).map(|n| format!("${n}")).collect();
        format!("{schema}.threadkeep_commit({})", arguments.join(", "))
    };
    // It is evaluated first.
    let nonce = if commits > 1 { format!("CASE WHEN {BRIEFLY} <> '' THEN $6 END") } else { "$6".to_owned() };
    format!("SELECT {nonce}, {}, {WARNED}", (0..commits).map(call).collect::<Vec<_>>().join(", "))
}
