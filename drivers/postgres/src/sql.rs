//! The statements.
//!
//! All statements that read a thread return rows of one shape, `(kind, ns, k1, k2, k3, n1, n2, b1, b2)`, which holds
//! different kinds of rows: so one statement, with one snapshot and one round trip, returns the thread, its heads,
//! checkpoints and the elements needed to decode them. `OFFSET 0` forces the planner to join by key, whatever it
//! assumes about table sizes. The frequent statements call functions, which hold their text: see [`crate::function`].

use uuid::Uuid;

use crate::serving::SERVING;

/// Writes an empty record to the log: a transaction that does so waits for the disk and the standby when it commits.
pub(crate) const EMIT: &str = "SELECT pg_catalog.pg_logical_emit_message(true, 'threadkeep', ''),
    CASE WHEN pg_catalog.current_setting('synchronous_commit') = 'off'
    THEN pg_catalog.set_config('synchronous_commit', 'on', true) END";

/// Makes the transaction wait for the disk when it commits, whatever the server's default.
const FLUSHING: &str = "CASE WHEN pg_catalog.current_setting('synchronous_commit') = 'off'
    THEN pg_catalog.set_config('synchronous_commit', 'on', true) END";

/// Makes the server warn of a commit that did not wait for the standby, which ends the connection: see the module
/// `connect`. A role or a database may be set to receive no warnings.
pub(crate) const WARNED: &str = "pg_catalog.set_config('client_min_messages', 'warning', true)";

/// The text of a statement.
pub(crate) struct Statement {
    text: String,
    is_call: bool,
}

impl Statement {
    /// A call of a function, whose own statements are planned by keys. A session may keep it prepared.
    pub(crate) fn call(text: String) -> Self {
        Self { text, is_call: true }
    }

    /// A statement that is planned each time: a plan that a session keeps was made for tables of the size of that time.
    pub(crate) fn planned(text: String) -> Self {
        Self { text, is_call: false }
    }

    pub(crate) fn is_call(&self) -> bool {
        self.is_call
    }
}

impl std::ops::Deref for Statement {
    type Target = str;

    fn deref(&self) -> &str {
        &self.text
    }
}

/// The statements, with the schema inserted.
pub(crate) struct Sql {
    /// `thread, ns, id`: one checkpoint.
    pub(crate) by_id: Statement,
    /// `thread, ns`: the head.
    pub(crate) head: Statement,
    /// `thread, ns, id`, and what is remembered: one checkpoint without that.
    pub(crate) by_id_beyond: Statement,
    /// `thread, ns`, and what is remembered: the head without that.
    pub(crate) head_beyond: Statement,
    /// `thread, ns or null, id and ns of the last one or null, limit or null`: the newest checkpoints after that one.
    pub(crate) newest: Statement,
    /// `thread, ns, id, reach`: the lineage back to the seeds, without entries of metadata maps.
    pub(crate) lineage: Statement,
    /// `thread`: everything but values.
    pub(crate) all: Statement,
    /// `thread`: everything but values and entries of metadata maps.
    pub(crate) outlines: Statement,
    /// `thread`: its row, its heads, and its checkpoints as they are stored, with what they need.
    pub(crate) rows: Statement,
    /// `from, to, first, ends, limit`: copies elements of a thread from the first number on, each below the end of its space.
    /// Returns how many, and the last number.
    pub(crate) copy_elements: String,
    /// `thread`: its row.
    pub(crate) thread: Statement,
    /// `thread`: the bytes of its rows of checkpoints and elements, as they are stored.
    pub(crate) stored: Statement,
    /// `end of a name`: see [`SERVING`].
    pub(crate) serving: Statement,
    /// `thread, first[], last[]`: elements, and the thread's row.
    pub(crate) elements: Statement,
    /// `after or null, limit`: names of threads.
    pub(crate) threads: Statement,
    /// `thread`: locks its row until the end of the transaction, and returns it.
    pub(crate) lock: Statement,
    /// `thread, nonce`: locks it until the end of the transaction whether it exists or not, by inserting an empty row with
    /// this nonce if there is none, and returns its row.
    pub(crate) claim: String,
    /// `thread, life[]`: whether one of these lives of the thread was deleted.
    pub(crate) buried: Statement,
    /// `thread, ns, ids, epoch, next[]`: what a writer must know: head, these checkpoints, hashes.
    pub(crate) look: String,
    /// `thread, ns, ids, epoch, next[], parent`: the same, and the children of that parent.
    pub(crate) look_below: String,
    /// `thread, epoch, next[]`: the same of a whole thread.
    pub(crate) look_at_all: String,
    /// Stores a change of a thread if it is unchanged, and returns its new nonce and whether it was: see
    /// [`crate::change::Change`].
    pub(crate) write: Statement,
    /// `thread, epoch, revision`, and what to remove: see [`crate::change::Removal`].
    pub(crate) remove: String,
    /// The schema, for [`Self::delete`].
    schema: String,
}

