-- Writes a change of a thread, if the thread is as it was, and answers whether it was: see the module `change`.
-- {s} is the schema.
BEGIN
    IF old_epoch IS NULL THEN
        INSERT INTO {s}.threadkeep_thread (id, epoch, revision, body, name)
        VALUES (of_thread, new_epoch, new_revision, new_body, called)
        ON CONFLICT (id) DO NOTHING;
    ELSE
        UPDATE {s}.threadkeep_thread t SET epoch = new_epoch, revision = new_revision, body = new_body
        WHERE t.id = of_thread AND t.epoch = old_epoch AND t.revision = old_revision;
    END IF;
    IF NOT found THEN
        RETURN false;
    END IF;
    IF NOT flushed THEN
        -- The transaction does not wait for the disk. The setting ends with it.
        PERFORM pg_catalog.set_config('synchronous_commit', 'off', true);
    END IF;
    -- Most commits bring no element, or one.
    IF cardinality(seqs) > 0 THEN
        INSERT INTO {s}.threadkeep_element (thread, seq, hash, size, body)
        SELECT of_thread, x.seq, x.hash, x.size, x.body
        FROM unnest(seqs, hashes, sizes, elements) AS x (seq, hash, size, body);
    END IF;
    INSERT INTO {s}.threadkeep_checkpoint (thread, ns, id, parent, seed, names, extra, needs, body, tasks)
    SELECT of_thread, x.ns, x.id, x.parent, x.seed, x.names, x.extra, x.needs::bigint[], x.body, x.tasks
    FROM unnest(namespaces, ids, parents, seeds, name_lists, extras, needed, bodies, tasks_of)
         AS x (ns, id, parent, seed, names, extra, needs, body, tasks)
    ON CONFLICT (thread, ns, id) DO UPDATE
    SET parent = excluded.parent, seed = excluded.seed, names = excluded.names, extra = excluded.extra,
        needs = excluded.needs, body = excluded.body, tasks = excluded.tasks;
    -- The writes of a task move no head.
    IF cardinality(heads) > 0 THEN
        INSERT INTO {s}.threadkeep_head (thread, ns, head, name, sum)
        SELECT of_thread, x.ns, x.head, x.name, x.sum
        FROM unnest(head_namespaces, heads, head_names, head_sums) AS x (ns, head, name, sum)
        ON CONFLICT (thread, ns) DO UPDATE SET head = excluded.head, name = excluded.name, sum = excluded.sum;
    END IF;
    RETURN true;
END
