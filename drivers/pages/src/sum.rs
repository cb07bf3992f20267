//! The checksum at the end of a page.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::PAGE_SIZE;

/// Bytes of a page, its checksum included.
pub(crate) const PAGE: usize = PAGE_SIZE as usize;
/// Bytes of a checksum.
pub(crate) const SUM: usize = RESERVED as usize;
/// The same, as a database's header has it.
pub(crate) const RESERVED: u8 = 8;

/// A page, in memory of our own.
pub(crate) type Page = [u8; PAGE];

/// The checksum of what a page holds. It covers where the page stands, so that one that was written to another place does
/// not pass.
fn sum(body: &[u8], number: u64) -> [u8; SUM] {
    xxh3_64_with_seed(body, number).to_le_bytes()
}

/// Ends the page of this number with its checksum.
pub(crate) fn seal(page: &mut Page, number: u64) {
    if let Some((body, end)) = page.split_last_chunk_mut::<SUM>() {
        *end = sum(body, number);
    }
}

/// Whether the page of this number has its checksum.
pub(crate) fn is_whole(page: &[u8], number: u64) -> bool {
    page.split_last_chunk::<SUM>().is_some_and(|(body, end)| *end == sum(body, number))
}

/// Whether the first bytes of a database say that its pages have our size, and room for a checksum.
pub(crate) fn is_sealed(header: &[u8; HEADER]) -> bool {
    let [.., high, low] = PAGE.to_be_bytes();
    header.starts_with(b"SQLite format 3\0") && header[16..18] == [high, low] && header[20] == RESERVED
}

/// Bytes of the header of a database.
pub(crate) const HEADER: usize = 100;
