//! The suite detects deliberately broken savers, and accepts a correct one.

mod broken;

use std::fmt::Debug;
use std::time::Duration;

use broken::{Comers, Fault, Lapse, Loners, Slip, Twist, Twister, Workshop};
use threadkeep_conformance::{Factory, Settings, Verdict, run};

const RANDOM: &str = "random_programs_agree_with_the_model";

/// Fails unless the suite names `case` for a saver with this fault.
async fn named(saver: impl Factory, fault: impl Debug, case: &str) {
    let report = run(saver, Settings::default(), |other| other.name == case).await;
    assert_eq!(report.failed(), [case], "{fault:?} is not named\n{report}");
}

macro_rules! mutants {
    ($factory:ident($faults:ident) $($test:ident: $fault:ident => $case:literal,)+) => {
        $(#[tokio::test(flavor = "multi_thread")]
        async fn $test() {
            named($factory($faults::$fault), $faults::$fault, $case).await;
        })+
    };
}

mutants! { Twister(Twist)
    a_saver_that_takes_the_parent_for_the_base: TakesTheParentForTheBase => "list_bases_are_told_by_their_version",
    a_saver_that_lists_the_oldest_first: ListsTheOldestFirst => "list_is_newest_first",
    a_saver_that_lists_one_namespace: ListsOneNamespace => "list_all_namespaces",
    a_saver_that_matches_any_key: MatchesAnyKey => "list_filters_on_metadata",
    a_saver_that_filters_one_namespace: FiltersOneNamespace => "list_all_namespaces",
    a_saver_that_stores_values_as_json: StoresValuesAsJson => "get_returns_what_was_committed",
    a_saver_that_shows_rows_backwards: ShowsRowsBackwards => "get_includes_writes_in_stored_order",
    a_saver_that_forgets_what_is_next: ForgetsWhatIsNext => "get_returns_what_was_committed",
    a_saver_that_shows_snapshots_as_values: ShowsSnapshotsAsValues => "kinds_of_storage_may_differ_at_one_version",
    a_saver_that_applies_unknown_tasks: AppliesUnknownTasks => "commit_applies_only_known_tasks",
    a_saver_that_commits_without_its_parent: CommitsWithoutItsParent => "commit_needs_its_parent",
    a_saver_that_has_one_head: HasOneHead => "commit_expects_the_head_of_its_own_namespace",
    a_saver_that_keeps_the_first_put: KeepsTheFirstPut => "put_writes_are_merged_by_position",
    a_saver_that_refuses_to_delete_the_unknown: RefusesToDeleteTheUnknown => "delete_unknown_thread_is_fine",
    a_saver_that_has_a_history_of_the_unknown: HasAHistoryOfTheUnknown => "history_of_an_unknown_checkpoint_is_not_found",
    a_saver_that_seeds_the_unwritten: SeedsTheUnwrittenWithNull => "history_of_a_never_written_channel_has_no_seed_and_no_writes",
    a_saver_that_gives_the_unknown_a_revision: GivesTheUnknownARevision => "read_thread_of_an_unknown_thread_is_absent",
    a_saver_that_takes_nothing_for_done: TakesNothingForDone => "rewrite_of_a_changed_thread_is_stale",
    a_saver_that_lists_threads_with_a_root: ListsThreadsWithARoot => "threads_are_listed_by_page",
    a_saver_that_forgets_what_is_put: ForgetsWhatIsPut => "rewrite_removes_and_puts",
    a_saver_that_puts_only_what_is_there: PutsOnlyWhatIsThere => "rewrite_removes_and_puts",
    a_saver_that_keeps_known_rows: KeepsKnownRows => "rewrite_removes_and_puts",
    a_saver_that_skips_what_is_there: SkipsWhatIsThere => "revisions_tell_every_change",
    a_saver_that_deletes_by_namespace: DeletesByNamespace => "a_deletion_beats_a_racing_commit",
    a_saver_that_leaves_nested_rows: LeavesNestedRows => "a_thread_made_anew_has_nothing_of_the_old_one",
    a_saver_that_stores_each_list_whole: StoresEachListWhole => "equal_elements_are_stored_once",
    a_saver_that_shares_in_secret: SharesInSecret => "capabilities_are_as_claimed",
    a_saver_that_shares_unclaimed: SharesUnclaimed => "capabilities_are_as_claimed",
    a_saver_that_frees_nothing: FreesNothing => "freed_space_is_free",
    a_saver_that_checks_nothing: ChecksNothing => "a_changed_byte_is_corruption",
}

