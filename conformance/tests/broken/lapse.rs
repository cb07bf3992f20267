//! What the author of a saver over documents may forget.

/// What the saver does wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lapse {
    /// Nothing: the control.
    None,
    /// Locks the document of a thread, and for the first commit of a namespace there is nothing to lock.
    LocksWhatExists,
    /// Locks the document of a thread, and for a copy to a new one there is nothing to lock.
    CopiesWithoutALock,
    /// Each handle has a lock of its own for rewrites.
    LocksItsRewrites,
    /// Each handle has a lock of its own.
    LocksItsHandle,
    /// Puts read, merge and store without a lock.
    PutsWithoutALock,
    /// Puts have another lock than commits and rewrites.
    PutsUnderAnotherLock,
    /// Rewrites have another lock than puts and commits.
    RewritesUnderAnotherLock,
    /// Deletes without a lock, so that what a put has read comes back.
    DeletesWithoutALock,
    /// Takes a lock that only the end of the call releases, and not that its caller is dropped.
    LeavesItsLock,
    /// Remembers a commit before it is stored, and acknowledges its repeat from memory.
    RemembersTooEarly,
    /// Remembers commits until its own handle removes them.
    RemembersForItself,
    /// Remembers commits until their thread is deleted.
    RemembersWhatWasRemoved,
    /// Acknowledges what could not be stored.
    SwallowsFailures,
    /// Stores, and then says that nothing was written.
    DeniesWhatItStored,
    /// Stores, and after a failure that leaves that in doubt goes on to show what was before, and changes nothing more.
    ShowsWhatWasBefore,
    /// Counts revisions in the handle.
    CountsInTheHandle,
    /// Counts revisions in the thread, whose next life begins at 1 again.
    CountsInTheThread,
    /// Takes the number of checkpoints and rows for the revision.
    CountsWhatIsThere,
    /// Takes a clock that is coarser than writes for the revision.
    TakesTheTime,
    /// Finds the head, and then reads it.
    ReadsTheHeadInTwo,
    /// Reads the metadata of a checkpoint after the rest of it.
    ReadsMetadataLast,
    /// Reads the revision of a thread after its checkpoints.
    ReadsTheRevisionLast,
    /// Reads the path of each channel by itself.
    ReadsChannelByChannel,
    /// Finds the names of threads, and then looks whether each one is there.
    ListsThreadByThread,
    /// Removes what a rewrite removes in one change, and puts in the next.
    RewritesInPieces,
    /// Deletes checkpoint by checkpoint.
    DeletesInPieces,
    /// Stores the rows of a commit before its checkpoint.
    CommitsRowsFirst,
    /// Compares namespaces without their case.
    FoldsNamespaces,
    /// Compares namespaces without trailing spaces.
    TrimsNamespaces,
    /// Removes from every namespace that begins with the one from which it should.
    RemovesByPrefix,
    /// Compares texts in metadata without their case.
    FoldsMetadata,
    /// Takes the dots in a filter's keys for a path.
    FollowsDots,
    /// Compares the numbers of a filter as floats.
    ComparesAsFloats,
    /// Stores keys of metadata without their dots.
    LosesDots,
    /// Stores whole numbers as integers.
    LosesFractions,
    /// Lists threads in the order of UTF-16.
    SortsByUtf16,
    /// Lists at most 1,000 checkpoints.
    ListsAPage,
    /// Reads at most 1,000 checkpoints of a thread.
    ReadsAPage,
    /// Lists at most 1,000 threads.
    ListsAPageOfThreads,
    /// Shows at most 1,000 rows under a checkpoint.
    ShowsAPageOfRows,
    /// Follows at most 1,000 parents.
    WalksAPage,
    /// Applies the limit before it looks at `before`.
    LimitsBeforeBefore,
    /// Looks for what a filter asks among the newest 1,000.
    FiltersAPage,
    /// Counts the rows under checkpoints for the limit, as a join does.
    LimitsJoinedRows,
    /// Takes as many checkpoints as the limit, and then the threads to which they belong.
    LimitsBeforeDistinct,
    /// Removes or puts at most 1,000 checkpoints in a change.
    RewritesAPage,
    /// Deletes at most 1,000 checkpoints of a thread.
    DeletesAPage,
    /// Has room for 255 characters of a thread's id.
    CutsIds,
    /// Lists in the order in which checkpoints were stored.
    ListsByInsertion,
    /// Lists what was there before the last change.
    ListsFromAReplica,
    /// Stores a task once in a thread, under whichever checkpoint came first.
    StoresATaskOnce,
    /// Copies no rows that no child has applied.
    CopiesWithoutPending,
    /// Sorts the rows of what a rewrite puts.
    SortsRows,
    /// Keeps the head of a namespace of which everything was removed.
    KeepsTheHead,
    /// Keeps the paths that it has read until its own handle changes the thread.
    CachesPaths,
}
