//! The statements.
//!
//! All that read a thread return rows of one shape, `(kind, ns, k1, k2, k3, n1, n2, b1, b2)`, in which different things
//! come together: so one statement, and with it one moment and one round trip, tells the thread, its heads, checkpoints and
//! the elements without which these cannot be understood. `OFFSET 0` keeps the planner from joining in any other way than
//! by key, whatever it believes of the sizes of tables.

use threadkeep::saver::Flush;

/// The statements, with the schema in them.
pub(crate) struct Sql {
    /// `thread, ns, id`: one checkpoint.
    pub(crate) by_id: String,
    /// `thread, ns`: the head.
    pub(crate) head: String,
    /// `thread, ns or null, id and ns of the last one or null, limit or null`: the newest checkpoints behind that one.
    pub(crate) newest: String,
    /// `thread, ns, id, reach`: the lineage back to the seeds.
    pub(crate) lineage: String,
    /// `thread, null`: everything but values.
    pub(crate) all: String,
    /// `thread, first[], last[]`: elements, and the thread's row.
    pub(crate) elements: String,
    /// `after or null, limit`: names of threads.
    pub(crate) threads: String,
    /// `thread`: locks its row until the end of the transaction.
    pub(crate) lock: String,
    /// `thread, ns, ids, epoch, next[]`: what a writer must know: head, these checkpoints, hashes.
    pub(crate) look: String,
    /// `thread, null, epoch, next[]`: the same of a whole thread.
    pub(crate) look_at_all: String,
    /// Stores a change of a thread that is there, if it is as it was: see [`crate::change::Change`].
    pub(crate) advance: Either,
    /// The same for a thread that is not there.
    pub(crate) create: Either,
    /// The same as `advance`, with rows to remove.
    pub(crate) rewrite: String,
    /// `thread`, in place of each `$1`: statements that remove everything of it.
    pub(crate) delete: String,
}

/// What a statement on a thread returns beside the checkpoints in `c`.
const OWNERS: &str = "
SELECT 0 AS kind, NULL::bytea AS ns, NULL::uuid AS k1, NULL::uuid AS k2, NULL::uuid AS k3,
       t.epoch AS n1, t.revision AS n2, t.name AS b1, t.body AS b2
FROM {s}.threadkeep_thread t WHERE t.id = $1
UNION ALL
SELECT 1, h.ns, h.head, NULL, NULL, NULL, NULL, h.name, h.sum
FROM {s}.threadkeep_head h WHERE h.thread = $1 AND ($2::bytea IS NULL OR h.ns = $2)
UNION ALL
SELECT 2, c.ns, c.id, c.parent, c.seed, c.names, c.extra, c.body, c.tasks FROM c
UNION ALL
SELECT 3, NULL, e.hash, NULL, NULL, e.seq, e.size, e.body, NULL
FROM (
    SELECT unnest(range_agg(r.range)) AS range
    FROM c CROSS JOIN LATERAL (
        SELECT int8range(4294967296 + c.names, 4294967296 + c.names, '[]') AS range
        UNION ALL
        SELECT int8range(4294967296 + c.extra, 4294967296 + c.extra, '[]') WHERE c.extra IS NOT NULL
        UNION ALL
        SELECT int8range(n.first, c.needs[(n.at + 1)::int], '[]')
        FROM unnest(c.needs) WITH ORDINALITY AS n (first, at) WHERE n.at % 2 = 1
    ) r
) w CROSS JOIN LATERAL (
    SELECT * FROM {s}.threadkeep_element x
    WHERE x.thread = $1 AND x.seq >= lower(w.range) AND x.seq < upper(w.range) OFFSET 0
) e";

/// The hashes of elements that a writer does not know: those behind `next` in each space if it knows this epoch, else
/// all.
const HASHES: &str = "
UNION ALL
SELECT 4, NULL, e.hash, NULL, NULL, e.seq, NULL, NULL, NULL
FROM unnest({next}) WITH ORDINALITY AS n (first, space)
CROSS JOIN (SELECT count(*) > 0 AS same FROM {s}.threadkeep_thread t WHERE t.id = $1 AND t.epoch = {epoch}) k
CROSS JOIN LATERAL (
    SELECT * FROM {s}.threadkeep_element x
    WHERE x.thread = $1 AND x.seq >= CASE WHEN k.same THEN n.first ELSE (n.space - 1) << 32 END
    AND x.seq < n.space << 32 OFFSET 0
) e";

