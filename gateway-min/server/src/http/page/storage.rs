//! What a thread takes, what a policy would remove from it, and removing it.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use axum::extract::{Form, Query, State};
use axum::response::{Html, Redirect};
use serde_json::Value;
use threadkeep::Error;
use threadkeep::deletion::{
    Boundary, DeletionPlan, Keep, Prune, RUN_ID_KEY, RetentionPolicy, Stats, carry_out, plan_prune,
    plan_retention,
};
use threadkeep::id::ThreadId;
use threadkeep::saver::ThreadImage;
use threadkeep::verify::verify;
use threadkeep_page::{Plan, Share, Storage, things};

use super::super::auth::Caller;
use super::super::error::{ApiError, OrApiError as _};
use super::super::exclusive::exclusively;
use super::super::extract::{ApiPath, ThreadPath};
use super::super::prune::check_replayed;
use super::checkpoints::option;
use super::session::Viewer;
use super::threads::head;
use super::{Page, Parameters};
use crate::app::App;
use threadkeep_records::WriterKind;

const FAILED: &str = "Failed to read storage";
const REMOVE_FAILED: &str = "Failed to remove checkpoints";
const BUSY: &str = "Thread has work in flight. Remove checkpoints after the work finishes.";
const CHANGED: &str = "The thread has changed since you saw what would go. Nothing was removed; look again.";
const UNKNOWN: &str = "keep: use notes, branches, latest or last:N";
/// The maximum number of turns listed.
const TURNS: usize = 30;

/// What is to be removed.
#[derive(Debug, Clone, PartialEq)]
enum Policy {
    Retention(RetentionPolicy),
    Prune(Prune),
}

impl Policy {
    /// The policy with this name.
    ///
    /// # Errors
    /// 400 if there is none.
    fn named(name: &str) -> Result<Self, ApiError> {
        let prune = |keep| Self::Prune(Prune { boundary: Boundary::FreshSnapshot, ..Prune::keeping(keep) });
        let last = || name.strip_prefix("last:")?.parse().ok().filter(|number| *number > 0);
        Ok(match name {
            "notes" => Self::Retention(RetentionPolicy::default()),
            "branches" => Self::Retention(RetentionPolicy {
                prune_leaf_sibling_branches: true,
                ..RetentionPolicy::default()
            }),
            "latest" => prune(Keep::Latest),
            _ => prune(Keep::Last(last().ok_or_else(|| ApiError::bad_request(UNKNOWN))?)),
        })
    }

    fn plan(&self, app: &App, image: &ThreadImage) -> threadkeep::Result<DeletionPlan> {
        let table = app.threads.accessor().table();
        match self {
            Self::Retention(policy) => plan_retention(image, policy, table),
            Self::Prune(prune) => plan_prune(image, prune, table),
        }
    }

    /// Refuses a plan that would need a snapshot which cannot be computed here.
    ///
    /// # Errors
    /// 409, with the remedy.
    fn check(&self, plan: &DeletionPlan, name: &str, thread: &ThreadId) -> Result<(), ApiError> {
        match self {
            Self::Retention(_) => Ok(()),
            Self::Prune(_) => check_replayed(plan, thread, name),
        }
    }

    /// The command that does the same.
    fn command(&self, name: &str, thread: &ThreadId) -> String {
        let thread = option(thread);
        match self {
            Self::Retention(policy) => {
                let branches =
                    if policy.prune_leaf_sibling_branches { " --leaf-sibling-branches" } else { "" };
                format!("threadkeep retention apply {thread}{branches}")
            }
            Self::Prune(_) => {
                format!("threadkeep prune apply {thread} --keep {name} --boundary fresh-snapshot")
            }
        }
    }
}