mutants! { Workshop(Fault)
    a_saver_that_drops_a_write: DropsAWrite => "history_replays_only_applied_writes",
    a_saver_that_ignores_namespaces: IgnoresNamespaces => "namespaces_are_separate",
    a_saver_that_falls_back_to_the_head: FallsBackToTheHead => "get_by_id_is_exact",
    a_saver_that_leaves_out_what_was_not_loaded: UnloadedIsAbsent => "get_loads_what_was_asked",
    a_saver_whose_before_is_inclusive: BeforeIsInclusive => "list_before_is_exclusive",
    a_saver_that_limits_before_it_filters: LimitsBeforeFiltering => "list_limit_bounds_matches",
    a_saver_that_puts_twice: PutsTwice => "put_writes_is_idempotent",
    a_saver_that_keeps_special_rows: KeepsSpecialRows => "put_writes_special_rows_are_replaced",
    a_saver_that_puts_into_the_void: PutsIntoTheVoid => "put_writes_needs_its_checkpoint",
    a_saver_that_ignores_the_expected_head: IgnoresTheExpectedHead => "commit_on_a_stale_head_conflicts",
    a_saver_that_checks_then_commits: ChecksThenCommits => "one_writer_wins_each_round",
    a_saver_that_refuses_repeats: RefusesRepeats => "commit_of_the_same_id_is_idempotent",
    a_saver_that_looks_for_the_parent_first: LooksForTheParentFirst => "commit_of_the_same_id_is_idempotent",
    a_saver_that_checks_the_form_first: ChecksTheFormFirst => "commit_of_the_same_id_is_idempotent",
    a_saver_that_leaves_out_what_may_wait: LeavesOutWhatMayWait => "commit_that_waits_for_a_flush_is_like_any_other",
    a_saver_that_flushes_only_what_it_has: FlushesOnlyWhatItHas => "flush_of_anything_is_fine",
    a_saver_that_drops_held_values: DropsHeldValues => "commit_takes_over_held_values",
    a_saver_that_ignores_the_random_part_of_versions: IgnoresTheRandomPart => "commit_of_siblings_keeps_both",
    a_saver_that_keeps_writes_of_refused_commits: KeepsWritesOfRefusedCommits => "commit_that_fails_stores_nothing",
    a_saver_that_commits_in_two_parts: CommitsInTwoParts => "a_dropped_call_happens_whole_or_not_at_all",
    a_saver_that_forgets_pending_rows: ForgetsPendingRows => "commit_stores_pending_rows_with_its_checkpoint",
    a_saver_that_puts_pending_rows_afterwards: PutsPendingRowsAfterwards => "a_dropped_call_happens_whole_or_not_at_all",
    a_saver_that_doubles_pending_rows: DoublesPendingRows => "commit_stores_pending_rows_with_its_checkpoint",
    a_saver_that_trusts_bases: TrustsBases => "list_bases_that_the_store_does_not_hold_do_no_harm",
    a_saver_that_replays_siblings: ReplaysSiblings => "r8443_sibling_inputs_on_one_parent_stay_apart",
    a_saver_that_replays_by_id: ReplaysById => "r8382_parallel_tasks_replay_in_the_order_they_ran",
    a_saver_that_replays_special_rows: ReplaysSpecialRows => "special_rows_never_replay",
    a_saver_that_walks_one_page: WalksOnePage => "r8447_old_checkpoints_are_exact_however_much_is_newer",
    a_saver_that_ignores_plain_seeds: IgnoresPlainSeeds => "r8534_a_plain_value_is_a_seed",
    a_saver_for_which_null_is_no_seed: NullIsNoSeed => "r8686_null_and_empty_seeds_are_seeds",
    a_saver_that_ignores_reach: IgnoresReach => "history_reaches_back_as_far_as_asked",
    a_saver_for_which_gaps_are_beginnings: GapsAreBeginnings => "history_with_a_missing_ancestor_is_broken_lineage",
    a_saver_that_deletes_one_namespace: DeletesOneNamespace => "delete_thread_removes_everything_of_it",
    a_saver_that_deletes_by_prefix: DeletesByPrefix => "delete_thread_leaves_other_threads",
    a_saver_that_shares_nothing: SharesNothing => "two_handles_share_one_store",
    a_saver_that_forgets_on_reopening: ForgetsOnReopening => "a_reopened_store_has_everything",
    a_saver_that_panics: Panics => "get_by_id_is_exact",
    a_saver_whose_after_is_inclusive: AfterIsInclusive => "threads_are_listed_by_page",
    a_saver_that_reads_one_namespace: ReadsOneNamespace => "read_thread_is_everything",
    a_saver_whose_revisions_miss_rows: RevisionsMissRows => "rewrite_of_a_changed_thread_is_stale",
    a_saver_whose_revisions_are_digests: RevisionsAreDigests => "revisions_tell_every_change",
    a_saver_that_ignores_the_revision: IgnoresTheRevision => "rewrite_of_a_changed_thread_is_stale",
    a_saver_whose_revisions_come_back: RevisionsMissMetadata => "revisions_never_repeat",
    a_saver_that_ignores_the_form_of_the_parent: IgnoresTheForm => "commit_on_a_parent_in_another_form_is_stale",
    a_saver_that_changes_applied_rows: ChangesAppliedRows => "applied_rows_are_final",
    a_saver_that_reads_in_two_parts: ReadsInTwoParts => "reads_are_of_one_moment",
    a_saver_that_reads_one_by_one: ReadsOneByOne => "reads_are_of_one_moment",
    a_saver_that_counts_applied_rows: CountsAppliedRows => "summary_counts_everything",
    a_saver_that_forgets_rows_without_values: ForgetsRowsWithoutValues => "get_loads_what_was_asked",
    a_saver_that_forgets_an_ancestor: ForgetsAnAncestor => "rewrite_that_breaks_a_lineage_is_refused",
    a_saver_that_cuts_at_a_missing_row: CutsAtAMissingRow => "rewrite_that_breaks_a_lineage_is_refused",
    a_saver_that_rewrites_in_two_parts: RewritesInTwoParts => "a_dropped_call_happens_whole_or_not_at_all",
    a_saver_that_takes_the_rows_of_siblings: TakesTheRowsOfSiblings => "delete_for_runs_spares_what_others_need",
    a_saver_that_loses_what_was_taken_over: LosesWhatWasTakenOver => "prune_keeps_the_state_of_what_stays",
    a_saver_that_keeps_empty_threads: KeepsEmptyThreads => "rewrite_may_leave_nothing",
    a_saver_that_makes_no_threads: MakesNoThreads => "copies_are_equal_and_their_own",
    a_saver_that_fails_half_way: FailsHalfWay => "a_failed_operation_leaves_all_or_nothing",
    a_saver_that_deletes_in_two_parts: DeletesInTwoParts => "a_dropped_call_happens_whole_or_not_at_all",
    a_saver_whose_forks_share_a_parents_rows: ReplaysSiblings => "r4_3_forks_and_updates_of_the_past_keep_every_branch",
    a_saver_whose_parallel_tasks_are_sorted: ReplaysById => "r4_1_parallel_steps_reload_as_they_ran",
    a_saver_that_loses_the_title: DropsHeldValues => "r4_4_a_title_written_from_outside_survives",
    a_saver_that_loses_the_turn_before_delta: IgnoresPlainSeeds => "r8384_the_first_write_after_full_mode_is_kept",
}