const COLUMNS: &str = "ns, id, parent, seed, names, extra, needs, body, tasks";

/// The parts of a change that every write has: elements, checkpoints, heads. `fence` returns a row if the thread is as it was.
const STORE: &str = ", elements AS (
    INSERT INTO {s}.threadkeep_element (thread, seq, hash, size, body)
    SELECT f.id, x.seq, x.hash, x.size, x.body
    FROM fence f, unnest($5::bigint[], $6::uuid[], $7::int[], $8::bytea[]) AS x (seq, hash, size, body)
), checkpoints AS (
    INSERT INTO {s}.threadkeep_checkpoint (thread, ns, id, parent, seed, names, extra, needs, body, tasks)
    SELECT f.id, x.ns, x.id, x.parent, x.seed, x.names, x.extra, x.needs::bigint[], x.body, x.tasks
    FROM fence f, unnest($9::bytea[], $10::uuid[], $11::uuid[], $12::uuid[], $13::int[], $14::int[], $15::text[],
                         $16::bytea[], $17::bytea[])
         AS x (ns, id, parent, seed, names, extra, needs, body, tasks)
    ON CONFLICT (thread, ns, id) DO UPDATE
    SET parent = excluded.parent, seed = excluded.seed, names = excluded.names, extra = excluded.extra,
        needs = excluded.needs, body = excluded.body, tasks = excluded.tasks
), heads AS (
    INSERT INTO {s}.threadkeep_head (thread, ns, head, name, sum)
    SELECT f.id, x.ns, x.head, x.name, x.sum
    FROM fence f, unnest($18::bytea[], $19::uuid[], $20::bytea[], $21::bytea[]) AS x (ns, head, name, sum)
    ON CONFLICT (thread, ns) DO UPDATE SET head = excluded.head, name = excluded.name, sum = excluded.sum
)";

/// What a rewrite does besides.
const REMOVE: &str = ", gone AS (
    DELETE FROM {s}.threadkeep_checkpoint c
    USING fence f, unnest($24::bytea[], $25::uuid[]) AS x (ns, id)
    WHERE c.thread = f.id AND c.ns = x.ns AND c.id = x.id
), dead AS (
    DELETE FROM {s}.threadkeep_element e
    USING fence f, unnest($26::bigint[], $27::bigint[]) AS x (first, last)
    WHERE e.thread = f.id AND e.seq BETWEEN x.first AND x.last
), headless AS (
    DELETE FROM {s}.threadkeep_head h
    USING fence f, unnest($28::bytea[]) AS x (ns)
    WHERE h.thread = f.id AND h.ns = x.ns
)";

const ADVANCE: &str = "WITH fence AS (
    UPDATE {s}.threadkeep_thread SET epoch = $2, revision = $3, body = $4
    WHERE id = $1 AND epoch = $22 AND revision = $23 RETURNING id
)";

const CREATE: &str = "WITH fence AS (
    INSERT INTO {s}.threadkeep_thread (id, epoch, revision, body, name) VALUES ($1, $2, $3, $4, $22)
    ON CONFLICT (id) DO NOTHING RETURNING id
)";

const WON: &str = " SELECT 1 FROM fence";
/// The same, and the transaction does not wait for the disk. The setting ends with it, and nothing is sent besides.
const WON_LATER: &str = " SELECT set_config('synchronous_commit', 'off', true) FROM fence";

/// A statement that writes, flushed or not.
pub(crate) struct Either {
    now: String,
    later: String,
}

impl Either {
    fn new(fill: impl Fn(&str) -> String, begin: &str) -> Self {
        Self { now: fill(&[begin, STORE, WON].concat()), later: fill(&[begin, STORE, WON_LATER].concat()) }
    }

