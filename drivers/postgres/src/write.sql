-- Writes a change of a thread, if the thread is as it was, and answers whether it was: see the module `change`.
-- {s} is the schema.
BEGIN
    IF old_epoch IS NULL THEN
        INSERT INTO {s}.threadkeep_thread (id, epoch, revision, nonce, body, name)
        VALUES (of_thread, new_epoch, new_revision, new_nonce, new_body, called)
        ON CONFLICT (id) DO NOTHING;
    ELSE
        UPDATE {s}.threadkeep_thread t
        SET epoch = new_epoch, revision = new_revision, nonce = new_nonce, body = new_body
        WHERE t.id = of_thread AND t.epoch = old_epoch AND t.revision = old_revision AND t.nonce = old_nonce;
    END IF;
    IF NOT found THEN
        RETURN false;
    END IF;
    -- Whether the transaction waits for the disk, whatever the default of the server is. The setting ends with it.
    IF NOT flushed THEN
        PERFORM pg_catalog.set_config('synchronous_commit', 'off', true);
    ELSIF pg_catalog.current_setting('synchronous_commit') = 'off' THEN
        PERFORM pg_catalog.set_config('synchronous_commit', 'on', true);
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