/// `thread` and `lives`, in place of each `{t}` and `{l}`: statements that remove everything of it, and leave graves.
const DELETE: &str = "
DELETE FROM {s}.threadkeep_thread WHERE id = {t};
DELETE FROM {s}.threadkeep_head WHERE thread = {t};
DELETE FROM {s}.threadkeep_checkpoint WHERE thread = {t};
DELETE FROM {s}.threadkeep_element WHERE thread = {t};
INSERT INTO {s}.threadkeep_grave (thread, life) SELECT {t}, life FROM unnest({l}::bigint[]) AS life
ON CONFLICT (thread, life) DO NOTHING;
DELETE FROM {s}.threadkeep_grave WHERE (thread, life) IN (
    SELECT thread, life FROM {s}.threadkeep_grave WHERE at < now() - interval '6 hours'
    ORDER BY at LIMIT 16 FOR UPDATE SKIP LOCKED
);";

/// What a statement on a thread returns besides the checkpoints in `c`: `{less}` than all that is needed to decode them,
/// of the runs that are `{only}` some.
const OWNERS: &str = "
SELECT 0 AS kind, NULL::bytea AS ns, t.nonce AS k1, NULL::uuid AS k2, NULL::uuid AS k3,
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
    SELECT unnest(range_agg(r.range){less}) AS range
    FROM c CROSS JOIN LATERAL (
        SELECT int8range(4294967296 + c.names, 4294967296 + c.names, '[]') AS range
        UNION ALL
        SELECT int8range(4294967296 + c.extra, 4294967296 + c.extra, '[]') WHERE c.extra IS NOT NULL
        UNION ALL
        SELECT int8range(n.first, c.needs[(n.at + 1)::int], '[]')
        FROM unnest(c.needs) WITH ORDINALITY AS n (first, at) WHERE n.at % 2 = 1{only}
    ) r
) w CROSS JOIN LATERAL (
    SELECT * FROM {s}.threadkeep_element x
    WHERE x.thread = $1 AND x.seq >= lower(w.range) AND x.seq < upper(w.range) OFFSET 0
) e";

/// A whole thread: its row, its heads, `{elements}`, and its checkpoints. The columns are those of all statements on a thread,
/// and those of `{needs}`, which only checkpoints have.
const ROWS: &str = "
SELECT 0 AS kind, NULL::bytea AS ns, t.nonce AS k1, NULL::uuid AS k2, NULL::uuid AS k3,
       t.epoch AS n1, t.revision AS n2, t.name AS b1, t.body AS b2{no needs}
FROM {s}.threadkeep_thread t WHERE t.id = $1
UNION ALL
SELECT 1, h.ns, h.head, NULL, NULL, NULL, NULL, h.name, h.sum{no needs}
FROM {s}.threadkeep_head h WHERE h.thread = $1{elements}
UNION ALL
SELECT 2, c.ns, c.id, c.parent, c.seed, c.names, c.extra, c.body, c.tasks{needs}
FROM {s}.threadkeep_checkpoint c WHERE c.thread = $1";

/// All elements of a thread but values. The checkpoints of a whole thread need all of them, which are sooner found so than
/// by [`OWNERS`]: of 23,000 checkpoints in 16 ms in place of 72.
const STRUCTURE: &str = "
UNION ALL
SELECT 3, NULL, e.hash, NULL, NULL, e.seq, e.size, e.body, NULL
FROM {s}.threadkeep_element e WHERE e.thread = $1 AND e.seq >= 4294967296";

/// The entries of metadata maps come last.
const BELOW_ENTRIES: &str = " AND e.seq < 8589934592";

const COPY_ELEMENTS: &str = "
WITH copied AS (
    INSERT INTO {s}.threadkeep_element (thread, hash, seq, size, body)
    SELECT $2, e.hash, e.seq, e.size, e.body FROM {s}.threadkeep_element e
    WHERE e.thread = $1 AND e.seq >= $3 AND e.seq < ($4::bigint[])[(e.seq >> 32)::int + 1] ORDER BY e.seq LIMIT $5
    RETURNING seq
) SELECT count(*), max(seq) FROM copied";

/// Less than all: without the runs from `{first}` to `{last}`, if the thread has this epoch and its revision is not below
/// `{least}` and not above `{most}`.
const LESS: &str = " - coalesce((
        SELECT range_agg(int8range(k.first, k.last, '[]'))
        FROM {s}.threadkeep_thread t CROSS JOIN unnest({first}::bigint[], {last}::bigint[]) AS k (first, last)
        WHERE t.id = $1 AND t.epoch = {epoch} AND t.revision BETWEEN {least} AND {most}
    ), '{}'::int8multirange)";

