//! The short form of each exercise.

mod common;

use common::play;
use threadkeep_torture::storage::Kind;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_process_loses_nothing_that_was_acknowledged() {
    let tally = play("killed", Kind::Sqlite, 1..6).await;
    assert_eq!(tally.counts()["kills"], 5);
    play("killed", Kind::Postgres, 1..3).await;
}

#[test]
fn each_exercise_has_a_turn_however_short_the_time_is() {
    let mut torture = std::process::Command::new(env!("CARGO_BIN_EXE_threadkeep-torture"));
    torture.args(["--minutes", "0", "--seed", "1", "--effort", "1", "--only", "storms, memory"]);
    let done = torture.output().unwrap();
    let shown = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success() && shown.contains("50 storms"), "{shown}");
    // A turn that does nothing finds nothing.
    let idle = torture.args(["--turns", "0"]).output().unwrap();
    assert!(!idle.status.success());
}

#[test]
fn a_name_that_no_exercise_has_is_an_error_with_the_names() {
    let mut torture = std::process::Command::new(env!("CARGO_BIN_EXE_threadkeep-torture"));
    let done = torture.args(["--only", "typo"]).output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(!done.status.success() && said.contains("\nreads beside rewrites, postgres\n"), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storms_of_create_and_delete_leave_threads_whole() {
    for saver in [Kind::Memory, Kind::Sqlite] {
        play("storms", saver, 1..3).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_processes_share_a_store() {
    play("two processes", Kind::Postgres, 1..2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_is_opened_beside_a_process_that_moves_its_log() {
    let tally = play("two processes", Kind::Sqlite, 1..3).await;
    // Beyond those of the rounds, which open the store as a whole.
    assert!(tally.counts()["opens"] > 100, "{:?}", tally.counts());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storms_of_create_and_delete_leave_threads_whole_on_postgres() {
    play("storms", Kind::Postgres, 1..3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_answer_and_somebody_else_before_the_retry_on_memory() {
    play("cut answers", Kind::Memory, 1..3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_answer_and_somebody_else_before_the_retry_on_sqlite() {
    play("cut answers", Kind::Sqlite, 1..3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_answer_and_somebody_else_before_the_retry_on_postgres() {
    play("cut answers", Kind::Postgres, 1..3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_power_loss_takes_nothing_that_was_flushed() {
    let tally = play("power loss", Kind::Sqlite, 1..4).await;
    assert!(tally.counts()["images"] >= 300);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_error_says_of_a_failed_flush_is_true_after_a_restart() {
    let tally = play("failing files", Kind::Sqlite, 1..3).await;
    assert!(tally.counts()["failures"] > 24);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn registers_keep_through_failovers_what_was_acknowledged() {
    let tally = play("registers", Kind::Postgres, 1..2).await;
    let counts = tally.counts();
    assert!(counts["acknowledged commits"] >= 480, "{counts:?}");
    assert_eq!((counts["failovers"], counts["cancelled waits with failover"]), (20, 4));
    assert!(
        counts["doubts settled by a repeat"] > 0 && counts["doubts settled by the driver"] > 0,
        "{counts:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_goes_back_is_reported_before_the_next_acknowledgement() {
    let tally = play("lost histories", Kind::Postgres, 1..2).await;
    let counts = tally.counts();
    assert_eq!((counts["failovers to a lagging standby"], counts["restored copies"]), (2, 2));
    // Two threads with one writer each and one with two, of which each loses three commits or more.
    assert!(counts["reports"] >= 16 && counts["lost commits"] >= 48, "{counts:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_an_older_backup_replaces_takes_no_commit_until_it_is_opened_again() {
    let tally = play("lost histories", Kind::Sqlite, 1..2).await;
    assert_eq!((tally.counts()["replaced files"], tally.counts()["lost commits"]), (5, 60));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_error_says_of_a_failed_statement_is_true() {
    let tally = play("failing statements", Kind::Postgres, 1..2).await;
    assert!(tally.counts()["failures"] > 12, "{:?}", tally.counts());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_beside_rewrites_are_right_and_never_call_a_thread_damaged_on_memory() {
    play("reads beside rewrites", Kind::Memory, 1..3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_beside_rewrites_are_right_and_never_call_a_thread_damaged_on_sqlite() {
    play("reads beside rewrites", Kind::Sqlite, 1..3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_beside_rewrites_are_right_and_never_call_a_thread_damaged_on_postgres() {
    play("reads beside rewrites", Kind::Postgres, 1..3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_puts_change_no_state_and_no_revision_comes_back_on_memory() {
    play("properties", Kind::Memory, 1..3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_puts_change_no_state_and_no_revision_comes_back_on_sqlite() {
    play("properties", Kind::Sqlite, 1..3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_puts_change_no_state_and_no_revision_comes_back_on_postgres() {
    play("properties", Kind::Postgres, 1..3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thread_is_converted_under_open_writers_on_memory() {
    play("open writers", Kind::Memory, 1..3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thread_is_converted_under_open_writers_on_sqlite() {
    play("open writers", Kind::Sqlite, 1..3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thread_is_converted_under_open_writers_on_postgres() {
    play("open writers", Kind::Postgres, 1..3).await;
}
