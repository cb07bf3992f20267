//! The checksum at the end of a page.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::PAGE_SIZE;

/// Sizes of pages that have checksums, these included: of new databases, and of older ones.
pub(crate) const PAGES: [usize; 2] = [PAGE_SIZE as usize, LARGEST];
/// The first bytes of a database.
const MAGIC: &[u8] = b"SQLite format 3\0";
/// The largest of these sizes.
pub(crate) const LARGEST: usize = 16_384;
/// Bytes of a checksum.
pub(crate) const SUM: usize = RESERVED as usize;
/// The same, as in a database's header.
pub(crate) const RESERVED: u8 = 8;

/// The checksum of a page. It covers the page number, so that a page written to another place fails.
fn sum(body: &[u8], number: u64) -> [u8; SUM] {
    xxh3_64_with_seed(body, number).to_le_bytes()
}

/// Ends the page of this number with its checksum.
pub(crate) fn seal(page: &mut [u8], number: u64) {
    if let Some((body, end)) = page.split_last_chunk_mut::<SUM>() {
        *end = sum(body, number);
    }
}

/// Whether the page of this number matches its checksum.
pub(crate) fn is_whole(page: &[u8], number: u64) -> bool {
    page.split_last_chunk::<SUM>().is_some_and(|(body, end)| *end == sum(body, number))
}

/// Whether this is a page size with checksums.
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

/// The page size of the database with this header, if its pages have space for a checksum.
pub(crate) fn page_size(header: &[u8; HEADER]) -> Option<usize> {
    let size = usize::from(u16::from_be_bytes([header[16], header[17]]));
    let sealed = is_header(header) && header[20] == RESERVED;
    (sealed && is_page(size)).then_some(size)
}

/// Whether this is a first page that matches its checksum once its header says that it has one. It changes the header.
pub(crate) fn is_whole_but_for_its_header(page: &mut [u8]) -> bool {
    let Ok(size) = u16::try_from(page.len()) else { return false };
    let Some(header) = page.first_chunk_mut::<HEADER>() else { return false };
    header[16..18].copy_from_slice(&size.to_be_bytes());
    header[20] = RESERVED;
    is_whole(page, 0)
}

/// Bytes of the header of a database.
pub(crate) const HEADER: usize = 100;
