//! The functions that `setup` creates.
//!
//! The server plans the text of a statement each time it is sent; for the frequent ones, planning takes three times as
//! long as execution. A session keeps the plans of statements in a function, whichever client calls it; so nothing has
//! to be prepared, and this works behind a pooler that gives each transaction another session.
//!
//! The functions have no rights of their own, and are part of the format: a changed text is a new version.

use crate::sql::{COLUMNS, about, about_beyond, about_without_entries, fill, of_namespace};

/// The functions of the newest version of the format.
pub(crate) const NAMES: [&str; 7] = [
    "threadkeep_write",
    "threadkeep_commit",
    "threadkeep_head",
    "threadkeep_by_id",
    "threadkeep_head_beyond",
    "threadkeep_by_id_beyond",
    "threadkeep_lineage",
];

/// What [`crate::change::Change::params`] gives.
const CHANGE: &str = "
    of_thread uuid, called bytea, old_epoch bigint, old_revision bigint, old_nonce uuid,
    new_epoch bigint, new_revision bigint, new_nonce uuid, new_body bytea, flushed boolean,
    seqs bigint[], hashes uuid[], sizes int[], elements bytea[],
    namespaces bytea[], ids uuid[], parents uuid[], seeds uuid[], name_lists int[], extras int[], needed text[],
    bodies bytea[], tasks_of bytea[],
    head_namespaces bytea[], heads uuid[], head_names bytea[], head_sums bytea[]";

/// The arguments of the same function in version 3 of the format.
const CHANGE_3: &str = "
    of_thread uuid, called bytea, old_epoch bigint, old_revision bigint,
    new_epoch bigint, new_revision bigint, new_body bytea, flushed boolean,
    seqs bigint[], hashes uuid[], sizes int[], elements bytea[],
    namespaces bytea[], ids uuid[], parents uuid[], seeds uuid[], name_lists int[], extras int[], needed text[],
    bodies bytea[], tasks_of bytea[],
    head_namespaces bytea[], heads uuid[], head_names bytea[], head_sums bytea[]";

/// What [`crate::step::Step::add`] gives.
const STEP: &str = "
    of_thread uuid, old_epoch bigint, old_revision bigint, old_nonce uuid, new_revision bigint, new_nonce uuid,
    new_body bytea, flushed boolean, waits boolean,
    seqs bigint[], hashes uuid[], sizes int[], elements bytea[],
    namespace bytea, checkpoint uuid, parent_id uuid, parent_tasks bytea, parent_needs bigint[],
    seed_id uuid, name_list int, extra_part int, needed bigint[], new_row bytea, head_sum bytea";

/// The columns that all statements on a thread return. All rows are of one snapshot: that of the calling statement.
const ROWS: &str = "TABLE (
    kind int, ns bytea, k1 uuid, k2 uuid, k3 uuid, n1 bigint, n2 bigint, b1 bytea, b2 bytea
) STABLE";

/// The arguments of the functions that leave out what the caller remembers.
const HEAD_BEYOND: &str = "uuid, bytea, bigint, bigint, bigint, bigint[], bigint[]";
const BY_ID_BEYOND: &str = "uuid, bytea, uuid, bigint, bigint, bigint, bigint[], bigint[]";

/// The arguments of the function for the lineage.
const LINEAGE: &str = "uuid, bytea, uuid, uuid";

/// Creates the functions of the newest version of the format.
pub(crate) fn create_all(schema: &str) -> String {
    [create(schema), create_commit(schema), create_beyond(schema)].concat()
}

/// Creates the function that version 5 of the format adds.
pub(crate) fn create_commit(schema: &str) -> String {
    let commit = in_schema(include_str!("commit.sql"), schema);
    function(schema, "commit", STEP, "boolean VOLATILE", &commit)
}

/// Creates the function that version 6 of the format changes.
pub(crate) fn create_lineage(schema: &str) -> String {
    function(schema, "lineage", LINEAGE, ROWS, &query(&of_schema(schema, &about(&walk(OLDER)))))
}

/// Creates the functions that version 7 of the format adds, and the one that it changes.
pub(crate) fn create_beyond(schema: &str) -> String {
    let head = function(schema, "head_beyond", HEAD_BEYOND, ROWS, &query(&head_beyond(schema)));
    let by_id = function(schema, "by_id_beyond", BY_ID_BEYOND, ROWS, &query(&by_id_beyond(schema)));
    [head, by_id, function(schema, "lineage", LINEAGE, ROWS, &query(&lineage(schema)))].concat()
}