/// `GET /threads/{thread_id}/storage`
pub(super) async fn show(
    State(app): State<Arc<App>>,
    Viewer(session): Viewer,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
    Query(parameters): Query<Parameters>,
) -> Page {
    let thread = head(&app, &thread_id).await?;
    let accessor = app.threads.accessor();
    accessor.check(&thread_id, None).await.or_engine(&thread_id, FAILED)?;
    let stored = app.stored_bytes(&thread_id).await;
    let violations = if parameters.contains_key("verify") {
        let saver = &**accessor.saver();
        let found = verify(saver, &thread_id, accessor.table()).await.or_engine(&thread_id, FAILED)?;
        Some(found.iter().map(ToString::to_string).collect())
    } else {
        None
    };
    let asked = parameters.get("keep").filter(|name| !name.is_empty()).cloned();
    let policy = asked.as_deref().map(Policy::named).transpose()?;
    let image = accessor.saver().read_thread(&thread_id).await.or_engine(&thread_id, FAILED)?;
    let work = Arc::clone(&app);
    // Counting and planning look at every value of the thread.
    let counted = tokio::task::spawn_blocking(move || {
        let stats = Stats::of(&image);
        let (channels, turns) = (by_channel(&image, &stats), by_turn(&image));
        let plan =
            asked.zip(policy).map(|(name, policy)| planned(&work, image, &name, &policy)).transpose()?;
        Ok::<_, ApiError>((stats, channels, turns, plan))
    });
    let (stats, channels, mut turns, plan) = counted.await.or_internal(FAILED)??;
    let more_turns = turns.len().saturating_sub(TURNS) as u64;
    turns.truncate(TURNS);
    let view = Storage {
        thread,
        stored,
        logical: stats.logical(),
        rows: (stats.checkpoint_rows, stats.blob_rows, stats.write_rows),
        channels,
        turns,
        more_turns,
        plan,
        violations,
        removed: parameters.get("removed").and_then(|removed| removed.parse().ok()),
    };
    Ok(Html(view.page(&session)))
}

/// What a policy does to a thread.
fn planned(app: &App, image: ThreadImage, name: &str, policy: &Policy) -> Result<Plan, ApiError> {
    let plan = policy.plan(app, &image).or_engine(&image.thread, FAILED)?;
    policy.check(&plan, name, &image.thread)?;
    let mut reasons: BTreeMap<(bool, String), u64> = BTreeMap::new();
    for (_, reason) in &plan.verdicts {
        // What goes comes first.
        *reasons.entry((!reason.goes(), reason.to_string())).or_default() += 1;
    }
    Ok(Plan {
        asked: name.to_owned(),
        reasons: reasons.into_iter().map(|((stays, reason), number)| (!stays, reason, number)).collect(),
        rewritten: plan.rewrite.put.len() as u64,
        command: policy.command(name, &image.thread),
        after: Stats::of(&image.after(&plan.rewrite)).logical(),
        id: identity(&plan).to_hex().to_string(),
    })
}

/// Identifies a plan by every checkpoint of the thread, and whether it goes: another one removes something else, even if its
/// numbers are the same.
fn identity(plan: &DeletionPlan) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for ((namespace, id), reason) in &plan.verdicts {
        hasher.update(&(namespace.as_str().len() as u64).to_le_bytes());
        hasher.update(namespace.as_str().as_bytes());
        hasher.update(id.as_bytes());
        hasher.update(&[u8::from(reason.goes())]);
    }
    hasher.finalize()
}

/// Bytes of values and writes by channel, each value once, and those of the metadata.
fn by_channel(image: &ThreadImage, stats: &Stats) -> Vec<Share> {
    let mut seen = HashSet::new();
    let mut channels: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for tuple in image.checkpoints.values() {
        for (name, entry) in &tuple.checkpoint.channels {
            if let Some(value) = entry.stored.value()
                && seen.insert((&tuple.namespace, name, entry.version))
            {
                channels.entry(name.as_str()).or_default().0 += value.encoded_len() as u64;
            }
        }
        for write in tuple.writes.iter().flat_map(|row| &row.writes) {
            channels.entry(write.channel.as_str()).or_default().1 += write.value.encoded_len() as u64;
        }
    }
    let share = |(name, (values, writes)): (&str, (u64, u64))| Share {
        name: name.to_owned(),
        bytes: values + writes,
        detail: if writes == 0 {
            String::new()
        } else {
            format!("{} in writes", threadkeep_page::bytes(writes))
        },
    };
    let metadata = Share {
        name: "metadata of checkpoints".to_owned(),
        bytes: stats.checkpoint_bytes,
        detail: String::new(),
    };
    let mut shares: Vec<Share> = channels.into_iter().map(share).chain([metadata]).collect();
    shares.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
    shares
}

