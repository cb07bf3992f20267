//! Finds the checkpoint before a turn, from which the turn can be branched off or repeated.
//!
//! It follows the parent links, because the previously written checkpoint need not be an ancestor. A checkpoint that
//! restores the state of an older one continues that one, whatever its parent: in delta mode it is written onto what it
//! replaces. A prune that removes that one leaves the name of the nearest checkpoint that stays of those which it
//! continued; if none does, nobody knows what came before. Only a lineage that ends too early, as in threads of other
//! writers, is searched by time instead; a damaged lineage is an error. A prune may have ended it, too, and left the
//! end of another branch, from which the conversation does not go on.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use serde_json::Value as Json;
use threadkeep::Error;
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::id::{ChannelName, CheckpointId, ThreadId};
use threadkeep::saver::Load;
use threadkeep::state::{HistoryQuery, StateAccessor, StateSnapshot};

/// The maximum number of parent links to follow.
const MAX_DEPTH: usize = 400;
/// The maximum number of checkpoints in a search by time: two for each that a user sees.
pub(crate) const SCAN_ROWS: usize = 400;
/// Checkpoints per page.
pub(crate) const PAGE: usize = 50;

/// Why the checkpoint before a message is not known.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LineageError {
    /// The starting checkpoint does not contain the message.
    #[error("Target message is not present in the checkpoint head")]
    NotInHead,
    /// A parent is missing, cannot be read, or is not the checkpoint that the link names.
    #[error("Checkpoint parent link is not addressable")]
    NotAddressable,
    /// A checkpoint is its own ancestor.
    #[error("Checkpoint lineage contains a cycle")]
    Cycle,
    /// The checkpoint is too far away.
    #[error("Checkpoint lineage exceeded the scan limit ({MAX_DEPTH})")]
    TooDeep,
    /// The lineage's root belongs to the message's own turn.
    #[error("Checkpoint lineage ended before the target message")]
    ParentMissing,
    /// The store failed.
    #[error(transparent)]
    Read(Error),
}

impl LineageError {
    /// Whether the lineage is damaged, so that searching by time would be a guess.
    pub(crate) fn is_integrity(&self) -> bool {
        matches!(self, Self::NotInHead | Self::NotAddressable | Self::Cycle | Self::TooDeep)
    }

    /// Classifies a failed read of an ancestor.
    fn of_read(error: Error) -> Self {
        match error {
            Error::NotFound { .. } | Error::BrokenLineage { .. } | Error::Corrupt { .. } => {
                Self::NotAddressable
            }
            other => Self::Read(other),
        }
    }
}

/// What precedes a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Base {
    /// The newest settled checkpoint without it.
    At(CheckpointId),
    /// Nothing: the thread begins with the message's own turn.
    Nothing,
    /// None of the searched checkpoints contains the message.
    Unknown,
    /// A checkpoint that another one restored, and that was pruned since with all that it continued.
    Pruned,
}

/// The checkpoint before the message with this id, which must be in `head` with its messages loaded.
///
/// # Errors
/// [`LineageError`], but never [`LineageError::ParentMissing`], which starts the search by time.
pub(crate) async fn base_before(
    accessor: &StateAccessor,
    thread: &ThreadId,
    head: &StateSnapshot,
    message: &str,
) -> Result<Base, LineageError> {
    if !has_message(head, message).map_err(LineageError::of_read)? {
        return Err(LineageError::NotInHead);
    }
    let mut stored =
        Stored { accessor, thread, message, links: BTreeMap::new(), oldest: head.key.id, exhausted: false };
    match walk(head.key.id, continued(head), &mut stored).await {
        Err(LineageError::ParentMissing) => {
            scan(accessor, thread, head, message).await.map_err(LineageError::Read)
        }
        walked => walked,
    }
}

/// Whether the state contains the message with this id.
pub(crate) fn has_message(state: &StateSnapshot, message: &str) -> threadkeep::Result<bool> {
    Ok(messages(state)?.iter().any(|one| one["id"] == message))
}

fn messages(state: &StateSnapshot) -> threadkeep::Result<Vec<Json>> {
    Ok(match state.json(MESSAGES_CHANNEL)? {
        Some(Json::Array(messages)) => messages,
        _ => Vec::new(),
    })
}

/// The checkpoint whose state another one continues.
#[derive(Debug, Clone, Copy)]
enum Link {
    Parent(CheckpointId),
    /// Only named: what removes it and everything that it continued leaves the name as it is.
    Restored(CheckpointId),
}