/// Creates the functions of version 4 of the format.
pub(crate) fn create(schema: &str) -> String {
    let write = in_schema(include_str!("write.sql"), schema);
    function(schema, "write", CHANGE, "boolean VOLATILE", &write) + &reads(schema)
}

/// Creates the functions of version 3. Its threads had no nonce.
pub(crate) fn create_3(schema: &str) -> String {
    let write = in_schema(include_str!("schema/write_3.sql"), schema);
    let reads = reads(schema).replace("t.nonce AS k1", "NULL::uuid AS k1");
    function(schema, "write", CHANGE_3, "boolean VOLATILE", &write) + &reads
}

fn reads(schema: &str) -> String {
    let functions = [
        function(schema, "head", "uuid, bytea", ROWS, &query(&head(schema))),
        function(schema, "by_id", "uuid, bytea, uuid", ROWS, &query(&by_id(schema))),
        function(schema, "lineage", LINEAGE, ROWS, &query(&of_schema(schema, &about(&walk(""))))),
    ];
    functions.concat()
}

/// A text with its schema, on one line in the comment that names it, whatever the name is.
fn in_schema(text: &str, schema: &str) -> String {
    let comment = |name: &str| format!("{name} is the schema.");
    let text =
        text.replace(&comment("{s}"), &comment(&schema.replace(['\n', '\r'], " ").replace("{s}", "{ s}")));
    text.replace("{s}", schema)
}

fn function(schema: &str, name: &str, arguments: &str, returns: &str, body: &str) -> String {
    // One plan for all arguments, kept from the first call on; it must go by keys, because it is still used when the
    // tables have grown.
    format!(
        "CREATE OR REPLACE FUNCTION {schema}.threadkeep_{name}({arguments}) RETURNS {returns}
         LANGUAGE plpgsql SECURITY INVOKER SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS '{}';\n",
        body.replace('\'', "''")
    )
}

fn query(statement: &str) -> String {
    // The returned columns have the same names as columns of the tables.
    format!("#variable_conflict use_column\nBEGIN RETURN QUERY {statement}; END")
}

/// `thread, ns`: the head.
pub(crate) fn head(schema: &str) -> String {
    of_schema(schema, &about(&newest()))
}

/// `thread, ns, id`: one checkpoint.
pub(crate) fn by_id(schema: &str) -> String {
    of_schema(schema, &about(&with_id()))
}

/// `thread, ns`, and what the caller remembers: the head without that.
pub(crate) fn head_beyond(schema: &str) -> String {
    of_schema(schema, &about_beyond(&newest(), 3))
}

/// `thread, ns, id`, and what the caller remembers: one checkpoint without that.
pub(crate) fn by_id_beyond(schema: &str) -> String {
    of_schema(schema, &about_beyond(&with_id(), 4))
}

/// `thread, ns, id, reach`: the lineage back to the seeds. Nobody asks a lineage for metadata, whose maps grow with the
/// thread.
pub(crate) fn lineage(schema: &str) -> String {
    of_schema(schema, &about_without_entries(&walk(OLDER)))
}

fn newest() -> String {
    format!("{} ORDER BY id DESC LIMIT 1", of_namespace())
}

fn with_id() -> String {
    format!("{} AND id = $3", of_namespace())
}

/// A parent is older than its child: a damaged row that says something else ends the walk, which would go round for ever, and is
/// noticed by its checksum. Before version 6 of the format there was no such condition.
const OLDER: &str = " AND o.id < w.id";

/// The walk from a checkpoint to its parents, with more conditions for a parent `o` of `w`.
fn walk(more: &str) -> String {
    let walked = COLUMNS.split(", ").map(|name| format!("p.{name}")).collect::<Vec<_>>().join(", ");
    let stop = |row: &str| format!("CASE WHEN {row}id <= $4 THEN coalesce({row}seed, {row}id) END");
    format!(
        "SELECT {COLUMNS}, {} AS stop FROM {{s}}.threadkeep_checkpoint WHERE thread = $1 AND ns = $2 AND id = $3
         UNION ALL
         SELECT {walked}, coalesce(w.stop, {}) FROM c w CROSS JOIN LATERAL (
             SELECT * FROM {{s}}.threadkeep_checkpoint o WHERE o.thread = $1 AND o.ns = $2 AND o.id = w.parent{more} OFFSET 0
         ) p WHERE w.stop IS NULL OR w.id > w.stop",
        stop(""),
        stop("p."),
    )
}

fn of_schema(schema: &str, statement: &str) -> String {
    fill(statement, &[("{s}", schema)])
}
