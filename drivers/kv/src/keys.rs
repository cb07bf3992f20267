//! The keys of all rows.
//!
//! | key | row |
//! |---|---|
//! | 0, `format` | the version of the format |
//! | 0, `threads` | the number of the next thread; numbers are never reused |
//! | 1, id of a thread | its number and its mark |
//! | 2, number of a thread, 0, namespace, id | a checkpoint |
//! | 2, number of a thread, 1, namespace, id, task | a task that ran from the checkpoint |
//! | 2, number of a thread, 2 to 4, number | an element of a [`Space`] |
//! | 2, number of a thread, 5 to 7, first 8 bytes of a hash | the number of the element with this hash |
//!
//! So threads are in the order of their ids, and everything of a thread is one range. A number is its length in bytes and its
//! bytes, high ones first: short, and in the order of the numbers. A namespace is preceded by its length.

use std::ops::Range;

use threadkeep::id::{CheckpointId, Namespace, TaskId, ThreadId};
use threadkeep::value::ElementHash;

const STORE: u8 = 0;
const THREAD: u8 = 1;
const ROWS: u8 = 2;
const CHECKPOINT: u8 = 0;
const TASK: u8 = 1;
const ELEMENT: u8 = 2;
const INDEX: u8 = 5;

/// Elements of one kind are numbered together, so that lists have few runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Space {
    /// Elements of lists, and large values.
    Values = 0,
    /// What is needed to decode a checkpoint: names, metadata, chunks of manifests.
    Structure = 1,
    /// Entries of large maps in metadata.
    Entries = 2,
}

pub(crate) const SPACES: [Space; 3] = [Space::Values, Space::Structure, Space::Entries];

/// A key, or the beginning that keys have in common.
pub(crate) type Key = Vec<u8>;

/// The number that identifies a thread in its rows.
pub(crate) type ThreadNumber = u64;

pub(crate) fn format() -> Key {
    [&[STORE], &b"format"[..]].concat()
}

pub(crate) fn next_thread() -> Key {
    [&[STORE], &b"threads"[..]].concat()
}

pub(crate) fn thread(id: &ThreadId) -> Key {
    [&[THREAD], id.as_str().as_bytes()].concat()
}

/// The keys of the threads after this one, or of all.
pub(crate) fn threads(after: Option<&ThreadId>) -> Range<Key> {
    let start = after.map_or_else(
        || vec![THREAD],
        |after| {
            let mut key = thread(after);
            key.push(0);
            key
        },
    );
    start..vec![THREAD + 1]
}

/// The id in a key of [`threads`].
pub(crate) fn thread_id(key: &[u8]) -> Option<ThreadId> {
    let text = key.strip_prefix(&[THREAD])?;
    std::str::from_utf8(text).ok().map(ThreadId::from)
}

/// Everything of a thread.
pub(crate) fn all(thread: ThreadNumber) -> Key {
    let mut key = vec![ROWS];
    put_number(&mut key, thread);
    key
}

fn of(thread: ThreadNumber, kind: u8) -> Key {
    let mut key = all(thread);
    key.push(kind);
    key
}

/// All checkpoints of a thread.
pub(crate) fn checkpoints(thread: ThreadNumber) -> Key {
    of(thread, CHECKPOINT)
}

/// The checkpoints of a namespace.
pub(crate) fn chain(thread: ThreadNumber, namespace: &Namespace) -> Key {
    let mut key = checkpoints(thread);
    put_namespace(&mut key, namespace);
    key
}

pub(crate) fn checkpoint(thread: ThreadNumber, namespace: &Namespace, id: CheckpointId) -> Key {
    let mut key = chain(thread, namespace);
    key.extend_from_slice(id.as_bytes());
    key
}

/// The namespace and the id in a key of [`checkpoints`].
pub(crate) fn place(thread: ThreadNumber, key: &[u8]) -> Option<(Namespace, CheckpointId)> {
    let rest = key.strip_prefix(&checkpoints(thread)[..])?;
    let (len, rest) = take_number(rest)?;
    let (namespace, id) = rest.split_at_checked(usize::try_from(len).ok()?)?;
    let namespace = Namespace::from(std::str::from_utf8(namespace).ok()?);
    Some((namespace, CheckpointId::from_bytes(id.try_into().ok()?)))
}

/// All tasks of a thread.
pub(crate) fn all_tasks(thread: ThreadNumber) -> Key {
    of(thread, TASK)
}

/// The tasks that ran from a checkpoint.
pub(crate) fn tasks(thread: ThreadNumber, namespace: &Namespace, id: CheckpointId) -> Key {
    let mut key = all_tasks(thread);
    put_namespace(&mut key, namespace);
    key.extend_from_slice(id.as_bytes());
    key
}

pub(crate) fn task(thread: ThreadNumber, namespace: &Namespace, id: CheckpointId, task: TaskId) -> Key {
    let mut key = tasks(thread, namespace, id);
    key.extend_from_slice(task.as_bytes());
    key
}