/// What a checkpoint continues; `None` for a root.
fn continued(state: &StateSnapshot) -> Option<Link> {
    let parent = state.parent?;
    Some(state.metadata.restored().map_or(Link::Parent(parent), Link::Restored))
}

/// Only the messages.
pub(crate) fn messages_only() -> Load {
    Load::Only([ChannelName::from(MESSAGES_CHANNEL)].into())
}

/// A checkpoint on the path.
#[derive(Debug, Clone, Copy)]
struct Ancestor {
    id: CheckpointId,
    continues: Option<Link>,
    /// Whether it only notes how long a run took, on its parent's state.
    is_note: bool,
    /// Whether no node is left to run: in the middle of a run, the message may exist under another id.
    settled: bool,
}

/// The reads of a walk.
trait Ancestry {
    /// The checkpoint with this id; `None` if it does not exist.
    async fn ancestor(&mut self, id: CheckpointId) -> Result<Option<Ancestor>, LineageError>;
    /// Whether that checkpoint contains the message.
    async fn has_message(&mut self, id: CheckpointId) -> Result<bool, LineageError>;
}

/// The nearest settled ancestor without the message, unless a restored one on the way was pruned.
async fn walk(
    head: CheckpointId,
    continues: Option<Link>,
    ancestry: &mut impl Ancestry,
) -> Result<Base, LineageError> {
    let mut seen = BTreeSet::from([head]);
    let mut link = continues;
    for _ in 0..MAX_DEPTH {
        let (id, is_named) = match link.ok_or(LineageError::ParentMissing)? {
            Link::Parent(id) => (id, false),
            Link::Restored(id) => (id, true),
        };
        if !seen.insert(id) {
            return Err(LineageError::Cycle);
        }
        let ancestor = match ancestry.ancestor(id).await? {
            Some(ancestor) if ancestor.id == id => ancestor,
            None if is_named => return Ok(Base::Pruned),
            _ => return Err(LineageError::NotAddressable),
        };
        if !ancestor.is_note && ancestor.settled && !ancestry.has_message(id).await? {
            return Ok(Base::At(id));
        }
        link = ancestor.continues;
    }
    Err(LineageError::TooDeep)
}

/// The checkpoints of a thread, read page by page, and the messages of relevant ones.
struct Stored<'a> {
    accessor: &'a StateAccessor,
    thread: &'a ThreadId,
    message: &'a str,
    /// Every checkpoint older than the head and not older than `oldest`.
    links: BTreeMap<CheckpointId, Ancestor>,
    oldest: CheckpointId,
    exhausted: bool,
}

impl Ancestry for Stored<'_> {
    async fn ancestor(&mut self, id: CheckpointId) -> Result<Option<Ancestor>, LineageError> {
        while !self.exhausted && id < self.oldest {
            let query = HistoryQuery {
                before: Some(self.oldest),
                limit: Some(PAGE),
                load: Load::None,
                ..HistoryQuery::default()
            };
            let page = self.accessor.history(self.thread, query).await.map_err(LineageError::of_read)?;
            self.exhausted = page.len() < PAGE;
            self.oldest = page.last().map_or(self.oldest, |state| state.key.id);
            self.links.extend(page.iter().map(|state| {
                let ancestor = Ancestor {
                    id: state.key.id,
                    continues: continued(state),
                    is_note: state.repeats_its_parent(),
                    settled: state.next.is_empty(),
                };
                (state.key.id, ancestor)
            }));
        }
        Ok(self.links.get(&id).copied())
    }

    async fn has_message(&mut self, id: CheckpointId) -> Result<bool, LineageError> {
        let state = self.accessor.get_loading(self.thread, Some(id), messages_only()).await;
        let state = state.map_err(LineageError::of_read)?.filter(|state| state.key.id == id);
        has_message(&state.ok_or(LineageError::NotAddressable)?, self.message).map_err(LineageError::of_read)
    }
}