mutants! { Comers(Slip)
    a_saver_that_shows_what_came: ShowsWhatCame => "a_thread_that_comes_is_seen_as_a_whole",
    a_saver_that_keeps_what_came: KeepsWhatCame => "a_thread_that_stops_coming_is_not_there",
    a_saver_that_sorts_what_comes: SortsWhatComes => "a_thread_that_comes_is_checked",
    a_saver_that_replaces_what_is_there: ReplacesWhatIsThere => "one_of_two_threads_that_come_is_written",
    a_saver_that_forgets_pending_rows_that_come: ForgetsPendingRows => "a_thread_is_written_as_it_comes",
    a_saver_that_holds_what_comes: HoldsWhatComes => "a_thread_that_comes_is_not_held",
    a_saver_that_copies_one_namespace: CopiesOneNamespace => "a_copy_is_the_whole_thread",
    a_saver_that_links_copies: LinksCopies => "a_copy_is_independent",
    a_saver_that_copies_over: CopiesOver => "a_copy_replaces_no_thread",
    a_saver_that_copies_one_by_one: CopiesOneByOne => "a_copy_is_of_one_moment",
    a_saver_that_looks_then_copies: LooksThenCopies => "one_of_two_copies_is_made",
    a_saver_that_deletes_what_changed: DeletesWhatChanged => "a_deletion_of_a_changed_thread_is_stale",
    a_saver_that_deletes_the_root_of_what_was_seen: DeletesTheRootOfWhatWasSeen => "a_deletion_of_what_was_seen_removes_everything",
    a_saver_that_remembers_revisions: RemembersRevisions => "the_revision_is_that_of_the_thread",
}

