//! The figures of `make scale` on small stores: what commands read and print must not grow with what they do not show, and
//! no turn fails beside a command.

use tempfile::TempDir;
use threadkeep_benches::load::StoreKind;
use threadkeep_benches::scale::{Form, Grows, Scale, tables};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_read_what_they_print_and_turns_go_on_beside_them() {
    let scratch = TempDir::new().unwrap();
    let scale = Scale {
        gateway: env!("CARGO_BIN_EXE_threadkeep").into(),
        scratch: scratch.path().to_owned(),
        stores: vec![StoreKind::Sqlite],
        threads: 220,
        turns: 120,
        beside: 8,
        rate: std::num::NonZeroU32::new(400),
    };
    let report = scale.run(|_| {}).await.unwrap();
    let shown = tables(&report, Form::Aligned);
    for row in &report.rows {
        let [small, wide, large] = [&row.small, &row.wide, &row.large];
        assert!(small.wall_ms > 0.0 && large.peak > 0, "{row:?}");
        if row.grows != Grows::Store {
            // Ten times the threads. A gateway that trains a dictionary or empties its log meanwhile reads more.
            assert!(wide.read <= 3 * small.read + 2_000_000, "{row:?}\n{shown}");
        }
        // Ten times the threads and turns.
        if row.grows == Grows::No {
            assert!(large.printed <= 2 * small.printed + 20_000, "{row:?}\n{shown}");
            assert!(large.read <= small.read + 400_000, "{row:?}\n{shown}");
        } else {
            // Linear, with what only a long thread needs; its square would be a hundred times as much.
            assert!(large.read <= 30 * small.read + 400_000, "{row:?}\n{shown}");
        }
    }
    for name in [
        "setup",
        "threads list --limit 20",
        "delegations verify",
        "batches list",
        "prune apply --all --keep nothing",
        "import exported",
        "convert --all",
        "vacuum --full",
        "/api/threads/{thread_id}/state",
        "/threads/{thread_id} (page)",
        "/api/threads/{thread_id}/runs/wait (POST)",
        "/api/threads/{thread_id}/runs/{run_id}/events",
        "/api/threads/{thread_id}/state/{checkpoint_id}",
        "/api/threads/{thread_id}/branches (POST)",
        "/api/threads/{thread_id}/copy (POST)",
    ] {
        assert!(report.rows.iter().any(|row| row.name.starts_with(name)), "{name}\n{shown}");
    }
    let beside: Vec<_> = report.turns.iter().filter(|turns| !turns.beside.is_empty()).collect();
    assert_eq!((beside.len(), report.turns.len()), (5, 10), "{shown}");
    let place = |name: &str| beside.iter().position(|turns| turns.beside.starts_with(name)).unwrap();
    assert!(place("copy") < place("retention").min(place("prune")), "they shorten what it copies\n{shown}");
    assert!(report.turns.iter().all(|turns| turns.turns >= 8 && turns.p50_ms <= turns.p99_ms), "{shown}");
    assert_eq!(report.turns.iter().map(|turns| turns.failed).sum::<usize>(), 0, "{shown}");
    let markdown = tables(&report, Form::Markdown);
    assert_eq!(markdown.lines().filter(|line| line.starts_with("|--")).count(), 2, "{markdown}");
    assert!(std::fs::read_dir(scratch.path()).unwrap().next().is_none(), "the stores are gone");
}
