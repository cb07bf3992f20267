-- What the store lost of what it had acknowledged, as an active run or its rollback found it: whoever ends the run, it ends
-- in this error. NULL for a run that found nothing lost.
ALTER TABLE runs ADD COLUMN history_lost TEXT;
