//! The `threadkeep-torture` command: see `docs/torture.md`.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use clap::{Args, Parser, Subcommand};
use futures::FutureExt as _;
use indicatif::{ProgressBar, ProgressStyle};
use threadkeep_torture::exercises::ALL;
use threadkeep_torture::report::{Row, table};
use threadkeep_torture::{Exercise, NotTried, Turn, child};

#[derive(Parser)]
#[command(name = "threadkeep-torture", about = "Tries to lose or damage what Threadkeep acknowledged")]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    run: Run,
}

#[derive(Subcommand)]
enum Command {
    /// What the exercises start processes for.
    #[command(hide = true)]
    Child(child::Task),
}

#[derive(Args)]
struct Run {
    /// How long to run, in minutes; longer if an exercise has had no turn yet.
    #[arg(long, default_value_t = 10.0)]
    minutes: f64,
    /// The seed of the first turn of each exercise; later turns count up from it. Default: taken from the clock.
    #[arg(long)]
    seed: Option<u64>,
    /// Only exercises with this text in their name, for example `power` or `postgres`.
    #[arg(long)]
    only: Option<String>,
    /// The maximum number of turns of each exercise: 1 with --seed and --only replays a turn.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    turns: Option<u64>,
    /// How much each turn does; a short test does 1.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    effort: u32,
    /// Also writes the table to this file, as Markdown.
    #[arg(long)]
    out: Option<PathBuf>,
}

fn main() -> ExitCode {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let done = runtime.map_err(anyhow::Error::from).and_then(|runtime| {
        runtime.block_on(async {
            let cli = Cli::parse();
            match cli.command {
                Some(Command::Child(task)) => child::work(task).await.map(|()| true),
                None => torture(&cli.run).await,
            }
        })
    });
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("threadkeep-torture: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The names of the exercises, a line each.
fn titles() -> String {
    ALL.iter().map(Exercise::title).collect::<Vec<_>>().join("\n")
}

/// Runs the exercises in turn until the time is over. Returns whether there were no findings.
async fn torture(run: &Run) -> anyhow::Result<bool> {
    let begun = Instant::now();
    let end = Duration::try_from_secs_f64(run.minutes * 60.0).context("--minutes")?;
    let seed = run.seed.unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.map_or(1, |now| now.as_secs())
    });
    let wanted = |title: &str| run.only.as_ref().is_none_or(|only| title.contains(only.as_str()));
    let mut rows: Vec<Row> =
        ALL.iter().filter(|exercise| wanted(&exercise.title())).map(|exercise| Row::new(*exercise)).collect();
    ensure!(!rows.is_empty(), "no exercise is called like that; there are:\n{}", titles());
    eprintln!("seed {seed}: replay a turn with SEED=(its seed) ONLY=(its name) TURNS=1");
    let progress = ProgressBar::no_length();
    progress.set_style(ProgressStyle::with_template("{spinner} {elapsed_precise} {msg}")?);
    progress.enable_steady_tick(Duration::from_millis(200));
    // The exercise with the least time so far goes next, so that each gets the same. Each has a turn, however short the
    // time is: of one that was not tried the table would say that nothing was found.
    while begun.elapsed() < end || rows.iter().any(|row| row.turns == 0) {
        let next = rows
            .iter_mut()
            .filter(|row| row.not_tried.is_none() && run.turns.is_none_or(|turns| row.turns < turns));
        let Some(row) = next.min_by_key(|row| row.took) else { break };
        let turn = Turn {
            seed: seed + row.turns,
            effort: run.effort,
            saver: row.exercise.saver,
            program: std::env::current_exe()?,
            tally: row.tally.clone(),
        };
        progress.set_message(format!("{}, seed {}", row.exercise.title(), turn.seed));
        let at = Instant::now();
        let number = turn.seed;
        let done = std::panic::AssertUnwindSafe((row.exercise.run)(turn)).catch_unwind().await;
        row.took += at.elapsed();
        row.turns += 1;
        let done = done.unwrap_or_else(|_| Err(anyhow::anyhow!("it panicked; see the text above")));
        if let Err(error) = done {
            let (title, what) = (row.exercise.title(), format!("{error:#}"));
            if error.is::<NotTried>() {
                progress.suspend(|| eprintln!("NOT TRIED: {title}: {what}"));
                row.not_tried = Some(what);
            } else {
                progress.suspend(|| eprintln!("FOUND by {title}, seed {number}: {what}"));
                row.found.push((number, what));
            }
        }
    }
    progress.finish_and_clear();
    for row in &mut rows {
        let known = row.found.len();
        row.finish(seed);
        for (number, what) in &row.found[known..] {
            eprintln!("FOUND by {}, seed {number}: {what}", row.exercise.title());
        }
    }
    let shown = table(&rows, false);
    writeln!(std::io::stdout().lock(), "{shown}")?;
    if let Some(out) = &run.out {
        let text = format!("{}\n\nSeed {seed}, {} s.\n", table(&rows, true), begun.elapsed().as_secs());
        std::fs::write(out, text).with_context(|| out.display().to_string())?;
    }
    Ok(rows.iter().all(|row| row.found.is_empty()))
}