mutants! { Loners(Lapse)
    a_saver_that_locks_what_exists: LocksWhatExists => "one_writer_begins_a_thread",
    a_saver_that_copies_without_a_lock: CopiesWithoutALock => "one_rewrite_of_a_revision_wins",
    a_saver_that_locks_its_rewrites: LocksItsRewrites => "one_rewrite_of_a_revision_wins",
    a_saver_that_locks_its_handle: LocksItsHandle => "two_handles_race_for_one_head",
    a_saver_that_puts_without_a_lock: PutsWithoutALock => "puts_race_with_commits_and_rewrites",
    a_saver_that_puts_under_another_lock: PutsUnderAnotherLock => "puts_race_with_commits_and_rewrites",
    a_saver_that_rewrites_under_another_lock: RewritesUnderAnotherLock => "puts_race_with_commits_and_rewrites",
    a_saver_that_deletes_without_a_lock: DeletesWithoutALock => "a_deletion_beats_a_racing_put_and_a_racing_rewrite",
    a_saver_that_remembers_too_early: RemembersTooEarly => "a_failed_operation_leaves_all_or_nothing",
    a_saver_that_remembers_for_itself: RemembersForItself => "two_handles_share_one_store",
    a_saver_that_remembers_what_was_removed: RemembersWhatWasRemoved => "a_commit_after_a_rewrite_goes_on",
    a_saver_that_swallows_failures: SwallowsFailures => "a_failed_operation_leaves_all_or_nothing",
    a_saver_that_denies_what_it_stored: DeniesWhatItStored => "a_failed_operation_leaves_all_or_nothing",
    a_saver_that_shows_what_was_before: ShowsWhatWasBefore => "a_failed_operation_leaves_all_or_nothing",
    a_saver_that_counts_in_the_handle: CountsInTheHandle => "revisions_never_repeat",
    a_saver_that_counts_in_the_thread: CountsInTheThread => "revisions_never_repeat",
    a_saver_that_counts_what_is_there: CountsWhatIsThere => "revisions_never_repeat",
    a_saver_that_takes_the_time: TakesTheTime => "revisions_tell_every_change",
    a_saver_that_reads_the_head_in_two: ReadsTheHeadInTwo => "a_thread_that_is_there_is_never_missing",
    a_saver_that_reads_metadata_last: ReadsMetadataLast => "reads_are_of_one_moment",
    a_saver_that_reads_the_revision_last: ReadsTheRevisionLast => "reads_are_of_one_moment",
    a_saver_that_reads_channel_by_channel: ReadsChannelByChannel => "reads_are_of_one_moment",
    a_saver_that_lists_thread_by_thread: ListsThreadByThread => "a_thread_that_is_there_is_never_missing",
    a_saver_that_rewrites_in_pieces: RewritesInPieces => "reads_are_of_one_moment",
    a_saver_that_deletes_in_pieces: DeletesInPieces => "reads_are_of_one_moment",
    a_saver_that_commits_rows_first: CommitsRowsFirst => "readers_see_whole_commits",
    a_saver_that_folds_namespaces: FoldsNamespaces => "namespaces_are_separate",
    a_saver_that_trims_namespaces: TrimsNamespaces => "namespaces_are_separate",
    a_saver_that_removes_by_prefix: RemovesByPrefix => "namespaces_are_separate",
    a_saver_that_folds_metadata: FoldsMetadata => "list_filters_on_metadata",
    a_saver_that_follows_dots: FollowsDots => "list_filters_on_metadata",
    a_saver_that_compares_as_floats: ComparesAsFloats => "list_filters_on_metadata",
    a_saver_that_loses_dots: LosesDots => "odd_metadata_survives",
    a_saver_that_loses_fractions: LosesFractions => "odd_metadata_survives",
    a_saver_that_sorts_by_utf16: SortsByUtf16 => "threads_are_listed_by_page",
    a_saver_that_lists_a_page: ListsAPage => "r8447_old_checkpoints_are_exact_however_much_is_newer",
    a_saver_that_reads_a_page: ReadsAPage => "r8447_old_checkpoints_are_exact_however_much_is_newer",
    a_saver_that_lists_a_page_of_threads: ListsAPageOfThreads => "many_threads_are_all_listed",
    a_saver_that_shows_a_page_of_rows: ShowsAPageOfRows => "many_tasks_survive",
    a_saver_that_walks_a_page: WalksAPage => "r8447_old_checkpoints_are_exact_however_much_is_newer",
    a_saver_that_limits_before_before: LimitsBeforeBefore => "list_before_is_exclusive",
    a_saver_that_filters_a_page: FiltersAPage => "r8447_old_checkpoints_are_exact_however_much_is_newer",
    a_saver_that_limits_joined_rows: LimitsJoinedRows => "list_limit_bounds_matches",
    a_saver_that_limits_before_distinct: LimitsBeforeDistinct => "threads_are_listed_by_page",
    a_saver_that_rewrites_a_page: RewritesAPage => "r8447_old_checkpoints_are_exact_however_much_is_newer",
    a_saver_that_deletes_a_page: DeletesAPage => "r8447_old_checkpoints_are_exact_however_much_is_newer",
    a_saver_that_cuts_ids: CutsIds => "odd_texts_survive",
    a_saver_that_lists_by_insertion: ListsByInsertion => "rewrite_removes_and_puts",
    a_saver_that_lists_from_a_replica: ListsFromAReplica => "list_returns_what_get_returns",
    a_saver_that_stores_a_task_once: StoresATaskOnce => "put_writes_may_repeat_a_task_elsewhere",
    a_saver_that_copies_without_pending: CopiesWithoutPending => "rewrite_makes_a_thread",
    a_saver_that_sorts_rows: SortsRows => "rewrite_makes_a_thread",
    a_saver_that_keeps_the_head: KeepsTheHead => "rewrite_may_leave_nothing",
    a_saver_that_caches_paths: CachesPaths => "two_handles_share_one_store",
}

