CREATE OR REPLACE FUNCTION {s}.threadkeep_write(
    of_thread uuid, called bytea, old_epoch bigint, old_revision bigint,
    new_epoch bigint, new_revision bigint, new_body bytea, flushed boolean,
    seqs bigint[], hashes uuid[], sizes int[], elements bytea[],
    namespaces bytea[], ids uuid[], parents uuid[], seeds uuid[], name_lists int[], extras int[], needed text[],
    bodies bytea[], tasks_of bytea[],
    head_namespaces bytea[], heads uuid[], head_names bytea[], head_sums bytea[]) RETURNS boolean VOLATILE
         LANGUAGE plpgsql SECURITY INVOKER SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS '-- Writes a change of a thread, if the thread is as it was, and answers whether it was: see the module `change`.
-- {q} is the schema.
BEGIN
    IF old_epoch IS NULL THEN
        INSERT INTO {q}.threadkeep_thread (id, epoch, revision, body, name)
        VALUES (of_thread, new_epoch, new_revision, new_body, called)
        ON CONFLICT (id) DO NOTHING;
    ELSE
        UPDATE {q}.threadkeep_thread t SET epoch = new_epoch, revision = new_revision, body = new_body
        WHERE t.id = of_thread AND t.epoch = old_epoch AND t.revision = old_revision;
    END IF;
    IF NOT found THEN
        RETURN false;
    END IF;
    IF NOT flushed THEN
        -- The transaction does not wait for the disk. The setting ends with it.
        PERFORM pg_catalog.set_config(''synchronous_commit'', ''off'', true);
    END IF;
    -- Most commits bring no element, or one.
    IF cardinality(seqs) > 0 THEN
        INSERT INTO {q}.threadkeep_element (thread, seq, hash, size, body)
        SELECT of_thread, x.seq, x.hash, x.size, x.body
        FROM unnest(seqs, hashes, sizes, elements) AS x (seq, hash, size, body);
    END IF;
    INSERT INTO {q}.threadkeep_checkpoint (thread, ns, id, parent, seed, names, extra, needs, body, tasks)
    SELECT of_thread, x.ns, x.id, x.parent, x.seed, x.names, x.extra, x.needs::bigint[], x.body, x.tasks
    FROM unnest(namespaces, ids, parents, seeds, name_lists, extras, needed, bodies, tasks_of)
         AS x (ns, id, parent, seed, names, extra, needs, body, tasks)
    ON CONFLICT (thread, ns, id) DO UPDATE
    SET parent = excluded.parent, seed = excluded.seed, names = excluded.names, extra = excluded.extra,
        needs = excluded.needs, body = excluded.body, tasks = excluded.tasks;
    -- The writes of a task move no head.
    IF cardinality(heads) > 0 THEN
        INSERT INTO {q}.threadkeep_head (thread, ns, head, name, sum)
        SELECT of_thread, x.ns, x.head, x.name, x.sum
        FROM unnest(head_namespaces, heads, head_names, head_sums) AS x (ns, head, name, sum)
        ON CONFLICT (thread, ns) DO UPDATE SET head = excluded.head, name = excluded.name, sum = excluded.sum;
    END IF;
    RETURN true;
END
';
CREATE OR REPLACE FUNCTION {s}.threadkeep_head(uuid, bytea) RETURNS TABLE (
    kind int, ns bytea, k1 uuid, k2 uuid, k3 uuid, n1 bigint, n2 bigint, b1 bytea, b2 bytea
) STABLE
         LANGUAGE plpgsql SECURITY INVOKER SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS '#variable_conflict use_column
BEGIN RETURN QUERY WITH RECURSIVE c AS (SELECT ns, id, parent, seed, names, extra, needs, body, tasks FROM {q}.threadkeep_checkpoint WHERE thread = $1 AND ns = $2 ORDER BY id DESC LIMIT 1) 
SELECT 0 AS kind, NULL::bytea AS ns, NULL::uuid AS k1, NULL::uuid AS k2, NULL::uuid AS k3,
       t.epoch AS n1, t.revision AS n2, t.name AS b1, t.body AS b2
FROM {q}.threadkeep_thread t WHERE t.id = $1
UNION ALL
SELECT 1, h.ns, h.head, NULL, NULL, NULL, NULL, h.name, h.sum
FROM {q}.threadkeep_head h WHERE h.thread = $1 AND ($2::bytea IS NULL OR h.ns = $2)
UNION ALL
SELECT 2, c.ns, c.id, c.parent, c.seed, c.names, c.extra, c.body, c.tasks FROM c
UNION ALL
SELECT 3, NULL, e.hash, NULL, NULL, e.seq, e.size, e.body, NULL
FROM (
    SELECT unnest(range_agg(r.range)) AS range
    FROM c CROSS JOIN LATERAL (
        SELECT int8range(4294967296 + c.names, 4294967296 + c.names, ''[]'') AS range
        UNION ALL
        SELECT int8range(4294967296 + c.extra, 4294967296 + c.extra, ''[]'') WHERE c.extra IS NOT NULL
        UNION ALL
        SELECT int8range(n.first, c.needs[(n.at + 1)::int], ''[]'')
        FROM unnest(c.needs) WITH ORDINALITY AS n (first, at) WHERE n.at % 2 = 1
    ) r
) w CROSS JOIN LATERAL (
    SELECT * FROM {q}.threadkeep_element x
    WHERE x.thread = $1 AND x.seq >= lower(w.range) AND x.seq < upper(w.range) OFFSET 0
) e; END';
CREATE OR REPLACE FUNCTION {s}.threadkeep_by_id(uuid, bytea, uuid) RETURNS TABLE (
    kind int, ns bytea, k1 uuid, k2 uuid, k3 uuid, n1 bigint, n2 bigint, b1 bytea, b2 bytea
) STABLE
         LANGUAGE plpgsql SECURITY INVOKER SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS '#variable_conflict use_column