/// The search by time: oldest first, up to the first checkpoint with the message. Only what the conversation of `head`
/// goes on from can come before it there: what ends with another message is another branch.
async fn scan(
    accessor: &StateAccessor,
    thread: &ThreadId,
    head: &StateSnapshot,
    message: &str,
) -> threadkeep::Result<Base> {
    let conversation = messages(head)?;
    let before = conversation.iter().take_while(|one| one["id"] != message);
    let before: HashSet<&str> = before.filter_map(|one| one["id"].as_str()).collect();
    let query = HistoryQuery { limit: Some(SCAN_ROWS), load: messages_only(), ..HistoryQuery::default() };
    let mut base = Base::Nothing;
    for state in accessor.history(thread, query).await?.iter().rev() {
        if state.repeats_its_parent() {
            continue;
        }
        let found = messages(state)?;
        if found.iter().any(|one| one["id"] == message) {
            return Ok(base);
        }
        let last = found.last().and_then(|last| last["id"].as_str());
        if state.next.is_empty() && last.is_none_or(|last| before.contains(last)) {
            base = Base::At(state.key.id);
        }
    }
    Ok(Base::Unknown)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Map, json};
    use threadkeep::channel::Schema;
    use threadkeep::deletion::{Boundary, Keep, Prune, prune};
    use threadkeep::id::IdSource;
    use threadkeep::metadata::RESTORED_KEY;
    use threadkeep::mode::ChannelMode;
    use threadkeep::state::Update;
    use threadkeep_memory::MemorySaver;

    use super::*;
    use threadkeep_agent::duration::{self, RunNotes};

    /// A lineage that no saver would accept.
    struct Made {
        ancestors: BTreeMap<CheckpointId, Ancestor>,
        without: BTreeSet<CheckpointId>,
    }

    impl Ancestry for Made {
        async fn ancestor(&mut self, id: CheckpointId) -> Result<Option<Ancestor>, LineageError> {
            Ok(self.ancestors.get(&id).copied())
        }

        async fn has_message(&mut self, id: CheckpointId) -> Result<bool, LineageError> {
            Ok(!self.without.contains(&id))
        }
    }

    fn id(number: u16) -> CheckpointId {
        CheckpointId::from_bytes(u128::from(number).to_be_bytes())
    }

    /// Checkpoints `length`, `length - 1` ... 0; all but 0, the root, contain the message.
    fn chain(length: u16) -> Made {
        let ancestor = |number: u16| Ancestor {
            id: id(number),
            continues: number.checked_sub(1).map(id).map(Link::Parent),
            is_note: false,
            settled: true,
        };
        let ancestors = (0..=length).map(|number| (id(number), ancestor(number))).collect();
        Made { ancestors, without: [id(0)].into() }
    }

    async fn walked(made: &mut Made, head: u16) -> Result<Base, String> {
        let continues = made.ancestors[&id(head)].continues;
        walk(id(head), continues, made).await.map_err(|error| error.to_string())
    }

    fn change(made: &mut Made, number: u16, change: impl FnOnce(&mut Ancestor)) {
        change(made.ancestors.get_mut(&id(number)).unwrap());
    }

    #[tokio::test]
    async fn a_walk_of_400_links_is_made_and_one_of_401_refused() {
        assert_eq!(walked(&mut chain(400), 400).await, Ok(Base::At(id(0))));
        let refused = Err("Checkpoint lineage exceeded the scan limit (400)".to_owned());
        assert_eq!(walked(&mut chain(401), 401).await, refused);
    }

    #[tokio::test]
    async fn duration_only_and_unsettled_checkpoints_are_stepped_over() {
        let mut made = chain(5);
        made.without.extend([id(4), id(3), id(2)]);
        change(&mut made, 4, |ancestor| ancestor.is_note = true);
        change(&mut made, 3, |ancestor| ancestor.settled = false);
        assert_eq!(walked(&mut made, 5).await, Ok(Base::At(id(2))));
    }

    #[tokio::test]
    async fn a_damaged_lineage_is_an_error_of_its_own_kind() {
        let dangling = "Checkpoint parent link is not addressable";
        let mut made = chain(3);
        made.ancestors.remove(&id(1));
        assert_eq!(walked(&mut made, 3).await, Err(dangling.to_owned()));
        let mut made = chain(3);
        change(&mut made, 1, |ancestor| ancestor.id = id(2));
        assert_eq!(walked(&mut made, 3).await, Err(dangling.to_owned()));
        for back_to in [3, 2] {
            let mut made = chain(3);
            change(&mut made, 1, |ancestor| ancestor.continues = Some(Link::Parent(id(back_to))));
            assert_eq!(walked(&mut made, 3).await, Err("Checkpoint lineage contains a cycle".to_owned()));
        }
        let mut made = chain(3);
        made.without.clear();
        let ended = "Checkpoint lineage ended before the target message";
        assert_eq!(walked(&mut made, 3).await, Err(ended.to_owned()));
        assert!(!LineageError::ParentMissing.is_integrity());
        assert!(LineageError::Cycle.is_integrity() && LineageError::NotAddressable.is_integrity());
        assert!(LineageError::TooDeep.is_integrity() && LineageError::NotInHead.is_integrity());
    }

    fn accessor(mode: ChannelMode) -> StateAccessor {
        let table = Schema::thread_state().compile(mode, 3).unwrap();
        StateAccessor::new(Arc::new(MemorySaver::default()), Arc::new(table), Arc::new(IdSource::default()))
    }

    async fn say(accessor: &StateAccessor, at: Option<CheckpointId>, text: &str) -> StateSnapshot {
        let message = json!([{"type": "human", "content": text, "id": text}]);
        let writes = vec![accessor.write("messages", message, false).unwrap()];
        let update = Update { at, node: "n".into(), writes, extra: Map::new() };
        accessor.update(&"t".into(), update).await.unwrap()
    }

    #[tokio::test]
    async fn the_base_is_an_ancestor_and_not_what_was_written_just_before() {
        for mode in [ChannelMode::Full, ChannelMode::Delta] {
            let (accessor, thread) = (accessor(mode), ThreadId::from("t"));
            let root = accessor.create(&thread, Map::new()).await.unwrap();
            let one = say(&accessor, None, "one").await;
            say(&accessor, None, "two").await;
            // A newer branch of the root, then more of the first one.
            say(&accessor, Some(root.key.id), "other").await;
            say(&accessor, Some(one.key.id), "three").await;
            // More than a page of ancestors.
            for number in 0..PAGE {
                say(&accessor, None, &format!("more {number}")).await;
            }
            let notes = RunNotes { durations: [("r".to_owned(), 1)].into(), ..RunNotes::default() };
            duration::note(&accessor, &thread, None, &notes).await.unwrap().unwrap();
            let head = say(&accessor, None, "last").await;
            let base = |message: &'static str| base_before(&accessor, &thread, &head, message);
            assert_eq!(base("three").await.unwrap(), Base::At(one.key.id), "{mode}");
            assert_eq!(base("one").await.unwrap(), Base::At(root.key.id));
            let Base::At(before_last) = base("last").await.unwrap() else { panic!() };
            let before_last = accessor.get(&thread, Some(before_last)).await.unwrap().unwrap();
            assert!(!before_last.metadata.is_duration_only(), "the note is skipped");
            assert!(matches!(base("two").await, Err(LineageError::NotInHead)), "it is not in this lineage");
        }
    }

    #[tokio::test]
    async fn a_restored_checkpoint_that_was_pruned_is_no_damage() {
        let (accessor, thread) = (accessor(ChannelMode::Delta), ThreadId::from("t"));
        accessor.create(&thread, Map::new()).await.unwrap();
        let one = say(&accessor, None, "one").await;
        say(&accessor, None, "two").await;
        let extra = Map::from_iter([(RESTORED_KEY.to_owned(), json!(one.key.id.to_string()))]);
        let mut known = accessor.known_head(&thread).await.unwrap();
        let restored = accessor.linearize(&mut known, one.key.id, extra).await.unwrap().unwrap();
        let head = say(&accessor, None, "three").await;
        let base = |message: &'static str| base_before(&accessor, &thread, &head, message);
        assert!(matches!(base("one").await.unwrap(), Base::At(root) if root < one.key.id));

        // The restored state stays on the line that it was written onto; what it restores is older, and goes.
        let newest = Prune { boundary: Boundary::FreshSnapshot, ..Prune::keeping(Keep::Last(3)) };
        prune(&**accessor.saver(), &thread, &newest, accessor.table()).await.unwrap();
        let read = async |id| accessor.get(&thread, Some(id)).await.unwrap();
        assert!(read(one.key.id).await.is_none());
        assert!(read(restored.key.id).await.unwrap().parent.is_some());
        assert_eq!(base("one").await.unwrap(), Base::Pruned);
        assert_eq!(base("three").await.unwrap(), Base::At(restored.key.id), "this one is there");
    }

    #[tokio::test]
    async fn what_a_prune_left_before_a_restored_checkpoint_is_found() {
        let (accessor, thread) = (accessor(ChannelMode::Delta), ThreadId::from("t"));
        accessor.create(&thread, Map::new()).await.unwrap();
        let one = say(&accessor, None, "one").await;
        let two = say(&accessor, None, "two").await;
        say(&accessor, Some(one.key.id), "other").await;
        let extra = Map::from_iter([(RESTORED_KEY.to_owned(), json!(two.key.id.to_string()))]);
        let mut known = accessor.known_head(&thread).await.unwrap();
        let restored = accessor.linearize(&mut known, two.key.id, extra).await.unwrap().unwrap();
        let head = say(&accessor, None, "three").await;
        let base = |message: &'static str| base_before(&accessor, &thread, &head, message);
        assert_eq!(base("two").await.unwrap(), Base::At(one.key.id));

        // What it was written onto stays, and so does what the restored checkpoint, which goes, continued.
        let protect = BTreeSet::from([one.key.id]);
        let newest = Prune { boundary: Boundary::FreshSnapshot, protect, ..Prune::keeping(Keep::Last(3)) };
        prune(&**accessor.saver(), &thread, &newest, accessor.table()).await.unwrap();
        let read = async |id| accessor.get(&thread, Some(id)).await.unwrap();
        assert!(read(two.key.id).await.is_none());
        assert!(read(restored.key.id).await.unwrap().parent.is_some());
        assert_eq!(base("two").await.unwrap(), Base::At(one.key.id));
    }

    #[tokio::test]
    async fn a_note_that_is_all_that_a_prune_left_is_the_base_of_the_next_turn() {
        for mode in [ChannelMode::Full, ChannelMode::Delta] {
            let (accessor, thread) = (accessor(mode), ThreadId::from("t"));
            accessor.create(&thread, Map::new()).await.unwrap();
            say(&accessor, None, "one").await;
            let notes = RunNotes { durations: [("r".to_owned(), 1)].into(), ..RunNotes::default() };
            let note = duration::note(&accessor, &thread, None, &notes).await.unwrap().unwrap().key.id;
            let latest = Prune { boundary: Boundary::FreshSnapshot, ..Prune::keeping(Keep::Latest) };
            prune(&**accessor.saver(), &thread, &latest, accessor.table()).await.unwrap();
            let head = say(&accessor, None, "two").await;
            assert_eq!(head.parent, Some(note));
            let base = |message: &'static str| base_before(&accessor, &thread, &head, message);
            assert_eq!(base("two").await.unwrap(), Base::At(note), "{mode}");
            assert_eq!(base("one").await.unwrap(), Base::Nothing);
        }
    }

    #[tokio::test]
    async fn a_lineage_that_begins_with_the_message_is_searched_by_time() {
        for mode in [ChannelMode::Full, ChannelMode::Delta] {
            let (accessor, thread) = (accessor(mode), ThreadId::from("t"));
            say(&accessor, None, "one").await;
            let head = say(&accessor, None, "two").await;
            assert_eq!(base_before(&accessor, &thread, &head, "one").await.unwrap(), Base::Nothing);
            assert_eq!(scan(&accessor, &thread, &head, "never").await.unwrap(), Base::Unknown);
        }
    }

    #[tokio::test]
    async fn the_end_of_another_branch_that_a_prune_left_is_no_base() {
        for mode in [ChannelMode::Full, ChannelMode::Delta] {
            let (accessor, thread) = (accessor(mode), ThreadId::from("t"));
            accessor.create(&thread, Map::new()).await.unwrap();
            let one = say(&accessor, None, "one").await;
            let other = say(&accessor, None, "two").await;
            let head = say(&accessor, Some(one.key.id), "three").await;
            let base = |message: &'static str| base_before(&accessor, &thread, &head, message);
            assert_eq!(base("three").await.unwrap(), Base::At(one.key.id), "{mode}");

            let newest = Prune { boundary: Boundary::FreshSnapshot, ..Prune::keeping(Keep::Last(2)) };
            prune(&**accessor.saver(), &thread, &newest, accessor.table()).await.unwrap();
            let head = accessor.get(&thread, Some(head.key.id)).await.unwrap().unwrap();
            assert_eq!(head.parent, None, "it has become a root");
            assert!(accessor.check(&thread, Some(other.key.id)).await.unwrap(), "the other branch is there");
            let base = base_before(&accessor, &thread, &head, "three").await.unwrap();
            assert_eq!(base, Base::Nothing, "{mode}");
        }
    }

    #[tokio::test]
    async fn a_search_by_time_finds_what_the_conversation_goes_on_from() {
        for mode in [ChannelMode::Full, ChannelMode::Delta] {
            let (accessor, thread) = (accessor(mode), ThreadId::from("t"));
            accessor.create(&thread, Map::new()).await.unwrap();
            let one = say(&accessor, None, "one").await;
            say(&accessor, None, "two").await;
            let head = say(&accessor, Some(one.key.id), "three").await;
            let base = async |message: &'static str| scan(&accessor, &thread, &head, message).await.unwrap();
            assert_eq!(base("three").await, Base::At(one.key.id), "{mode}: not the newer one with two");
            assert!(matches!(base("one").await, Base::At(root) if root < one.key.id));
        }
    }
}
