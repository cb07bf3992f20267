-- The tokens of all that was done for the batch, so that nobody adds up thousands of executions.
ALTER TABLE subagent_batches ADD COLUMN input_tokens BIGINT NOT NULL DEFAULT 0;
ALTER TABLE subagent_batches ADD COLUMN output_tokens BIGINT NOT NULL DEFAULT 0;
ALTER TABLE subagent_batches ADD COLUMN total_tokens BIGINT NOT NULL DEFAULT 0;

UPDATE subagent_batches AS b
SET input_tokens = used.input_tokens, output_tokens = used.output_tokens, total_tokens = used.total_tokens
FROM (
    SELECT i.batch_id,
           SUM((of_model.value ->> 'input_tokens')::BIGINT) AS input_tokens,
           SUM((of_model.value ->> 'output_tokens')::BIGINT) AS output_tokens,
           SUM((of_model.value ->> 'total_tokens')::BIGINT) AS total_tokens
    FROM subagent_batch_items AS i
    JOIN executions AS e ON e.execution_id = i.id
    CROSS JOIN LATERAL json_each(replace(e.usage_json, '\u0000', '\ufffd')::json) AS of_model
    WHERE e.kind = 'batch_item'
    GROUP BY i.batch_id
) AS used
WHERE b.id = used.batch_id;

-- What runs read of a thread: not the items of its batches, of which there may be thousands.
CREATE INDEX threadkeep_gateway_executions_of_runs ON executions (thread_id, created_at) WHERE kind <> 'batch_item';