BEGIN RETURN QUERY WITH RECURSIVE c AS (SELECT ns, id, parent, seed, names, extra, needs, body, tasks FROM {q}.threadkeep_checkpoint WHERE thread = $1 AND ns = $2 AND id = $3) 
SELECT 0 AS kind, NULL::bytea AS ns, NULL::uuid AS k1, NULL::uuid AS k2, NULL::uuid AS k3,
       t.epoch AS n1, t.revision AS n2, t.name AS b1, t.body AS b2
FROM {q}.threadkeep_thread t WHERE t.id = $1
UNION ALL
SELECT 1, h.ns, h.head, NULL, NULL, NULL, NULL, h.name, h.sum
FROM {q}.threadkeep_head h WHERE h.thread = $1 AND ($2::bytea IS NULL OR h.ns = $2)
UNION ALL
SELECT 2, c.ns, c.id, c.parent, c.seed, c.names, c.extra, c.body, c.tasks FROM c
UNION ALL
SELECT 3, NULL, e.hash, NULL, NULL, e.seq, e.size, e.body, NULL
FROM (
    SELECT unnest(range_agg(r.range)) AS range
    FROM c CROSS JOIN LATERAL (
        SELECT int8range(4294967296 + c.names, 4294967296 + c.names, ''[]'') AS range
        UNION ALL
        SELECT int8range(4294967296 + c.extra, 4294967296 + c.extra, ''[]'') WHERE c.extra IS NOT NULL
        UNION ALL
        SELECT int8range(n.first, c.needs[(n.at + 1)::int], ''[]'')
        FROM unnest(c.needs) WITH ORDINALITY AS n (first, at) WHERE n.at % 2 = 1
    ) r
) w CROSS JOIN LATERAL (
    SELECT * FROM {q}.threadkeep_element x
    WHERE x.thread = $1 AND x.seq >= lower(w.range) AND x.seq < upper(w.range) OFFSET 0
) e; END';
CREATE OR REPLACE FUNCTION {s}.threadkeep_lineage(uuid, bytea, uuid, uuid) RETURNS TABLE (
    kind int, ns bytea, k1 uuid, k2 uuid, k3 uuid, n1 bigint, n2 bigint, b1 bytea, b2 bytea
) STABLE
         LANGUAGE plpgsql SECURITY INVOKER SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS '#variable_conflict use_column
BEGIN RETURN QUERY WITH RECURSIVE c AS (SELECT ns, id, parent, seed, names, extra, needs, body, tasks, CASE WHEN id <= $4 THEN coalesce(seed, id) END AS stop FROM {q}.threadkeep_checkpoint WHERE thread = $1 AND ns = $2 AND id = $3
         UNION ALL
         SELECT p.ns, p.id, p.parent, p.seed, p.names, p.extra, p.needs, p.body, p.tasks, coalesce(w.stop, CASE WHEN p.id <= $4 THEN coalesce(p.seed, p.id) END) FROM c w CROSS JOIN LATERAL (
             SELECT * FROM {q}.threadkeep_checkpoint o WHERE o.thread = $1 AND o.ns = $2 AND o.id = w.parent OFFSET 0
         ) p WHERE w.stop IS NULL OR w.id > w.stop) 
SELECT 0 AS kind, NULL::bytea AS ns, NULL::uuid AS k1, NULL::uuid AS k2, NULL::uuid AS k3,
       t.epoch AS n1, t.revision AS n2, t.name AS b1, t.body AS b2
FROM {q}.threadkeep_thread t WHERE t.id = $1
UNION ALL
SELECT 1, h.ns, h.head, NULL, NULL, NULL, NULL, h.name, h.sum
FROM {q}.threadkeep_head h WHERE h.thread = $1 AND ($2::bytea IS NULL OR h.ns = $2)
UNION ALL
SELECT 2, c.ns, c.id, c.parent, c.seed, c.names, c.extra, c.body, c.tasks FROM c
UNION ALL
SELECT 3, NULL, e.hash, NULL, NULL, e.seq, e.size, e.body, NULL
FROM (
    SELECT unnest(range_agg(r.range)) AS range
    FROM c CROSS JOIN LATERAL (
        SELECT int8range(4294967296 + c.names, 4294967296 + c.names, ''[]'') AS range
        UNION ALL
        SELECT int8range(4294967296 + c.extra, 4294967296 + c.extra, ''[]'') WHERE c.extra IS NOT NULL
        UNION ALL
        SELECT int8range(n.first, c.needs[(n.at + 1)::int], ''[]'')
        FROM unnest(c.needs) WITH ORDINALITY AS n (first, at) WHERE n.at % 2 = 1
    ) r
) w CROSS JOIN LATERAL (
    SELECT * FROM {q}.threadkeep_element x
    WHERE x.thread = $1 AND x.seq >= lower(w.range) AND x.seq < upper(w.range) OFFSET 0
) e; END';
