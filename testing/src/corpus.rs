//! The inputs of the fuzz targets, for the tests that replay them on the stable toolchain.

use std::path::Path;

use crate::Result;

/// Every input in `fuzz/corpus/<target>`.
///
/// # Errors
/// If there is none, or one cannot be read.
pub fn corpus(target: &str) -> Result<Vec<Vec<u8>>> {
    let directory = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus")).join(target);
    let unreadable = |error| format!("{}: {error}", directory.display());
    let mut inputs = Vec::new();
    for file in std::fs::read_dir(&directory).map_err(unreadable)? {
        inputs.push(std::fs::read(file.map_err(unreadable)?.path()).map_err(unreadable)?);
    }
    if inputs.is_empty() {
        return Err(format!("{} is empty", directory.display()).into());
    }
    Ok(inputs)
}