/// Bytes of values and writes by run, the newest first: what each added.
fn by_turn(image: &ThreadImage) -> Vec<Share> {
    struct Turn {
        first: String,
        bytes: u64,
        checkpoints: u64,
    }
    let mut tuples: Vec<_> = image.checkpoints.values().collect();
    tuples.sort_by_key(|tuple| tuple.checkpoint.id);
    let (mut seen, mut order) = (HashSet::new(), Vec::new());
    let mut turns: BTreeMap<&str, Turn> = BTreeMap::new();
    for tuple in tuples {
        let run = tuple.metadata.extra.get(RUN_ID_KEY).and_then(Value::as_str).unwrap_or_default();
        let turn = turns.entry(run).or_insert_with(|| {
            order.push(run);
            Turn { first: tuple.checkpoint.id.created_at(), bytes: 0, checkpoints: 0 }
        });
        turn.checkpoints += 1;
        for (name, entry) in &tuple.checkpoint.channels {
            if let Some(value) = entry.stored.value()
                && seen.insert((&tuple.namespace, name, entry.version))
            {
                turn.bytes += value.encoded_len() as u64;
            }
        }
        turn.bytes += tuple
            .writes
            .iter()
            .flat_map(|row| &row.writes)
            .map(|write| write.value.encoded_len() as u64)
            .sum::<u64>();
    }
    let named = |run: &&str| {
        let turn = &turns[*run];
        let time = turn.first.get(..19).unwrap_or(&turn.first).replace('T', " ");
        let name = if run.is_empty() { "outside of runs".to_owned() } else { time };
        Share { name, bytes: turn.bytes, detail: things(turn.checkpoints, "checkpoint") }
    };
    order.iter().rev().map(named).collect()
}

/// `POST /threads/{thread_id}/storage`: removes what the person has seen, or nothing.
pub(super) async fn remove(
    State(app): State<Arc<App>>,
    Caller(caller): Caller,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
    Form(fields): Form<Parameters>,
) -> Result<Redirect, ApiError> {
    let policy = Policy::named(fields.get("keep").map_or("", String::as_str))?;
    let seen = fields
        .get("plan")
        .and_then(|plan| blake3::Hash::from_hex(plan).ok())
        .ok_or_else(|| ApiError::bad_request("plan: that of the preview which you have seen"))?;
    let thread = head(&app, &thread_id).await?;
    app.threads.accessor().check(&thread_id, None).await.or_engine(&thread_id, REMOVE_FAILED)?;
    let (work, target) = (Arc::clone(&app), thread_id.clone());
    let work = async move {
        let saver = &**work.threads.accessor().saver();
        let plan = |image: &ThreadImage| {
            let plan = policy.plan(&work, image)?;
            if identity(&plan) == seen { Ok(plan) } else { Err(Error::Stale { thread: target.clone() }) }
        };
        match carry_out(saver, &target, plan).await {
            Ok((_, plan)) => Ok(plan.removed().count()),
            Err(Error::Stale { .. }) => Err(ApiError::conflict(CHANGED)),
            Err(error) => Err(ApiError::from_engine(&target, REMOVE_FAILED, &error)),
        }
    };
    let kind = WriterKind::CheckpointWrite;
    let removed =
        exclusively((&app, &caller), &thread_id, kind, BUSY.to_owned(), REMOVE_FAILED, work).await?;
    Ok(Redirect::to(&format!("/threads/{}/storage?removed={removed}", thread.id)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_have_names_and_commands() {
        let thread = ThreadId::from("t");
        for (name, command) in [
            ("notes", "threadkeep retention apply --thread t"),
            ("branches", "threadkeep retention apply --thread t --leaf-sibling-branches"),
            ("latest", "threadkeep prune apply --thread t --keep latest --boundary fresh-snapshot"),
            ("last:20", "threadkeep prune apply --thread t --keep last:20 --boundary fresh-snapshot"),
        ] {
            assert_eq!(Policy::named(name).unwrap().command(name, &thread), command);
        }
        for name in ["", "nothing", "last:", "last:0", "last:-1", "all"] {
            assert!(Policy::named(name).is_err(), "{name}");
        }
    }
}
