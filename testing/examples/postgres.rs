//! A private Postgres for programs that are not in Rust: prints its address, and ends when its standard input does.

#![allow(clippy::print_stdout)] // Its purpose.

use std::io::{Read, Write};

fn main() -> threadkeep_testing::Result<()> {
    let server = threadkeep_testing::Postgres::start()?;
    println!("{}", server.url("postgres"));
    std::io::stdout().flush()?;
    let mut ignored = Vec::new();
    std::io::stdin().read_to_end(&mut ignored)?;
    Ok(())
}