/// Its next call waits for a lock for ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_saver_that_leaves_its_lock() {
    const CASE: &str = "a_dropped_call_happens_whole_or_not_at_all";
    let settings = Settings { limit: Duration::from_secs(20), ..Settings::default() };
    let report = run(Loners(Lapse::LeavesItsLock), settings, |case| case.name == CASE).await;
    assert_eq!(report.failed(), [CASE], "{report}");
    let text = report.to_string();
    assert!(text.contains("did not end within 20s; it waits for\n    put_writes under checkpoint"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_saver_of_documents_passes_everything() {
    let report = run(Loners(Lapse::None), Settings::default(), |_| true).await;
    assert!(report.failed().is_empty(), "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_control_passes_everything() {
    let report = run(Workshop(Fault::None), Settings::default(), |_| true).await;
    assert!(report.failed().is_empty(), "{report}");
    let passed = report.cases.iter().filter(|report| report.verdict == Verdict::Passed).count();
    assert!(passed > 70, "{report}");
}

/// Faults that show only in combinations of calls are found by random programs, and shrunk to a few calls.
#[tokio::test(flavor = "multi_thread")]
async fn random_programs_find_faults_and_shrink_to_what_shows_them() {
    for fault in [
        Fault::ReplaysSiblings,
        Fault::ReplaysById,
        Fault::DropsHeldValues,
        Fault::IgnoresTheRandomPart,
        Fault::KeepsWritesOfRefusedCommits,
        Fault::PutsTwice,
        Fault::TrustsBases,
        Fault::IgnoresReach,
        Fault::RefusesRepeats,
        Fault::SharesNothing,
        Fault::ForgetsRowsWithoutValues,
        Fault::CountsAppliedRows,
    ] {
        let report = run(Workshop(fault), Settings::default(), |case| case.name == RANDOM).await;
        assert_eq!(report.failed(), [RANDOM], "{fault:?} was not found");
        let text = report.to_string();
        let (_, program) =
            text.split_once("the smallest program that shows it:").expect("a program is shown");
        let operation = |line: &&str| line.trim_start().starts_with(|c: char| c.is_ascii_digit());
        let operations = program.lines().filter(operation).count();
        assert!((1..=6).contains(&operations), "{fault:?} is shown by {operations} operations\n{report}");
    }
}
