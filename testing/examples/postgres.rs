//! A private Postgres for programs that are not in Rust: prints its address, and ends when its standard input does.
//! With the argument `flushing` it flushes every commit, for measurements.

#![allow(clippy::print_stdout)] // Its purpose.

use std::io::{Read, Write};

use threadkeep_testing::Postgres;

fn main() -> threadkeep_testing::Result<()> {
    let server = match std::env::args().nth(1).as_deref() {
        None => Postgres::start()?,
        Some("flushing") => Postgres::start_flushing()?,
        Some(other) => return Err(format!("unknown argument {other}; pass flushing, or nothing").into()),
    };
    println!("{}", server.url("postgres"));
    std::io::stdout().flush()?;
    let mut ignored = Vec::new();
    std::io::stdin().read_to_end(&mut ignored)?;
    Ok(())
}
