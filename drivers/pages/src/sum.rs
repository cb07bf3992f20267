//! The checksum at the end of a page.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::PAGE_SIZE;

/// Bytes of the pages that have checksums, these included: those of new databases, and those of older ones.
const PAGES: [usize; 2] = [PAGE_SIZE as usize, LARGEST];
/// What a database begins with.
const MAGIC: &[u8] = b"SQLite format 3\0";
/// Bytes of the largest of them.
pub(crate) const LARGEST: usize = 16_384;
/// Bytes of a checksum.
pub(crate) const SUM: usize = RESERVED as usize;
/// The same, as a database's header has it.
pub(crate) const RESERVED: u8 = 8;

/// The checksum of what a page holds. It covers where the page stands, so that one that was written to another place does
/// not pass.
fn sum(body: &[u8], number: u64) -> [u8; SUM] {
    xxh3_64_with_seed(body, number).to_le_bytes()
}

/// Ends the page of this number with its checksum.
pub(crate) fn seal(page: &mut [u8], number: u64) {
    if let Some((body, end)) = page.split_last_chunk_mut::<SUM>() {
        *end = sum(body, number);
    }
}

/// Whether the page of this number has its checksum.
pub(crate) fn is_whole(page: &[u8], number: u64) -> bool {
    page.split_last_chunk::<SUM>().is_some_and(|(body, end)| *end == sum(body, number))
}

/// Whether so many bytes are a page.
pub(crate) fn is_page(bytes: usize) -> bool {
    PAGES.contains(&bytes)
}

/// Whether these are the first bytes of a database.
pub(crate) fn is_header(bytes: &[u8]) -> bool {
    bytes.starts_with(MAGIC)
}

/// Whether the first page says that its database has a write-ahead log.
pub(crate) fn is_logged(page: &[u8]) -> bool {
    is_header(page) && page.get(18..20) == Some(&[2, 2])
}

/// Bytes of a page of the database with this header, if its pages have room for a checksum.
pub(crate) fn page_size(header: &[u8; HEADER]) -> Option<usize> {
    let size = usize::from(u16::from_be_bytes([header[16], header[17]]));
    let sealed = is_header(header) && header[20] == RESERVED;
    (sealed && is_page(size)).then_some(size)
}

/// Bytes of the header of a database.
pub(crate) const HEADER: usize = 100;
