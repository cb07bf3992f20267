//! The ways in which savers are broken.

/// What the saver does wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Nothing: the control.
    None,
    /// Forgets the last write of a task that comes with a commit.
    DropsAWrite,
    /// Has one namespace.
    IgnoresNamespaces,
    /// Answers a request for an unknown id with the head.
    FallsBackToTheHead,
    /// Leaves out the channels that were not loaded.
    UnloadedIsAbsent,
    /// Lists the checkpoint that the page should end before.
    BeforeIsInclusive,
    /// Applies the limit before the filter.
    LimitsBeforeFiltering,
    /// Puts the writes of a known task behind those it has.
    PutsTwice,
    /// Keeps the first special row of a kind.
    KeepsSpecialRows,
    /// Ignores writes for checkpoints that are not there.
    PutsIntoTheVoid,
    /// Commits whatever the head is.
    IgnoresTheExpectedHead,
    /// Looks at the head, waits, and commits.
    ChecksThenCommits,
    /// Refuses to commit twice.
    RefusesRepeats,
    /// Does not store what may wait for a flush.
    LeavesOutWhatMayWait,
    /// Refuses to flush a thread that is not there.
    FlushesOnlyWhatItHas,
    /// Stores nothing for the channels that a step holds over.
    DropsHeldValues,
    /// Finds values by the counter of their version.
    IgnoresTheRandomPart,
    /// Keeps the writes of a commit that it refuses.
    KeepsWritesOfRefusedCommits,
    /// Puts the writes, waits, and commits.
    CommitsInTwoParts,
    /// Takes the base of a list from what it holds under the base's version, and nothing where it holds none.
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
    /// Takes a stored null for nothing.
    NullIsNoSeed,
    /// Always starts from the nearest value.
    IgnoresReach,
    /// Takes a gap in the lineage for its beginning.
    GapsAreBeginnings,
    /// Deletes the root namespace only.
    DeletesOneNamespace,
    /// Deletes every thread whose name begins with that of the thread.
    DeletesByPrefix,
    /// Each handle is a store of its own.
    SharesNothing,
    /// Claims to be durable, and begins anew with each handle.
    ForgetsOnReopening,
    /// Panics on every commit that has a parent.
    Panics,
    /// Lists threads from `after` on.
    AfterIsInclusive,
    /// Reads the root namespace of a thread, and calls it everything.
    ReadsOneNamespace,
    /// Tells the same revision as long as no checkpoint comes or goes.
    RevisionsMissRows,
    /// Tells a revision by what the thread holds, so that a second life like the first one has its revision.
    RevisionsAreDigests,
    /// Rewrites whatever happened meanwhile.
    IgnoresTheRevision,
    /// Removes a checkpoint that others were made from, without asking.
    ForgetsAnAncestor,
    /// Cuts a thread off at the first row that is missing, instead of refusing the rewrite.
    CutsAtAMissingRow,
    /// Removes in one change, and puts in another.
    RewritesInTwoParts,
    /// Takes the rows under a removed checkpoint's parent with it.
    TakesTheRowsOfSiblings,
    /// Forgets what survivors took over from a removed checkpoint.
    LosesWhatWasTakenOver,
    /// A thread without checkpoints stays in the list.
    KeepsEmptyThreads,
    /// Puts nothing where the thread is not there yet.
    MakesNoThreads,
    /// Puts the writes first and fails then, where an operation fails.
    FailsHalfWay,
    /// Deletes half of a thread when its caller walks away.
    DeletesInTwoParts,
}
