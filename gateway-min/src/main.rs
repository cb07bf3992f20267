//! The `threadkeep` binary.
fn main() {}
