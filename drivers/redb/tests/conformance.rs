//! The conformance suite on redb.

use std::process::ExitCode;

use threadkeep_conformance::savers::Kv;
use threadkeep_redb::RedbStore;

fn main() -> ExitCode {
    threadkeep_conformance::main(Kv {
        name: "redb",
        open: |directory| RedbStore::open(directory.join("checkpoints.redb")),
        in_use: Some("already open"),
        used_bytes: Some(RedbStore::used_bytes),
    })
}
