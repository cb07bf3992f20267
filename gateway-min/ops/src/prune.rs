//! `threadkeep prune`: keeps the newest checkpoints of threads and what they need.

use std::collections::BTreeSet;

use chrono::{DateTime, NaiveDate, TimeDelta, Utc};
use clap::{Args, Subcommand, ValueEnum};
use threadkeep::deletion::{Boundary, Keep, Prune, plan_prune};
use threadkeep::id::CheckpointId;
use threadkeep::saver::ThreadImage;

use super::error::Result;
use super::output::Out;
use super::plan::{ApplyArgs, Asked, PlanArgs, Policy};
use super::target::{StoreArgs, Target};

/// Remove old checkpoints of threads.
#[derive(Debug, Subcommand)]
pub(crate) enum PruneCommand {
    /// Show what would be removed, with a reason per checkpoint. Changes nothing.
    #[command(after_help = "\
Examples:
  threadkeep prune plan --thread my-thread --keep last:10
  threadkeep prune plan --all --keep since:30d --summary

--json prints one document per line, one for each thread.")]
    Plan {
        #[command(flatten)]
        plan: PlanArgs,
        #[command(flatten)]
        what: What,
    },
    /// Remove it, with one atomic change per thread or batch.
    ///
    /// Every remaining checkpoint keeps its state. A gateway may run: if it writes meanwhile, the command plans again.
    #[command(after_help = "\
Examples:
  threadkeep prune apply --thread my-thread --keep latest --boundary fresh-snapshot
  threadkeep prune apply --all --keep since:2026-01-31 --batch 500 --yes

Run `threadkeep vacuum` afterwards to return the freed space to the file system.")]
    Apply {
        #[command(flatten)]
        apply: ApplyArgs,
        #[command(flatten)]
        what: What,
    },
}

/// What to prune.
#[derive(Debug, Args)]
pub(crate) struct What {
    /// What to keep in each namespace: latest, last:N, since:30d (or h, m, s, w), since:2026-01-31 (or a time),
    /// nothing.
    #[arg(long, value_name = "WHAT", value_parser = keep)]
    keep: Keep,
    /// What to do if a delta channel would lose the history before the oldest kept checkpoint.
    #[arg(long, value_enum, default_value = "keep-set")]
    boundary: BoundaryName,
    /// Checkpoints to keep in any case, with what they need. Nothing is removed if one of them is not found.
    #[arg(long, value_name = "ID", num_args = 1..)]
    protect: Vec<CheckpointId>,
    /// Maximum checkpoints removed per atomic change, oldest first; `apply` continues until all are removed.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    batch: Option<u32>,
}

/// The values of `--boundary`.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum BoundaryName {
    /// Also keep ancestors, back to those that store a complete value.
    KeepSet,
    /// Store a snapshot in the oldest kept checkpoints, and remove all ancestors. Only LangGraph can compute its delta
    /// channels: their checkpoints keep ancestors as with keep-set.
    FreshSnapshot,
}

impl What {
    fn prune(&self) -> Prune {
        Prune {
            keep: self.keep,
            boundary: match self.boundary {
                BoundaryName::KeepSet => Boundary::KeepSet,
                BoundaryName::FreshSnapshot => Boundary::FreshSnapshot,
            },
            protect: self.protect.iter().copied().collect::<BTreeSet<_>>(),
            batch: self.batch.map(|batch| batch as usize),
        }
    }
}

impl PruneCommand {
    pub(crate) fn store(&self) -> &StoreArgs {
        self.asked().store()
    }

    fn asked(&self) -> Asked<'_> {
        match self {
            Self::Plan { plan, .. } => Asked::Plan(plan),
            Self::Apply { apply, .. } => Asked::Apply(apply),
        }
    }

    pub(crate) async fn run(&self, target: &Target, out: &mut Out) -> Result<()> {
        let (Self::Plan { what, .. } | Self::Apply { what, .. }) = self;
        let prune = what.prune();
        let plan = |image: &ThreadImage| plan_prune(image, &prune, &target.table);
        let policy = Policy { plan: &plan, protect: &prune.protect, repeat: prune.batch.is_some() };
        self.asked().run(target, out, policy).await
    }
}

fn keep(text: &str) -> Result<Keep, String> {
    match text.split_once(':') {
        None if text == "latest" => Ok(Keep::Latest),
        None if text == "nothing" => Ok(Keep::Nothing),
        Some(("last", count)) => match count.parse() {
            Ok(0) | Err(_) => {
                Err(format!("last:{count}: use a number of at least 1, or `nothing` to keep none"))
            }
            Ok(count) => Ok(Keep::Last(count)),
        },
        Some(("since", when)) => since(when, Utc::now()).map(Keep::Since),
        _ => Err("use latest, last:N, since:DURATION, since:DATE or nothing".to_owned()),
    }
}

/// A time in milliseconds since the Unix epoch: a duration ago, a day, or a time.
fn since(text: &str, now: DateTime<Utc>) -> Result<u64, String> {
    let ago = || {
        let unit = text.chars().last()?;
        let count: i64 = text[..text.len() - unit.len_utf8()].parse().ok().filter(|count| *count >= 0)?;
        let span = match unit {
            's' => TimeDelta::try_seconds(count),
            'm' => TimeDelta::try_minutes(count),
            'h' => TimeDelta::try_hours(count),
            'd' => TimeDelta::try_days(count),
            'w' => TimeDelta::try_weeks(count),
            _ => None,
        };
        now.checked_sub_signed(span?)
    };
    let day = || Some(text.parse::<NaiveDate>().ok()?.and_hms_opt(0, 0, 0)?.and_utc());
    let time = || Some(DateTime::parse_from_rfc3339(text).ok()?.to_utc());
    let moment = ago().or_else(day).or_else(time);
    moment.and_then(|moment| u64::try_from(moment.timestamp_millis()).ok()).ok_or_else(|| {
        format!("since:{text}: use a duration (30d, 12h, 90m, 45s, 2w), a day (2026-01-31) or a time (2026-01-31T12:00:00Z)")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_read_from_words() {
        assert_eq!(keep("latest"), Ok(Keep::Latest));
        assert_eq!(keep("nothing"), Ok(Keep::Nothing));
        assert_eq!(keep("last:10"), Ok(Keep::Last(10)));
        for bad in [
            "",
            "last",
            "last:",
            "last:0",
            "last:-1",
            "since",
            "since:",
            "since:soon",
            "since:5y",
            "all",
            "since:-3d",
        ] {
            assert!(keep(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn moments_are_durations_days_or_times() {
        let now = "2026-03-10T12:00:00Z".parse::<DateTime<Utc>>().unwrap();
        let at =
            |text: &str| u64::try_from(text.parse::<DateTime<Utc>>().unwrap().timestamp_millis()).unwrap();
        for (text, moment) in [
            ("45s", "2026-03-10T11:59:15Z"),
            ("90m", "2026-03-10T10:30:00Z"),
            ("12h", "2026-03-10T00:00:00Z"),
            ("30d", "2026-02-08T12:00:00Z"),
            ("2w", "2026-02-24T12:00:00Z"),
            ("2026-01-31", "2026-01-31T00:00:00Z"),
            ("2026-01-31T13:00:00+01:00", "2026-01-31T12:00:00Z"),
        ] {
            assert_eq!(since(text, now), Ok(at(moment)), "{text}");
        }
        assert!(since("99999999999999999999d", now).is_err());
        assert!(since("100000000w", now).is_err(), "out of the calendar's range");
    }
}
