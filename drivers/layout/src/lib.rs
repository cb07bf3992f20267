#![doc = include_str!("../README.md")]

mod channels;
mod codec;
mod entries;
mod form;
mod list;
mod manifest;
mod memory;
mod names;
mod pack;
mod reader;
mod related;
mod row;
mod shape;
mod tasks;

pub use channels::{
    Kept, Places, Seed, StoredChannel, put_all_counters, put_channels, put_kept, take_all_counters,
    take_channels, take_entry_bits, take_kept,
};
pub use codec::{Decoder, Malformed, put_bytes, put_int, put_len, put_uint};
pub use entries::{EntrySource, Numbers, Object, Objects, StoredEntry, draft_entries, entry, runs_of};
pub use form::{FORM, Form, form_bits, put_form, take_form, take_number};
pub use list::{INLINE, ListStore, Stored, draft, plain};
pub use manifest::{
    Manifest, NUMBER_LIMIT, Run, chunk_bytes, chunk_runs, continuation, push_run, put_runs, take_runs,
};
pub use memory::{HASH, PART, SHAPES, Shapes, entries_bytes};
pub use names::{decode_names, encode_names};
pub use pack::{Packer, Unpacker};
pub use reader::{Refers, ValueSource, Values};
pub use related::Related;
pub use row::{
    Heading, Rest, RestKind, bits_of, first_byte, put_counters, put_parents, put_version, put_write,
    take_counters, take_parents, take_plain_start, take_version, take_write,
};
pub use shape::{Builder, Shape};
pub use tasks::{WriteRecord, put_nodes, put_task, put_task_ids, take_nodes, take_task, take_task_ids};
