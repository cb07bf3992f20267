//! The faults of broken savers.

/// What the saver does wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Nothing: the control.
    None,
    /// Forgets the last write of a task that comes with a commit.
    DropsAWrite,
    /// Has one namespace.
    IgnoresNamespaces,
    /// Returns the head for an unknown id.
    FallsBackToTheHead,
    /// Omits channels that were not loaded.
    UnloadedIsAbsent,
    /// Includes the checkpoint before which the page should end.
    BeforeIsInclusive,
    /// Applies the limit before the filter.
    LimitsBeforeFiltering,
    /// Appends the writes of a known task to its existing ones.
    PutsTwice,
    /// Keeps the first special row of a kind.
    KeepsSpecialRows,
    /// Ignores writes for missing checkpoints.
    PutsIntoTheVoid,
    /// Commits whatever the head is.
    IgnoresTheExpectedHead,
    /// Checks the head, waits, and commits.
    ChecksThenCommits,
    /// Refuses to commit twice.
    RefusesRepeats,
    /// Looks for the parent of a commit before it looks for the checkpoint.
    LooksForTheParentFirst,
    /// Compares a commit with the form of its parent before it looks for the checkpoint.
    ChecksTheFormFirst,
    /// Does not store what may wait for a flush.
    LeavesOutWhatMayWait,
    /// Refuses to flush an unknown thread.
    FlushesOnlyWhatItHas,
    /// Stores nothing for the channels that a step holds.
    DropsHeldValues,
    /// Finds values by their version's counter alone.
    IgnoresTheRandomPart,
    /// Keeps the writes of a commit that it refuses.
    KeepsWritesOfRefusedCommits,
    /// Puts the writes, waits, and commits.
    CommitsInTwoParts,
    /// Commits without the pending rows.
    ForgetsPendingRows,
    /// Commits, waits, and puts the pending rows.
    PutsPendingRowsAfterwards,
    /// Appends the pending rows of a commit again when it is repeated.
    DoublesPendingRows,
    /// Takes the base of a list from what it holds under the base's version, or an empty list.
    TrustsBases,
    /// Replays every row under a parent.
    ReplaysSiblings,
    /// Replays tasks in the order of their ids.
    ReplaysById,
    /// Replays the special rows of applied tasks as well.
    ReplaysSpecialRows,
    /// Sees only the newest 1,024 checkpoints of a thread when it walks.
    WalksOnePage,
    /// Starts only from snapshots.
    IgnoresPlainSeeds,
    /// Treats a stored null as no seed.
    NullIsNoSeed,
    /// Always starts from the nearest value.
    IgnoresReach,
    /// Treats a gap in the lineage as its beginning.
    GapsAreBeginnings,
    /// Deletes the root namespace only.
    DeletesOneNamespace,
    /// Deletes every thread whose name starts with that of the thread.
    DeletesByPrefix,
    /// Each handle is a store of its own.
    SharesNothing,
    /// Claims to be durable, but starts empty with each handle.
    ForgetsOnReopening,
    /// Panics on every commit that has a parent.
    Panics,
    /// Lists threads from `after` on.
    AfterIsInclusive,
    /// Reads only the root namespace of a thread as the whole thread.
    ReadsOneNamespace,
    /// Returns the same revision while no checkpoint is added or removed.
    RevisionsMissRows,
    /// Derives the revision from the thread's contents, so that an identical second life has the same revision.
    RevisionsAreDigests,
    /// Returns the same revision whatever the metadata is.
    RevisionsMissMetadata,
    /// Takes a step that was planned on another form of its parent.
    IgnoresTheForm,
    /// Takes more writes of a task that a child has applied.
    ChangesAppliedRows,
    /// Reads a path checkpoint by checkpoint, while others rewrite the thread.
    ReadsInTwoParts,
    /// Lists, and reads whole threads, checkpoint by checkpoint; excludes only the writers of its own handle meanwhile.
    ReadsOneByOne,
    /// Forgets the task writes where no value is loaded.
    ForgetsRowsWithoutValues,
    /// Counts rows that a child has applied as pending.
    CountsAppliedRows,
    /// Rewrites regardless of concurrent changes.
    IgnoresTheRevision,
    /// Removes checkpoints with children without checking.
    ForgetsAnAncestor,
    /// Cuts a thread off at the first missing row, instead of refusing the rewrite.
    CutsAtAMissingRow,
    /// Removes in one change, and puts in another.
    RewritesInTwoParts,
    /// Also removes the rows under a removed checkpoint's parent.
    TakesTheRowsOfSiblings,
    /// Loses what survivors held from a removed checkpoint.
    LosesWhatWasTakenOver,
    /// A thread without checkpoints stays in the list.
    KeepsEmptyThreads,
    /// Puts nothing if the thread does not exist yet.
    MakesNoThreads,
    /// If an operation fails, puts the writes first and then fails.
    FailsHalfWay,
    /// Deletes half of a thread when its caller is dropped.
    DeletesInTwoParts,
}