    pub(crate) fn of(&self, flush: Flush) -> &str {
        match flush {
            Flush::Now => &self.now,
            Flush::WithNext => &self.later,
        }
    }
}

impl Sql {
    pub(crate) fn new(schema: &str) -> Self {
        let table = format!("{schema}.threadkeep_checkpoint");
        let fill = |text: &str| text.replace("{s}", schema);
        let about = |c: &str| fill(&format!("WITH RECURSIVE c AS ({c}) {OWNERS}"));
        let hashes = |epoch, next| fill(&HASHES.replace("{epoch}", epoch).replace("{next}", next));
        let one_ns = format!("SELECT {COLUMNS} FROM {table} WHERE thread = $1 AND ns = $2");
        let all = format!("SELECT {COLUMNS} FROM {table} WHERE thread = $1");
        let walked = COLUMNS.split(", ").map(|name| format!("p.{name}")).collect::<Vec<_>>().join(", ");
        let stop = |row: &str| format!("CASE WHEN {row}id <= $4 THEN coalesce({row}seed, {row}id) END");
        let lineage = format!(
            "SELECT {COLUMNS}, {} AS stop FROM {table} WHERE thread = $1 AND ns = $2 AND id = $3
             UNION ALL
             SELECT {walked}, coalesce(w.stop, {}) FROM c w CROSS JOIN LATERAL (
                 SELECT * FROM {table} o WHERE o.thread = $1 AND o.ns = $2 AND o.id = w.parent OFFSET 0
             ) p WHERE w.stop IS NULL OR w.id > w.stop",
            stop(""),
            stop("p."),
        );
        Self {
            by_id: about(&format!("{one_ns} AND id = $3")),
            head: about(&format!("{one_ns} ORDER BY id DESC LIMIT 1")),
            newest: about(&format!(
                "{all} AND ($2::bytea IS NULL OR ns = $2) AND ($3::uuid IS NULL OR (id <= $3 AND (id, ns) < ($3, $4)))
                 ORDER BY id DESC, ns DESC LIMIT $5"
            )),
            lineage: about(&lineage),
            all: about(&all),
            elements: fill(
                "SELECT 0 AS kind, NULL::bytea AS ns, NULL::uuid AS k1, NULL::uuid AS k2, NULL::uuid AS k3,
                        t.epoch AS n1, t.revision AS n2, t.name AS b1, t.body AS b2
                 FROM {s}.threadkeep_thread t WHERE t.id = $1
                 UNION ALL
                 SELECT 3, NULL, e.hash, NULL, NULL, e.seq, e.size, e.body, NULL
                 FROM unnest($2::bigint[], $3::bigint[]) AS w (first, last) CROSS JOIN LATERAL (
                     SELECT * FROM {s}.threadkeep_element x
                     WHERE x.thread = $1 AND x.seq BETWEEN w.first AND w.last OFFSET 0
                 ) e",
            ),
            threads: fill(
                "SELECT id, epoch, revision, name, body FROM {s}.threadkeep_thread
                 WHERE $1::bytea IS NULL OR (substring(name, 1, 512), name) > (substring($1::bytea, 1, 512), $1)
                 ORDER BY substring(name, 1, 512), name LIMIT $2",
            ),
            lock: fill("SELECT 1 FROM {s}.threadkeep_thread WHERE id = $1 FOR UPDATE"),
            look: about(&format!("({one_ns} ORDER BY id DESC LIMIT 1) UNION {one_ns} AND id = ANY ($3)"))
                + &hashes("$4", "$5"),
            look_at_all: about(&all) + &hashes("$3", "$4"),
            advance: Either::new(fill, ADVANCE),
            create: Either::new(fill, CREATE),
            rewrite: fill(&[ADVANCE, STORE, REMOVE, WON].concat()),
            delete: fill(
                "DELETE FROM {s}.threadkeep_thread WHERE id = $1;
                 DELETE FROM {s}.threadkeep_head WHERE thread = $1;
                 DELETE FROM {s}.threadkeep_checkpoint WHERE thread = $1;
                 DELETE FROM {s}.threadkeep_element WHERE thread = $1;",
            ),
        }
    }
}

#[cfg(test)]
mod tests;
