-- Commits a checkpoint onto a thread that has its namespace, if the thread is as it was, and answers whether it was: see
-- the module `step`. {s} is the schema.
BEGIN
    IF NOT waits THEN
        -- Others commit in this transaction: a thread that somebody has locked does not hold them up.
        PERFORM 1 FROM {s}.threadkeep_thread t WHERE t.id = of_thread FOR UPDATE SKIP LOCKED;
        IF NOT found THEN
            RETURN false;
        END IF;
    END IF;
    UPDATE {s}.threadkeep_thread t SET revision = new_revision, nonce = new_nonce, body = new_body
    WHERE t.id = of_thread AND t.epoch = old_epoch AND t.revision = old_revision AND t.nonce = old_nonce;
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
    IF cardinality(seqs) = 1 THEN
        INSERT INTO {s}.threadkeep_element (thread, seq, hash, size, body)
        VALUES (of_thread, seqs[1], hashes[1], sizes[1], elements[1]);
    ELSIF cardinality(seqs) > 1 THEN
        INSERT INTO {s}.threadkeep_element (thread, seq, hash, size, body)
        SELECT of_thread, x.seq, x.hash, x.size, x.body
        FROM unnest(seqs, hashes, sizes, elements) AS x (seq, hash, size, body);
    END IF;
    IF parent_tasks IS NOT NULL THEN
        UPDATE {s}.threadkeep_checkpoint c SET tasks = parent_tasks, needs = parent_needs
        WHERE c.thread = of_thread AND c.ns = namespace AND c.id = parent_id;
        IF NOT found THEN
            RAISE 'the parent has no row' USING ERRCODE = 'data_corrupted';
        END IF;
    END IF;
    INSERT INTO {s}.threadkeep_checkpoint (thread, ns, id, parent, seed, names, extra, needs, body)
    VALUES (of_thread, namespace, checkpoint, parent_id, seed_id, name_list, extra_part, needed, new_row);
    UPDATE {s}.threadkeep_head h SET head = checkpoint, sum = head_sum
    WHERE h.thread = of_thread AND h.ns = namespace;
    IF NOT found THEN
        RAISE 'the namespace has no row' USING ERRCODE = 'data_corrupted';
    END IF;
    RETURN true;
END