/// The task in a key of [`tasks`].
pub(crate) fn task_id(key: &[u8]) -> Option<TaskId> {
    key.last_chunk().copied().map(TaskId::from_bytes)
}

/// The elements of a space.
pub(crate) fn elements(thread: ThreadNumber, space: Space) -> Key {
    of(thread, ELEMENT + space as u8)
}

pub(crate) fn element(thread: ThreadNumber, space: Space, number: u32) -> Key {
    let mut key = elements(thread, space);
    put_number(&mut key, u64::from(number));
    key
}

/// The number in a key of [`elements`].
pub(crate) fn element_number(thread: ThreadNumber, space: Space, key: &[u8]) -> Option<u32> {
    let (number, rest) = take_number(key.strip_prefix(&elements(thread, space)[..])?)?;
    if rest.is_empty() { u32::try_from(number).ok() } else { None }
}

/// Where the number of an element is found by its hash. Elements whose hashes begin alike share it.
pub(crate) fn index(thread: ThreadNumber, space: Space, hash: &ElementHash) -> Key {
    let mut key = all_indexed(thread, space);
    key.extend_from_slice(&hash[..8]);
    key
}

/// All of [`index`] of a space.
pub(crate) fn all_indexed(thread: ThreadNumber, space: Space) -> Key {
    of(thread, INDEX + space as u8)
}

/// The range of rows that are put in ascending order: one kind of a thread's rows.
pub(crate) fn range_of(key: &[u8]) -> &[u8] {
    let number = match key {
        [ROWS, len, ..] => usize::from(*len),
        _ => return &key[..key.len().min(1)],
    };
    &key[..key.len().min(number + 3)]
}

/// The keys that begin with `prefix`.
pub(crate) fn under(prefix: Key) -> Range<Key> {
    let mut end = prefix.clone();
    // Ends: a prefix begins with a small byte.
    while end.last() == Some(&u8::MAX) {
        end.pop();
    }
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    prefix..end
}

fn put_namespace(key: &mut Key, namespace: &Namespace) {
    let text = namespace.as_str().as_bytes();
    put_number(key, text.len() as u64);
    key.extend_from_slice(text);
}

fn put_number(key: &mut Key, number: u64) {
    let bytes = number.to_be_bytes();
    let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
    key.push(u8::try_from(bytes.len() - zeros).unwrap_or_default());
    key.extend_from_slice(&bytes[zeros..]);
}

fn take_number(key: &[u8]) -> Option<(u64, &[u8])> {
    let (len, rest) = key.split_first()?;
    let (bytes, rest) = rest.split_at_checked(usize::from(*len))?;
    if bytes.len() > 8 || bytes.first() == Some(&0) {
        return None;
    }
    Some((bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)), rest))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn numbers_sort_as_their_bytes(a in any::<u64>(), b in any::<u64>(), shift in 0..64_u32) {
            let (a, b) = (a >> shift, b >> shift);
            let bytes = |number| { let mut key = Vec::new(); put_number(&mut key, number); key };
            prop_assert_eq!(a.cmp(&b), bytes(a).cmp(&bytes(b)));
            let key = bytes(a);
            prop_assert_eq!(take_number(&key), Some((a, &[][..])));
        }

        #[test]
        fn keys_say_what_they_are_of(
            thread in any::<u64>(), other in any::<u64>(), namespace in ".{0,300}", longer in ".{1,5}", id in any::<[u8; 16]>(),
            number in 0..u32::MAX,
        ) {
            let (namespace, id) = (Namespace::from(namespace), CheckpointId::from_bytes(id));
            let key = checkpoint(thread, &namespace, id);
            let longer = Namespace::from(format!("{namespace}{longer}"));
            prop_assert!(under(chain(thread, &namespace)).contains(&key));
            prop_assert!(!under(chain(thread, &longer)).contains(&key));
            prop_assert!(!under(chain(thread, &namespace)).contains(&checkpoint(thread, &longer, id)));
            prop_assert!(under(all(thread)).contains(&key) && !under(all_tasks(thread)).contains(&key));
            prop_assert_eq!(under(all(other)).contains(&key), other == thread);
            prop_assert_eq!(place(thread, &key), Some((namespace, id)));
            for space in SPACES {
                let key = element(thread, space, number);
                prop_assert!(under(elements(thread, space)).contains(&key));
                prop_assert_eq!(element_number(thread, space, &key), Some(number));
            }
        }

        #[test]
        fn what_is_under_a_prefix_begins_with_it(prefix in prop::collection::vec(any::<u8>(), 0..4), key in prop::collection::vec(any::<u8>(), 0..6)) {
            let prefix = [&[ROWS], &prefix[..]].concat();
            let key = [&[ROWS], &key[..]].concat();
            prop_assert_eq!(under(prefix.clone()).contains(&key), key.starts_with(&prefix));
        }
    }
}