/// The bytes of columns as they are stored, compressed or not, which is known without reading those that are kept aside.
const STORED: &str = "SELECT (
    SELECT coalesce(sum(16 + pg_column_size(c.body) + coalesce(pg_column_size(c.tasks), 0)), 0)
    FROM {s}.threadkeep_checkpoint c WHERE c.thread = $1
) + (
    SELECT coalesce(sum(16 + pg_column_size(e.body)), 0) FROM {s}.threadkeep_element e WHERE e.thread = $1
)";

/// Only runs that begin before the entries of metadata maps.
const NO_ENTRIES: &str = " AND n.first < 8589934592";

/// The hashes of elements that a writer does not know: those from `next` on in each space if it knows this epoch, else
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

pub(crate) const COLUMNS: &str = "ns, id, parent, seed, names, extra, needs, body, tasks";

/// What a rewrite removes if it was written: the thread is locked, and has its mark.
const REMOVE: &str = "WITH fence AS (
    SELECT t.id FROM {s}.threadkeep_thread t WHERE t.id = $1 AND t.epoch = $2 AND t.revision = $3
), gone AS (
    DELETE FROM {s}.threadkeep_checkpoint c
    USING fence f, unnest($4::bytea[], $5::uuid[]) AS x (ns, id)
    WHERE c.thread = f.id AND c.ns = x.ns AND c.id = x.id
), dead AS (
    DELETE FROM {s}.threadkeep_element e
    USING fence f, unnest($6::bigint[], $7::bigint[]) AS x (first, last)
    WHERE e.thread = f.id AND e.seq BETWEEN x.first AND x.last
)
DELETE FROM {s}.threadkeep_head h
USING fence f, unnest($8::bytea[]) AS x (ns)
WHERE h.thread = f.id AND h.ns = x.ns";

/// Puts values in the places of a template, in one pass: a value may contain anything, a place too.
pub(crate) fn fill(template: &str, values: &[(&str, &str)]) -> String {
    let mut filled = String::with_capacity(2 * template.len());
    let mut rest = template;
    loop {
        let places = values.iter().filter_map(|(place, value)| Some((rest.find(place)?, place, value)));
        let Some((at, place, value)) = places.min_by_key(|(at, ..)| *at) else { break };
        filled.push_str(&rest[..at]);
        filled.push_str(value);
        rest = &rest[at + place.len()..];
    }
    filled + rest
}

/// The template of the checkpoints of a namespace.
pub(crate) fn of_namespace() -> String {
    format!("SELECT {COLUMNS} FROM {{s}}.threadkeep_checkpoint WHERE thread = $1 AND ns = $2")
}

/// The template of the query that returns these checkpoints, the thread, its heads (of the namespace `$2` unless that is
/// null), and the elements needed to decode the checkpoints.
pub(crate) fn about(checkpoints: &str) -> String {
    with_elements(checkpoints, "", "")
}

/// The same without the elements that a reader remembers. `next` is the number of the first parameter that describes
/// these: `epoch, least revision, most revision, first[], last[]`, see [`crate::memory::LeftOut`].
pub(crate) fn about_beyond(checkpoints: &str, next: usize) -> String {
    let places = ["{epoch}", "{least}", "{most}", "{first}", "{last}"];
    let numbers: Vec<_> = (next..).take(places.len()).map(|n| format!("${n}")).collect();
    let values: Vec<_> = places.into_iter().zip(numbers.iter().map(String::as_str)).collect();
    with_elements(checkpoints, &fill(LESS, &values), "")
}

/// The same without entries of metadata maps.
pub(crate) fn about_without_entries(checkpoints: &str) -> String {
    with_elements(checkpoints, "", NO_ENTRIES)
}

fn with_elements(checkpoints: &str, less: &str, only: &str) -> String {
    let owners = fill(OWNERS, &[("{less}", less), ("{only}", only)]);
    format!("WITH RECURSIVE c AS ({checkpoints}) {owners}")
}

