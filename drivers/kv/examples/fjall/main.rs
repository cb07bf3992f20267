//! A second store, to show that the saver is not made for one: [fjall](https://docs.rs/fjall), whose data is in logs and sorted
//! files rather than in a tree of pages. `store.rs` is the whole driver; here is the conformance suite on it.
//!
//! Run it with `cargo run -p threadkeep-kv --example fjall`.

mod store;

use std::process::ExitCode;

use store::FjallStore;
use threadkeep_conformance::savers::Kv;

fn main() -> ExitCode {
    threadkeep_conformance::main(Kv {
        name: "fjall",
        open: FjallStore::open,
        in_use: Some("Locked"),
        used_bytes: Some(FjallStore::live_bytes),
    })
}
