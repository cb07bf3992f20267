-- What the store lost of what it had acknowledged, as an active run or its rollback found it: the run ends in this error,
-- whichever process ends it. NULL for a run that found nothing lost.
ALTER TABLE runs ADD COLUMN history_lost TEXT;