impl Sql {
    pub(crate) fn new(schema: &str) -> Self {
        let fill = |template: &str| fill(template, &[("{s}", schema)]);
        let about = |checkpoints: &str, more: &str| fill(&(about(checkpoints) + more));
        let rows = |elements, none, needs| {
            fill(&self::fill(ROWS, &[("{elements}", elements), ("{no needs}", none), ("{needs}", needs)]))
        };
        let whole = rows(STRUCTURE, "", "");
        let call = |verb: &str, function: &str, arguments: usize| {
            let arguments: Vec<_> = (1..=arguments).map(|n| format!("${n}")).collect();
            format!("{verb} {schema}.threadkeep_{function}({})", arguments.join(", "))
        };
        let hashes = |epoch, next| HASHES.replace("{epoch}", epoch).replace("{next}", next);
        let one_ns = of_namespace();
        let looked_at = format!("({one_ns} ORDER BY id DESC LIMIT 1) UNION {one_ns} AND id = ANY ($3)");
        Self {
            by_id: Statement::call(call("SELECT * FROM", "by_id", 3)),
            head: Statement::call(call("SELECT * FROM", "head", 2)),
            by_id_beyond: Statement::call(call("SELECT * FROM", "by_id_beyond", 8)),
            head_beyond: Statement::call(call("SELECT * FROM", "head_beyond", 7)),
            newest: Statement::planned(about(&format!(
                "SELECT {COLUMNS} FROM {{s}}.threadkeep_checkpoint WHERE thread = $1
                 AND ($2::bytea IS NULL OR ns = $2) AND ($3::uuid IS NULL OR (id <= $3 AND (id, ns) < ($3, $4)))
                 ORDER BY id DESC, ns DESC LIMIT $5"
            ), "")),
            lineage: Statement::call(call("SELECT * FROM", "lineage", 4)),
            outlines: Statement::planned(rows(&[STRUCTURE, BELOW_ENTRIES].concat(), "", "")),
            rows: Statement::planned(rows("", ", NULL::bigint[] AS needs", ", c.needs")),
            copy_elements: fill(COPY_ELEMENTS),
            thread: Statement::planned(fill(
                "SELECT id, epoch, revision, name, body, nonce FROM {s}.threadkeep_thread WHERE id = $1",
            )),
            stored: Statement::planned(fill(STORED)),
            serving: Statement::planned(SERVING.to_owned()),
            elements: Statement::planned(fill(
                "SELECT 0 AS kind, NULL::bytea AS ns, t.nonce AS k1, NULL::uuid AS k2, NULL::uuid AS k3,
                        t.epoch AS n1, t.revision AS n2, t.name AS b1, t.body AS b2
                 FROM {s}.threadkeep_thread t WHERE t.id = $1
                 UNION ALL
                 SELECT 3, NULL, e.hash, NULL, NULL, e.seq, e.size, e.body, NULL
                 FROM unnest($2::bigint[], $3::bigint[]) AS w (first, last) CROSS JOIN LATERAL (
                     SELECT * FROM {s}.threadkeep_element x
                     WHERE x.thread = $1 AND x.seq BETWEEN w.first AND w.last OFFSET 0
                 ) e",
            )),
            threads: Statement::planned(fill(
                "SELECT id, epoch, revision, name, body, nonce FROM {s}.threadkeep_thread
                 WHERE $1::bytea IS NULL OR (substring(name, 1, 512), name) > (substring($1::bytea, 1, 512), $1)
                 ORDER BY substring(name, 1, 512), name LIMIT $2",
            )),
            lock: Statement::planned(fill(&format!(
                "SELECT id, epoch, revision, name, body, nonce, {FLUSHING}, {WARNED}
                 FROM {{s}}.threadkeep_thread WHERE id = $1 FOR UPDATE",
            ))),
            claim: fill(&format!(
                "INSERT INTO {{s}}.threadkeep_thread AS t (id, epoch, revision, name, body, nonce)
                 VALUES ($1, 0, 0, '', '', $2)
                 ON CONFLICT (id) DO UPDATE SET epoch = t.epoch
                 RETURNING id, epoch, revision, name, body, nonce, {FLUSHING}",
            )),
            buried: Statement::planned(fill(
                "SELECT 1 FROM {s}.threadkeep_grave WHERE thread = $1 AND life = ANY ($2) LIMIT 1",
            )),
            look: about(&looked_at, &hashes("$4", "$5")),
            look_below: about(
                &format!("{looked_at} UNION {one_ns} AND id > $6 AND parent = $6"),
                &hashes("$4", "$5"),
            ),
            look_at_all: whole.clone() + &fill(&hashes("$2", "$3")),
            all: Statement::planned(whole),
            write: Statement::call(format!("{}, {WARNED}", call("SELECT $8,", "write", 27))),
            remove: fill(REMOVE),
            schema: schema.to_owned(),
        }
    }

    /// Statements that remove everything of a thread, and leave a grave for each of these lives of it.
    pub(crate) fn delete(&self, thread: Uuid, lives: &[i64]) -> String {
        let lives: Vec<_> = lives.iter().map(i64::to_string).collect();
        let (thread, lives) = (format!("'{thread}'::uuid"), format!("'{{{}}}'", lives.join(",")));
        fill(DELETE, &[("{s}", &self.schema), ("{t}", &thread), ("{l}", &lives)])
    }
}

#[cfg(test)]
mod tests;
